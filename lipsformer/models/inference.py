"""Fold what is affine into the neighbouring layers: the same function with fewer passes."""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from timm.layers import Mlp as TimmMlp
from timm.models.swin_transformer import PatchMerging as TimmPatchMerging
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lipsformer.kernels.pointwise import add_gelu, center
from lipsformer.layers import CenterNorm, Linear, ScaledCosineAttention
from lipsformer.models.frozen import FrozenCosineAttention, FrozenLinear
from lipsformer.models.lipsformer import LipsFormerBlock, PatchEmbed
from lipsformer.models.lipsformer_cswin import ConvMerging, StripeAttention
from lipsformer.models.lipsformer_swin import PatchMerging


class FoldedBlock(nn.Module):
    r"""LipsFormerBlock as it is run: residual scales in the last linear layer of their branch.

    A CenterNorm behind a sum is split: its matrix and bias enter the branch's last layer, and the
    shortcut is centred while the branch is added,
    :math:`CN(x + f) = \gamma \tfrac{d}{d-1} (x - \mathrm{mean}(x)) + f'`.

    Shape: [B, H, W, C] to the same.
    """

    gain_attn: Tensor | None
    gain_mlp: Tensor

    def __init__(self, block: Any) -> None:
        """Take over and change the layers of ``block``."""
        super().__init__()
        pointwise = FrozenLinear(block.conv1.pointwise, gelu=True)
        self.conv1 = nn.Sequential(block.conv1.depthwise, nn.GELU(), pointwise)
        self.conv2 = block.conv2
        self.scale1 = nn.Buffer(block.residual_conv1.residual_scale.detach())
        self.scale2 = nn.Buffer(block.residual_conv2.residual_scale.detach())
        self.attn = block.attn
        _scale_output(self.attn.proj, block.residual_attn.residual_scale)
        self.register_buffer("gain_attn", _fold_norm_of_sum(self.attn.proj, block.norm1))
        _scale_output(block.mlp.fc2, block.residual_mlp.residual_scale)
        self.register_buffer("gain_mlp", _fold_norm_of_sum(block.mlp.fc2, block.norm2))
        fc1, fc2 = FrozenLinear(block.mlp.fc1, gelu=True), FrozenLinear(block.mlp.fc2)
        self.mlp = nn.Sequential(fc1, fc2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to ``x`` ([B, H, W, C])."""
        x = torch.addcmul(x, self.conv1(x), self.scale1)
        x = add_gelu(x, self.conv2(x), self.scale2)
        x = self._sum(x, self.attn(x), self.gain_attn)
        return self._sum(x, self.mlp(x), self.gain_mlp)

    @staticmethod
    def _sum(x: Tensor, branch: Tensor, gain: Tensor | None) -> Tensor:
        if gain is None:
            return x + branch
        return center(x, gain, branch)


@torch.no_grad()
def optimize_for_inference(model: nn.Module) -> nn.Module:
    r"""Return a copy of a model in which every affine map that allows it is folded.

    .. math:: W\,CN(x) + b = W'x + b', \quad
        W' = W \mathrm{diag}(\gamma) \tfrac{d}{d-1} (I - 11^T/d), \quad b' = b + W\beta

    and :math:`CN(Wx + b)` likewise from the other side; residual scales enter the last linear
    layer of their branch, tau and nu the normalisation of queries and values. Computed in float64
    and rounded once. On the CPU in float32 linear layers run from a copy of their
    weights in oneDNN's layout, GELU included, which takes their memory twice. Not folded: the last
    CenterNorm (``forward_features`` returns its result) and scales behind a GELU.

    The copy gives the same logits and features. Its parameters have other names and no gradients;
    keep the model itself for training, checkpoints and Lipschitz bounds.

    Args:
        model: A LipsFormer (CSwin, Swin, ViT) or a model made by ``convert``, in evaluation mode.

    Raises:
        ValueError: If the model is in training mode.
        TypeError: If nothing in the model can be folded.
    """
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    folded = copy.deepcopy(model)
    if not any(
        isinstance(module, (CenterNorm, ScaledCosineAttention)) for module in folded.modules()
    ):
        raise TypeError(
            f"{type(model).__name__} has nothing to fold: pass a LipsFormer or a model of convert()"
        )
    for module in list(folded.modules()):
        for kind, fold in FOLDS.items():
            if isinstance(module, kind):
                fold(module)
    classifier = cast(Any, folded).get_classifier()
    for parent in list(folded.modules()):
        for name, child in parent.named_children():
            if child is not classifier and (frozen := _frozen(child)) is not None:
                setattr(parent, name, frozen)
    return folded.requires_grad_(False).eval()


def _frozen(module: nn.Module) -> nn.Module | None:
    """What stands for ``module`` where nothing is trained any more, None for itself."""
    if isinstance(module, LipsFormerBlock):
        return FoldedBlock(module)
    if isinstance(module, ScaledCosineAttention):
        return FrozenCosineAttention(module)
    if type(module) in (Linear, nn.Linear):
        return FrozenLinear(cast(nn.Linear, module))
    return None


def _fold_patch_embed(embed: Any) -> None:
    _fold_norm_behind(embed.proj, embed.norm)
    embed.norm = nn.Identity()


def _fold_conv_merging(merging: Any) -> None:
    _fold_norm_behind(merging.conv, merging.norm)
    merging.norm = nn.Identity()


def _fold_patch_merging(merging: Any) -> None:
    if isinstance(merging.norm, CenterNorm):
        _fold_norm_before(merging.norm, merging.reduction)
        merging.norm = nn.Identity()


def _fold_stripes(attn: Any) -> None:
    weight = attn.proj.weight
    weight.copy_((weight.double() * attn.output_scale).to(weight.dtype))
    attn.output_scale = 1.0


def _fold_vit_block(block: Any) -> None:
    if isinstance(block.norm1, CenterNorm):
        _fold_norm_before(block.norm1, block.attn.qkv)
        _fold_norm_before(block.norm2, block.mlp.fc1)
        _scale_output(block.attn.proj, block.ls1.gamma)
        _scale_output(block.mlp.fc2, block.ls2.gamma)
        block.norm1, block.norm2, block.ls1, block.ls2 = (nn.Identity() for _ in range(4))


def _fold_swin_block(block: Any) -> None:
    if isinstance(block.norm1, CenterNorm):
        if _keeps_zero_padding(block):
            _fold_norm_before(block.norm1, block.attn.qkv)
            block.norm1 = nn.Identity()
        _fold_norm_before(block.norm2, block.mlp.fc1)
        _scale_output(block.attn.proj, block.drop_path1[0].gamma)
        _scale_output(block.mlp.fc2, block.drop_path2[0].gamma)
        block.norm2, block.drop_path1, block.drop_path2 = (nn.Identity() for _ in range(3))


def _fold_mlp(mlp: Any) -> None:
    if type(mlp.act) is nn.GELU:
        mlp.fc1, mlp.act = FrozenLinear(mlp.fc1, gelu=True), nn.Identity()


def _keeps_zero_padding(block: Any) -> bool:
    """Whether folding norm1 leaves timm's Swin block alone: it pads with zeros behind the norm.

    A padded token has the projection's bias, which the fold would move by W beta.
    """
    sizes = zip(block.input_resolution, block.window_size, strict=True)
    fits = not block.dynamic_mask and all(size % window == 0 for size, window in sizes)
    return fits or not block.norm1.bias.any()


def _gain(norm: CenterNorm) -> Tensor:
    return norm.weight.double() * (norm.dim / (norm.dim - 1))


def _fold_norm_before(norm: CenterNorm, linear: nn.Linear) -> None:
    """Make ``linear`` compute what it computes behind ``norm``."""
    weight = linear.weight.double()
    shift = weight @ norm.bias.double()
    centred = weight * _gain(norm)
    centred -= centred.mean(1, keepdim=True)
    bias = shift if linear.bias is None else linear.bias.double() + shift
    _assign(linear, centred, bias)


def _fold_norm_behind(layer: nn.Linear | nn.Conv2d, norm: CenterNorm) -> None:
    """Make ``layer`` compute what ``norm`` gives behind it."""
    weight, gain = layer.weight.double(), _gain(norm)
    bias = weight.new_zeros(norm.dim) if layer.bias is None else layer.bias.double()
    weight = (weight - weight.mean(0, keepdim=True)).movedim(0, -1) * gain
    _assign(layer, weight.movedim(-1, 0), (bias - bias.mean()) * gain + norm.bias.double())


def _fold_norm_of_sum(layer: nn.Linear, norm: nn.Module) -> Tensor | None:
    """Make ``layer``, the branch's last, compute the branch's part of ``norm`` of the sum.

    Returns:
        [C], by which the centred shortcut is multiplied; None where nothing is normalised.
    """
    if not isinstance(norm, CenterNorm):
        return None
    _fold_norm_behind(layer, norm)
    return _gain(norm).to(norm.weight.dtype)


def _scale_output(linear: nn.Linear, scale: Tensor) -> None:
    """Make ``linear`` multiply its output by ``scale`` ([C_out])."""
    scale = scale.double()
    bias = None if linear.bias is None else linear.bias.double() * scale
    _assign(linear, linear.weight.double() * scale[:, None], bias)


def _assign(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor | None) -> None:
    dtype = layer.weight.dtype
    layer.weight.copy_(weight.to(dtype))
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(dtype))


FOLDS: dict[type[nn.Module], Callable[[Any], None]] = {
    PatchEmbed: _fold_patch_embed,
    ConvMerging: _fold_conv_merging,
    PatchMerging: _fold_patch_merging,
    TimmPatchMerging: _fold_patch_merging,
    StripeAttention: _fold_stripes,
    Block: _fold_vit_block,
    SwinTransformerBlock: _fold_swin_block,
    TimmMlp: _fold_mlp,
}
