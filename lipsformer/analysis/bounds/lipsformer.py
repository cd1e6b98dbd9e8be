"""Bounds of LipsFormer's modules. Each rule composes its parts as the module's `forward` does."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lipsformer.analysis.bounds.attention import (
    HeadWeights,
    Window,
    attention_bound,
    check_attention,
    column_mass,
    max_abs_score,
    projected_bound,
    projection_rounding,
    side_by_side,
    split_qkv,
)
from lipsformer.analysis.bounds.composition import (
    Bound,
    Domain,
    carried,
    compose,
    max_abs,
    scale_output,
)
from lipsformer.analysis.bounds.core import (
    Layout,
    UnknownModuleError,
    bound_rule,
    chain,
    checked_domain,
    children_in_order,
    require_unchanged,
)
from lipsformer.analysis.bounds.layers import (
    PASSIVE,
    bias_norm,
    check_depthwise,
    conv2d_bound,
    depthwise_radius,
    depthwise_sigma_bounds,
    gelu_bound,
)
from lipsformer.analysis.bounds.rounding import (
    gamma,
    log10_of,
    log10_one_plus,
    log10_product,
    outward,
)
from lipsformer.layers import DepthwiseConv2d, Linear, WeightedResidual
from lipsformer.models.embed import ConvStem, PatchConv2d, PatchEmbed
from lipsformer.models.lipsformer import (
    ConvBranch,
    LipsFormer,
    LipsFormerBlock,
    LipsFormerStage,
    Mlp,
)
from lipsformer.models.lipsformer_cswin import ConvMerging, StripeAttention
from lipsformer.models.lipsformer_swin import PatchMerging, WindowAttention

bound_rule(PatchConv2d)(conv2d_bound)
bound_rule(LipsFormerBlock)(children_in_order("conv1", "conv2", "attn", "norm1", "mlp", "norm2"))
bound_rule(LipsFormerStage)(children_in_order("downsample", "blocks"))
bound_rule(LipsFormer)(children_in_order("patch_embed", "stages", "norm", "head"))


@bound_rule(PatchEmbed)
def _patch_embed(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    if any(side % module.patch_size != 0 for side in domain.size):
        raise ValueError(
            f"the model refuses images of {domain.size} pixels: use a multiple of the patch size "
            f"{module.patch_size}"
        )
    return chain([("proj", module.proj), ("norm", module.norm)], domain, scale)


@bound_rule(ConvStem)
def _conv_stem(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    first = with_gelu(chain([("proj", module.proj)], domain))
    return compose(first, chain([("patches", module.patches)], first.output, scale))


@bound_rule(ConvMerging)
def _conv_merging(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    # Padding the map with zeros to even sides is an isometry.
    even = replace(domain, size=tuple(side + side % 2 for side in domain.size))
    return chain([("conv", module.conv), ("norm", module.norm)], even, scale)


@bound_rule(PatchMerging)
def patch_merging_bound(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    """Bound the merging of 2x2 tokens by concatenation, norm and linear reduction.

    The concatenation is an isometry of the map. It increases the 2-norm of the longest token by a
    factor of at most 2.
    """
    domain = checked_domain(module, domain, None, on_map=True)
    size = tuple((side + 1) // 2 for side in domain.size)
    merged = replace(domain, size=size, radius=2.0 * domain.radius, channels=None)
    return chain([("norm", module.norm), ("reduction", module.reduction)], merged, scale)


@bound_rule(ConvBranch)
def _conv_branch(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    # GELU acts on every channel separately. |diag(scale) GELU'| is at most GELU_BOUND |scale|, so
    # `scale` can be applied to the convolution before it.
    if module.pointwise is None:
        return with_gelu(chain([("depthwise", module.depthwise)], domain, scale))
    require_unchanged(module.pointwise, Linear)
    first = with_gelu(chain([("depthwise", module.depthwise)], domain))
    return with_gelu(compose(first, chain([("pointwise", module.pointwise)], first.output, scale)))


@bound_rule(Mlp)
def _mlp(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    require_unchanged(module.fc2, Linear)
    require_unchanged(module.drop, *PASSIVE)
    hidden = with_gelu(chain([("fc1", module.fc1)], domain))
    return compose(hidden, chain([("fc2", module.fc2)], hidden.output, scale))


def with_gelu(bound: Bound) -> Bound:
    """Return the bound of a map followed by GELU."""
    return compose(bound, gelu_bound(bound.output))


def residual_bound(
    alpha: Tensor | None,
    branch: Iterable[tuple[str, nn.Module]],
    domain: Domain,
    scale: Tensor | None = None,
) -> Bound:
    """Bound x + diag(alpha) f(x), whose constant is at most 1 + |diag(alpha) f|.

    Args:
        alpha: Weight of the branch per channel, [C]; None for ones.
        branch: Names and modules of f, in order.
        domain: The inputs x.
        scale: Factor per channel that multiplies the sum; None for none.
    """
    branch = list(branch)
    if alpha is not None:
        domain = checked_domain(branch[-1][1], domain, len(alpha))
    require_input_kept(*(module for _, module in branch))
    plain = chain(branch, domain, moves_channels=False)
    if domain.channels is None:  # only inputs with the channels of the branch are added to it
        domain = replace(domain, channels=plain.output.channels)
    require_same_shape(domain, plain.output)
    weighted = chain(branch, domain, alpha, moves_channels=False)
    largest_weight = max_abs(alpha)
    # With alpha = 0 the branch adds nothing, unless its values may be infinite. The program then
    # computes 0 * inf = nan, so the error counts as infinite.
    rounded = 0.0 if plain.output.error < math.inf else math.inf
    nothing = Domain(size=(), radius=0.0, norm=0.0, error=rounded, ball=0.0)
    added = weighted.output if largest_weight > 0.0 else nothing
    paper_log10 = log10_product((plain.paper_log10, log10_of(largest_weight)))
    # The product with alpha and the sum round.
    rounding = gamma(3) * (domain.rms + added.rms)
    error = carried(1.0, domain.error, rounding, domain.tokens) + added.error
    total = Bound(
        log10=log10_one_plus(weighted.log10),
        paper_log10=log10_one_plus(paper_log10),
        output=replace(
            domain,
            radius=outward(domain.radius + added.radius),
            norm=outward(domain.norm + added.norm),
            error=outward(error),
            ball=outward(domain.ball + added.ball),
        ),
        input=domain,
        parts=plain.parts,
    )
    return scale_output(total, scale)


def require_same_shape(x: Domain, added: Domain) -> None:
    """Raise `UnknownModuleError` unless the sum of a shortcut and a branch repeats neither."""
    known = x.channels is not None and added.channels is not None
    if x.size != added.size or (known and x.channels != added.channels):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for the sum of a map of {x.size} with {x.channels} "
            f"channels and one of {added.size} with {added.channels}: it would repeat one of them"
        )


def require_input_kept(*branch: nn.Module) -> None:
    """Raise `UnknownModuleError` if a branch may stretch the residual's input in place.

    The shortcut would then add the stretched input. A ReLU in place shrinks both, which keeps the
    bound.
    """
    for part in (part for module in branch for part in module.modules()):
        if getattr(part, "inplace", False) and not isinstance(part, (nn.ReLU, *PASSIVE)):
            raise UnknownModuleError(
                f"no Lipschitz bound is known for a residual whose branch holds "
                f"{type(part).__name__} with inplace=True: it changes what the shortcut adds"
            )


@bound_rule(WeightedResidual)
def _weighted_residual(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    return residual_bound(module.residual_scale, [("branch", module.branch)], domain, scale)


def _window_layout(_model: Any, module: Any, _index: int, x: Tensor) -> Layout:
    size = (x.shape[1], x.shape[2])
    return Layout(module.window(*size), size)


@bound_rule(WindowAttention, layout=_window_layout)
def window_attention_bound(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    """Bound attention whose windows partition the map, whatever tokens a window joins.

    Permuting the tokens of the map is an isometry, so the bound does not depend on their places.

    Raises:
        UnknownModuleError: If the attention or its table of biases is not what the proofs cover.
    """
    check_attention(module, module.num_heads, module.attention)
    domain = checked_domain(module, domain, module.qkv.weight.shape[1], on_map=True)
    h, w = module.window(*domain.size)
    bias = module.position_bias(h, w)[0]
    if len(bias) != module.num_heads:
        raise UnknownModuleError(f"the table of biases has {len(bias)} heads")
    attended = attention_bound(
        module.attention,
        split_qkv(module.qkv.weight, module.qkv.bias, module.num_heads),
        Window(
            h * w,
            domain.reach,
            mass=column_mass(max_abs_score(module.attention), h * w, bias),
            largest_bias=max_abs(bias),
            padded=_pads(domain.size, (h, w)),
            qkv_rounding=projection_rounding(module.qkv, domain),
        ),
    )
    return projected_bound(attended, module.proj, domain, scale)


def _pads(size: tuple[int, ...], window: tuple[int, ...]) -> bool:
    """Return whether windows of this size do not cover the map exactly."""
    return any(side % extent != 0 for side, extent in zip(size, window, strict=True))


def _stripe_layout(_model: Any, module: Any, partition: int, x: Tensor) -> Layout:
    size = (x.shape[1], x.shape[2])
    return Layout(module.stripe(partition, *size), size)


@bound_rule(StripeAttention, layout=_stripe_layout)
def _stripe_attention(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    num_heads = module.heads_per_partition
    check_attention(module, num_heads, *module.attention)
    domain = checked_domain(module, domain, module.qkv.weight.shape[1], on_map=True)
    heads = split_qkv(module.qkv.weight, module.qkv.bias, module.num_partitions * num_heads)
    qkv_rounding = projection_rounding(module.qkv, domain)
    parts = []
    for partition, (attention, lepe) in enumerate(zip(module.attention, module.lepe, strict=True)):
        require_unchanged(lepe, DepthwiseConv2d)
        check_depthwise(lepe)
        of_partition = slice(partition * num_heads, (partition + 1) * num_heads)
        size = module.stripe(partition, *domain.size)
        # LePE convolves every channel separately, and so every head separately.
        local = depthwise_sigma_bounds(lepe.weight, size).unflatten(0, (num_heads, -1))
        attended = attention_bound(
            attention,
            HeadWeights(*(part[of_partition] for part in heads)),
            Window(
                math.prod(size),
                domain.reach,
                mass=column_mass(max_abs_score(attention), math.prod(size)),
                padded=_pads(domain.size, size),
                local_norm=local.amax(1).cpu(),
                local_radius=depthwise_radius(lepe.weight, 1.0),
                qkv_rounding=qkv_rounding,
            ),
        )
        radius = math.sqrt(attended.radius_squared) + bias_norm(lepe.bias)
        # LePE sums nine products and a bias. `attn_factor` may multiply the result.
        rounding = attended.rounding + gamma(16) * radius
        parts.append(attended._replace(radius_squared=radius**2, rounding=rounding))
    return projected_bound(side_by_side(parts), module.proj, domain, scale, abs(module.attn_factor))
