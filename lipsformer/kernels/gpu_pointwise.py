"""Biases, GELU, weighted residuals and CenterNorm on a GPU, as operators that PyTorch can compile.

The operators have no autograd formula, because `gpu_block` calls both directions itself. Maps are
[B, ..., C] and contiguous, parameters are [C] and masks [B]. `sums` has one row per program.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from lipsformer.kernels.gpu_operator import operator


@operator
def gelu(
    x: Tensor | None, z: Tensor, bias: Tensor, scale: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Return GELU(z + bias), or x + mask * scale * GELU(z + bias)."""
    from lipsformer.kernels.triton import pointwise

    return pointwise.gelu_forward(x, z, bias, scale, mask)


@register_fake(gelu)
def _(x: Tensor | None, z: Tensor, *_: Any) -> Tensor:
    return z.new_empty(z.shape)


@operator
def gelu_backward(
    grad: Tensor,
    grad_2: Tensor | None,
    z: Tensor,
    bias: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the backward pass of `gelu` needs.

    Returns:
        The sum of both gradients (empty if there is only one), or GELU(z + bias) if there is no
        scale; the gradient of z; the sums for the gradients of the bias and the scale, side by
        side.
    """
    from lipsformer.kernels.triton import pointwise

    sums = _gelu_sums(z, scale)
    return *pointwise.gelu_backward(grad, grad_2, z, bias, scale, mask, sums), sums


@register_fake(gelu_backward)
def _(
    grad: Tensor, grad_2: Tensor | None, z: Tensor, bias: Tensor, scale: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    other = z.new_empty(0) if scale is not None and grad_2 is None else z.new_empty(z.shape)
    return other, z.new_empty(z.shape), _gelu_sums(z, scale)


def _gelu_sums(z: Tensor, scale: Tensor | None) -> Tensor:
    from lipsformer.kernels.triton import pointwise

    channels = z.shape[-1]
    programs = pointwise.num_programs(z.numel() // channels, pointwise.gelu_blocks(channels))
    columns = channels if scale is None else 2 * channels
    return z.new_empty(programs, columns, dtype=torch.float32)


@operator
def residual_center(
    x: Tensor,
    branch: Tensor,
    bias: Tensor,
    scale: Tensor,
    mask: Tensor | None,
    gain: Tensor,
    shift: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return CenterNorm(x + mask * (branch + scale * bias)) and the centered sum."""
    from lipsformer.kernels.triton import pointwise

    y, centered = pointwise.center_forward(x, branch, bias, scale, mask, gain, shift)
    assert centered is not None
    return y, centered


@register_fake(residual_center)
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@operator
def residual(x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, mask: Tensor | None) -> Tensor:
    """Return x + mask * (branch + scale * bias)."""
    from lipsformer.kernels.triton import pointwise

    return pointwise.center_forward(x, branch, bias, scale, mask, None, None)[0]


@register_fake(residual)
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator
def residual_center_backward(
    grad: Tensor,
    grad_2: Tensor | None,
    centered: Tensor | None,
    gain: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the backward pass of `residual_center` needs; without a gain, of `residual`.

    Returns:
        The gradient of x; that of the branch, which is empty if there is no mask, because it then
        is the same; the sums for the gradients of scale * bias, the gain and the shift, side by
        side.
    """
    from lipsformer.kernels.triton import pointwise

    sums = _center_sums(grad, gain)
    grad_x, grad_branch = pointwise.center_backward(grad, grad_2, centered, gain, mask, sums)
    return grad_x, grad.new_empty(0) if grad_branch is None else grad_branch, sums


@register_fake(residual_center_backward)
def _(
    grad: Tensor,
    grad_2: Tensor | None,
    centered: Tensor | None,
    gain: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_branch = grad.new_empty(0) if mask is None else grad.new_empty(grad.shape)
    return grad.new_empty(grad.shape), grad_branch, _center_sums(grad, gain)


def _center_sums(grad: Tensor, gain: Tensor | None) -> Tensor:
    from lipsformer.kernels.triton import pointwise

    channels = grad.shape[-1]
    programs = pointwise.num_programs(grad.numel() // channels, pointwise.row_blocks(channels))
    columns = channels if gain is None else 3 * channels
    return grad.new_empty(programs, columns, dtype=torch.float32)
