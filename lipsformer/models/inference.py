"""Fold what is affine into the neighbouring layers: the same function with fewer passes."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from timm.models.swin_transformer import PatchMerging as TimmPatchMerging
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lipsformer.layers import CenterNorm, ScaledCosineAttention, cosine_normalize
from lipsformer.layers.attention import MAX_LOGIT_SCALE
from lipsformer.models._body import LipsFormerBlock, PatchEmbed
from lipsformer.models.lipsformer_cswin import ConvMerging, StripeAttention
from lipsformer.models.lipsformer_swin import PatchMerging


class FoldedResidual(nn.Module):
    """x + branch, where the branch's last layer holds the residual scale."""

    residual_scale: Tensor | None

    def __init__(self) -> None:
        """Create the sum, which has no parameters."""
        super().__init__()
        self.residual_scale = None

    def draw_mask(self, x: Tensor) -> Tensor | None:
        """Nothing is dropped."""
        return None

    def forward(
        self,
        x: Tensor,
        branch: Tensor,
        mask: Tensor | None = None,
        gelu: bool = False,
        scaled: bool = True,
    ) -> Tensor:
        """Add ``branch`` to ``x`` (both [B, ..., C]); the arguments are WeightedResidual's."""
        return x + branch


class FoldedCosineAttention(nn.Module):
    """Scaled cosine attention with fixed tau and nu, which cost nothing inside the normalisation.

    Shape:
        q, k, v: [B, H, N, d]; bias: broadcastable to [B, H, N, N]; output [B, H, N, d].
    """

    def __init__(self, attention: ScaledCosineAttention) -> None:
        """Take tau per head, nu and eps from ``attention``."""
        super().__init__()
        self.eps = attention.eps
        tau = attention.init_logit_scale
        self.logit_scale = 1.0 if attention.log_logit_scale is not None else tau
        per_head = None
        if attention.log_logit_scale is not None:
            per_head = attention.log_logit_scale.detach().exp().clamp(max=MAX_LOGIT_SCALE)
        self.register_buffer("logit_scale_per_head", per_head)
        nu = attention.value_scale
        self.value_scale = None if nu is None else float(nu)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend with queries ``q``, keys ``k`` and values ``v``, adding ``bias`` to the scores."""
        q, k = cosine_normalize(q, self.eps, self.logit_scale), cosine_normalize(k, self.eps)
        if self.logit_scale_per_head is not None:
            q = q * self.logit_scale_per_head.to(q.dtype)
        if self.value_scale is not None:
            v = cosine_normalize(v, self.eps, self.value_scale)
        return F.scaled_dot_product_attention(q, k, v, bias, scale=1.0)


register_notrace_module(FoldedCosineAttention)  # the normalisation depends on the input's type


@torch.no_grad()
def optimize_for_inference(model: nn.Module) -> nn.Module:
    r"""Return a copy of a model in which every affine map that allows it is folded.

    .. math:: W\,CN(x) + b = W'x + b', \quad
        W' = W \mathrm{diag}(\gamma) \tfrac{d}{d-1} (I - 11^T/d), \quad b' = b + W\beta

    and :math:`CN(Wx + b)` likewise from the other side; residual scales enter the last linear
    layer of their branch, tau and nu the normalisation of queries and values. Computed in float64
    and rounded once. Not folded: a CenterNorm whose result the shortcut needs too, one before a
    depthwise convolution, the last one (``forward_features`` returns its result) and scales behind
    a GELU.

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
    count = sum(_fold_module(module) for module in list(folded.modules()))
    for parent in list(folded.modules()):
        for name, child in parent.named_children():
            if isinstance(child, ScaledCosineAttention):
                setattr(parent, name, FoldedCosineAttention(child))
                count += 1
    if count == 0:
        raise TypeError(
            f"{type(model).__name__} has nothing to fold: pass a LipsFormer or a model of convert()"
        )
    return folded.requires_grad_(False).eval()


def _fold_module(module: Any) -> bool:
    """Fold what ``module`` itself joins; tell whether there was anything."""
    if isinstance(module, PatchEmbed):
        _fold_norm_behind(module.proj, module.norm)
    elif isinstance(module, ConvMerging):
        _fold_norm_behind(module.conv, module.norm)
    elif isinstance(module, (PatchMerging, TimmPatchMerging)):
        if not isinstance(module.norm, CenterNorm):
            return False
        _fold_norm_before(module.norm, module.reduction)
    elif isinstance(module, LipsFormerBlock):
        for branch, name in ((module.attn.proj, "attn"), (module.mlp.fc2, "mlp")):
            residual = getattr(module, f"residual_{name}")
            _scale_output(branch, residual.residual_scale)
            setattr(module, f"residual_{name}", FoldedResidual())
        return True
    elif isinstance(module, StripeAttention):
        if module.output_scale == 1.0:
            return False
        weight = module.proj.weight
        weight.copy_((weight.double() * module.output_scale).to(weight.dtype))
        module.output_scale = 1.0
        return True
    elif isinstance(module, Block) and isinstance(module.norm1, CenterNorm):
        _fold_norm_before(module.norm1, module.attn.qkv)
        _fold_norm_before(module.norm2, module.mlp.fc1)
        _scale_output(module.attn.proj, module.ls1.gamma)  # pyright: ignore[reportArgumentType]
        _scale_output(module.mlp.fc2, module.ls2.gamma)  # pyright: ignore[reportArgumentType]
        module.norm1, module.norm2 = nn.Identity(), nn.Identity()
        module.ls1, module.ls2 = nn.Identity(), nn.Identity()
        return True
    elif isinstance(module, SwinTransformerBlock) and isinstance(module.norm1, CenterNorm):
        if _keeps_zero_padding(module):
            _fold_norm_before(module.norm1, module.attn.qkv)
            module.norm1 = nn.Identity()
        _fold_norm_before(module.norm2, module.mlp.fc1)
        _scale_output(module.attn.proj, module.drop_path1[0].gamma)
        _scale_output(module.mlp.fc2, module.drop_path2[0].gamma)
        module.norm2, module.drop_path1, module.drop_path2 = (nn.Identity() for _ in range(3))
        return True
    else:
        return False
    module.norm = nn.Identity()
    return True


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


def _fold_norm_behind(conv: nn.Conv2d, norm: CenterNorm) -> None:
    """Make ``conv`` compute what ``norm`` gives behind it."""
    weight, gain = conv.weight.double(), _gain(norm)
    bias = weight.new_zeros(norm.dim) if conv.bias is None else conv.bias.double()
    weight = (weight - weight.mean(0, keepdim=True)) * gain[:, None, None, None]
    _assign(conv, weight, (bias - bias.mean()) * gain + norm.bias.double())


def _scale_output(linear: nn.Linear, scale: Tensor) -> None:
    """Make ``linear`` multiply its output by ``scale`` ([C_out])."""
    weight = linear.weight.double() * scale.double()[:, None]
    _assign(linear, weight, None if linear.bias is None else linear.bias.double() * scale.double())


def _assign(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor | None) -> None:
    dtype = layer.weight.dtype
    layer.weight.copy_(weight.to(dtype))
    layer.bias = None if bias is None else nn.Parameter(bias.to(dtype))
