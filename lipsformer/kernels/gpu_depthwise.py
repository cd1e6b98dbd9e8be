"""Depthwise 7x7 convolution of channels-last maps on a GPU, as operators for `gpu_block`."""

import torch
from torch import Tensor
from torch.library import register_fake

from lipsformer.kernels.gpu_operator import operator

GPU_DEPTHWISE_SIZE = 7  # side of the kernels, the only one that the Triton kernels have


@operator
def depthwise(x: Tensor, taps: Tensor, add: Tensor | None, flip: bool) -> Tensor:
    """Return w * x + add; with `flip` the kernels are turned by 180 degrees.

    Args:
        x: [B, H, W, C].
        taps: The kernels as [49, C], in any type.
        add: [B, H, W, C] or None.
        flip: Compute the gradient of the input from that of the output.
    """
    from lipsformer.kernels.triton import depthwise as kernel

    return kernel.convolve(x, taps, add, flip)


@register_fake(depthwise)
def _(x: Tensor, taps: Tensor, add: Tensor | None, flip: bool) -> Tensor:
    return x.new_empty(x.shape)


@operator
def depthwise_sums(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the kernels, one summand per program: [programs, C, 1, 7, 7]."""
    from lipsformer.kernels.triton import depthwise as kernel

    sums = _sums(x)
    kernel.weight_sums(x, grad, sums)
    return sums


@register_fake(depthwise_sums)
def _(x: Tensor, grad: Tensor) -> Tensor:
    return _sums(x)


def _sums(x: Tensor) -> Tensor:
    from lipsformer.kernels.triton import depthwise as kernel

    size = GPU_DEPTHWISE_SIZE
    return x.new_empty(kernel.weight_programs(x), x.shape[-1], 1, size, size, dtype=torch.float32)
