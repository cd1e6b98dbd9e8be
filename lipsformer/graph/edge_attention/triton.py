"""Compute `edge_attention` with CUDA kernels: one program per node and head visits its edges.

The forward pass and the gradient of the queries go by target, the gradients of keys and values by
source. Sums are kept in single precision or better. One warp visits all edges of a node, so a few
nodes with very many edges can determine the total time.

Shapes: as in `edge_attention`; all tensors are contiguous.
"""
# pyright: reportArgumentType=false, reportMissingImports=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lipsformer.graph.edge_attention.csr import EdgeCSR
from lipsformer.graph.edge_attention.settings import Settings

__all__ = ["LAUNCH", "TILES", "backward", "forward", "max_backward", "max_forward"]

LAUNCH: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": True}
# Numbers of each tensor that a program holds at once. With 1,024 the backward pass spills registers
# on a B200, for 64 channels in half precision.
TILES = {"forward": 1024, "backward": 512}


@triton.jit
def _rows(x, node, head, H: tl.constexpr, W: tl.constexpr, columns, valid, ACC: tl.constexpr):
    """Load the rows [nodes, BLOCK] of x [N, H, W] for one head, with zeros where not valid."""
    at = x + (node[:, None] * H + head) * W + columns[None, :]
    return tl.load(at, mask=valid[:, None] & (columns < W)[None, :], other=0.0).to(ACC)


@triton.jit
def _forward(
    ptr,
    col,
    query,
    key,
    value,
    keep,
    out,
    shift,
    log_sum,
    num_edges,
    H: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    SLOPE: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # target * H + head
    target, head = row // H, row % H
    d, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    q = tl.load(query + row * D + d, mask=d < D, other=0.0).to(ACC)
    largest = tl.full((), float("-inf"), ACC)
    total = tl.full((), 0.0, ACC)
    sums = tl.zeros((BLOCK_C,), ACC)
    stop = tl.load(ptr + target + 1)
    for start in range(tl.load(ptr + target), stop, BLOCK_E):
        edge = start + tl.arange(0, BLOCK_E)
        valid = edge < stop
        source = tl.load(col + edge, mask=valid, other=0).to(tl.int64)
        k = _rows(key, source, head, H, D, d, valid, ACC)
        score = tl.sum(k * q[None, :], 1)
        score = tl.where(score > 0, score, score * SLOPE)
        score = tl.where(valid, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 0))
        weight = tl.exp(score - new_largest)
        rescale = tl.exp(largest - new_largest)
        largest = new_largest
        total = total * rescale + tl.sum(weight, 0)
        if HAS_KEEP:
            weight *= tl.load(keep + head * num_edges + edge, mask=valid, other=0).to(ACC)
        v = _rows(value, source, head, H, C, c, valid, ACC)
        sums = sums * rescale + tl.sum(weight[:, None] * v, 0)
    total = tl.where(total == 0, 1.0, total)  # a target without edges
    sums *= KEEP_SCALE / total
    tl.store(out + row * C + c, sums, mask=c < C)
    # not added: a large score would swallow the logarithm
    tl.store(shift + row, largest)
    tl.store(log_sum + row, tl.log(total))


