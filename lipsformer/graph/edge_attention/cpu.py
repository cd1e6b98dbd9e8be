"""Compute `edge_attention` on the CPU with PyTorch's own sparse kernels, a few heads per pass.

Sums over the edges of a node are embedding bags. The dot products of the two ends of every edge are
a sampled matrix product. Each head of a pass works on its own copy of the graph. The copies lie
node by node, so that no tensor of nodes x channels is copied.

Shapes: as in `edge_attention`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer.graph.edge_attention.csr import EdgeCSR
from lipsformer.graph.edge_attention.settings import Settings

__all__ = ["backward", "forward", "max_backward", "max_forward"]

# Heads share a pass while it has at most this many edges. Small graphs then need few calls, and the
# arrays of large graphs stay in the cache.
_EDGES_PER_PASS = 2**20


def _heads_per_pass(csr: EdgeCSR, num_heads: int) -> int:
    count = max(1, min(num_heads, _EDGES_PER_PASS // csr.num_edges))
    while num_heads % count:
        count -= 1
    return count


def _by_pass(x: Tensor, count: int) -> Tensor:
    """[N, H, C] -> [H / count, N * count, C], without a copy if one pass computes all heads."""
    passes = x.size(1) // count
    by_pass = x.reshape(len(x), passes, count, x.size(-1)).transpose(0, 1)
    return by_pass.reshape(passes, len(x) * count, x.size(-1)).contiguous()


def _from_passes(x: Tensor, count: int) -> Tensor:
    """Undo `_by_pass`."""
    by_node = x.view(len(x), -1, count, x.size(-1)).transpose(0, 1)
    return by_node.reshape(len(by_node), -1, x.size(-1))


def _keep_by_pass(keep: Tensor | None, csr: EdgeCSR, passes: int) -> list[Tensor | None]:
    """[H, E] -> for every pass, the mask of the edges of its copies of the graph."""
    if keep is None:
        return [None] * passes
    keep = keep.view(passes, -1)
    return list(keep if csr.original is None else keep.index_select(1, csr.original))


def _weighted_sum(weight: Tensor, x: Tensor, index: Tensor, ptr: Tensor) -> Tensor:
    return F.embedding_bag(
        index, x, ptr, mode="sum", per_sample_weights=weight, include_last_offset=True
    )


def _edge_sum(csr: EdgeCSR, values: Tensor) -> Tensor:
    ones = values.new_ones(csr.num_targets, 1)
    return _weighted_sum(values, ones, csr.row, csr.ptr).squeeze(1)


def _edge_dot(csr: EdgeCSR, target: Tensor, source: Tensor) -> Tensor:
    """Return the dot product of the two ends of every edge, [E]."""
    if csr.num_edges > csr.num_targets * csr.num_sources:
        # there must be duplicate edges, and so many that the sparse kernel refuses them
        return (target.index_select(0, csr.row) * source.index_select(0, csr.col)).sum(1)
    if target.size(1) % 8:  # the kernel is fast for multiples of 8 channels
        pad = (0, -target.size(1) % 8)
        target, source = F.pad(target, pad), F.pad(source, pad)
    out = csr.adjacency(target.new_zeros(csr.num_edges))
    torch.sparse.sampled_addmm(out, target, source.T, beta=0, out=out)
    return out.values()


def forward(
    csr: EdgeCSR, query: Tensor, key: Tensor, value: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the shift and the log of the sum of the softmax for `backward`.

    The shift is the largest score, or 0 where no score needs one. The two are not added: a large
    score would swallow the logarithm.
    """
    count = _heads_per_pass(csr, value.size(1))
    csr = csr.copies(count)
    query, key, value = (_by_pass(x, count) for x in (query, key, value))
    masks = _keep_by_pass(settings.keep, csr, len(value))
    shift, log_sum = value.new_zeros(2, len(value), csr.num_targets)
    passes = (
        _pass_output(
            csr,
            (query[i], key[i], value[i]),
            settings._replace(keep=masks[i]),
            shift[i],
            log_sum[i],
        )
        for i in range(len(value))
    )
    if len(value) == 1:
        return _from_passes(next(passes).unsqueeze(0), count), shift, log_sum
    out = value.new_empty(len(value), csr.num_targets, value.size(-1))
    for whole, part in zip(out, passes, strict=True):
        whole.copy_(part)
    return _from_passes(out, count), shift, log_sum


