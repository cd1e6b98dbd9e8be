"""Triton: depthwise convolution of channels-last maps, and its gradients.

Shapes: maps [B, H, W, C], contiguous; kernels [C, K * K]. Everything is added in float32.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_PROGRAMS = 2048  # in all, of the gradient of the kernels
BLOCKS = {"BLOCK_P": 32, "BLOCK_C": 64}
GRADIENT_BLOCKS = {"BLOCK_P": 8, "BLOCK_C": 64}


@triton.jit
def _shifted(x, n, c, dy, dx, batch, height, width, C: tl.constexpr):
    """Load the channels c of the tokens at an offset from the tokens n, with zeros outside."""
    y, x_position = n // width % height + dy, n % width + dx
    inside = (n < batch * height * width) & (y >= 0) & (y < height)
    inside &= (x_position >= 0) & (x_position < width)
    at = x + (n + dy * width + dx)[:, None] * C + c[None, :]
    return tl.load(at, mask=inside[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _convolve(
    x,
    weight,
    add,
    out,
    batch,
    height,
    width,
    C: tl.constexpr,
    K: tl.constexpr,
    FLIP: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    n = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    if ADD:
        total += _shifted(add, n, c, 0, 0, batch, height, width, C)
    for t in range(K * K):
        tap = K * K - 1 - t if FLIP else t
        row = tl.load(weight + c * K * K + tap, mask=c < C, other=0.0).to(tl.float32)
        value = _shifted(x, n, c, t // K - K // 2, t % K - K // 2, batch, height, width, C)
        total += value * row[None, :]
    inside = (n < batch * height * width)[:, None] & (c < C)[None, :]
    tl.store(out + n[:, None] * C + c[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weight_sums(
    x,
    grad,
    sums,
    batch,
    height,
    width,
    C: tl.constexpr,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sum the products of a row of taps over the tokens of a program, seven taps at once."""
    c = tl.program_id(0) // K * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.program_id(0) % K
    dy, half = row - K // 2, K // 2
    sum_0 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    sum_1, sum_2, sum_3, sum_4, sum_5, sum_6 = sum_0, sum_0, sum_0, sum_0, sum_0, sum_0
    tokens = batch * height * width
    for block in range(tl.program_id(1), (tokens + BLOCK_P - 1) // BLOCK_P, tl.num_programs(1)):
        n = block * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)
        g = _shifted(grad, n, c, 0, 0, batch, height, width, C)
        sum_0 += g * _shifted(x, n, c, dy, 0 - half, batch, height, width, C)
        sum_1 += g * _shifted(x, n, c, dy, 1 - half, batch, height, width, C)
        sum_2 += g * _shifted(x, n, c, dy, 2 - half, batch, height, width, C)
        sum_3 += g * _shifted(x, n, c, dy, 3 - half, batch, height, width, C)
        sum_4 += g * _shifted(x, n, c, dy, 4 - half, batch, height, width, C)
        sum_5 += g * _shifted(x, n, c, dy, 5 - half, batch, height, width, C)
        sum_6 += g * _shifted(x, n, c, dy, 6 - half, batch, height, width, C)
    at = sums + tl.program_id(1) * C * K * K + c * K * K + row * K
    tl.store(at, tl.sum(sum_0, 0), mask=c < C)
    tl.store(at + 1, tl.sum(sum_1, 0), mask=c < C)
    tl.store(at + 2, tl.sum(sum_2, 0), mask=c < C)
    tl.store(at + 3, tl.sum(sum_3, 0), mask=c < C)
    tl.store(at + 4, tl.sum(sum_4, 0), mask=c < C)
    tl.store(at + 5, tl.sum(sum_5, 0), mask=c < C)
    tl.store(at + 6, tl.sum(sum_6, 0), mask=c < C)


def convolve(x: Tensor, weight: Tensor, add: Tensor | None, flip: bool) -> Tensor:
    """Return the convolution of ``x`` with kernels [C, 1, K, K], flipped if asked, plus ``add``."""
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    channels, side = x.shape[-1], weight.shape[-1]
    grid = (
        triton.cdiv(channels, BLOCKS["BLOCK_C"]),
        triton.cdiv(x.numel() // channels, BLOCKS["BLOCK_P"]),
    )
    add = None if add is None else add.contiguous()
    flags = {"FLIP": flip, "ADD": add is not None}
    with torch.cuda.device_of(x):
        _convolve[grid](x, weight, add, out, *x.shape[:3], channels, side, **flags, **BLOCKS)
    return out


def weight_programs(x: Tensor) -> int:
    """Return how many programs share the tokens in `weight_sums`."""
    channels = x.shape[-1]
    blocks = triton.cdiv(x.numel() // channels, GRADIENT_BLOCKS["BLOCK_P"])
    return min(blocks, max(1, NUM_PROGRAMS // (7 * triton.cdiv(channels, 64))))


def weight_sums(x: Tensor, grad: Tensor, sums: Tensor) -> None:
    """Fill ``sums`` [programs, C, 1, 7, 7] with the gradient of the kernels."""
    x, grad = x.contiguous(), grad.contiguous()
    channels = x.shape[-1]
    grid = (7 * triton.cdiv(channels, GRADIENT_BLOCKS["BLOCK_C"]), sums.shape[0])
    with torch.cuda.device_of(x):
        _weight_sums[grid](x, grad, sums, *x.shape[:3], channels, 7, **GRADIENT_BLOCKS, num_warps=2)
