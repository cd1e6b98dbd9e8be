"""The bodies of the league: one Swin model, and what each method changes in it.

This is the only file of the league, beside `nvit.py`, that knows how a LipsFormer is built. Modules
are found by their class, so that names of attributes inside a block do not matter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
from torch import nn

import lipsformer  # noqa: F401  (registers the models)
from benchmarks.league.attention import DotProductAttention, QKNormAttention
from benchmarks.league.nvit import NormalizeWeights, make_normalized
from benchmarks.league.pointwise_norms import Derf, DyT
from benchmarks.league.residual_scales import layer_scale_, rezero_
from benchmarks.league.sigma_reparam import sigma_reparam_
from benchmarks.league.simple_norm import RMSNorm, simple_norm_
from lipsformer.analysis.instruments import InstrumentBase, SpectralCap, UpdateLimit
from lipsformer.layers import CenterNorm, DepthwiseConv2d, WeightedResidual
from lipsformer.models.lipsformer import LipsFormerBlock
from lipsformer.models.lipsformer_swin import WindowAttention

Model = Any
IMAGE_SIZE = 32


def lipsformer_body(blocks: int, num_classes: int) -> Model:
    """Return a LipsFormer-Swin of two stages with a third and two thirds of the blocks.

    Args:
        blocks: Number of blocks, at least 2.
        num_classes: Number of classes.
    """
    first = max(1, blocks // 3)
    return timm.create_model(
        "lipsformer_swin_nano",
        img_size=IMAGE_SIZE,
        patch_size=4,
        embed_dim=16,
        depths=(first, blocks - first),
        num_heads=(2, 4),
        window_size=4,
        num_classes=num_classes,
    )


def replace_modules(model: Model, kind: type, make: Callable[[Any], nn.Module]) -> None:
    """Put another module in the place of every module of a class."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, kind):
                setattr(parent, name, make(child))


def replace_norms(model: Model, make: Callable[[int], nn.Module]) -> None:
    """Put another norm, made from the number of channels, in the place of every CenterNorm."""
    replace_modules(model, CenterNorm, lambda norm: make(norm.dim))


