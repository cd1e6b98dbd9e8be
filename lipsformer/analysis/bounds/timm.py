"""Bounds of timm's ViT, DeiT and Swin in their Lipschitz form (``lipsformer.convert``).

The classes are named, not imported: analysis stands below the models.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer.analysis.bounds.attention import (
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
    rule,
    simple_bound,
)
from lipsformer.analysis.bounds.lipsformer import project, residual_bound, then
from lipsformer.analysis.sigma import residual_scale_of

_FORM = "lipsformer.models.timm_conversion."
_VIT = "timm.models.vision_transformer."
_SWIN = "timm.models.swin_transformer."


@rule("timm.layers.patch_embed.PatchEmbed")
def _patch_embed(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    return chain([("proj", module.proj), ("norm", module.norm)], domain, scale)


@rule(_FORM + "CosineAttention")
def _cosine_attention(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    mass = column_mass(max_abs_score(module.attention), domain.tokens)
    return _attention(module, domain.tokens, mass, domain, scale)


@rule(_FORM + "CosineWindowAttention")
def _cosine_window_attention(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    # shifted windows add a mask to the biases, so nothing is assumed of what is added
    return _attention(module, math.prod(module.window_size), None, domain, scale)


def _attention(
    module: Any, num_tokens: int, mass: Tensor | None, domain: Domain, scale: Tensor | None
) -> Bound:
    heads = split_qkv(module.qkv.weight, module.qkv.bias, module.num_heads)
    attended = attention_bound(module.attention, heads, num_tokens, domain.radius, mass)
    return project(
        module.proj,
        gram_norm(attended.gram),
        math.sqrt(attended.paper_squared),
        math.sqrt(attended.radius_squared),
        domain,
        scale,
    )


@rule(_VIT + "Block")
def _vit_block(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    x = chain([], domain)
    for index, branch in ((1, "attn"), (2, "mlp")):
        names = (f"norm{index}", branch)
        gamma = _residual_scale(getattr(module, f"ls{index}"), getattr(module, f"norm{index}"))
        x = residual_bound(x, gamma, [(name, getattr(module, name)) for name in names])
    return x


@rule(_SWIN + "SwinTransformerBlock")
def _swin_block(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    x = chain([], domain)
    for index, branch in ((1, "attn"), (2, "mlp")):
        names = (f"norm{index}", branch)
        end, norm = getattr(module, f"drop_path{index}"), getattr(module, f"norm{index}")
        branch_modules = [(name, getattr(module, name)) for name in names]
        x = residual_bound(x, _residual_scale(end, norm), branch_modules)
    return x


def _residual_scale(end: nn.Module, norm: Any) -> Tensor:
    """The weight that the end of a branch holds, or ones as many as channels."""
    scales = [scale for m in end.modules() if (scale := residual_scale_of(m)) is not None]
    return scales[0] if scales else torch.ones_like(norm.weight)


@rule(_SWIN + "PatchMerging")
def _patch_merging(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    merged = Domain(size=tuple((side + 1) // 2 for side in domain.size), radius=2.0 * domain.radius)
    return chain([("norm", module.norm), ("reduction", module.reduction)], merged, scale)


@rule(_SWIN + "SwinTransformerStage")
def _swin_stage(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    return chain([("downsample", module.downsample), ("blocks", module.blocks)], domain, scale)


@rule(_SWIN + "SwinTransformer")
def _swin(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    names = ("patch_embed", "layers", "norm", "head")
    return chain([(name, getattr(module, name)) for name in names], domain, scale)


@rule(_VIT + "VisionTransformer")
def _vit(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    x = then(chain([], domain), "patch_embed", module.patch_embed)
    x = _then_simple(x, _tokens(module, x.output))
    for name in ("norm_pre", "blocks", "norm"):
        x = then(x, name, getattr(module, name))
    x = _then_simple(x, _vit_pool(module, x.output))
    return then(then(x, "fc_norm", module.fc_norm), "head", module.head)


def _then_simple(x: Bound, step: Bound) -> Bound:
    """Apply a step that is not a module of its own."""
    return Bound(
        log10=x.log10 + step.log10,
        paper_log10=x.paper_log10 + step.paper_log10,
        output=step.output,
        input=x.input,
        parts=x.parts,
    )


def _tokens(module: Any, patches: Domain) -> Bound:
    """Class and register tokens and position embeddings are constants: an isometry and a shift."""
    radius = patches.radius
    for token in (module.cls_token, module.reg_token):
        if token is not None:
            radius = max(radius, token.detach().norm(dim=-1).max().item())
    if module.pos_embed is not None:
        radius += module.pos_embed.detach().norm(dim=-1).max().item()
    size = (patches.tokens + module.num_prefix_tokens,)
    return simple_bound(1.0, patches, size=size, radius=radius)


def _vit_pool(module: Any, tokens: Domain) -> Bound:
    """Take the class token, or the mean of the N others with norm 1 / sqrt(N)."""
    if module.attn_pool is None and module.global_pool in ("token", "avg"):
        averaged = tokens.tokens - (0 if module.pool_include_prefix else module.num_prefix_tokens)
        value = 1.0 if module.global_pool == "token" else 1.0 / math.sqrt(averaged)
        return simple_bound(value, tokens, size=(), radius=tokens.radius)
    raise UnknownModuleError(
        f"no Lipschitz bound is known for the pooling {module.global_pool!r}: use 'avg' or 'token'"
    )
