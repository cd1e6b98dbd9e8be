"""Bounds of timm's ViT, DeiT and Swin after `lipsformer.convert` has made them Lipschitz."""

import math
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
    attention_bound,
    check_attention,
    column_mass,
    max_abs_score,
    projected_bound,
    split_qkv,
)
from lipsformer.analysis.bounds.core import (
    Bound,
    Domain,
    Layout,
    UnknownModuleError,
    bound_rule,
    chain,
    children_in_order,
    compose,
    lipschitz_bound,
    log10_of,
    simple_bound,
    unchanged,
)
from lipsformer.analysis.bounds.layers import PASSIVE, product
from lipsformer.analysis.bounds.lipsformer import patch_merging_bound, residual_bound
from lipsformer.models.timm_conversion import CosineAttention, CosineWindowAttention

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
    padded = Domain(size=size, radius=domain.radius)
    return chain([("proj", module.proj), ("norm", module.norm)], padded, scale)


def _sequence_layout(model: Any, _: Any, __: int, ___: Tensor) -> Layout:
    grid = model.patch_embed.grid_size
    return Layout(grid, grid, model.num_prefix_tokens)


@bound_rule(CosineAttention, layout=_sequence_layout)
def _cosine_attention(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    mass = column_mass(max_abs_score(module.attention), domain.tokens)
    return _attention(module, domain.tokens, mass, domain, scale)


@bound_rule(CosineWindowAttention)
def _cosine_window_attention(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    # Shifted windows add a mask to the bias, so `mass=None`, which holds for every bias and mask.
    return _attention(module, math.prod(module.window_size), None, domain, scale, biased=True)


def _attention(
    module: Any,
    num_tokens: int,
    mass: Tensor | None,
    domain: Domain,
    scale: Tensor | None,
    biased: bool = False,
) -> Bound:
    check_attention(module, module.num_heads, module.attention)
    heads = split_qkv(module.qkv.weight, module.qkv.bias, module.num_heads)
    attended = attention_bound(
        module.attention, heads, num_tokens, domain.radius, mass, biased=biased
    )
    return projected_bound(attended, module.proj, domain, scale)


def _shifted_window_layout(_: Any, block: Any, __: int, x: Tensor) -> Layout:
    return Layout(block.window_size, (x.shape[1], x.shape[2]), shift=block.shift_size)


# In Swin the block has the layout, because its attention knows neither the map nor the shift.
@bound_rule(Block)
@bound_rule(SwinTransformerBlock, layout=_shifted_window_layout)
def _pre_norm_block(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    # `convert` puts the weights of the branches into `ls1` and `ls2` of ViT and into `drop_path1`
    # and `drop_path2` of Swin, which has no `ls1`.
    attn = [("norm1", module.norm1), ("attn", module.attn)]
    mlp = [("norm2", module.norm2), ("mlp", module.mlp)]
    ends = [
        [getattr(module, name) for name in (f"ls{i}", f"drop_path{i}") if hasattr(module, name)]
        for i in (1, 2)
    ]
    x = residual_bound(_alpha(*ends[0]), attn, domain)
    return compose(x, residual_bound(_alpha(*ends[1]), mlp, x.output, scale))


def _alpha(*ends: nn.Module) -> Tensor | None:
    """Return the product of the weights by which a branch ends, or None if there are none."""
    alpha = None
    for end in ends:
        unchanged(end, LayerScale, nn.Sequential, *PASSIVE)
        if isinstance(end, nn.Sequential):
            inner = _alpha(*end._modules.values())  # pyright: ignore[reportArgumentType]
            alpha = alpha if inner is None else product(inner, alpha)
        elif isinstance(end, LayerScale):
            alpha = product(end.gamma, alpha)
    return alpha


@bound_rule(VisionTransformer)
def _vit(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    unchanged(module.head_drop, *PASSIVE)
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
    unchanged(module.head_drop, *PASSIVE)
    x = _vit_features(module, domain, [module.cls_token, module.dist_token])
    pooled = Domain(size=(), radius=x.output.radius)
    heads = {
        name: lipschitz_bound(getattr(module, name), pooled, scale)
        for name in ("head", "head_dist")
    }
    log10 = log10_of(math.hypot(*(head.value for head in heads.values())) / 2.0)
    radius = sum(head.output.radius for head in heads.values()) / 2.0
    mean = Bound(
        log10=log10,
        paper_log10=log10,
        output=Domain(size=(), radius=radius),
        input=x.output,
        parts=heads,
    )
    return compose(x, mean)


def _vit_features(module: Any, domain: Domain, prefix: list[Tensor | None]) -> Bound:
    unchanged(module.pos_drop, *PASSIVE)
    unchanged(module.patch_drop, *PASSIVE)
    x = chain([("patch_embed", module.patch_embed)], domain)
    x = compose(x, _tokens(module, x.output, [token for token in prefix if token is not None]))
    for name in ("norm_pre", "blocks", "norm"):
        x = compose(x, lipschitz_bound(getattr(module, name), x.output), name)
    return x


def _tokens(module: Any, patches: Domain, prefix: list[Tensor]) -> Bound:
    """Bound the step that adds class and register tokens and the position embedding.

    All of them are constants, so the step is an isometry followed by a shift.
    """
    tokens = [row for token in prefix for row in token.detach()[0]]
    position = module.pos_embed
    num_embedded = patches.tokens + (0 if module.no_embed_class else module.num_prefix_tokens)
    if position is not None and module.dynamic_img_size:
        prefix_tokens = 0 if module.no_embed_class else module.num_prefix_tokens
        grid = list(module.patch_embed.grid_size)
        position = resample_abs_pos_embed(
            position.detach(), list(patches.size), grid, num_prefix_tokens=prefix_tokens
        )
    if position is not None and position.shape[1] != num_embedded:
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {num_embedded} embedded tokens with "
            f"{position.shape[1]} position embeddings: use the image size of the model"
        )
    radius = max([patches.radius, *(token.norm().item() for token in tokens)])
    if position is not None:
        radius += position.detach().norm(dim=-1).max().item()
    return simple_bound(1.0, patches, size=(patches.tokens + len(tokens),), radius=radius)


def _vit_pool(module: Any, tokens: Domain) -> Bound:
    """Bound the pooling: the class token, or the mean of N tokens, whose norm is 1 / sqrt(N)."""
    if module.attn_pool is None and module.global_pool in ("token", "avg"):
        averaged = tokens.tokens - (0 if module.pool_include_prefix else module.num_prefix_tokens)
        value = 1.0 if module.global_pool == "token" else 1.0 / math.sqrt(averaged)
        return simple_bound(value, tokens, size=(), radius=tokens.radius)
    raise UnknownModuleError(
        f"no Lipschitz bound is known for the pooling {module.global_pool!r}: use 'avg' or 'token'"
    )
