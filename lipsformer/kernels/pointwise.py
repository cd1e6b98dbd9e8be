"""GELU, residuals and CenterNorm in one pass over the map on the CPU; PyTorch's operators else."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer.kernels.build import native, run


def _one_pass(*tensors: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # first: the compiler cannot follow the others
        and not torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()
        and all(
            tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
            for tensor in tensors
        )
        and native(*tensors)
    )


def gelu_backward_(grad: Tensor, z: Tensor) -> Tensor:
    """Multiply ``grad`` by the derivative of GELU at ``z``, in place, and return GELU(z)."""
    if _one_pass(grad, z):
        activated = torch.empty_like(z)
        run("gelu_gradient", z, grad, activated, z.numel())
        return activated
    torch.ops.aten.gelu_backward.grad_input(grad, z, grad_input=grad)
    return F.gelu(z)


def add_gelu(x: Tensor, z: Tensor, scale: Tensor, index: Tensor | None = None) -> Tensor:
    """Return x + scale * GELU(z).

    Args:
        x: [B, ..., C].
        z: [K, ..., C], the branch of all samples or of those of ``index``.
        scale: [C] or [K, 1, ..., C].
        index: [K], increasing.
    """
    fits = x.shape[1:] == z.shape[1:] and (index is not None or len(x) == len(z))
    if fits and _scales(z, scale) and _one_pass(x, z, scale):
        y = torch.empty_like(x)
        run("gelu_residual", x, z, *_rows(scale), index, y, len(x), *_sizes(z))
        return y
    if index is not None:
        return x.index_add(0, index, F.gelu(z) * scale)
    return torch.addcmul(x, F.gelu(z), scale)


def add_gelu_backward(
    grad: Tensor, z: Tensor, scale: Tensor, index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``add_gelu`` with respect to ``z`` and ``scale``."""
    if _scales(z, scale) and _one_pass(grad, z, scale):
        grad_z, grad_scale = torch.empty_like(z), torch.empty_like(scale)
        sizes = (grad_z, grad_scale, *_sizes(z))
        run("gelu_residual_gradients", grad, z, *_rows(scale), index, *sizes)
        return grad_z, grad_scale
    grad_branch = grad if index is None else grad.index_select(0, index)
    grad_z = grad_branch * scale
    activated = gelu_backward_(grad_z, z)
    return grad_z, activated.mul_(grad_branch).sum_to_size(scale.shape)


def center(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Return gain * (x - mean(x)) + shift.

    Args:
        x: [..., C].
        gain: [C].
        shift: [C] or of the shape of ``x``.
    """
    fits = gain.shape == x.shape[-1:] and shift.shape in (gain.shape, x.shape)
    if fits and _one_pass(x, gain, shift):
        y = torch.empty_like(x)
        run("center", x, gain, *_rows(shift), y, x.numel() // x.shape[-1], x.shape[-1])
        return y
    return torch.addcmul(shift, x - x.mean(dim=-1, keepdim=True), gain)


def center_backward(
    grad: Tensor, y: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of ``center`` with respect to ``x``, and two sums over the rows.

    Args:
        grad: [..., C].
        y: [..., C], the result.
        gain: [C].
        shift: [C].

    Returns:
        The gradient, the sum of grad * (y - shift) and that of grad ([C] both).
    """
    if _one_pass(grad, y, gain, shift):
        grad_x = torch.empty_like(grad)
        sums = torch.empty_like(gain), torch.empty_like(gain)
        sizes = (y.numel() // y.shape[-1], y.shape[-1])
        run("center_gradients", grad, y, gain, shift, grad_x, *sums, *sizes)
        return grad_x, *sums
    rows = grad.reshape(-1, len(gain))
    grad_shift = rows.sum(0)
    offset = (rows * y.reshape(rows.shape)).sum(0) - shift * grad_shift
    grad_x = grad * gain
    grad_x -= grad_x.mean(dim=-1, keepdim=True)
    return grad_x, offset, grad_shift


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of ``x`` ([..., C]) over all dimensions but the last."""
    if _one_pass(x):
        total = x.new_empty(x.shape[-1])
        run("row_sum", x, total, x.numel() // x.shape[-1], x.shape[-1])
        return total
    return x.reshape(-1, x.shape[-1]).sum(0)


def _scales(z: Tensor, scale: Tensor) -> bool:
    """Whether ``scale`` is one row of channels or one per sample of ``z`` ([K, ..., C])."""
    channels = z.shape[-1]
    per_sample = (len(z), *[1] * (z.ndim - 2), channels)
    return z.ndim > 1 and scale.shape in ((channels,), per_sample)


def _rows(scale: Tensor) -> tuple[Tensor, int]:
    """A scale or shift and the distance between its rows, 0 where there is one."""
    return scale, 0 if scale.ndim == 1 else scale.shape[-1]


def _sizes(z: Tensor) -> tuple[int, int, int]:
    """Samples, tokens per sample and channels."""
    return len(z), math.prod(z.shape[1:-1]), z.shape[-1]
