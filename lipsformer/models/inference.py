"""Fold what is affine into the neighbouring layers: the same function with fewer passes."""

import copy
from typing import Any, cast

import torch
from timm.layers import Mlp as TimmMlp
from timm.models.swin_transformer import PatchMerging as TimmPatchMerging
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lipsformer.layers import CenterNorm, Linear, ScaledCosineAttention
from lipsformer.layers.frozen import FrozenCosineAttention, FrozenLinear
from lipsformer.models._body import LipsFormerBlock, PatchEmbed
from lipsformer.models.lipsformer_cswin import ConvMerging, StripeAttention
from lipsformer.models.lipsformer_swin import PatchMerging


class FoldedBlock(nn.Module):
    r"""LipsFormerBlock as it is run: residual scales in the last linear layer of their branch.

    A CenterNorm behind a sum is split: its matrix and bias enter the branch's last layer, and the
    shortcut is centred while the branch is added,
    :math:`CN(x + f) = \gamma \tfrac{d}{d-1} (x - \mathrm{mean}(x)) + f'`.

    Shape: [B, H, W, C] to the same.
    """

    def __init__(self, block: LipsFormerBlock) -> None:
        """Take over and change the layers of ``block``."""
        super().__init__()
        pointwise = FrozenLinear(cast(nn.Linear, block.conv1.pointwise), gelu=True)
        self.conv1 = nn.Sequential(block.conv1.depthwise, nn.GELU(), pointwise)
        self.conv2 = nn.Sequential(block.conv2.depthwise, nn.GELU())
        self.register_buffer("scale1", block.residual_conv1.residual_scale.detach())
        self.register_buffer("scale2", block.residual_conv2.residual_scale.detach())
        self.attn = block.attn
        _scale_output(self.attn.proj, block.residual_attn.residual_scale)  # pyright: ignore[reportArgumentType]
        self.register_buffer("gain_attn", _fold_norm_of_sum(self.attn.proj, block.norm1))  # pyright: ignore[reportArgumentType]
        _scale_output(block.mlp.fc2, block.residual_mlp.residual_scale)
        self.register_buffer("gain_mlp", _fold_norm_of_sum(block.mlp.fc2, block.norm2))
        fc1, fc2 = FrozenLinear(block.mlp.fc1, gelu=True), FrozenLinear(block.mlp.fc2)
        self.mlp = nn.Sequential(fc1, fc2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to ``x`` ([B, H, W, C])."""
        x = torch.addcmul(x, self.conv1(x), self.get_buffer("scale1"))
        x = torch.addcmul(x, self.conv2(x), self.get_buffer("scale2"))
        x = self._sum(x, self.attn(x), self.get_buffer("gain_attn"))
        return self._sum(x, self.mlp(x), self.gain_mlp)

    @staticmethod
    def _sum(x: Tensor, branch: Tensor, gain: Tensor | None) -> Tensor:
        if gain is None:
            return x + branch
        return torch.addcmul(branch, x - x.mean(dim=-1, keepdim=True), gain)


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
        _fold_inside(module)
    classifier = folded.get_classifier()
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
        return FrozenLinear(module)
    return None


def _fold_inside(module: Any) -> None:
    """Fold what ``module`` joins into the layers that stay."""
    if isinstance(module, PatchEmbed):
        _fold_norm_behind(module.proj, module.norm)
        module.norm = nn.Identity()
    elif isinstance(module, ConvMerging):
        _fold_norm_behind(module.conv, module.norm)
        module.norm = nn.Identity()
    elif isinstance(module, (PatchMerging, TimmPatchMerging)):
        if isinstance(module.norm, CenterNorm):
            _fold_norm_before(module.norm, module.reduction)
            module.norm = nn.Identity()
    elif isinstance(module, StripeAttention):
        weight = module.proj.weight
        weight.copy_((weight.double() * module.output_scale).to(weight.dtype))
        module.output_scale = 1.0
    elif isinstance(module, Block) and isinstance(module.norm1, CenterNorm):
        _fold_norm_before(module.norm1, module.attn.qkv)
        _fold_norm_before(module.norm2, module.mlp.fc1)
        _scale_output(module.attn.proj, module.ls1.gamma)  # pyright: ignore[reportArgumentType]
        _scale_output(module.mlp.fc2, module.ls2.gamma)  # pyright: ignore[reportArgumentType]
        module.norm1, module.norm2 = nn.Identity(), nn.Identity()
        module.ls1, module.ls2 = nn.Identity(), nn.Identity()
    elif isinstance(module, SwinTransformerBlock) and isinstance(module.norm1, CenterNorm):
        if _keeps_zero_padding(module):
            _fold_norm_before(module.norm1, module.attn.qkv)
            module.norm1 = nn.Identity()
        _fold_norm_before(module.norm2, module.mlp.fc1)
        _scale_output(module.attn.proj, module.drop_path1[0].gamma)
        _scale_output(module.mlp.fc2, module.drop_path2[0].gamma)
        module.norm2, module.drop_path1, module.drop_path2 = (nn.Identity() for _ in range(3))
    elif isinstance(module, TimmMlp) and type(module.act) is nn.GELU:
        module.fc1 = FrozenLinear(module.fc1, gelu=True)
        module.act = nn.Identity()


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
    layer.bias = None if bias is None else nn.Parameter(bias.to(dtype))
