"""What a block on a GPU does with all of its parameters at once, as operators for `gpu_block`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lipsformer.kernels.gpu_arguments import FLEXIBLE


@torch.library.custom_op("lipsformer::cast", mutates_args=(), tags=FLEXIBLE)
def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    from lipsformer.kernels.triton import parameters

    out = _flat(tensors[:6], parameters.ALIGN, dtype)
    parameters.cast(tensors, out)
    return out


@_cast.register_fake
def _(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    from lipsformer.kernels.triton import parameters

    return _flat(tensors[:6], parameters.ALIGN, dtype)


def cast(
    matrices: Sequence[Tensor], bias: Tensor, scales: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Return the matrices of a block and the bias in another type, in one launch.

    Args:
        matrices: Those of the 1x1 convolution, qkv, proj, fc1 and fc2.
        bias: That of qkv.
        scales: They multiply the rows of proj and fc2.
        dtype: Type of the result.
    """
    from lipsformer.kernels.triton import parameters

    tensors = [*matrices, bias]
    return _parts(_cast([*tensors, *scales], dtype), [t.shape for t in tensors], parameters.ALIGN)


@torch.library.custom_op("lipsformer::weight_gradients", mutates_args=(), tags=FLEXIBLE)
def _weight_gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    from lipsformer.kernels.triton import parameters

    out, vectors = _gradients(tensors)
    parameters.weight_gradients(tensors, out, vectors)
    return out, vectors


@_weight_gradients.register_fake
def _(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return _gradients(tensors)


def _gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    from lipsformer.kernels.triton import parameters

    vectors = tensors[0].new_empty(4, tensors[0].shape[0], dtype=torch.float32)
    return _flat(tensors[:5], parameters.ALIGN, torch.float32), vectors


def weight_gradients(
    grads: Sequence[Tensor], proj: Sequence[Tensor], fc2: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of a block's matrices, and of the biases and scales behind two of them.

    Args:
        grads: Those of the matrices as they were multiplied, in the order of ``cast``.
        proj: Weight, bias, scale and the sum of the gradients of scale * bias.
        fc2: The same.

    Returns:
        The gradients of the five matrices in float32, and those of the bias and the scale of proj
        and of fc2.
    """
    from lipsformer.kernels.triton import parameters

    flat, vectors = _weight_gradients([*grads, *proj, *fc2])
    return _parts(flat, [g.shape for g in grads], parameters.ALIGN), list(vectors.unbind(0))


@torch.library.custom_op("lipsformer::add_programs", mutates_args=(), tags=FLEXIBLE)
def _add_programs(sums: Sequence[Tensor]) -> Tensor:
    from lipsformer.kernels.triton import parameters

    out = _flat([s[0] for s in sums], parameters.COLUMNS, torch.float32)
    parameters.add_programs([s.contiguous() for s in sums], out)
    return out


@_add_programs.register_fake
def _(sums: Sequence[Tensor]) -> Tensor:
    from lipsformer.kernels.triton import parameters

    return _flat([s[0] for s in sums], parameters.COLUMNS, torch.float32)


def add_programs(sums: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum over the first dimension of each of at most ten tensors, in one launch."""
    from lipsformer.kernels.triton import parameters

    return _parts(_add_programs(sums), [s.shape[1:] for s in sums], parameters.COLUMNS)


def _flat(tensors: Sequence[Tensor], align: int, dtype: torch.dtype) -> Tensor:
    from lipsformer.kernels.triton import parameters

    size = parameters.starts([tensor.numel() for tensor in tensors], align)[-1]
    return tensors[0].new_empty(size, dtype=dtype)


def _parts(flat: Tensor, shapes: Sequence[torch.Size], align: int) -> list[Tensor]:
    """Return the tensors that lie in a flat one."""
    from lipsformer.kernels.triton import parameters

    sizes = [shape.numel() for shape in shapes]
    places = parameters.starts(sizes, align)
    return [
        flat[start : start + size].view(shape)
        for start, size, shape in zip(places, sizes, shapes, strict=False)
    ]
