"""Bounds of timm's ViT, DeiT and Swin after `lipsformer.convert` has made them Lipschitz."""

import math
from dataclasses import replace
from typing import Any

from timm.layers import LayerScale, PatchEmbed, resample_abs_pos_embed
from timm.layers.format import Format
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
)
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from lipsformer.analysis.bounds.attention import (
    Window,
    attention_bound,
    check_attention,
    column_mass,
    max_abs_score,
    projected_bound,
    projection_rounding,
    split_qkv,
)
from lipsformer.analysis.bounds.composition import (
    Bound,
    Domain,
    carried,
    compose,
    max_abs,
    simple_bound,
)
from lipsformer.analysis.bounds.core import (
    Layout,
    UnknownModuleError,
    bound_rule,
    chain,
    checked_domain,
    children_in_order,
    lipschitz_bound,
    require_unchanged,
)
from lipsformer.analysis.bounds.layers import PASSIVE, product
from lipsformer.analysis.bounds.lipsformer import (
    patch_merging_bound,
    require_input_kept,
    require_same_shape,
    residual_bound,
)
from lipsformer.analysis.bounds.rounding import (
    gamma,
    log10_of,
    norm_bound,
    outward,
)
from lipsformer.models.timm_conversion import CosineAttention, CosineWindowAttention

# timm adds -100 to the scores of tokens that a shifted window does not join.
SHIFT_MASK = 100.0

bound_rule(PatchMerging)(patch_merging_bound)
bound_rule(SwinTransformerStage)(children_in_order("downsample", "blocks"))
bound_rule(SwinTransformer)(children_in_order("patch_embed", "layers", "norm", "head"))


@bound_rule(PatchEmbed)
def _patch_embed(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    size, patch = domain.size, module.patch_size
    divides = all(side % p == 0 for side, p in zip(size, patch, strict=True))
    if module.img_size is not None and (
        size != tuple(module.img_size)
        if module.strict_img_size
        else not (divides or module.dynamic_img_pad)
    ):
        raise ValueError(f"the model refuses images of {size} pixels: use {module.img_size}")
    if not module.flatten and module.output_fmt not in (Format.NHWC, Format.NLC):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for a norm over the width of {module.output_fmt}"
        )
    if module.dynamic_img_pad:  # Padding with zeros is an isometry.
        size = tuple(side + -side % p for side, p in zip(size, patch, strict=True))
    padded = replace(domain, size=size)
    return chain([("proj", module.proj), ("norm", module.norm)], padded, scale)


def _sequence_layout(model: Any, _module: Any, _index: int, _x: Tensor) -> Layout:
    grid = model.patch_embed.grid_size
    return Layout(grid, grid, model.num_prefix_tokens)


