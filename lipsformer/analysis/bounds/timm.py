"""Bounds of timm's ViT, DeiT and Swin after `lipsformer.convert` has made them Lipschitz."""

import math
from typing import Any

import torch
from timm.layers import PatchEmbed
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
    simple_bound,
)
from lipsformer.analysis.bounds.lipsformer import patch_merging_bound, residual_bound
from lipsformer.analysis.sigma import residual_scale_of
from lipsformer.models.timm_conversion import CosineAttention, CosineWindowAttention

bound_rule(PatchEmbed)(children_in_order("proj", "norm"))
bound_rule(PatchMerging)(patch_merging_bound)
bound_rule(SwinTransformerStage)(children_in_order("downsample", "blocks"))
bound_rule(SwinTransformer)(children_in_order("patch_embed", "layers", "norm", "head"))


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
    return _attention(module, math.prod(module.window_size), None, domain, scale)


def _attention(
    module: Any, num_tokens: int, mass: Tensor | None, domain: Domain, scale: Tensor | None
) -> Bound:
    heads = split_qkv(module.qkv.weight, module.qkv.bias, module.num_heads)
    attended = attention_bound(module.attention, heads, num_tokens, domain.radius, mass)
    return projected_bound(attended, module.proj, domain, scale)


def _shifted_window_layout(_: Any, block: Any, __: int, x: Tensor) -> Layout:
    return Layout(block.window_size, (x.shape[1], x.shape[2]), shift=block.shift_size)


# In Swin the block has the layout, because its attention knows neither the map nor the shift.
@bound_rule(Block)
@bound_rule(SwinTransformerBlock, layout=_shifted_window_layout)
def _pre_norm_block(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    # `convert` puts the weights of the branches into `ls1` and `ls2` of ViT and into `drop_path1`
    # and `drop_path2` of Swin, which has no `ls1`.
    ends = "ls" if hasattr(module, "ls1") else "drop_path"
    attn = [("norm1", module.norm1), ("attn", module.attn)]
    mlp = [("norm2", module.norm2), ("mlp", module.mlp)]
    x = residual_bound(_alpha(getattr(module, f"{ends}1"), module.norm1), attn, domain)
    alpha = _alpha(getattr(module, f"{ends}2"), module.norm2)
    return compose(x, residual_bound(alpha, mlp, x.output, scale))


def _alpha(end: nn.Module, norm: Any) -> Tensor:
    """Return the weight of the residual branch that `end` holds, or ones if it holds none."""
    scales = [scale for m in end.modules() if (scale := residual_scale_of(m)) is not None]
    return scales[0] if scales else torch.ones_like(norm.weight)


@bound_rule(VisionTransformer)
def _vit(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    x = chain([("patch_embed", module.patch_embed)], domain)
    x = compose(x, _tokens(module, x.output))
    for name in ("norm_pre", "blocks", "norm"):
        x = compose(x, lipschitz_bound(getattr(module, name), x.output), name)
    x = compose(x, _vit_pool(module, x.output))
    x = compose(x, lipschitz_bound(module.fc_norm, x.output), "fc_norm")
    return compose(x, lipschitz_bound(module.head, x.output, scale), "head")


def _tokens(module: Any, patches: Domain) -> Bound:
    """Bound the step that adds class and register tokens and the position embedding.

    All of them are constants, so the step is an isometry followed by a shift.
    """
    radius = patches.radius
    for token in (module.cls_token, module.reg_token):
        if token is not None:
            radius = max(radius, token.detach().norm(dim=-1).max().item())
    if module.pos_embed is not None:
        radius += module.pos_embed.detach().norm(dim=-1).max().item()
    size = (patches.tokens + module.num_prefix_tokens,)
    return simple_bound(1.0, patches, size=size, radius=radius)


def _vit_pool(module: Any, tokens: Domain) -> Bound:
    """Bound the pooling: the class token, or the mean of N tokens, whose norm is 1 / sqrt(N)."""
    if module.attn_pool is None and module.global_pool in ("token", "avg"):
        averaged = tokens.tokens - (0 if module.pool_include_prefix else module.num_prefix_tokens)
        value = 1.0 if module.global_pool == "token" else 1.0 / math.sqrt(averaged)
        return simple_bound(value, tokens, size=(), radius=tokens.radius)
    raise UnknownModuleError(
        f"no Lipschitz bound is known for the pooling {module.global_pool!r}: use 'avg' or 'token'"
    )
