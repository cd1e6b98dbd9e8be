"""Proved Lipschitz bounds: import them from here, which loads the rule of every class."""

from lipsformer.analysis.bounds import attention, layers, lipsformer, timm
from lipsformer.analysis.bounds.core import (
    Bound,
    Domain,
    UnknownModuleError,
    chain,
    flatten_bound,
    gathered_bound,
    image_domain,
    largest,
    lipschitz_bound,
    log10_of,
    log10_one_plus,
    log10_product,
    rule,
    simple_bound,
)

__all__ = [
    "Bound",
    "Domain",
    "UnknownModuleError",
    "attention",
    "chain",
    "flatten_bound",
    "gathered_bound",
    "image_domain",
    "largest",
    "layers",
    "lipschitz_bound",
    "lipsformer",
    "log10_of",
    "log10_one_plus",
    "log10_product",
    "rule",
    "simple_bound",
    "timm",
]
