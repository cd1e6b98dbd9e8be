"""What a block on a GPU does with all of its parameters at once, as operators for `gpu_block`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import register_fake

from lipsformer.kernels.gpu_operator import operator


@operator
def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return parameters of a block in another type, in one launch; see `matrices_in`.

    Args:
        tensors: The matrices of the 1x1 convolution, qkv, proj, fc1 and fc2, the bias of qkv, both
            depthwise kernels, and two scales, which multiply the rows of proj and fc2.
        dtype: Type of the result.

    Returns:
        One flat tensor in which the first eight start at multiples of `parameters.ALIGN`. The
        depthwise kernels [C, 1, 7, 7] become [49, C].
    """
    from lipsformer.kernels.triton import parameters

    out = _flat(tensors[:8], parameters.ALIGN, dtype)
    parameters.cast(tensors, out)
    return out


@register_fake(cast)
def _(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    from lipsformer.kernels.triton import parameters

    return _flat(tensors[:8], parameters.ALIGN, dtype)


@operator
def weight_gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the gradients of a block's matrices, and of the biases and scales after two of them.

    Args:
        tensors: First the gradients of the five matrices as they were multiplied, in the order of
            `cast`. Then four tensors of proj: the weight, the bias, the scale, and the sum of the
            gradients of scale * bias. Then the same four of fc2.

    Returns:
        The gradients of the five matrices in float32 in one flat tensor, aligned as those of
        `cast`, and those of the bias and the scale of proj and of fc2, [4, C].
    """
    from lipsformer.kernels.triton import parameters

    out, vectors = _gradients(tensors)
    parameters.weight_gradients(tensors, out, vectors)
    return out, vectors


@register_fake(weight_gradients)
def _(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return _gradients(tensors)


def _gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    from lipsformer.kernels.triton import parameters

    vectors = tensors[0].new_empty(4, tensors[0].shape[0], dtype=torch.float32)
    return _flat(tensors[:5], parameters.ALIGN, torch.float32), vectors


@operator
def add_programs(sums: Sequence[Tensor]) -> Tensor:
    """Return the sum over the first dimension of each of at most ten tensors, in one launch.

    Returns:
        One flat tensor in which the sums start at multiples of `parameters.COLUMNS`.
    """
    from lipsformer.kernels.triton import parameters

    out = _flat([s[0] for s in sums], parameters.COLUMNS, torch.float32)
    parameters.add_programs([s.contiguous() for s in sums], out)
    return out


@register_fake(add_programs)
def _(sums: Sequence[Tensor]) -> Tensor:
    from lipsformer.kernels.triton import parameters

    return _flat([s[0] for s in sums], parameters.COLUMNS, torch.float32)


def _flat(tensors: Sequence[Tensor], align: int, dtype: torch.dtype) -> Tensor:
    from lipsformer.kernels.triton import parameters

    size = parameters.starts([tensor.numel() for tensor in tensors], align)[-1]
    return tensors[0].new_empty(size, dtype=dtype)


def matrices_in(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the tensors that lie in a flat one of `cast` or `weight_gradients`."""
    from lipsformer.kernels.triton import parameters

    return _parts(flat, shapes, parameters.ALIGN)


def sums_in(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the sums that lie in a flat tensor of `add_programs`."""
    from lipsformer.kernels.triton import parameters

    return _parts(flat, shapes, parameters.COLUMNS)


def _parts(flat: Tensor, shapes: Sequence[Sequence[int]], align: int) -> list[Tensor]:
    """Return the tensors that lie in a flat one."""
    from lipsformer.kernels.triton import parameters

    sizes = [math.prod(shape) for shape in shapes]
    places = parameters.starts(sizes, align)
    return [
        flat[start : start + size].view(shape)
        for start, size, shape in zip(places, sizes, shapes, strict=False)
    ]
