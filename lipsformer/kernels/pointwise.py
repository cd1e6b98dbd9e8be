"""Weighted residuals and CenterNorm on the CPU: each in one pass over the map.

A map may be bfloat16. It is computed in float32, with float32 parameters, and the result has the
type of the map.

The functions at the top are called by the layers. Those below are their forward and backward
passes, which use PyTorch's operators where the compiled kernels cannot run.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer.kernels.bindings import name_of, run
from lipsformer.kernels.dispatch import refuse_second_derivatives, usable
from lipsformer.kernels.linear import gelu_backward_

# Below this |bias / gain| the centered input follows from a float32 result without much rounding.
MAX_OFFSET = 64.0


def center_affine(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Return C / (C - 1) * gain * (x - mean(x)) + bias.

    Args:
        x: [..., C].
        gain: [C].
        bias: [C].
    """
    if x.dtype == torch.bfloat16 or gain.dtype.itemsize < 4:
        gain, bias = gain.float(), bias.float()
    if torch.is_grad_enabled():
        return _CenterAffine.apply(x, gain, bias)
    return center(x, gain * _factor(gain), bias)


class _CenterAffine(torch.autograd.Function):
    """Keep the result, which the next layer keeps as well, or the input.

    The gradient of the gain needs the centered input, which is (result - bias) / gain, as in Rota
    Bulo et al. 2018 (in-place activated batch norm). Where the gain is too small against the bias
    for that, down to zero, in any channel, the input is kept as well. The rounding of a bfloat16
    result may be larger than what varies between tokens, so in bfloat16 only the input is kept. The
    gradients can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        y, saved = center_affine_forward(x, gain, bias)
        ctx.save_for_backward(gain, bias, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gain, bias, *saved = ctx.saved_tensors
        (grad,) = grad_outputs
        return center_affine_backward(grad, gain, bias, saved)


def center_affine_forward(
    x: Tensor, gain: Tensor, bias: Tensor
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return what `center_affine` returns, and three values that its backward pass needs.

    Each of them may be None: the result; a mask of the channels whose centered input cannot be
    computed from the result; and `x`, if there is such a channel. In bfloat16 only `x` is kept.
    """
    y = center(x, gain * _factor(gain), bias)
    if x.dtype == torch.bfloat16:
        return y, (None, None, x)
    lost = bias.abs() >= MAX_OFFSET * gain.abs()
    return y, (y, lost, x if lost.any() else None)


