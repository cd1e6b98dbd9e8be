"""Triton: biases, GELU, weighted residuals and CenterNorm, each with what surrounds it in a block.

Sums over the rows (gradients of biases, scales, gains and shifts) are kept in registers and written
once per program. The caller adds the programs.

Shapes: maps are [rows, C], contiguous; parameters are [C]. A mask has one number per sample, which
is `tokens` rows.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_PROGRAMS = 512  # that share the rows, where there are sums
TILE = 2048  # elements that a program holds of each map


@triton.jit
def _map(x, r, c, rows, C: tl.constexpr):
    """Load a tile in float32, with zeros outside."""
    inside = (r < rows)[:, None] & (c < C)[None, :]
    return tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(x, value, r, c, rows, C: tl.constexpr):
    inside = (r < rows)[:, None] & (c < C)[None, :]
    tl.store(x + r[:, None] * C + c[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _row(x, c, C: tl.constexpr):
    """Load the parameters of some channels in float32."""
    return tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _samples(mask, r, rows, tokens, HAS_MASK: tl.constexpr):
    """Load the factors of the samples of some rows; 1 if there are none."""
    if HAS_MASK:
        return tl.load(mask + r // tokens, mask=r < rows, other=0.0).to(tl.float32)[:, None]
    else:
        return 1.0


@triton.jit
def _phi(x):
    """Return the distribution function of the normal distribution."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_forward(
    x,
    z,
    bias,
    scale,
    mask,
    y,
    rows,
    tokens,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RESIDUAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    value = _map(z, r, c, rows, C) + _row(bias, c, C)
    value *= _phi(value)
    if RESIDUAL:
        value *= _row(scale, c, C) * _samples(mask, r, rows, tokens, HAS_MASK)
        value += _map(x, r, c, rows, C)
    _store(y, value, r, c, rows, C)


