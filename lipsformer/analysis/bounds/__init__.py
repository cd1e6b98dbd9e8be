"""Proved Lipschitz bounds. Importing this package registers the rules of every class.

Each file holds the rules of one family of modules. The rule of a class and the layout of its
attention are registered together, with `bound_rule(cls, layout=...)`.
"""

from lipsformer._renamed import renamed
from lipsformer.analysis.bounds import (  # noqa: F401  (registers rules)
    contractive,
    layers,
    lipsformer,
    timm,
)
from lipsformer.analysis.bounds.composition import (
    Bound,
    Domain,
    compose,
    flatten_bound,
    image_domain,
    max_abs,
    scale_output,
    simple_bound,
)
from lipsformer.analysis.bounds.core import (
    Layout,
    UnknownModuleError,
    bound_rule,
    chain,
    children_in_order,
    gathered_bound,
    lipschitz_bound,
    registration_of,
    require_unchanged,
)
from lipsformer.analysis.bounds.rounding import (
    log10_of,
    log10_one_plus,
    log10_product,
)

__all__ = [
    "Bound",
    "Domain",
    "Layout",
    "UnknownModuleError",
    "bound_rule",
    "chain",
    "children_in_order",
    "compose",
    "flatten_bound",
    "gathered_bound",
    "image_domain",
    "lipschitz_bound",
    "log10_of",
    "log10_one_plus",
    "log10_product",
    "max_abs",
    "registration_of",
    "require_unchanged",
    "scale_output",
    "simple_bound",
]

__getattr__ = renamed(__name__)
