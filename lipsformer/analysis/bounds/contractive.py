"""Bounds of the layers with the constant 1 and of `LipsFormerContractive`."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipsformer.analysis.bounds.attention import column_mass, core_rounding, max_abs_score
from lipsformer.analysis.bounds.composition import (
    Bound,
    Domain,
    carried,
    max_abs,
    scale_output,
    simple_bound,
)
from lipsformer.analysis.bounds.core import (
    UnknownModuleError,
    bound_rule,
    checked_domain,
    children_in_order,
    lipschitz_bound,
    require_unchanged,
)
from lipsformer.analysis.bounds.layers import bias_norm, linear_sigma_bound
from lipsformer.analysis.bounds.rounding import gamma, outward
from lipsformer.layers import FoldShift, JoinTokens, ScaledCosineAttention
from lipsformer.layers.contractive import GROUPS
from lipsformer.models.lipsformer_contractive import (
    ContractiveBlock,
    ContractiveResidual,
    LipsFormerContractive,
)
from lipsformer.models.lipsformer_swin import WindowAttention

bound_rule(ContractiveBlock)(children_in_order("fc1", "act1", "attn", "fc2", "act2"))
bound_rule(LipsFormerContractive)(children_in_order("patch_embed", "stages", "norm", "head"))


@bound_rule(FoldShift)
def _fold_shift(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    if len(domain.size) != 2 or (domain.channels or GROUPS) % GROUPS != 0:
        raise UnknownModuleError(
            f"no Lipschitz bound is known for FoldShift on a map of {domain.size} with "
            f"{domain.channels} channels: use a map whose channels are a multiple of {GROUPS}"
        )
    domain, largest = checked_domain(module, domain, None), max_abs(scale)
    # A token holds channels of at most five tokens: its own and its four neighbors.
    radius = largest * math.sqrt(5.0) * domain.radius
    rounding = 0.0 if scale is None else gamma(1) * largest * domain.rms
    return simple_bound(largest, domain, radius=radius, shift=0.0, rounding=rounding)


@bound_rule(JoinTokens)
def _join_tokens(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    domain = checked_domain(module, domain, None)
    length = math.sqrt(domain.tokens) * domain.radius
    channels = None if domain.channels is None else domain.channels * domain.tokens
    joined = simple_bound(1.0, domain, size=(1, 1), radius=length, shift=0.0, rounding=0.0)
    joined = replace(joined, output=replace(joined.output, channels=channels))
    return scale_output(joined, scale)


@bound_rule(ContractiveResidual)
def _contractive_residual(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    require_unchanged(module.branch, WindowAttention)
    core = module.branch.attention
    require_unchanged(core, ScaledCosineAttention)
    scales = (core.tau(), math.inf if core.value_scale is None else core.value_scale)
    if (
        core.log_logit_scale is not None
        or module.mix.ndim > 0
        or not 0.0 <= module.least <= 1.0
        or not all(0.0 < scale < math.inf for scale in scales)
    ):
        raise UnknownModuleError(
            "no Lipschitz bound is known for ContractiveResidual with a learned logit scale, "
            "several weights, raw values, or scales that are not positive and finite"
        )
    domain = checked_domain(module, domain, None)
    if domain.channels is not None and domain.channels < module.dim:
        raise UnknownModuleError(
            f"no Lipschitz bound is known for attention on the last {module.dim} of "
            f"{domain.channels} channels"
        )
    window = module.branch.window(*domain.size)
    a = min(max(module.mix.detach().double().item(), module.least), 1.0)
    # What the program computed before is the exact input of the branch here.
    reached = outward(domain.norm + domain.error)
    part = replace(domain, channels=module.dim, radius=domain.reach, norm=reached, error=0.0)
    plain = lipschitz_bound(module.branch, part)
    factor = a / divisor(module.branch, window)
    scaled = lipschitz_bound(
        module.branch, part, torch.full((module.dim,), factor, dtype=torch.float64)
    )
    added = scaled.output
    largest = max(outward(1.0 - a + scaled.value), 1.0)  # in this order NaN stays NaN
    mixed = simple_bound(
        largest,
        domain,
        radius=math.hypot(domain.radius, (1.0 - a) * domain.radius + added.radius),
        shift=factor * _at_zero(module.branch),
    )
    # L is computed from exponentials, as an attention weight is, and has its relative error.
    most = max_abs(module.branch.position_bias(*window))
    relative = gamma(6) + core_rounding(
        core.tau(), math.prod(window), module.dim // core.num_heads, most
    )
    rounding = gamma(3) * domain.rms + relative * added.rms
    error = carried(largest, domain.error, rounding, domain.tokens) + added.error
    output = replace(mixed.output, error=outward(error))
    return scale_output(replace(mixed, output=output, parts={"branch": plain}), scale)


def _at_zero(attention: Any) -> float:
    """Bound the length of the tokens of attention on the input 0.

    All values are then the bias of the values, and attention returns convex combinations of them.
    """
    core, nu = attention.attention, attention.attention.value_scale.double().abs().item()
    bias = 0.0 if attention.qkv.bias is None else bias_norm(attention.qkv.bias.chunk(3)[2])
    value = min(nu * core.eps**-0.5 * bias, nu * math.sqrt(core.num_heads))
    return linear_sigma_bound(attention.proj.weight) * value + bias_norm(attention.proj.bias)


def divisor(attention: Any, window: tuple[int, int]) -> float:
    """Return the divisor L of `ContractiveResidual` in float64, rounded down.

    Args:
        attention: The branch, a `WindowAttention`.
        window: (h, w) in tokens.
    """
    core, tokens = attention.attention, math.prod(window)
    bias = attention.position_bias(*window)[0]
    mass = column_mass(max_abs_score(core), tokens, bias).max().item()
    largest = core.tau() * math.sqrt(1.0 + min(mass, tokens / 2)) + math.sqrt(mass)
    nu = core.value_scale.double().item()
    # `column_mass` is rounded up by a relative 1e-12 at most.
    return largest * abs(nu) * core.eps**-0.5 * (1.0 - 1e-9)
