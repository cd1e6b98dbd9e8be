"""Scaled cosine attention in the windows of a map on a GPU: one kernel in each direction."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipsformer.kernels.dispatch import refuse_second_derivatives
from lipsformer.kernels.gpu_arguments import WindowArguments
from lipsformer.kernels.gpu_operator import FLEXIBLE

# Tokens of a window. The gradient of a bias is summed in registers, which hold no larger one.
MAX_GPU_TOKENS, MAX_GPU_TOKENS_WITH_BIAS = 128, 64


def gpu_cosine_windows(qkv: Tensor, arguments: WindowArguments) -> Tensor:
    """Attend in windows without copies of queries, keys, values or scores.

    Args:
        qkv: [B, H, W, 3, P, C], queries, keys and values of one or two partitions of the heads.
        arguments: The attention.

    Returns:
        [B, H, W, P * C].
    """
    return torch.ops.lipsformer.cosine_windows(qkv, *arguments)


@torch.library.custom_op("lipsformer::cosine_windows", mutates_args=(), tags=FLEXIBLE)
def _forward(
    qkv: Tensor,
    bias: Tensor | None,
    tau: Sequence[Tensor],
    nu: Sequence[Tensor],
    lepe: Sequence[Tensor],
    lepe_bias: Sequence[Tensor],
    windows: Sequence[int],
    heads: int,
    scale: float,
    eps: float,
) -> Tensor:
    from lipsformer.kernels.triton import windows as kernel

    arguments = WindowArguments(bias, tau, nu, lepe, lepe_bias, windows, heads, scale, eps)
    return kernel.forward(qkv, arguments)


@torch.library.custom_op("lipsformer::cosine_windows_backward", mutates_args=(), tags=FLEXIBLE)
def _backward(
    grad: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    tau: Sequence[Tensor],
    nu: Sequence[Tensor],
    lepe: Sequence[Tensor],
    lepe_bias: Sequence[Tensor],
    windows: Sequence[int],
    heads: int,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    from lipsformer.kernels.triton import windows as kernel

    arguments = WindowArguments(bias, tau, nu, lepe, lepe_bias, windows, heads, scale, eps)
    sums = _sums(qkv, arguments)
    return kernel.backward(grad, sums, qkv, arguments), sums


@_forward.register_fake
def _(qkv: Tensor, *args: Any) -> Tensor:
    return qkv.new_empty(*qkv.shape[:3], qkv.shape[-2] * qkv.shape[-1])


@_backward.register_fake
def _(grad: Tensor, qkv: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), _sums(qkv, WindowArguments(*args))


def learned(arguments: WindowArguments) -> list[Tensor]:
    """Return the tensors that learn, in the order of the columns of the sums."""
    bias = [] if arguments.bias is None else [arguments.bias]
    return [*bias, *arguments.tau, *arguments.lepe, *arguments.lepe_bias]


def _sums(qkv: Tensor, arguments: WindowArguments) -> Tensor:
    """Return what the programs fill, a row each: the gradients of all that learns."""
    from lipsformer.kernels.triton import windows as kernel

    columns = sum(tensor.numel() for tensor in learned(arguments))
    rows = kernel.grid(qkv, arguments.windows, arguments.heads)[1]
    return qkv.new_empty(rows, columns, dtype=torch.float32)


def window_gradients(
    grad: Tensor, qkv: Tensor, arguments: WindowArguments
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `qkv`, and a row per program for `parameter_gradients`."""
    return torch.ops.lipsformer.cosine_windows_backward(grad.to(qkv.dtype), qkv, *arguments)


def parameter_gradients(total: Tensor, arguments: WindowArguments) -> list[Tensor | None]:
    """Return the gradients of the tensors of the arguments from the sum over the programs."""
    parameters = learned(arguments)
    columns = total.split([tensor.numel() for tensor in parameters])
    grads: list[Tensor | None] = [
        column.reshape(tensor.shape).to(tensor.dtype)
        for column, tensor in zip(columns, parameters, strict=True)
    ]
    if arguments.bias is None:
        grads.insert(0, None)
    taus = 1 + len(arguments.tau)
    return [*grads[:taus], *[None] * len(arguments.nu), *grads[taus:]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, *rest = inputs
    arguments = WindowArguments(*rest)
    ctx.save_for_backward(qkv, *arguments.tensors())
    ctx.arguments = arguments.without_tensors()


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    refuse_second_derivatives(grad)
    qkv, *tensors = ctx.saved_tensors
    arguments = ctx.arguments.with_tensors(tensors)
    grad_qkv, sums = window_gradients(grad, qkv, arguments)
    grads = parameter_gradients(sums.sum(0), arguments)
    return grad_qkv, *arguments.with_tensors(grads)[:5], *[None] * 4


_forward.register_autograd(_gradients, setup_context=_keep)