@triton.jit
def _backward_by_target(
    ptr,
    col,
    query,
    key,
    value,
    keep,
    out,
    shift,
    log_sum,
    grad,
    grad_query,
    delta,
    num_edges,
    H: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    SLOPE: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target, head = row // H, row % H
    d, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    q = tl.load(query + row * D + d, mask=d < D, other=0.0).to(ACC)
    g = tl.load(grad + row * C + c, mask=c < C, other=0.0).to(ACC)
    o = tl.load(out + row * C + c, mask=c < C, other=0.0).to(ACC)
    own_delta = tl.sum(g * o, 0)  # weighted mean of the gradients of the attention weights
    own_shift, own_log_sum = tl.load(shift + row), tl.load(log_sum + row)
    sums = tl.zeros((BLOCK_D,), ACC)
    stop = tl.load(ptr + target + 1)
    for start in range(tl.load(ptr + target), stop, BLOCK_E):
        edge = start + tl.arange(0, BLOCK_E)
        valid = edge < stop
        source = tl.load(col + edge, mask=valid, other=0).to(tl.int64)
        k = _rows(key, source, head, H, D, d, valid, ACC)
        score = tl.sum(k * q[None, :], 1)
        slopes = tl.where(score > 0, tl.full((BLOCK_E,), 1.0, ACC), tl.full((BLOCK_E,), SLOPE, ACC))
        attn = tl.where(valid, tl.exp(score * slopes - own_shift - own_log_sum), 0.0)
        v = _rows(value, source, head, H, C, c, valid, ACC)
        grad_attn = tl.sum(v * g[None, :], 1)
        if HAS_KEEP:
            kept = tl.load(keep + head * num_edges + edge, mask=valid, other=0).to(ACC)
            grad_attn *= kept * KEEP_SCALE
        grad_score = attn * (grad_attn - own_delta) * slopes
        sums += tl.sum(grad_score[:, None] * k, 0)
    tl.store(grad_query + row * D + d, sums.to(grad_query.dtype.element_ty), mask=d < D)
    tl.store(delta + row, own_delta)


@triton.jit
def _backward_by_source(
    ptr_t,
    row_t,
    perm,
    query,
    key,
    value,
    keep,
    shift,
    log_sum,
    delta,
    grad,
    grad_key,
    grad_value,
    num_edges,
    H: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    SLOPE: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # source * H + head
    source, head = row // H, row % H
    d, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    k = tl.load(key + row * D + d, mask=d < D, other=0.0).to(ACC)
    v = tl.load(value + row * C + c, mask=c < C, other=0.0).to(ACC)
    key_sums = tl.zeros((BLOCK_D,), ACC)
    value_sums = tl.zeros((BLOCK_C,), ACC)
    stop = tl.load(ptr_t + source + 1)
    for start in range(tl.load(ptr_t + source), stop, BLOCK_E):
        edge = start + tl.arange(0, BLOCK_E)
        valid = edge < stop
        target = tl.load(row_t + edge, mask=valid, other=0).to(tl.int64)
        q = _rows(query, target, head, H, D, d, valid, ACC)
        g = _rows(grad, target, head, H, C, c, valid, ACC)
        at = target * H + head
        score = tl.sum(q * k[None, :], 1)
        slopes = tl.where(score > 0, tl.full((BLOCK_E,), 1.0, ACC), tl.full((BLOCK_E,), SLOPE, ACC))
        shifts = tl.load(shift + at, mask=valid, other=0.0)
        log_sums = tl.load(log_sum + at, mask=valid, other=0.0)
        attn = tl.where(valid, tl.exp(score * slopes - shifts - log_sums), 0.0)
        grad_attn = tl.sum(g * v[None, :], 1)
        weight = attn
        if HAS_KEEP:
            position = tl.load(perm + edge, mask=valid, other=0)
            kept = tl.load(keep + head * num_edges + position, mask=valid, other=0).to(ACC)
            weight = attn * kept * KEEP_SCALE
            grad_attn *= kept * KEEP_SCALE
        grad_score = attn * (grad_attn - tl.load(delta + at, mask=valid, other=0.0)) * slopes
        key_sums += tl.sum(grad_score[:, None] * q, 0)
        value_sums += tl.sum(weight[:, None] * g, 0)
    tl.store(grad_key + row * D + d, key_sums.to(grad_key.dtype.element_ty), mask=d < D)
    tl.store(grad_value + row * C + c, value_sums.to(grad_value.dtype.element_ty), mask=c < C)


@triton.jit
def _max_forward(
    ptr, col, values, largest, H: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr
):
    target = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    best = tl.zeros((BLOCK_H,), values.dtype.element_ty)
    stop = tl.load(ptr + target + 1)
    for begin in range(tl.load(ptr + target), stop, BLOCK_E):
        edge = begin + tl.arange(0, BLOCK_E)
        source = tl.load(col + edge, mask=edge < stop, other=0).to(tl.int64)
        mask = (edge < stop)[:, None] & (h < H)[None, :]
        x = tl.load(values + source[:, None] * H + h[None, :], mask=mask, other=0.0)
        # tl.max widens half precision, and the type of a variable must not change in a loop
        best = tl.maximum(best, tl.max(x, 0)).to(values.dtype.element_ty)
    tl.store(largest + target * H + h, best, mask=h < H)


@triton.jit
def _max_share(
    ptr,
    col,
    values,
    largest,
    grad,
    share,
    H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Divide the gradient of a target by the number of its edges that hold the maximum."""
    target = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    at = target * H + h
    best = tl.load(largest + at, mask=h < H, other=0.0)
    count = tl.zeros((BLOCK_H,), tl.int32)
    stop = tl.load(ptr + target + 1)
    for begin in range(tl.load(ptr + target), stop, BLOCK_E):
        edge = begin + tl.arange(0, BLOCK_E)
        source = tl.load(col + edge, mask=edge < stop, other=0).to(tl.int64)
        mask = (edge < stop)[:, None] & (h < H)[None, :]
        x = tl.load(values + source[:, None] * H + h[None, :], mask=mask, other=-1.0)
        count += tl.sum((x == best[None, :]).to(tl.int32), 0)
    g = tl.load(grad + at, mask=h < H, other=0.0)
    tl.store(share + at, g / tl.maximum(count, 1), mask=h < H)


@triton.jit
def _max_backward(
    ptr_t,
    row_t,
    values,
    largest,
    share,
    grad_values,
    H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    source = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    own = tl.load(values + source * H + h, mask=h < H, other=0.0)
    sums = tl.zeros((BLOCK_H,), grad_values.dtype.element_ty)
    stop = tl.load(ptr_t + source + 1)
    for begin in range(tl.load(ptr_t + source), stop, BLOCK_E):
        edge = begin + tl.arange(0, BLOCK_E)
        target = tl.load(row_t + edge, mask=edge < stop, other=0).to(tl.int64)
        mask = (edge < stop)[:, None] & (h < H)[None, :]
        at = target[:, None] * H + h[None, :]
        is_largest = tl.load(largest + at, mask=mask, other=-1.0) == own[None, :]
        sums += tl.sum(tl.where(is_largest, tl.load(share + at, mask=mask, other=0.0), 0.0), 0)
    tl.store(grad_values + source * H + h, sums, mask=h < H)


def _constants(query: Tensor, value: Tensor, settings: Settings, tile: int) -> dict[str, Any]:
    _, heads, channels = value.shape
    block_d, block_c = (triton.next_power_of_2(x.size(-1)) for x in (query, value))
    return {
        "H": heads,
        "D": query.size(-1),
        "C": channels,
        "BLOCK_E": max(2, min(16, tile // max(block_c, block_d))),
        "BLOCK_D": block_d,
        "BLOCK_C": block_c,
        "SLOPE": settings.negative_slope,
        "KEEP_SCALE": settings.keep_scale,
        "HAS_KEEP": settings.keep is not None,
        "ACC": tl.float64 if torch.float64 in (query.dtype, value.dtype) else tl.float32,
        **LAUNCH,
    }


def forward(
    csr: EdgeCSR, query: Tensor, key: Tensor, value: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the unrounded output, then for `backward` the same output and the softmax's terms.

    These are the largest score of every target and head, and the log of the sum over its edges.
    """
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    dtype = torch.promote_types(torch.promote_types(query.dtype, value.dtype), torch.float32)
    out = value.new_empty(csr.num_targets, *value.shape[1:], dtype=dtype)
    shift, log_sum = out.new_empty(2, *out.shape[:2])
    with torch.cuda.device_of(value):
        _forward[(log_sum.numel(),)](
            csr.ptr,
            csr.col,
            query,
            key,
            value,
            settings.keep,
            out,
            shift,
            log_sum,
            csr.num_edges,
            **_constants(query, value, settings, TILES["forward"]),
        )
    return out, out, shift, log_sum


def backward(
    csr: EdgeCSR,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    settings: Settings,
    out: Tensor,
    shift: Tensor,
    log_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    grad = grad.contiguous()
    grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
    delta = torch.empty_like(log_sum)
    constants = _constants(query, value, settings, TILES["backward"])
    with torch.cuda.device_of(value):
        _backward_by_target[(log_sum.numel(),)](
            csr.ptr,
            csr.col,
            query,
            key,
            value,
            settings.keep,
            out,
            shift,
            log_sum,
            grad,
            grad_query,
            delta,
            csr.num_edges,
            **constants,
        )
        _backward_by_source[(csr.num_sources * value.size(1),)](
            csr.ptr_t,
            csr.row_t,
            csr.perm,
            query,
            key,
            value,
            settings.keep,
            shift,
            log_sum,
            delta,
            grad,
            grad_key,
            grad_value,
            csr.num_edges,
            **constants,
        )
    return grad_query, grad_key, grad_value


def _max_constants(values: Tensor) -> dict[str, Any]:
    heads = values.size(1)
    return {"H": heads, "BLOCK_E": 16, "BLOCK_H": triton.next_power_of_2(heads), **LAUNCH}


def max_forward(csr: EdgeCSR, values: Tensor) -> Tensor:
    """Return the maxima, [T, H]."""
    values = values.contiguous()
    largest = values.new_empty(csr.num_targets, values.size(1))
    with torch.cuda.device_of(values):
        _max_forward[(csr.num_targets,)](
            csr.ptr, csr.col, values, largest, **_max_constants(values)
        )
    return largest


def max_backward(csr: EdgeCSR, values: Tensor, largest: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the values: edges that hold the maximum share it evenly."""
    values, grad = values.contiguous(), grad.contiguous()
    share, grad_values = torch.empty_like(grad), torch.empty_like(values)
    constants = _max_constants(values)
    with torch.cuda.device_of(values):
        _max_share[(csr.num_targets,)](csr.ptr, csr.col, values, largest, grad, share, **constants)
        _max_backward[(csr.num_sources,)](
            csr.ptr_t, csr.row_t, values, largest, share, grad_values, **constants
        )
    return grad_values
