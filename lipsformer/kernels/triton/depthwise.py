"""Triton: depthwise 7x7 convolution of channels-last maps, and its gradients.

One warp takes a tile of seven rows and eight columns of some channels, and keeps the results of
all seven rows in registers. So a row that is loaded serves up to seven rows of results. Everything
is added in float32.

Shapes: maps [B, H, W, C], contiguous; taps [49, C].
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import register_fake

from lipsformer.kernels.gpu_operator import operator

COLUMNS = 8  # of a tile
CHANNELS, GRADIENT_CHANNELS = 16, 32  # of a tile; the fastest of 16, 32 and 64 on an H100
PAIRS = 4  # of columns of taps, of which there are seven
_PAIRS = tl.constexpr(PAIRS)  # kernels read no other globals
NUM_PROGRAMS = 2048  # in all, of the gradient of the taps


@triton.jit
def _place(tile, height, width, C: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return where the image of a tile starts, the first row of the tile, and its columns."""
    strips, across = tl.cdiv(height, 7), tl.cdiv(width, BLOCK_W)
    start = (tile // (strips * across)).to(tl.int64) * height * width * C
    return start, tile // across % strips * 7, tile % across * BLOCK_W + tl.arange(0, BLOCK_W)


@triton.jit
def _row(image, y, at, inside, height, stride):
    """Load a row of a tile in float32, with zeros outside."""
    mask = inside & (y >= 0) & (y < height)
    return tl.load(image + y * stride + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _in_row(columns, c, width, C: tl.constexpr):
    """Return where columns and channels lie in a row of an image, and which are in it."""
    inside = (columns >= 0) & (columns < width)
    return columns[:, None] * C + c[None, :], inside[:, None] & (c < C)[None, :]


@triton.jit
def _convolve(
    x,
    taps,
    add,
    out,
    height,
    width,
    C: tl.constexpr,
    FLIP: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    start, top, columns = _place(tl.program_id(0) // blocks, height, width, C, BLOCK_W)
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    zero = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero)
    for dx in range(7):
        rows, column = (), ()
        at, inside = _in_row(columns + dx - 3, c, width, C)
        for i in tl.static_range(13):
            rows += (_row(x + start, top + i - 3, at, inside, height, width * C),)
        for dy in tl.static_range(7):
            tap = 48 - 7 * dy - dx if FLIP else 7 * dy + dx
            weight = tl.load(taps + tap * C + c, mask=c < C, other=0.0).to(tl.float32)
            column += (weight[None, :],)
        added = ()
        for r in tl.static_range(7):
            total = sums[r]
            for dy in tl.static_range(7):
                total += rows[r + dy] * column[dy]
            added += (total,)
        sums = added
    at, inside = _in_row(columns, c, width, C)
    for r in tl.static_range(7):
        value, y = sums[r], top + r
        if ADD:
            value += _row(add + start, y, at, inside, height, width * C)
        here = out + start + y * width * C + at
        tl.store(here, value.to(out.dtype.element_ty), mask=inside & (y < height))


@triton.jit
def _weight_sums(
    x,
    grad,
    sums,
    batch,
    height,
    width,
    C: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sum the products of two neighboring columns of taps over every n-th tile."""
    tiles = batch * tl.cdiv(height, 7) * tl.cdiv(width, BLOCK_W)
    c = tl.program_id(0) // _PAIRS * BLOCK_C + tl.arange(0, BLOCK_C)
    dx = tl.program_id(0) % _PAIRS * 2
    zero = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    left = (zero, zero, zero, zero, zero, zero, zero)
    right = left
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        start, top, columns = _place(tile, height, width, C, BLOCK_W)
        at, inside = _in_row(columns, c, width, C)
        at_1, inside_1 = _in_row(columns + dx - 3, c, width, C)
        at_2, inside_2 = _in_row(columns + dx - 2, c, width, C)
        grads = ()
        for i in tl.static_range(13):
            grads += (_row(grad + start, top + i - 3, at, inside, height, width * C),)
        # the rows of the tile are those of x, each of which meets seven of the gradient
        for r in tl.static_range(7):
            one = _row(x + start, top + r, at_1, inside_1, height, width * C)
            two = _row(x + start, top + r, at_2, inside_2, height, width * C)
            new_left, new_right = (), ()
            for dy in tl.static_range(7):
                new_left += (left[dy] + one * grads[r + 6 - dy],)
                new_right += (right[dy] + two * grads[r + 6 - dy],)
            left, right = new_left, new_right
    at = sums + tl.program_id(1).to(tl.int64) * C * 49 + c * 49 + dx
    for dy in tl.static_range(7):
        tl.store(at + 7 * dy, tl.sum(left[dy], 0), mask=c < C)
        tl.store(at + 7 * dy + 1, tl.sum(right[dy], 0), mask=(c < C) & (dx < 6))


def _tiles(x: Tensor) -> int:
    batch, height, width, _ = x.shape
    return batch * triton.cdiv(height, 7) * triton.cdiv(width, COLUMNS)


@operator
def depthwise(x: Tensor, taps: Tensor, add: Tensor | None, flip: bool) -> Tensor:
    """Return w * x + add; with `flip` the kernels are turned by 180 degrees.

    Args:
        x: [B, H, W, C].
        taps: The kernels as [49, C], in any type.
        add: [B, H, W, C] or None.
        flip: Compute the gradient of the input from that of the output.
    """
    x, add = x.contiguous(), None if add is None else add.contiguous()
    taps, out = taps.contiguous(), torch.empty_like(x)
    grid = (triton.cdiv(x.shape[-1], CHANNELS) * _tiles(x),)
    flags = {"FLIP": flip, "ADD": add is not None, "BLOCK_W": COLUMNS, "BLOCK_C": CHANNELS}
    with torch.cuda.device_of(x):
        _convolve[grid](x, taps, add, out, *x.shape[1:], **flags, num_warps=1)
    return out


@register_fake(depthwise)
def _(x: Tensor, taps: Tensor, add: Tensor | None, flip: bool) -> Tensor:
    return x.new_empty(x.shape)


@operator
def depthwise_sums(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the kernels, one summand per program: [programs, C, 1, 7, 7]."""
    x, grad = x.contiguous(), grad.contiguous()
    sums = _empty_sums(x, grad)
    grid = (PAIRS * triton.cdiv(x.shape[-1], GRADIENT_CHANNELS), sums.shape[0])
    blocks = {"BLOCK_W": COLUMNS, "BLOCK_C": GRADIENT_CHANNELS}
    with torch.cuda.device_of(x):
        _weight_sums[grid](x, grad, sums, *x.shape, **blocks, num_warps=1)
    return sums


@register_fake(depthwise_sums)
def _empty_sums(x: Tensor, grad: Tensor) -> Tensor:
    blocks = PAIRS * triton.cdiv(x.shape[-1], GRADIENT_CHANNELS)
    programs = min(_tiles(x), max(1, NUM_PROGRAMS // blocks))  # that share the tiles
    return x.new_empty(programs, x.shape[-1], 1, 7, 7, dtype=torch.float32)
