"""Triton: what a block does with all of its parameters at once, one launch for all of them.

Tensors that are written together lie in one flat tensor, in which each starts at a multiple of
`ALIGN`, or of `COLUMNS` if they are sums over programs.
"""
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import register_fake

from lipsformer.kernels.gpu_operator import operator

ALIGN = 1024  # elements, and what a program of `_cast` writes
COLUMNS = 64  # that a program of `_add_programs` sums
_ALIGN, _COLUMNS = tl.constexpr(ALIGN), tl.constexpr(COLUMNS)  # kernels read no other globals


def _starts(sizes: Sequence[int], align: int) -> list[int]:
    """Return where tensors of the given sizes start in a flat tensor, and where it ends."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + triton.cdiv(size, align) * align)
    return places


def _flat(tensors: Sequence[Tensor], align: int, dtype: torch.dtype) -> Tensor:
    """Return memory for tensors of the given sizes."""
    size = _starts([tensor.numel() for tensor in tensors], align)[-1]
    return tensors[0].new_empty(size, dtype=dtype)


def parts(flat: Tensor, shapes: Sequence[Sequence[int]], align: int) -> list[Tensor]:
    """Return the tensors of the given shapes that lie in a flat one."""
    sizes = [math.prod(shape) for shape in shapes]
    return [
        flat[start : start + size].view(shape)
        for start, size, shape in zip(_starts(sizes, align), sizes, shapes, strict=False)
    ]


@triton.jit
def _cast_part(source, scale, out, start, at, size, columns, SCALED: tl.constexpr):
    i = (tl.program_id(0) - start) * _ALIGN + tl.arange(0, _ALIGN)
    value = tl.load(source + i, mask=i < size, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(scale + i // columns, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty))


@triton.jit
def _transpose_part(kernels, out, start, at, C: tl.constexpr):
    """Write depthwise kernels [C, 49] as [49, C]."""
    i = (tl.program_id(0) - start) * _ALIGN + tl.arange(0, _ALIGN)
    value = tl.load(kernels + i % C * 49 + i // C, mask=i < 49 * C, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty))


@triton.jit
def _cast(
    pointwise,
    qkv,
    proj,
    fc1,
    fc2,
    qkv_bias,
    depthwise_1,
    depthwise_2,
    scale_3,
    scale_4,
    out,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    QKV: tl.constexpr,
    PROJ: tl.constexpr,
    FC1: tl.constexpr,
    FC2: tl.constexpr,
    BIAS: tl.constexpr,
    TAPS_1: tl.constexpr,
    TAPS_2: tl.constexpr,
):
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * _ALIGN + tl.arange(0, _ALIGN)
    if pid < QKV:
        _cast_part(pointwise, scale_3, out, 0, at, C * C, C, False)
    elif pid < PROJ:
        _cast_part(qkv, scale_3, out, QKV, at, 3 * C * C, C, False)
    elif pid < FC1:
        _cast_part(proj, scale_3, out, PROJ, at, C * C, C, True)
    elif pid < FC2:
        _cast_part(fc1, scale_3, out, FC1, at, HIDDEN * C, C, False)
    elif pid < BIAS:
        _cast_part(fc2, scale_4, out, FC2, at, C * HIDDEN, HIDDEN, True)
    elif pid < TAPS_1:
        _cast_part(qkv_bias, scale_3, out, BIAS, at, 3 * C, C, False)
    elif pid < TAPS_2:
        _transpose_part(depthwise_1, out, TAPS_1, at, C)
    else:
        _transpose_part(depthwise_2, out, TAPS_2, at, C)


@triton.jit
def _row(
    grad,
    out,
    at,
    row,
    weight,
    bias,
    scale,
    total,
    grad_bias,
    grad_scale,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Write a row of a weight's gradient, and of those of its bias and scale."""
    BLOCK: tl.constexpr = 1024
    summed = tl.full((), 0.0, tl.float32)
    factor = 1.0
    if SCALED:
        factor = tl.load(scale + row).to(tl.float32)
    for first in range(0, WIDTH, BLOCK):
        c = first + tl.arange(0, BLOCK)
        g = tl.load(grad + row * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32)
        if SCALED:
            w = tl.load(weight + row * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32)
            summed += tl.sum(g * w, 0)
            g *= factor
        tl.store(out + at + row * WIDTH + c, g, mask=c < WIDTH)
    if SCALED:
        b = tl.load(total + row)
        tl.store(grad_bias + row, b * factor)
        tl.store(grad_scale + row, summed + b * tl.load(bias + row).to(tl.float32))


@triton.jit
def _weight_gradients(
    pointwise,
    qkv,
    proj,
    fc1,
    fc2,
    proj_weight,
    proj_bias,
    scale_3,
    total_3,
    fc2_weight,
    fc2_bias,
    scale_4,
    total_4,
    out,
    vectors,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    QKV: tl.constexpr,
    PROJ: tl.constexpr,
    FC1: tl.constexpr,
    FC2: tl.constexpr,
):
    pid = tl.program_id(0)
    bias_3, grad_3, bias_4, grad_4 = vectors, vectors + C, vectors + 2 * C, vectors + 3 * C
    w, b, s, t = proj_weight, proj_bias, scale_3, total_3
    if pid < C:
        _row(pointwise, out, 0, pid, w, b, s, t, bias_3, grad_3, C, False)
    elif pid < 4 * C:
        _row(qkv, out, QKV * _ALIGN, pid - C, w, b, s, t, bias_3, grad_3, C, False)
    elif pid < 5 * C:
        _row(proj, out, PROJ * _ALIGN, pid - 4 * C, w, b, s, t, bias_3, grad_3, C, True)
    elif pid < 5 * C + HIDDEN:
        _row(fc1, out, FC1 * _ALIGN, pid - 5 * C, w, b, s, t, bias_3, grad_3, C, False)
    else:
        row, w, b = pid - 5 * C - HIDDEN, fc2_weight, fc2_bias
        _row(fc2, out, FC2 * _ALIGN, row, w, b, scale_4, total_4, bias_4, grad_4, HIDDEN, True)


