"""Depthwise convolution of channels-last maps on the CPU, with fast gradients of its kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer.kernels.bindings import name_of, run
from lipsformer.kernels.dispatch import product_dtype, usable

DEPTHWISE_SIZES = (3, 7)  # sides K for which csrc/depthwise.cpp is compiled


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve every channel of `x` with its own kernel.

    Args:
        x: [B, H, W, C] in float32 or bfloat16; autocast casts it.
        weight: [C, 1, K, K], K in `DEPTHWISE_SIZES`.
        bias: [C].
    """
    x = x.to(product_dtype(x))
    if torch.is_grad_enabled():
        return _DepthwiseConv.apply(x, weight.float(), bias.float())
    return convolve(x, weight.float(), bias.float())


def depthwise_gelu(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return GELU(w * x + b), or x + scale * GELU(w * x + b), in one pass without gradients.

    Args:
        x: [B, H, W, C] in float32 or bfloat16; autocast casts it.
        weight: [C, 1, K, K], K in `DEPTHWISE_SIZES`.
        bias: [C].
        scale: [C], or None for the first form.
    """
    x = x.to(product_dtype(x)).contiguous()
    weight, bias = weight.float().contiguous(), bias.float().contiguous()
    scale = None if scale is None else scale.float().contiguous()
    y = torch.empty_like(x)
    run(f"depthwise_gelu_{name_of(x.dtype)}", x, weight, bias, scale, y, *x.shape, weight.shape[-1])
    return y


class _DepthwiseConv(torch.autograd.Function):
    """Depthwise convolution whose backward pass can itself be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return convolve(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_x = convolve(grad, weight, None, flip=True) if ctx.needs_input_grad[0] else None
        return grad_x, *depthwise_gradients(x, weight, grad)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, flip: bool = False) -> Tensor:
    """Convolve `x` ([B, H, W, C]) with `weight` ([C, 1, K, K]), flipped if asked."""
    parameters = (weight,) if bias is None else (weight, bias)
    if usable("depthwise.csrc", x, *parameters):
        x, weight = x.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        y = torch.empty_like(x)
        run(f"depthwise_{name_of(x.dtype)}", x, weight, bias, y, *x.shape, weight.shape[-1], flip)
        return y
    weight = weight.flip(2, 3) if flip else weight
    x = x.to(weight.dtype).permute(0, 3, 1, 2)
    y = F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    return y.permute(0, 2, 3, 1)


def depthwise_gradients(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the kernels and the bias.

    PyTorch's own take up to ten times as long as the forward pass. The gradient of the kernels is
    itself a convolution: every channel of every image, as one group, with the map of its output
    gradient as the kernel.
    """
    if usable("depthwise.csrc", x, weight, grad):
        x, grad = x.contiguous(), grad.contiguous()
        gradients = (weight.new_empty(weight.shape), weight.new_empty(weight.shape[0]))
        name = f"depthwise_parameters_{name_of(x.dtype)}"
        run(name, x, grad, *gradients, *x.shape, weight.shape[-1])
        return gradients
    x, grad = x.to(weight.dtype), grad.to(weight.dtype)
    batch, height, width, channels = x.shape
    grad_weight = F.conv2d(
        x.permute(0, 3, 1, 2).reshape(1, batch * channels, height, width),
        grad.permute(0, 3, 1, 2).reshape(batch * channels, 1, height, width),
        padding=weight.shape[-1] // 2,
        groups=batch * channels,
    )
    return grad_weight.reshape(batch, *weight.shape).sum(0), grad.sum((0, 1, 2))
