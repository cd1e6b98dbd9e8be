"""Scaled cosine attention in the windows of a map on the CPU: one kernel from map to map."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipsformer.kernels.bindings import name_of, run
from lipsformer.kernels.dispatch import refuse_second_derivatives

# the windows (h, w), nu and eps of every partition
Options = list[tuple[tuple[int, int], float, float]]
MAX_WINDOW_TOKENS = 1024  # scores and their gradients then take 8 MB in every thread


def cosine_windows(
    qkv: Tensor,
    windows: Sequence[tuple[int, int]],
    tau: Tensor,
    nu: Sequence[float],
    eps: Sequence[float],
    bias: Tensor | None = None,
    lepe: Tensor | None = None,
) -> Tensor:
    """Attend in windows without copies of queries, keys, values or scores.

    A partition is a group of heads that share the shape of their windows. bfloat16 is read and
    written; the computation in between is in float32.

    Args:
        qkv: [B, H, W, 3, P, C], queries, keys and values of the P partitions of the heads, in
            float32 or bfloat16.
        windows: (h, w) in tokens of each partition, at most ``MAX_WINDOW_TOKENS`` tokens.
        tau: [P, heads], factors of the cosines.
        nu: Length of the normalized values of each partition; 0 leaves the values as they are.
        eps: Smoothing constant of the normalization of each partition.
        bias: [1, heads, h * w, h * w], added to the scores; for one partition only.
        lepe: [P, 10, C], the nine taps and the bias of a depthwise 3x3 convolution of the values
            that is added to the output; or None.

    Returns:
        [B, H, W, P * C].
    """
    bias = None if bias is None else bias.float()
    lepe = None if lepe is None else lepe.float()
    options = list(zip(windows, nu, eps, strict=True))
    return _CosineWindows.apply(qkv, bias, tau.float(), lepe, options)


class _CosineWindows(torch.autograd.Function):
    """Keep the projected tokens and compute the weights again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        tau: Tensor,
        lepe: Tensor | None,
        options: Options,
    ) -> Tensor:
        qkv = qkv.contiguous()
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(qkv, bias, tau, lepe)
        ctx.options = options
        return windows_forward(qkv, bias, tau, lepe, options)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        qkv, bias, tau, lepe = ctx.saved_tensors
        grad = grad_outputs[0].to(qkv.dtype).contiguous()
        return *windows_backward(grad, qkv, bias, tau, lepe, ctx.options), None


def windows_forward(
    qkv: Tensor, bias: Tensor | None, tau: Tensor, lepe: Tensor | None, options: Options
) -> Tensor:
    """Return the attention's output; the tensors are contiguous."""
    batch, height, width, _, parts, channels = qkv.shape
    out = qkv.new_empty(batch, height, width, parts * channels)
    of_qkv, of_out = qkv.view(-1, channels), out.view(-1, channels)
    for part, (window, nu, eps) in enumerate(options):
        run(
            f"cosine_windows_forward_{name_of(qkv.dtype)}",
            *(of_qkv[i * parts + part] for i in range(3)),
            of_out[part],
            *(bias, tau[part], None if lepe is None else lepe[part]),
            *_geometry(qkv, tau, window, nu, eps),
        )
    return out


def windows_backward(
    grad: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    tau: Tensor,
    lepe: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return the gradients of ``windows_forward`` with respect to its tensors."""
    grad_qkv, grad_tau = torch.empty_like(qkv), torch.zeros_like(tau)
    grad_bias = None if bias is None else torch.zeros_like(bias)
    grad_lepe = None if lepe is None else torch.zeros_like(lepe)
    parts, channels = qkv.shape[-2:]
    of_qkv, of_grad_qkv, of_grad = (x.view(-1, channels) for x in (qkv, grad_qkv, grad))
    for part, (window, nu, eps) in enumerate(options):
        run(
            f"cosine_windows_backward_{name_of(qkv.dtype)}",
            *(of_qkv[i * parts + part] for i in range(3)),
            of_grad[part],
            *(bias, tau[part], None if lepe is None else lepe[part]),
            *(of_grad_qkv[i * parts + part] for i in range(3)),
            *(grad_bias, grad_tau[part], None if grad_lepe is None else grad_lepe[part]),
            *_geometry(qkv, tau, window, nu, eps),
        )
    return grad_qkv, grad_bias, grad_tau, grad_lepe


def _geometry(
    qkv: Tensor, tau: Tensor, window: tuple[int, int], nu: float, eps: float
) -> tuple[float | int, ...]:
    batch, height, width, _, parts, channels = qkv.shape
    heads = tau.shape[1]
    strides = (3 * parts * channels, parts * channels)
    return nu, eps, batch, height, width, heads, channels // heads, *window, *strides