def replace_attention(model: Model, make: Callable[[int, int], nn.Module]) -> None:
    """Put another attention on q, k and v into every block.

    Args:
        model: Changed in place.
        make: Called with the number of heads and the channels of a head.
    """
    for module in model.modules():
        if isinstance(module, WindowAttention):
            module.attention = make(module.num_heads, module.dim // module.num_heads)


def normalize_before(model: Model, make: Callable[[int], nn.Module]) -> None:
    """Move the norms of the blocks from after the sums to the start of all four branches.

    This is the pre-norm arrangement of today's transformers. The norms of the patches, of merging
    and before the classifier stay where they are. A hook of each branch
    applies its new norm.

    Args:
        model: Changed in place.
        make: Called with the number of channels.
    """
    for block in model.modules():
        if isinstance(block, LipsFormerBlock):
            norms = [n for n, child in block.named_children() if isinstance(child, CenterNorm)]
            dim = getattr(block, norms[0]).dim
            for name in norms:
                setattr(block, name, nn.Identity())
            for residual in residuals(block):
                residual.branch.input_norm = make(dim)
                residual.branch.register_forward_pre_hook(_normalize_input)
    replace_norms(model, make)


def _normalize_input(branch: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (branch.input_norm(args[0]), *args[1:])


def residuals(model: nn.Module) -> list[WeightedResidual]:
    """Return the residual branches."""
    return [module for module in model.modules() if isinstance(module, WeightedResidual)]


def linear_maps(model: Model) -> list[nn.Module]:
    """Return the linear layers and the convolutions."""
    kinds = (nn.Linear, nn.Conv2d, DepthwiseConv2d)
    return [module for module in model.modules() if isinstance(module, kinds)]


def layer_norm(model: Model, blocks: int) -> None:
    """Swap CenterNorm for LayerNorm."""
    replace_norms(model, nn.LayerNorm)


def unit_norm(model: Model, blocks: int) -> None:
    """Start CenterNorm with the constant 1 (`weight_init="unit_norm"`) instead of d / (d - 1)."""
    for module in model.modules():
        if isinstance(module, CenterNorm):
            module.reset_parameters(unit=True)


def dot_product(model: Model, blocks: int) -> None:
    """Swap scaled cosine attention for dot-product attention."""
    replace_attention(model, lambda num_heads, head_dim: DotProductAttention(num_heads))


def plain_residual(model: Model, blocks: int) -> None:
    """Swap x + alpha f(x) for x + f(x)."""
    for residual in residuals(model):
        nn.init.ones_(residual.residual_scale).requires_grad_(False)


def default_init(model: Model, blocks: int) -> None:
    """Swap spectral initialization for a truncated normal of 0.02, PyTorch's for depthwise."""
    for layer in linear_maps(model):
        if isinstance(layer, DepthwiseConv2d):
            layer.reset_parameters()
        else:
            nn.init.trunc_normal_(layer.weight, std=0.02)  # pyright: ignore


def plain(model: Model, blocks: int) -> None:
    """Swap out all four parts of LipsFormer: the LayerNorms follow attention and MLP."""
    for swap in (layer_norm, dot_product, plain_residual, default_init):
        swap(model, blocks)


def qk_norm(model: Model, blocks: int) -> None:
    """Change `plain` by LayerNorm of queries and keys."""
    plain(model, blocks)
    replace_attention(model, QKNormAttention)


def pre_norm(model: Model, blocks: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
    """Change `plain` by norms at the start of the branches instead of after the sums."""
    normalize_before(model, norm)
    plain(model, blocks)


def layer_scale(model: Model, blocks: int) -> None:
    """Change `pre-norm` by learned weights of the branches that start small."""
    pre_norm(model, blocks)
    for residual in residuals(model):
        layer_scale_(residual, blocks)
        residual.residual_scale.requires_grad_(True)


def rezero(model: Model, blocks: int) -> None:
    """Change `plain` by one learned weight per branch, zero at first, and no norms.

    Linear weights start by Xavier's uniform distribution, as PyTorch's transformers do: 0.02 would
    need the norms.
    """
    replace_norms(model, lambda dim: nn.Identity())
    plain(model, blocks)
    for layer in linear_maps(model):
        if not isinstance(layer, DepthwiseConv2d):
            nn.init.xavier_uniform_(layer.weight)  # pyright: ignore
    for residual in residuals(model):
        residual.residual_scale.requires_grad_(True)
        rezero_(residual)


def sigma_reparam(model: Model, blocks: int) -> None:
    """Change `plain` by weights of learned spectral norm, and no norms."""
    replace_norms(model, lambda dim: nn.Identity())
    plain(model, blocks)
    for layer in linear_maps(model):
        sigma_reparam_(layer)


def simple_norm(model: Model, blocks: int) -> None:
    """Change `plain` by a norm after every linear map but the classifier, and no others."""
    last = model.norm.dim
    dim = model.patch_embed.norm.dim
    replace_norms(model, lambda dim: nn.Identity())
    plain(model, blocks)
    model.patch_embed.norm, model.norm = RMSNorm(dim), RMSNorm(last)
    threefold = [m.qkv for m in model.modules() if isinstance(m, WindowAttention)]
    others = (model.patch_embed.proj, model.head.fc)  # the first is followed by a norm already
    for layer in linear_maps(model):
        if all(layer is not other for other in others):
            simple_norm_(layer, parts=3 if any(layer is qkv for qkv in threefold) else 1)


@dataclass(frozen=True)
class Body:
    """A row of the league.

    Attributes:
        change: Changes a LipsFormer-Swin in place; called with the number of blocks.
        weight_decay: Whether the method is trained with weight decay.
        instruments: Make what acts around every update, from the model.
    """

    change: Callable[[Model, int], None]
    weight_decay: bool = True
    instruments: tuple[Callable[[Model], InstrumentBase], ...] = ()


# Largest ratio of sigma_1(update) to sigma_1(weight) of UpdateLimit, and the cap of SpectralCap:
# the spectral norm at which LipsFormer starts.
SHARE, CAP = 0.02, 1.0

BODIES = {
    "lipsformer": Body(lambda model, blocks: None),
    "plain": Body(plain),
    "pre-norm": Body(pre_norm),
    "plain + QK-norm": Body(qk_norm),
    "LayerScale": Body(layer_scale),
    "ReZero": Body(rezero),
    "DyT": Body(partial(pre_norm, norm=DyT)),
    "Derf": Body(partial(pre_norm, norm=Derf)),
    "sigmaReparam": Body(sigma_reparam, weight_decay=False),
    "SimpleNorm": Body(simple_norm),
    "nViT": Body(make_normalized, weight_decay=False, instruments=(NormalizeWeights,)),
    "plain + SpectralCap": Body(plain, instruments=(partial(SpectralCap, sigma=CAP),)),
    "plain + UpdateLimit": Body(plain, instruments=(partial(UpdateLimit, share=SHARE),)),
    "lipsformer, unit norm": Body(unit_norm),
    "lipsformer, LayerNorm": Body(layer_norm),
    "lipsformer, dot product": Body(dot_product),
    "lipsformer, plain residual": Body(plain_residual),
    "lipsformer, default init": Body(default_init),
}


def build(name: str, blocks: int, num_classes: int) -> Model:
    """Build a body with torch's default generator.

    Args:
        name: A key of `BODIES`.
        blocks: Number of blocks, at least 2.
        num_classes: Number of classes.
    """
    model = lipsformer_body(blocks, num_classes)
    BODIES[name].change(model, blocks)
    return model