@triton.jit
def _gelu_backward(
    grad,
    grad_2,
    z,
    bias,
    scale,
    mask,
    other,
    grad_z,
    sums,
    rows,
    tokens,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RESIDUAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TWO: tl.constexpr,
):
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    bias_sum = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    scale_sum = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for block in range(tl.program_id(0), (rows + BLOCK_R - 1) // BLOCK_R, tl.num_programs(0)):
        r = block * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
        g = _map(grad, r, c, rows, C)
        value = _map(z, r, c, rows, C) + _row(bias, c, C)
        phi = _phi(value)
        slope = phi + value * 0.3989422804014327 * tl.exp(-0.5 * value * value)
        if RESIDUAL:
            if TWO:
                g += _map(grad_2, r, c, rows, C)
                _store(other, g, r, c, rows, C)
            g *= _samples(mask, r, rows, tokens, HAS_MASK)
            scale_sum += g * value * phi
            g *= _row(scale, c, C)
        else:
            _store(other, value * phi, r, c, rows, C)
        g *= slope
        bias_sum += g
        _store(grad_z, g, r, c, rows, C)
    columns = C
    if RESIDUAL:
        columns = 2 * C
        at = sums + tl.program_id(0) * columns + C + c
        tl.store(at, tl.sum(scale_sum, 0), mask=c < C)
    tl.store(sums + tl.program_id(0) * columns + c, tl.sum(bias_sum, 0), mask=c < C)


@triton.jit
def _center_forward(
    x,
    branch,
    bias,
    scale,
    mask,
    gain,
    shift,
    y,
    centered,
    rows,
    tokens,
    factor,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NORM: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    value = _map(branch, r, c, rows, C) + _row(bias, c, C) * _row(scale, c, C)
    value = _map(x, r, c, rows, C) + value * _samples(mask, r, rows, tokens, HAS_MASK)
    if NORM:
        value -= (tl.sum(value, 1) / C)[:, None]
        _store(centered, value, r, c, rows, C)
        value = value * (_row(gain, c, C) * factor) + _row(shift, c, C)
    _store(y, value, r, c, rows, C)


@triton.jit
def _center_backward(
    grad,
    grad_2,
    centered,
    gain,
    mask,
    grad_x,
    grad_branch,
    sums,
    rows,
    tokens,
    factor,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NORM: tl.constexpr,
    TWO: tl.constexpr,
):
    c = tl.arange(0, BLOCK_C)
    bias_sum = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    gain_sum = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    shift_sum = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for block in range(tl.program_id(0), (rows + BLOCK_R - 1) // BLOCK_R, tl.num_programs(0)):
        r = block * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
        g = _map(grad, r, c, rows, C)
        if TWO:
            g += _map(grad_2, r, c, rows, C)
        if NORM:
            gain_sum += g * _map(centered, r, c, rows, C)
            shift_sum += g
            g *= _row(gain, c, C) * factor
            g -= tl.where((c < C)[None, :], (tl.sum(g, 1) / C)[:, None], 0.0)
        _store(grad_x, g, r, c, rows, C)
        if HAS_MASK:
            g *= _samples(mask, r, rows, tokens, HAS_MASK)
            _store(grad_branch, g, r, c, rows, C)
        bias_sum += g
    columns = C
    if NORM:
        columns = 3 * C
        at = sums + tl.program_id(0) * columns + C + c
        tl.store(at, tl.sum(gain_sum, 0) * factor, mask=c < C)
        tl.store(at + C, tl.sum(shift_sum, 0), mask=c < C)
    tl.store(sums + tl.program_id(0) * columns + c, tl.sum(bias_sum, 0), mask=c < C)


def gelu_blocks(channels: int) -> dict[str, int]:
    """Return the shape of a tile of a kernel that treats every element by itself."""
    block_c = min(128, triton.next_power_of_2(channels))
    return {"C": channels, "BLOCK_R": TILE // block_c, "BLOCK_C": block_c}


def row_blocks(channels: int) -> dict[str, int]:
    """Return the shape of a tile of whole rows."""
    block_c = triton.next_power_of_2(channels)
    return {"C": channels, "BLOCK_R": max(1, TILE // block_c), "BLOCK_C": block_c}


def num_programs(rows: int, blocks: dict[str, int]) -> int:
    """Return how many programs share the rows of a kernel with sums."""
    return min(NUM_PROGRAMS, triton.cdiv(rows, blocks["BLOCK_R"]))


def _rows(z: Tensor) -> tuple[int, int]:
    """Return the number of rows and of rows per sample."""
    rows = z.numel() // z.shape[-1]
    return rows, rows // z.shape[0]


def gelu_forward(
    x: Tensor | None, z: Tensor, bias: Tensor, scale: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Return GELU(z + bias), or x + mask * scale * GELU(z + bias)."""
    x, z = x if x is None else x.contiguous(), z.contiguous()
    y = torch.empty_like(z)
    blocks, (rows, tokens) = gelu_blocks(z.shape[-1]), _rows(z)
    grid = (triton.cdiv(rows, blocks["BLOCK_R"]), triton.cdiv(blocks["C"], blocks["BLOCK_C"]))
    flags = {"RESIDUAL": x is not None, "HAS_MASK": mask is not None}
    with torch.cuda.device_of(z):
        _gelu_forward[grid](x, z, bias, scale, mask, y, rows, tokens, **blocks, **flags)
    return y


def gelu_backward(
    grad: Tensor,
    grad_2: Tensor | None,
    z: Tensor,
    bias: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
    sums: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the two gradients, or GELU(z + bias) without a scale, and that of z."""
    grad, z = grad.contiguous(), z.contiguous()
    grad_2 = grad_2 if grad_2 is None else grad_2.contiguous()
    grad_z = torch.empty_like(z)
    other = z.new_empty(0) if scale is not None and grad_2 is None else torch.empty_like(z)
    blocks, (rows, tokens) = gelu_blocks(z.shape[-1]), _rows(z)
    grid = (len(sums), triton.cdiv(blocks["C"], blocks["BLOCK_C"]))
    flags = {"RESIDUAL": scale is not None, "HAS_MASK": mask is not None, "TWO": grad_2 is not None}
    tensors = (grad, grad_2, z, bias, scale, mask, other, grad_z, sums)
    with torch.cuda.device_of(z):
        _gelu_backward[grid](*tensors, rows, tokens, **blocks, **flags)
    return other, grad_z


def center_forward(
    x: Tensor,
    branch: Tensor,
    bias: Tensor,
    scale: Tensor,
    mask: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return CenterNorm(x + mask * (branch + scale * bias)), and the centered sum; or the sum."""
    x, branch = x.contiguous(), branch.contiguous()
    y, centered = torch.empty_like(x), None if gain is None else torch.empty_like(x)
    blocks, (rows, tokens) = row_blocks(x.shape[-1]), _rows(x)
    tensors = (x, branch, bias, scale, mask, gain, shift, y, centered)
    flags: dict[str, Any] = {"HAS_MASK": mask is not None, "NORM": gain is not None}
    factor = x.shape[-1] / (x.shape[-1] - 1)
    grid = (triton.cdiv(rows, blocks["BLOCK_R"]),)
    with torch.cuda.device_of(x):
        _center_forward[grid](*tensors, rows, tokens, factor, **blocks, **flags)
    return y, centered


def center_backward(
    grad: Tensor,
    grad_2: Tensor | None,
    centered: Tensor | None,
    gain: Tensor | None,
    mask: Tensor | None,
    sums: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and, if there is a mask, of the branch."""
    grad, grad_2 = grad.contiguous(), grad_2 if grad_2 is None else grad_2.contiguous()
    grad_x, grad_branch = torch.empty_like(grad), None if mask is None else torch.empty_like(grad)
    blocks, (rows, tokens) = row_blocks(grad.shape[-1]), _rows(grad)
    tensors = (grad, grad_2, centered, gain, mask, grad_x, grad_branch, sums)
    flags = {"HAS_MASK": mask is not None, "NORM": gain is not None, "TWO": grad_2 is not None}
    factor = grad.shape[-1] / (grad.shape[-1] - 1)
    with torch.cuda.device_of(grad):
        _center_backward[(len(sums),)](*tensors, rows, tokens, factor, **blocks, **flags)
    return grad_x, grad_branch