@bound_rule(CosineAttention, layout=_sequence_layout)
def _cosine_attention(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    mass = column_mass(max_abs_score(module.attention), domain.tokens)
    return _attention(module, Window(domain.tokens, mass=mass), domain, scale)


@bound_rule(CosineWindowAttention)
def _cosine_window_attention(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    # Shifted windows add a mask to the bias, so `mass=None`, which holds for every bias and mask.
    largest_bias = SHIFT_MASK + max_abs(module.relative_position_bias_table)
    if math.prod(module.window_size) != module.window_area:
        raise UnknownModuleError("the window of the attention was changed after it was built")
    return _attention(module, Window(module.window_area, largest_bias=largest_bias), domain, scale)


def _attention(module: Any, window: Window, domain: Domain, scale: Tensor | None) -> Bound:
    check_attention(module, module.num_heads, module.attention)
    domain = checked_domain(module, domain, module.qkv.weight.shape[1])
    attended = attention_bound(
        module.attention,
        split_qkv(module.qkv.weight, module.qkv.bias, module.num_heads),
        window._replace(radius=domain.reach, qkv_rounding=projection_rounding(module.qkv, domain)),
    )
    return projected_bound(attended, module.proj, domain, scale)


def _shifted_window_layout(_model: Any, block: Any, _index: int, x: Tensor) -> Layout:
    return Layout(block.window_size, (x.shape[1], x.shape[2]), shift=block.shift_size)


# In Swin the block has the layout, because its attention knows neither the map nor the shift.
@bound_rule(Block)
@bound_rule(SwinTransformerBlock, layout=_shifted_window_layout)
def _pre_norm_block(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    for name in ("window_size", "window_area"):  # of Swin
        if getattr(module, name, None) != getattr(module.attn, name, None):
            raise UnknownModuleError(f"the {name} of the block is not that of its attention")
    mask = getattr(module, "attn_mask", None)  # of shifted windows; large numbers swallow scores
    if mask is not None and max_abs(mask) > SHIFT_MASK:
        raise UnknownModuleError(
            f"the mask of the shifted windows was changed: use numbers of at most {SHIFT_MASK:g}"
        )
    # `convert` puts the weights of the branches into `ls1` and `ls2` of ViT and into `drop_path1`
    # and `drop_path2` of Swin, whose forward pass reads no `ls1`.
    names = ("ls", "drop_path") if isinstance(module, Block) else ("drop_path",)
    attn = [("norm1", module.norm1), ("attn", module.attn)]
    mlp = [("norm2", module.norm2), ("mlp", module.mlp)]
    ends = [[getattr(module, f"{name}{i}") for name in names] for i in (1, 2)]
    x = residual_bound(_alpha(*ends[0]), attn, domain)
    return compose(x, residual_bound(_alpha(*ends[1]), mlp, x.output, scale))


def _alpha(*ends: nn.Module) -> Tensor | None:
    """Return the product of the weights by which a branch ends, or None if there are none."""
    alpha = None
    require_input_kept(*ends)
    for end in ends:
        require_unchanged(end, LayerScale, nn.Sequential, *PASSIVE)
        if isinstance(end, nn.Sequential):
            inner = _alpha(*end._modules.values())  # pyright: ignore[reportArgumentType]
            alpha = alpha if inner is None else product(inner, alpha)
        elif isinstance(end, LayerScale):
            alpha = product(end.gamma, alpha)
    return alpha


@bound_rule(VisionTransformer)
def _vit(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    require_unchanged(module.head_drop, *PASSIVE)
    x = _vit_features(module, domain, [module.cls_token, module.reg_token])
    x = compose(x, _vit_pool(module, x.output))
    x = compose(x, lipschitz_bound(module.fc_norm, x.output), "fc_norm")
    return compose(x, lipschitz_bound(module.head, x.output, scale), "head")


@bound_rule(VisionTransformerDistilled)
def _distilled_vit(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    r"""Bound the mean of two classifiers, of the class token and of the distillation token.

    The two tokens are different rows, so :math:`|f(x) + g(y)| / 2` has a constant of at most
    :math:`\sqrt{|f|^2 + |g|^2} / 2`.
    """
    require_unchanged(module.head_drop, *PASSIVE)
    x = _vit_features(module, domain, [module.cls_token, module.dist_token])
    pooled = replace(x.output, size=())
    heads = {
        name: lipschitz_bound(getattr(module, name), pooled, scale)
        for name in ("head", "head_dist")
    }
    require_same_shape(heads["head"].output, heads["head_dist"].output)
    value = math.hypot(*(head.value for head in heads.values())) / 2.0
    radius = sum(head.output.radius for head in heads.values()) / 2.0
    # Each head carries the whole error of the tokens, which is more than its share.
    error = sum(head.output.error for head in heads.values()) / 2.0
    mean = Bound(
        log10=log10_of(value),
        paper_log10=log10_of(value),
        output=Domain(
            size=(),
            radius=outward(radius),
            norm=sum(head.output.norm for head in heads.values()),
            error=carried(1.0, error, gamma(2) * (radius + error), 1),
        ),
        input=x.output,
        parts=heads,
    )
    return compose(x, mean)


def _vit_features(module: Any, domain: Domain, prefix: list[Tensor | None]) -> Bound:
    require_unchanged(module.pos_drop, *PASSIVE)
    require_unchanged(module.patch_drop, *PASSIVE)
    x = chain([("patch_embed", module.patch_embed)], domain)
    x = compose(x, _tokens(module, x.output, [token for token in prefix if token is not None]))
    for name in ("norm_pre", "blocks", "norm"):
        x = compose(x, lipschitz_bound(getattr(module, name), x.output), name)
    return x


def _tokens(module: Any, patches: Domain, prefix: list[Tensor]) -> Bound:
    """Bound the step that adds class and register tokens and the position embedding.

    All of them are constants, so the step is an isometry followed by a shift.
    """
    tokens = [row for token in prefix for row in token.detach().flatten(0, 1)]
    if len(tokens) != module.num_prefix_tokens:
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {len(tokens)} class and register tokens with "
            f"num_prefix_tokens={module.num_prefix_tokens}"
        )
    position = module.pos_embed
    embedded_prefix = 0 if module.no_embed_class else module.num_prefix_tokens
    num_embedded = patches.tokens + embedded_prefix
    if position is not None and module.dynamic_img_size:
        grid = list(module.patch_embed.grid_size)
        position = resample_abs_pos_embed(
            position.detach(), list(patches.size), grid, num_prefix_tokens=embedded_prefix
        )
    if position is not None and position.shape != (1, num_embedded, patches.channels):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {num_embedded} embedded tokens of {patches.channels} "
            f"channels with position embeddings of shape {tuple(position.shape)}: use the image "
            "size of the model"
        )
    lengths = [norm_bound(token).item() for token in tokens]
    radius, shift = max([patches.radius, *lengths]), max([0.0, *lengths])
    if position is not None:
        longest = norm_bound(position, dim=-1).max().item()
        radius, shift = radius + longest, shift + longest
    # The float32 program may interpolate the position embedding, whose error is not known.
    rounding = math.inf if module.dynamic_img_size else gamma(1) * (radius + patches.error)
    size = (patches.tokens + len(tokens),)
    return simple_bound(1.0, patches, size=size, radius=radius, shift=shift, rounding=rounding)


def _vit_pool(module: Any, tokens: Domain) -> Bound:
    """Bound the pooling: the class token, or the mean of N tokens, whose norm is 1 / sqrt(N)."""
    if module.attn_pool is None and module.global_pool in ("token", "avg"):
        averaged = tokens.tokens - (0 if module.pool_include_prefix else module.num_prefix_tokens)
        value = 1.0 if module.global_pool == "token" else 1.0 / math.sqrt(averaged)
        rounding = 0.0 if module.global_pool == "token" else gamma(averaged + 2) * tokens.reach
        radius = tokens.radius
        return simple_bound(value, tokens, size=(), radius=radius, shift=0.0, rounding=rounding)
    raise UnknownModuleError(
        f"no Lipschitz bound is known for the pooling {module.global_pool!r}: use 'avg' or 'token'"
    )
