"""Scaled cosine attention in the windows of a map on the CPU: one kernel from map to map."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lipsformer.kernels.build import name_of, native, run
from lipsformer.kernels.dispatch import first_order_on_cpu
from lipsformer.layers.conv import DepthwiseConv2d

MAX_TOKENS = 1024  # per window: scores and their gradients take 8 MB in every thread


def cosine_windows(
    qkv: Tensor,
    windows: Sequence[tuple[int, int]],
    attentions: Sequence[nn.Module],
    bias: Tensor | None = None,
    lepes: Sequence[nn.Module] = (),
) -> Tensor | None:
    """Attend in windows without copies of queries, keys, values or scores, if the CPU kernel can.

    Equal to ``partition_heads``, the attention, LePE and ``merge_heads``, which the caller takes
    when this returns None: elsewhere than in float32 or bfloat16 on the CPU, where gradients of
    gradients may be asked for, with hooks on the modules that would not be called, with dropout of
    the weights. bfloat16 is read and written; what lies between is float32.

    Args:
        qkv: [B, H, W, 3, P, C], queries, keys and values of the P partitions of the heads.
        windows: (h, w) in tokens of each partition.
        attentions: ``ScaledCosineAttention`` or its frozen form for each partition; others give
            None.
        bias: [1, heads, h * w, h * w], added to the scores; with one partition only.
        lepes: Depthwise 3x3 convolution of the values of each partition, or none.

    Returns:
        [B, H, W, P * C].
    """
    inference = not torch.is_grad_enabled()
    if not (
        first_order_on_cpu(qkv, inference or attentions[0].training)
        and all(getattr(attention, "kernel_scales", None) for attention in attentions)
        and all(h * w <= MAX_TOKENS for h, w in windows)
        and not any(_hooked(module) for module in (*attentions, *lepes))
        and qkv.numel() > 0
    ):
        return None
    scales = [attention.kernel_scales() for attention in attentions]  # pyright: ignore
    if any(scale is None for scale in scales):
        return None
    taus = torch.stack([tau for tau, _, _ in scales]).float()
    kernels = torch.stack([_lepe_kernels(lepe) for lepe in lepes]).float() if lepes else None
    bias = None if bias is None else bias.float()
    tensors = [tensor for tensor in (qkv, bias, taus, kernels) if tensor is not None]
    if not native(*tensors):
        return None
    options = [(window, nu, eps) for window, (_, nu, eps) in zip(windows, scales, strict=True)]
    return _CosineWindowsFunction.apply(qkv, bias, taus, kernels, options)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def _lepe_kernels(lepe: Any) -> Tensor:
    """The nine taps and the bias, [10, C]."""
    assert isinstance(lepe, DepthwiseConv2d)
    return torch.cat((lepe.weight.flatten(1).t(), lepe.bias.unsqueeze(0)))


class _CosineWindowsFunction(torch.autograd.Function):
    """Keeps the projected tokens and computes the weights again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        taus: Tensor,
        kernels: Tensor | None,
        options: list[tuple[tuple[int, int], float, float]],
    ) -> Tensor:
        qkv = qkv.contiguous()
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(qkv, bias, taus, kernels)
        ctx.options = options
        batch, height, width, _, parts, channels = qkv.shape
        out = qkv.new_empty(batch, height, width, parts * channels)
        for part, (window, nu, eps) in enumerate(options):
            run(
                f"cosine_windows_forward_{name_of(qkv)}",
                *(qkv[0, 0, 0, i, part] for i in range(3)),
                out[0, 0, 0, part * channels :],
                *(bias, taus[part], None if kernels is None else kernels[part]),
                *_geometry(qkv, taus, window, nu, eps),
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        qkv, bias, taus, kernels = ctx.saved_tensors
        grad = grad.to(qkv.dtype).contiguous()
        grad_qkv = torch.empty_like(qkv)
        grad_bias, grad_taus, grad_kernels = (
            None if tensor is None else torch.zeros_like(tensor) for tensor in (bias, taus, kernels)
        )
        assert grad_taus is not None
        for part, (window, nu, eps) in enumerate(ctx.options):
            run(
                f"cosine_windows_backward_{name_of(qkv)}",
                *(qkv[0, 0, 0, i, part] for i in range(3)),
                grad[0, 0, 0, part * qkv.shape[-1] :],
                *(bias, taus[part], None if kernels is None else kernels[part]),
                *(grad_qkv[0, 0, 0, i, part] for i in range(3)),
                *(grad_bias, grad_taus[part], None if grad_kernels is None else grad_kernels[part]),
                *_geometry(qkv, taus, window, nu, eps),
            )
        return grad_qkv, grad_bias, grad_taus, grad_kernels, None


def _geometry(
    qkv: Tensor, taus: Tensor, window: tuple[int, int], nu: float, eps: float
) -> tuple[float | int, ...]:
    batch, height, width, _, parts, channels = qkv.shape
    heads = taus.shape[1]
    strides = (3 * parts * channels, parts * channels)
    return nu, eps, batch, height, width, heads, channels // heads, *window, *strides
