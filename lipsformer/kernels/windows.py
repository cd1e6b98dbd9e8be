"""Scaled cosine attention in the windows of a map on the CPU: one kernel from map to map."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipsformer.kernels.bindings import name_of, run
from lipsformer.kernels.dispatch import refuse_second_derivatives

MAX_WINDOW_TOKENS = 1024  # scores and their gradients then take 8 MB in every thread


class Partition(NamedTuple):
    """A group of heads that share the shape of their windows.

    Attributes:
        window: (h, w) in tokens, at most `MAX_WINDOW_TOKENS` tokens.
        nu: Length of the normalized values; 0 leaves the values as they are.
        eps: Smoothing constant of the normalization.
    """

    window: tuple[int, int]
    nu: float
    eps: float


def cosine_windows(
    qkv: Tensor,
    partitions: Sequence[Partition],
    tau: Tensor,
    bias: Tensor | None = None,
    lepe: Sequence[Tensor] = (),
) -> Tensor:
    """Attend in windows without copies of queries, keys, values or scores.

    bfloat16 is read and written, and the computation in between is in float32, but for one thing: a
    processor with AVX512-BF16 multiplies bfloat16 in the forward pass, for which the weights of the
    values are rounded to it.

    Args:
        qkv: [B, H, W, 3, P, C], queries, keys and values of the P partitions of the heads, in
            float32 or bfloat16.
        partitions: The P partitions.
        tau: [P, heads], factors of the cosines.
        bias: [1, heads, h * w, h * w], added to the scores; for one partition only.
        lepe: The kernels, [C, 1, 3, 3], of a depthwise convolution of each partition's values,
            and then the biases, [C], of these convolutions, which are added to the output. Empty
            without them.

    Returns:
        [B, H, W, P * C].
    """
    bias = None if bias is None else bias.float()
    lepe = [x.float().contiguous() for x in lepe]
    return _CosineWindows.apply(qkv, bias, tau.float(), partitions, *lepe)


class _CosineWindows(torch.autograd.Function):
    """Keep the projected tokens and compute the weights again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        tau: Tensor,
        partitions: Sequence[Partition],
        *lepe: Tensor,
    ) -> Tensor:
        qkv = qkv.contiguous()
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(qkv, bias, tau, *lepe)
        ctx.partitions = partitions
        return cosine_windows_forward(qkv, bias, tau, lepe, partitions)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(*grad_outputs)
        qkv, bias, tau, *lepe = ctx.saved_tensors
        grad = grad_outputs[0].to(qkv.dtype).contiguous()
        *grads, grad_lepe = cosine_windows_backward(grad, qkv, bias, tau, lepe, ctx.partitions)
        return *grads, None, *grad_lepe


def cosine_windows_forward(
    qkv: Tensor,
    bias: Tensor | None,
    tau: Tensor,
    lepe: Sequence[Tensor],
    partitions: Sequence[Partition],
) -> Tensor:
    """Return what `cosine_windows` returns; the tensors are contiguous."""
    batch, height, width, _, parts, channels = qkv.shape
    out = qkv.new_empty(batch, height, width, parts * channels)
    name = f"cosine_windows_forward_{name_of(qkv.dtype)}"
    for part, partition in enumerate(partitions):
        tensors = (qkv, out, bias, tau, *_lepe_of(part, lepe))
        run(name, *tensors, *_numbers(qkv, tau, part, partition))
    return out


def cosine_windows_backward(
    grad: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    tau: Tensor,
    lepe: Sequence[Tensor],
    partitions: Sequence[Partition],
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor]]:
    """Return the gradients of `cosine_windows` with respect to its tensors."""
    grad_qkv, grad_tau = torch.empty_like(qkv), torch.zeros_like(tau)
    grad_bias = None if bias is None else torch.zeros_like(bias)
    grad_lepe = [torch.zeros_like(x) for x in lepe]
    name = f"cosine_windows_backward_{name_of(qkv.dtype)}"
    for part, partition in enumerate(partitions):
        inputs = (qkv, grad, bias, tau, *_lepe_of(part, lepe))
        outputs = (grad_qkv, grad_bias, grad_tau, *_lepe_of(part, grad_lepe))
        run(name, *inputs, *outputs, *_numbers(qkv, tau, part, partition))
    return grad_qkv, grad_bias, grad_tau, grad_lepe


def _lepe_of(part: int, lepe: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the kernels and the bias of a partition's convolution, None for each without one."""
    return (lepe[part], lepe[part + len(lepe) // 2]) if len(lepe) > 0 else (None, None)


def _numbers(qkv: Tensor, tau: Tensor, part: int, partition: Partition) -> tuple[float | int, ...]:
    """Return the numbers that the kernels take, in their order."""
    batch, height, width, _, parts, channels = qkv.shape
    window, nu, eps = partition
    heads = tau.shape[1]
    return nu, eps, part, parts, batch, height, width, heads, channels // heads, *window