def center_affine_backward(
    grad: Tensor,
    gain: Tensor,
    bias: Tensor,
    saved: Sequence[Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `center_affine` with respect to `x`, gain and bias."""
    factor = _factor(gain)
    y, lost, x = saved
    if y is None:
        zeros = torch.zeros_like(bias)
        centered = center(x, torch.ones_like(gain), zeros)
        grad_x, product_sum, grad_bias = center_backward(grad, centered, gain * factor, zeros)
        return grad_x, product_sum * factor, grad_bias
    grad_x, offset, grad_bias = center_backward(grad, y, gain * factor, bias)
    if x is None:
        return grad_x, offset / gain, grad_bias
    grad_gain = offset / gain.masked_fill(lost, 1.0)  # 0 / 0 has no derivative
    centered = x[..., lost] - x.mean(dim=-1, keepdim=True, dtype=gain.dtype)
    direct = (grad[..., lost] * centered).reshape(-1, centered.shape[-1]).sum(0) * factor
    return grad_x, grad_gain.index_put((lost,), direct), grad_bias


def _factor(gain: Tensor) -> float:
    return len(gain) / (len(gain) - 1)


def gelu_residual(x: Tensor, z: Tensor, scale: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return x + scale * GELU(z), where z may hold only the samples of `kept`.

    Args:
        x: [B, ..., C].
        z: [K, ..., C], the branch before its last GELU.
        scale: [C] or [K, 1, ..., C].
        kept: [K], increasing; None for all samples.
    """
    z, scale = z.to(x.dtype), scale.float()
    if torch.is_grad_enabled():
        return _GeluResidual.apply(x, z, scale, kept)
    return gelu_residual_forward(x, z, scale, kept)


class _GeluResidual(torch.autograd.Function):
    """Keep z and compute GELU(z) again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, scale: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(z, scale, kept)
        return gelu_residual_forward(x, z, scale, kept)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        z, scale, kept = ctx.saved_tensors
        (grad,) = grad_outputs
        return grad, *gelu_residual_backward(grad, z, scale, kept), None


def residual(x: Tensor, z: Tensor, mask: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return x + mask * z, where z may hold only the samples of `kept`.

    Args:
        x: [B, ..., C], contiguous, as `z`, which has its type.
        z: [K, ..., C].
        mask: [K, 1, ..., 1], which gets no gradient.
        kept: [K], increasing; None for all samples.
    """
    return _Residual.apply(x, z, mask, kept)


class _Residual(torch.autograd.Function):
    """Keep neither map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, mask: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(mask, kept)
        return residual_forward(x, z, mask, kept)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(*grad_outputs)
        mask, kept = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        return grad, residual_backward(grad, mask, kept), None, None


def fork(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` and its samples `kept`, whose gradients are added in one pass.

    Args:
        x: [B, ..., C], contiguous.
        kept: [K], increasing.
    """
    return _Fork.apply(x, kept)


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(kept)
        return x.view_as(x), x.index_select(0, kept)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives(*grad_outputs)
        (kept,) = ctx.saved_tensors
        grad, grad_kept = (tensor.contiguous() for tensor in grad_outputs)
        return residual_forward(grad, grad_kept, None, kept), None


def residual_forward(x: Tensor, z: Tensor, mask: Tensor | None, kept: Tensor | None) -> Tensor:
    """Return x + mask * z as `residual` does; None is a mask of ones."""
    scale = (
        torch.ones(x.shape[-1], dtype=torch.float32, device="cpu")
        if mask is None
        else _mask_rows(mask, x.shape[-1])
    )
    y = torch.empty_like(x)
    run(f"residual_{name_of(x.dtype)}", x, z, *_rows(scale), kept, y, len(x), *_sizes(z))
    return y


def residual_backward(grad: Tensor, mask: Tensor, kept: Tensor | None) -> Tensor:
    """Return the gradient of `residual` with respect to `z`."""
    scale = _mask_rows(mask, grad.shape[-1])
    grad_z = grad.new_empty(len(scale), *grad.shape[1:])
    name = f"residual_gradient_{name_of(grad.dtype)}"
    run(name, grad, *_rows(scale), kept, grad_z, *_sizes(grad_z))
    return grad_z


def _mask_rows(mask: Tensor, channels: int) -> Tensor:
    return mask.float().expand(*mask.shape[:-1], channels).contiguous()


def gelu_residual_forward(
    x: Tensor, z: Tensor, scale: Tensor, kept: Tensor | None = None
) -> Tensor:
    """Return what `gelu_residual` returns; `scale` has the type in which the sum is computed."""
    fits = x.shape[1:] == z.shape[1:] and (kept is not None or len(x) == len(z))
    if fits and _scale_fits(z, scale) and usable("gelu_residual.csrc", x, z, scale):
        y = torch.empty_like(x)
        name = f"gelu_residual_{name_of(x.dtype)}"
        run(name, x, z, *_rows(scale), kept, y, len(x), *_sizes(z))
        return y
    wide, activated = x.to(scale.dtype), F.gelu(z.to(scale.dtype))
    if kept is not None:
        return wide.index_add(0, kept, activated * scale).to(x.dtype)
    return torch.addcmul(wide, activated, scale).to(x.dtype)


def gelu_residual_backward(
    grad: Tensor, z: Tensor, scale: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gelu_residual` with respect to `z` and `scale`."""
    if _scale_fits(z, scale) and usable("gelu_residual.csrc", grad, z, scale):
        grad_z, grad_scale = torch.empty_like(z), torch.empty_like(scale)
        name = f"gelu_residual_gradients_{name_of(z.dtype)}"
        run(name, grad, z, *_rows(scale), kept, grad_z, grad_scale, *_sizes(z))
        return grad_z, grad_scale
    grad_branch = grad if kept is None else grad.index_select(0, kept)
    grad_z = grad_branch * scale
    activated = gelu_backward_(grad_z, z.to(scale.dtype))
    return grad_z.to(z.dtype), activated.mul_(grad_branch).sum_to_size(scale.shape)


def center(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Return gain * (x - mean(x)) + shift.

    Args:
        x: [..., C].
        gain: [C].
        shift: [C] or of the shape of `x`.
    """
    # The number of dimensions decides first: sizes of another kind would be compared in an export,
    # which then excludes the batch that is as large as the number of channels.
    is_map = shift.ndim == x.ndim > 1
    like = x if is_map else gain
    fits = gain.shape == x.shape[-1:] and shift.shape == like.shape and shift.dtype == like.dtype
    if fits and gain.dtype == torch.float32 and usable("center.csrc", x, gain, shift):
        y = torch.empty_like(x)
        name = f"center_{'map_' if is_map else ''}{name_of(x.dtype)}"
        run(name, x, gain, *_rows(shift), y, x.numel() // x.shape[-1], x.shape[-1])
        return y
    wide = x.to(gain.dtype)
    return torch.addcmul(shift, wide - wide.mean(dim=-1, keepdim=True), gain).to(x.dtype)


def center_backward(
    grad: Tensor, y: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `center` with respect to `x`, and two sums over the rows.

    Args:
        grad: [..., C].
        y: [..., C], the result.
        gain: [C].
        shift: [C].

    Returns:
        The gradient with respect to `x`, the sum over the rows of grad * (y - shift), and the
        sum over the rows of grad; both sums are [C].
    """
    fits = gain.dtype == shift.dtype == torch.float32
    if fits and usable("center.csrc", grad, y, gain, shift):
        grad_x = torch.empty_like(grad)
        sums = torch.empty_like(gain), torch.empty_like(gain)
        sizes = (y.numel() // y.shape[-1], y.shape[-1])
        name = f"center_gradients_{name_of(y.dtype)}"
        run(name, grad, y, gain, shift, grad_x, *sums, *sizes)
        return grad_x, *sums
    rows = grad.reshape(-1, len(gain)).to(gain.dtype)
    grad_shift = rows.sum(0)
    product_sum = (rows * y.reshape(rows.shape)).sum(0) - shift * grad_shift
    grad_x = grad * gain
    grad_x -= grad_x.mean(dim=-1, keepdim=True)
    return grad_x.to(grad.dtype), product_sum, grad_shift


def _scale_fits(z: Tensor, scale: Tensor) -> bool:
    """Return whether `scale` has one row, or one row for each sample of `z` ([K, ..., C])."""
    channels = z.shape[-1]
    per_sample = (len(z), *[1] * (z.ndim - 2), channels)
    shape_fits = z.ndim > 1 and scale.shape in ((channels,), per_sample)
    return shape_fits and scale.dtype == torch.float32


def _rows(scale: Tensor) -> tuple[Tensor, int]:
    """Return a scale or shift and the distance between its rows, 0 for a single row."""
    return scale, 0 if scale.ndim == 1 else scale.shape[-1]


def _sizes(z: Tensor) -> tuple[int, int, int]:
    """Return the number of samples, tokens per sample and channels."""
    return len(z), math.prod(z.shape[1:-1]), z.shape[-1]
