"""Bounds of LipsFormer's composite modules, each composed as its ``forward`` composes the parts.

The models are named, not imported: analysis stands below them.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer.analysis.bounds.attention import (
    HeadWeights,
    attention_bound,
    column_mass,
    gram_norm,
    max_abs_score,
    split_qkv,
)
from lipsformer.analysis.bounds.core import (
    Bound,
    Domain,
    UnknownModuleError,
    chain,
    largest,
    lipschitz_bound,
    log10_of,
    log10_one_plus,
    log10_product,
    rule,
)
from lipsformer.analysis.bounds.layers import (
    GELU_BOUND,
    bias_norm,
    depthwise_channel_sigma,
    depthwise_radius,
    linear_sigma,
)
from lipsformer.layers import WeightedResidual
from lipsformer.models.lipsformer import fit_window

_BODY = "lipsformer.models.lipsformer."
_SWIN = "lipsformer.models.lipsformer_swin."
_CSWIN = "lipsformer.models.lipsformer_cswin."


@rule(_BODY + "PatchEmbed")
def _patch_embed(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    return chain([("proj", module.proj), ("norm", module.norm)], domain, scale)


@rule(_CSWIN + "ConvMerging")
def _conv_merging(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    # padding with zeros is an isometry
    even = Domain(size=tuple(side + side % 2 for side in domain.size), radius=domain.radius)
    return chain([("conv", module.conv), ("norm", module.norm)], even, scale)


@rule(_SWIN + "PatchMerging")
def _patch_merging(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    # joining four tokens is an isometry of the map and at most doubles the longest token
    merged = Domain(size=tuple((side + 1) // 2 for side in domain.size), radius=2.0 * domain.radius)
    return chain([("norm", module.norm), ("reduction", module.reduction)], merged, scale)


@rule(_BODY + "ConvBranch")
def _conv_branch(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    layers = [("depthwise", module.depthwise)]
    if module.pointwise is not None:
        layers.append(("pointwise", module.pointwise))
    # a GELU follows each; it acts on every channel by itself, so its bound holds behind diag(scale)
    return _with_gelus(chain(layers, domain, scale), len(layers))


@rule(_BODY + "Mlp")
def _mlp(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    return _with_gelus(chain([("fc1", module.fc1), ("fc2", module.fc2)], domain, scale), 1)


def _with_gelus(bound: Bound, number: int) -> Bound:
    gelus = number * math.log10(GELU_BOUND)
    return replace(bound, log10=bound.log10 + gelus, paper_log10=bound.paper_log10 + gelus)


def residual_bound(x: Bound, alpha: Tensor, branch: list[tuple[str, nn.Module]]) -> Bound:
    """Bound x + diag(alpha) f(x) behind what led to x: 1 + |diag(alpha) f|, evaluation mode.

    Args:
        x: Bound of what came before.
        alpha: Weight of the branch, [C].
        branch: Names and modules of f, in order.
    """
    scaled = chain(branch, x.output, alpha)
    log10, paper_log10, radius = 0.0, 0.0, 0.0
    plain = scaled
    if largest(alpha) > 0.0:
        plain = chain(branch, x.output)
        log10 = log10_one_plus(scaled.log10)
        paper_log10 = log10_one_plus(plain.paper_log10 + math.log10(largest(alpha)))
        radius = scaled.output.radius
    return Bound(
        log10=x.log10 + log10,
        paper_log10=x.paper_log10 + paper_log10,
        output=Domain(size=x.output.size, radius=x.output.radius + radius),
        input=x.input,
        parts={**x.parts, **plain.parts},
    )


def then(x: Bound, name: str, module: nn.Module) -> Bound:
    """Apply one more module behind what led to x."""
    part = lipschitz_bound(module, x.output)
    return Bound(
        log10=log10_product((x.log10, part.log10)),
        paper_log10=log10_product((x.paper_log10, part.paper_log10)),
        output=part.output,
        input=x.input,
        parts={**x.parts, name: part},
    )


@rule(WeightedResidual)
def _weighted_residual(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    if scale is not None:
        raise UnknownModuleError("no bound is known for a weighted residual that is scaled")
    return residual_bound(chain([], domain), module.residual_scale, [("branch", module.branch)])


@rule(_BODY + "LipsFormerBlock")
def _block(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    names = ("conv1", "conv2", "attn", "norm1", "mlp", "norm2")
    return chain([(name, getattr(module, name)) for name in names], domain, scale)


@rule(_BODY + "LipsFormerStage")
def _stage(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    return chain([("downsample", module.downsample), ("blocks", module.blocks)], domain, scale)


@rule(_BODY + "LipsFormer")
def _lipsformer(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    names = ("patch_embed", "stages", "norm", "head")
    return chain([(name, getattr(module, name)) for name in names], domain, scale)


@rule(_SWIN + "WindowAttention")
def _window_attention(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    h, w = (fit_window(s, m) for s, m in zip(domain.size, module.window_size, strict=True))
    attended = attention_bound(
        module.attention,
        split_qkv(module.qkv.weight, module.qkv.bias, module.num_heads),
        h * w,
        domain.radius,
        mass=column_mass(max_abs_score(module.attention), h * w, module.position_bias(h, w)[0]),
    )
    return project(
        module.proj,
        gram_norm(attended.gram),
        math.sqrt(attended.paper_squared),
        math.sqrt(attended.radius_squared),
        domain,
        scale,
    )


@rule(_CSWIN + "StripeAttention")
def _stripe_attention(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    num_heads = module.heads_per_branch
    heads = split_qkv(module.qkv.weight, module.qkv.bias, module.num_branches * num_heads)
    gram, paper_squared, radius_squared = 0.0, 0.0, 0.0
    for branch, (attention, lepe) in enumerate(zip(module.attention, module.lepe, strict=True)):
        own = slice(branch * num_heads, (branch + 1) * num_heads)
        size = module.stripe(branch, *domain.size)
        # LePE acts on each channel by itself and so on each head by itself
        local = depthwise_channel_sigma(lepe.weight, size).unflatten(
            0, (module.heads_per_branch, -1)
        )
        attended = attention_bound(
            attention,
            HeadWeights(*(part[own] for part in heads)),
            math.prod(size),
            domain.radius,
            mass=column_mass(max_abs_score(attention), math.prod(size)),
            local_norm=local.amax(1).cpu(),
            local_radius=depthwise_radius(lepe.weight, 1.0),
        )
        gram = gram + attended.gram
        paper_squared += attended.paper_squared
        radius = math.sqrt(attended.radius_squared) + bias_norm(lepe.bias)
        radius_squared += radius**2
    s = module.attn_factor
    return project(
        module.proj,
        s * gram_norm(torch.as_tensor(gram)),
        s * math.sqrt(paper_squared),
        s * math.sqrt(radius_squared),
        domain,
        scale,
    )


def project(
    proj: nn.Linear, value: float, paper: float, radius: float, domain: Domain, scale: Tensor | None
) -> Bound:
    """Bound an output projection behind attention.

    Args:
        proj: The projection.
        value: Bound of the attention.
        paper: The same by the paper's theorem.
        radius: Largest length of a token of the attention's output.
        domain: Inputs of the attention.
        scale: Factor per channel that follows.
    """
    sigma = linear_sigma(proj.weight, scale)
    paper_sigma = linear_sigma(proj.weight) * largest(scale)
    radius = sigma * radius + bias_norm(proj.bias, scale)
    return Bound(
        log10=log10_product((log10_of(sigma), log10_of(value))),
        paper_log10=log10_product((log10_of(paper_sigma), log10_of(paper))),
        output=Domain(size=domain.size, radius=radius),
        input=domain,
    )