def _pass_output(
    csr: EdgeCSR,
    maps: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
    shift: Tensor,
    log_sum: Tensor,
) -> Tensor:
    """Return the output of one pass, and write its shift and the log of its sum of the softmax."""
    query, key, value = maps
    negative_slope, keep_scale, mask = settings
    weight = F.leaky_relu_(_edge_dot(csr, query, key), negative_slope)
    least, largest = weight.aminmax()
    if not (-30 < least and largest < 30):  # exponentials or their sums could overflow
        shift.copy_(torch.segment_reduce(weight, "max", offsets=csr.ptr.long()))
        weight -= shift.index_select(0, csr.row)
    total = _edge_sum(csr, weight.exp_())
    torch.log(total, out=log_sum)
    if mask is not None:
        weight *= mask
    # a target without edges has total 0
    scale = keep_scale / total.clamp_min_(torch.finfo(total.dtype).tiny)
    weight *= scale.index_select(0, csr.row)
    return _weighted_sum(weight, value, csr.col, csr.ptr)


def backward(
    csr: EdgeCSR,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    settings: Settings,
    shift: Tensor,
    log_sum: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    count = _heads_per_pass(csr, value.size(1))
    csr = csr.copies(count)
    maps = query, key, value, grad = tuple(_by_pass(x, count) for x in (query, key, value, grad))
    masks = _keep_by_pass(settings.keep, csr, len(value))
    passes = (
        _pass_gradients(
            csr, tuple(x[i] for x in maps), settings._replace(keep=masks[i]), shift[i], log_sum[i]
        )
        for i in range(len(value))
    )
    if len(value) == 1:
        return tuple(_from_passes(x.unsqueeze(0), count) for x in next(passes))
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for i, one in enumerate(passes):
        for whole, part in zip(grads, one, strict=True):
            whole[i] = part
    return tuple(_from_passes(x, count) for x in grads)


def _pass_gradients(
    csr: EdgeCSR,
    maps: tuple[Tensor, ...],
    settings: Settings,
    shift: Tensor,
    log_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries, keys and values of one pass, whose mask is `keep`."""
    query, key, value, grad = maps
    negative_slope, keep_scale, mask = settings
    score = _edge_dot(csr, query, key)
    attn = F.leaky_relu(score, negative_slope)
    if shift.any():
        attn -= shift.index_select(0, csr.row)
    attn = attn.sub_(log_sum.index_select(0, csr.row)).exp_()
    grad_attn = _edge_dot(csr, grad, value)
    dropped = attn
    if mask is not None:
        factor = mask * keep_scale
        dropped, grad_attn = attn * factor, grad_attn.mul_(factor)
    by_source = dropped.index_select(0, csr.perm)
    grad_value = _weighted_sum(by_source, grad, csr.row_t, csr.ptr_t)
    # through the softmax, then through LeakyReLU
    grad_attn *= attn
    total = _edge_sum(csr, grad_attn)
    grad_attn -= attn.mul_(total.index_select(0, csr.row))
    grad_score = torch.ops.aten.leaky_relu_backward(grad_attn, score, negative_slope, False)
    grad_query = _weighted_sum(grad_score, key, csr.col, csr.ptr)
    by_source = grad_score.index_select(0, csr.perm)
    return grad_query, _weighted_sum(by_source, query, csr.row_t, csr.ptr_t), grad_value


def max_forward(csr: EdgeCSR, values: Tensor) -> Tensor:
    """Return the maxima, [T, H]."""
    ones = values.new_ones(csr.num_edges)
    return torch.sparse.mm(csr.adjacency(ones), values, "amax")


def max_backward(csr: EdgeCSR, values: Tensor, largest: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the values: edges that hold the maximum share it evenly."""
    count = _heads_per_pass(csr, values.size(1))
    passes = (x.split(count, dim=1) for x in (values, largest, grad))
    return torch.cat([_max_gradient(csr, *heads) for heads in zip(*passes, strict=True)], dim=1)


def _max_gradient(csr: EdgeCSR, values: Tensor, largest: Tensor, grad: Tensor) -> Tensor:
    equal = values.index_select(0, csr.col) == largest.index_select(0, csr.row)
    edge, head = equal.nonzero(as_tuple=True)
    count = equal.size(1)
    target = csr.row.index_select(0, edge) * count + head
    source = csr.col.index_select(0, edge) * count + head
    share = grad.flatten() / torch.bincount(target, minlength=grad.numel()).clamp_min_(1)
    out = torch.zeros_like(values).flatten()
    return out.index_add_(0, source, share.index_select(0, target)).view_as(values)