@triton.jit
def _sum_part(sums, out, pid, at, programs, columns):
    ROWS: tl.constexpr = 8
    c = pid * _COLUMNS + tl.arange(0, _COLUMNS)
    total = tl.zeros((ROWS, _COLUMNS), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < programs)[:, None] & (c < columns)[None, :]
        total += tl.load(
            sums + row[:, None].to(tl.int64) * columns + c[None, :], mask=inside, other=0.0
        )
    tl.store(out + at + c, tl.sum(total, 0), mask=c < columns)


@triton.jit
def _add_programs(
    s_0, s_1, s_2, s_3, s_4, s_5, s_6, s_7, s_8,
    out,
    p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8,
    c_0, c_1, c_2, c_3, c_4, c_5, c_6, c_7, c_8,
    e_0, e_1, e_2, e_3, e_4, e_5, e_6, e_7,
):  # fmt: skip
    """Sum the rows of nine matrices of p programs and c columns; e is where blocks end."""
    pid = tl.program_id(0)
    if pid < e_0:
        _sum_part(s_0, out, pid, 0, p_0, c_0)
    elif pid < e_1:
        _sum_part(s_1, out, pid - e_0, e_0 * _COLUMNS, p_1, c_1)
    elif pid < e_2:
        _sum_part(s_2, out, pid - e_1, e_1 * _COLUMNS, p_2, c_2)
    elif pid < e_3:
        _sum_part(s_3, out, pid - e_2, e_2 * _COLUMNS, p_3, c_3)
    elif pid < e_4:
        _sum_part(s_4, out, pid - e_3, e_3 * _COLUMNS, p_4, c_4)
    elif pid < e_5:
        _sum_part(s_5, out, pid - e_4, e_4 * _COLUMNS, p_5, c_5)
    elif pid < e_6:
        _sum_part(s_6, out, pid - e_5, e_5 * _COLUMNS, p_6, c_6)
    elif pid < e_7:
        _sum_part(s_7, out, pid - e_6, e_6 * _COLUMNS, p_7, c_7)
    else:
        _sum_part(s_8, out, pid - e_7, e_7 * _COLUMNS, p_8, c_8)


def _blocks(tensors: Sequence[Tensor]) -> list[int]:
    """Return the blocks of `ALIGN` in which the second and the further tensors start."""
    return [start // ALIGN for start in _starts([t.numel() for t in tensors], ALIGN)[1:-1]]


@operator
def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return parameters of a block in another type, in one launch; see `parts`.

    Args:
        tensors: The matrices of the 1x1 convolution, qkv, proj, fc1 and fc2, the bias of qkv, both
            depthwise kernels, and two scales, which multiply the rows of proj and fc2.
        dtype: Type of the result.

    Returns:
        One flat tensor of the first eight. The depthwise kernels [C, 1, 7, 7] become [49, C].
    """
    out = _empty_cast(tensors, dtype)
    channels, hidden = tensors[3].shape[1], tensors[3].shape[0]
    with torch.cuda.device_of(out):
        _cast[(out.numel() // ALIGN,)](
            *(tensor.contiguous() for tensor in tensors),
            out,
            channels,
            hidden,
            *_blocks(tensors[:8]),
        )
    return out


@register_fake(cast)
def _empty_cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return _flat(tensors[:8], ALIGN, dtype)


@operator
def weight_gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the gradients of a block's matrices, and of the biases and scales after two of them.

    Args:
        tensors: First the gradients of the five matrices as they were multiplied, in the order of
            `cast`. Then four tensors of proj: the weight, the bias, the scale, and the sum of the
            gradients of scale * bias. Then the same four of fc2.

    Returns:
        The gradients of the five matrices in float32 in one flat tensor, and those of the bias and
        the scale of proj and of fc2, [4, C].
    """
    out, vectors = _empty_gradients(tensors)
    channels, hidden = tensors[3].shape[1], tensors[3].shape[0]
    with torch.cuda.device_of(out):
        _weight_gradients[(6 * channels + hidden,)](
            *(tensor.contiguous() for tensor in tensors),
            out,
            vectors,
            channels,
            hidden,
            *_blocks(tensors[:5]),
        )
    return out, vectors


@register_fake(weight_gradients)
def _empty_gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    vectors = tensors[0].new_empty(4, tensors[0].shape[0], dtype=torch.float32)
    return _flat(tensors[:5], ALIGN, torch.float32), vectors


@operator
def add_programs(sums: Sequence[Tensor]) -> Tensor:
    """Return the sum over the first dimension of each of nine tensors, in one launch.

    Returns:
        One flat tensor in which the sums start at multiples of `COLUMNS`; see `parts`.
    """
    out = _empty_totals(sums)
    tensors = [tensor.contiguous() for tensor in sums]
    columns = [tensor[0].numel() for tensor in tensors]
    *ends, last = (end // COLUMNS for end in _starts(columns, COLUMNS)[1:])
    with torch.cuda.device_of(out):
        _add_programs[(last,)](*tensors, out, *map(len, tensors), *columns, *ends)
    return out


@register_fake(add_programs)
def _empty_totals(sums: Sequence[Tensor]) -> Tensor:
    return _flat([s[0] for s in sums], COLUMNS, torch.float32)
