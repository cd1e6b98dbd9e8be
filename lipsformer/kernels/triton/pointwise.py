"""Triton: biases, GELU, weighted residuals and CenterNorm, each with what surrounds it in a block.

The operators have no autograd formula, because the block calls both directions itself. Sums over
the rows (gradients of biases, scales, gains and shifts) are kept in registers and written once per
program, as a row of `sums`. The caller adds the programs.

Shapes: maps are [B, ..., C], for the kernels [rows, C]; parameters are [C]. A mask, [B], has one
number per sample, which is `tokens` rows.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import register_fake

from lipsformer.kernels.gpu_operator import operator

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


def _gelu_blocks(channels: int) -> dict[str, int]:
    """Return the shape of a tile of a kernel that treats every element by itself."""
    block_c = min(128, triton.next_power_of_2(channels))
    return {"C": channels, "BLOCK_R": TILE // block_c, "BLOCK_C": block_c}


def _row_blocks(channels: int) -> dict[str, int]:
    """Return the shape of a tile of whole rows."""
    block_c = triton.next_power_of_2(channels)
    return {"C": channels, "BLOCK_R": max(1, TILE // block_c), "BLOCK_C": block_c}


def _rows(z: Tensor) -> tuple[int, int]:
    """Return the number of rows and of rows per sample."""
    rows = z.numel() // z.shape[-1]
    return rows, rows // z.shape[0]


def _empty_sums(z: Tensor, blocks: dict[str, int], parameters: int) -> Tensor:
    """Return memory for the sums over the rows of `z`, one row for each program that shares them.

    Args:
        z: The map.
        blocks: The shape of a tile.
        parameters: Number of parameters per channel whose gradients are summed.
    """
    programs = min(NUM_PROGRAMS, triton.cdiv(_rows(z)[0], blocks["BLOCK_R"]))
    return z.new_empty(programs, parameters * z.shape[-1], dtype=torch.float32)


@operator
def gelu(
    x: Tensor | None, z: Tensor, bias: Tensor, scale: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Return GELU(z + bias), or x + mask * scale * GELU(z + bias)."""
    x, z = x if x is None else x.contiguous(), z.contiguous()
    y = torch.empty_like(z)
    blocks, (rows, tokens) = _gelu_blocks(z.shape[-1]), _rows(z)
    grid = (triton.cdiv(rows, blocks["BLOCK_R"]), triton.cdiv(blocks["C"], blocks["BLOCK_C"]))
    flags = {"RESIDUAL": x is not None, "HAS_MASK": mask is not None}
    with torch.cuda.device_of(z):
        _gelu_forward[grid](x, z, bias, scale, mask, y, rows, tokens, **blocks, **flags)
    return y


@register_fake(gelu)
def _(x: Tensor | None, z: Tensor, *_: Any) -> Tensor:
    return z.new_empty(z.shape)


@operator
def gelu_backward(
    grad: Tensor,
    grad_2: Tensor | None,
    z: Tensor,
    bias: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the backward pass of `gelu` needs.

    Returns:
        The sum of both gradients (empty if there is only one), or GELU(z + bias) if there is no
        scale; the gradient of z; the sums for the gradients of the bias and the scale, side by
        side.
    """
    grad, z = grad.contiguous(), z.contiguous()
    grad_2 = grad_2 if grad_2 is None else grad_2.contiguous()
    results = _gelu_results(grad, grad_2, z, bias, scale)
    blocks, (rows, tokens) = _gelu_blocks(z.shape[-1]), _rows(z)
    grid = (len(results[2]), triton.cdiv(blocks["C"], blocks["BLOCK_C"]))
    flags = {"RESIDUAL": scale is not None, "HAS_MASK": mask is not None, "TWO": grad_2 is not None}
    tensors = (grad, grad_2, z, bias, scale, mask, *results)
    with torch.cuda.device_of(z):
        _gelu_backward[grid](*tensors, rows, tokens, **blocks, **flags)
    return results


@register_fake(gelu_backward)
def _gelu_results(
    grad: Tensor, grad_2: Tensor | None, z: Tensor, bias: Tensor, scale: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    other = z.new_empty(0) if scale is not None and grad_2 is None else z.new_empty(z.shape)
    sums = _empty_sums(z, _gelu_blocks(z.shape[-1]), 1 if scale is None else 2)
    return other, z.new_empty(z.shape), sums


@operator
def residual_center(
    x: Tensor,
    branch: Tensor,
    bias: Tensor,
    scale: Tensor,
    mask: Tensor | None,
    gain: Tensor,
    shift: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return CenterNorm(x + mask * (branch + scale * bias)) and the centered sum."""
    y, centered = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch_center(x, branch, bias, scale, mask, gain, shift, y, centered)
    return y, centered


@register_fake(residual_center)
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@operator
def residual(x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, mask: Tensor | None) -> Tensor:
    """Return x + mask * (branch + scale * bias)."""
    y = x.new_empty(x.shape)
    _launch_center(x, branch, bias, scale, mask, None, None, y, None)
    return y


@register_fake(residual)
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _launch_center(x: Tensor, branch: Tensor, *others: Tensor | None) -> None:
    """Call `_center_forward` with its tensors in order."""
    mask, gain = others[2:4]
    blocks, (rows, tokens) = _row_blocks(x.shape[-1]), _rows(x)
    flags: dict[str, Any] = {"HAS_MASK": mask is not None, "NORM": gain is not None}
    factor = x.shape[-1] / (x.shape[-1] - 1)
    grid = (triton.cdiv(rows, blocks["BLOCK_R"]),)
    tensors = (x.contiguous(), branch.contiguous(), *others)
    with torch.cuda.device_of(x):
        _center_forward[grid](*tensors, rows, tokens, factor, **blocks, **flags)


@operator
def residual_center_backward(
    grad: Tensor,
    grad_2: Tensor | None,
    centered: Tensor | None,
    gain: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the backward pass of `residual_center` needs; without a gain, of `residual`.

    Returns:
        The gradient of x; that of the branch, which is empty if there is no mask, because it then
        is the same; the sums for the gradients of scale * bias, the gain and the shift, side by
        side.
    """
    grad, grad_2 = grad.contiguous(), grad_2 if grad_2 is None else grad_2.contiguous()
    results = _center_results(grad, grad_2, centered, gain, mask)
    blocks, (rows, tokens) = _row_blocks(grad.shape[-1]), _rows(grad)
    flags = {"HAS_MASK": mask is not None, "NORM": gain is not None, "TWO": grad_2 is not None}
    factor = grad.shape[-1] / (grad.shape[-1] - 1)
    tensors = (grad, grad_2, centered, gain, mask, *results)
    with torch.cuda.device_of(grad):
        _center_backward[(len(results[2]),)](*tensors, rows, tokens, factor, **blocks, **flags)
    return results


@register_fake(residual_center_backward)
def _center_results(
    grad: Tensor,
    grad_2: Tensor | None,
    centered: Tensor | None,
    gain: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_branch = grad.new_empty(0) if mask is None else grad.new_empty(grad.shape)
    sums = _empty_sums(grad, _row_blocks(grad.shape[-1]), 1 if gain is None else 3)
    return grad.new_empty(grad.shape), grad_branch, sums
