r"""Attention over edges in one pass, without a message per edge and channel.

.. math::
    z_{ij} = q_i \cdot k_j, \quad p_i = \mathrm{softmax}_{j \in N(i)}(\mathrm{LeakyReLU}(z_{ij})),
    \quad o_i = \sum_{j \in N(i)} m_{ij}\, p_{ij} v_j

per head, m the dropout mask. A dot-product score is this with slope 1; a GAT's additive score
:math:`c_i\,\mathrm{LeakyReLU}(s_j + t_i)`, c_i > 0, is :math:`q_i = (c_i, c_i t_i)`,
:math:`k_j = (s_j, 1)`. Nothing of size E x channels is ever stored, and of size E x heads only the
mask: the backward pass computes the weights again from the softmax's normaliser.

Shapes: S sources, T targets, E edges, H heads, D channels of queries and keys, C of values.
"""

import warnings
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing, SumAggregation

from .csr import EdgeCSR

__all__ = ["edge_attention", "fusable", "neighbor_max", "reference_edge_attention"]

_STEPS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")

# heads share a pass while it has at most this many edges: few calls for small graphs, arrays that
# stay in the cache for large ones
_EDGES_PER_PASS = 2**20

with warnings.catch_warnings():  # the notice, once per process, that CSR tensors are in beta
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def fusable(
    conv: MessagePassing,
    kind: type[MessagePassing],
    edge_index: Tensor,
    source: Tensor,
    target: Tensor | None,
    size: tuple[int, int] | None = None,
) -> bool:
    """Whether a fused pass gives what ``conv`` would give message by message.

    Not so when its messages are hooked, explained, overridden in a subclass of ``kind`` or not
    summed, when the graph is anything but a plain ``edge_index`` between known nodes, and under
    ``torch.func`` and ``torch.compile``, which need to see every step.
    """
    return (
        type(edge_index) is Tensor
        and edge_index.layout is torch.strided
        and edge_index.dtype is torch.int64
        and 0 < edge_index.numel() < 2**31
        and target is not None
        and (size is None or tuple(size) == (len(source), len(target)))
        and source.device.type == "cpu"
        and conv.flow == "source_to_target"
        and isinstance(conv.aggr_module, SumAggregation)
        and not conv.explain
        and conv.decomposed_layers == 1
        and all(getattr(type(conv), step, None) is getattr(kind, step, None) for step in _STEPS[1:])
        and not any(
            getattr(conv, f"_{step}_forward{when}_hooks") for step in _STEPS for when in ("", "_pre")
        )
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def edge_attention(
    graph: EdgeCSR,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    negative_slope: float = 1.0,
    dropout: float = 0.0,
    keep: Tensor | None = None,
) -> Tensor:
    """Attend from every target to its sources.

    Args:
        graph: Edges.
        query: [T, H, D], scaled.
        key: [S, H, D].
        value: [S, H, C].
        negative_slope: Slope of the scores' LeakyReLU; 1 for none.
        dropout: Probability in [0, 1) of dropping an attention weight.
        keep: Boolean mask of the weights that stay, [H, E], edges by target; None draws it.

    Returns:
        [T, H, C]; zero for targets without an edge.
    """
    if dropout > 0 and keep is None:
        keep = torch.stack(
            [torch.rand(graph.num_edges, device=value.device) >= dropout for _ in range(query.size(1))]
        )
    dtype = torch.promote_types(query.dtype, value.dtype)
    inputs = (query, key, value)
    if value.device.type == "cpu" and dtype.itemsize < 4:
        inputs = (x.float() for x in inputs)
    else:
        inputs = (x.to(dtype) for x in inputs)
    out = _EdgeAttention.apply(*inputs, graph, negative_slope, 1 / (1 - dropout), keep)
    return cast(Tensor, out).to(dtype)


def reference_edge_attention(
    graph: EdgeCSR,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negative_slope: float = 1.0,
    keep_scale: float = 1.0,
    keep: Tensor | None = None,
) -> Tensor:
    """What ``edge_attention`` computes, from messages; differentiable any number of times."""
    row, col = graph.row.long(), graph.col.long()
    scores = F.leaky_relu((query[row] * key[col]).sum(-1), negative_slope)
    index = row[:, None].expand_as(scores)
    largest = scores.detach().new_zeros(graph.num_targets, scores.size(1))
    largest = largest.scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
    weight = (scores - largest[row]).exp()
    attn = weight / torch.zeros_like(largest).index_add(0, row, weight)[row]
    if keep is not None:
        attn = attn * keep.T * keep_scale
    out = value.new_zeros(graph.num_targets, *value.shape[1:])
    return out.index_add(0, row, attn.unsqueeze(-1) * value[col])


class _EdgeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: EdgeCSR,
        negative_slope: float,
        keep_scale: float,
        keep: Tensor | None,
    ) -> Tensor:
        ctx.graph, ctx.settings = graph, (negative_slope, keep_scale)
        out, log_sum = _forward(graph, query, key, value, negative_slope, keep_scale, keep)
        ctx.save_for_backward(query, key, value, log_sum, keep)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, log_sum, keep = ctx.saved_tensors
        inputs = (query, key, value)
        if torch.is_grad_enabled():  # create_graph=True
            out = reference_edge_attention(ctx.graph, *inputs, *ctx.settings, keep)
            own = torch.autograd.grad(out, inputs, grads[0], create_graph=True)
        else:
            own = _backward(ctx.graph, *inputs, log_sum, grads[0], *ctx.settings, keep)
        return *own, None, None, None, None


def _passes(graph: EdgeCSR, num_heads: int) -> tuple[EdgeCSR, list[slice]]:
    count = max(1, min(num_heads, _EDGES_PER_PASS // max(graph.num_edges, 1)))
    while num_heads % count:
        count -= 1
    return graph.copies(count), [slice(h, h + count) for h in range(0, num_heads, count)]


def _rows(x: Tensor, heads: slice) -> Tensor:
    """[N, H, C] -> [heads * N, C], contiguous, one head after the other."""
    return x[:, heads].transpose(0, 1).reshape(-1, x.size(-1))


def _put(x: Tensor, heads: slice, rows: Tensor) -> None:
    x[:, heads] = rows.view(-1, x.size(0), x.size(-1)).transpose(0, 1)


def _weighted_sum(weight: Tensor, x: Tensor, index: Tensor, ptr: Tensor) -> Tensor:
    return F.embedding_bag(
        index, x, ptr, mode="sum", per_sample_weights=weight, include_last_offset=True
    )


def _edge_sum(graph: EdgeCSR, values: Tensor) -> Tensor:
    ones = values.new_ones(graph.num_targets, 1)
    return _weighted_sum(values, ones, graph.row, graph.ptr).squeeze(1)


def _edge_dot(graph: EdgeCSR, target: Tensor, source: Tensor) -> Tensor:
    """Dot product of both ends of every edge, [E]; rows padded to what the kernel is fast for."""
    pad = (0, -target.size(1) % 8)
    out = torch.sparse_csr_tensor(
        graph.ptr,
        graph.col,
        target.new_zeros(graph.num_edges),
        (graph.num_targets, graph.num_sources),
        check_invariants=False,
    )
    torch.sparse.sampled_addmm(out, F.pad(target, pad), F.pad(source, pad).T, beta=0, out=out)
    return out.values()


def _forward(
    graph: EdgeCSR,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negative_slope: float,
    keep_scale: float,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_heads = value.size(1)
    out = value.new_empty(graph.num_targets, *value.shape[1:])
    log_sum = value.new_empty(num_heads, graph.num_targets)
    graph, passes = _passes(graph, num_heads)
    for heads in passes:
        scores = _edge_dot(graph, _rows(query, heads), _rows(key, heads))
        scores = F.leaky_relu_(scores, negative_slope)
        shift = None
        if not scores.abs().max() < 30:  # else no exponential leaves the range of the dtype
            shift = torch.segment_reduce(scores, "max", offsets=graph.ptr.long())
            scores -= shift.index_select(0, graph.row)
        weight = scores.exp_()
        total = _edge_sum(graph, weight)
        if keep is not None:
            weight *= keep[heads].flatten()
        mean = _weighted_sum(weight, _rows(value, heads), graph.col, graph.ptr)
        # a target without edges has sum 0
        mean *= (keep_scale / total.clamp_min(torch.finfo(total.dtype).tiny)).unsqueeze(1)
        _put(out, heads, mean)
        log_total = total.log()
        log_sum[heads] = (log_total if shift is None else log_total + shift).view_as(log_sum[heads])
    return out, log_sum


def _backward(
    graph: EdgeCSR,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    negative_slope: float,
    keep_scale: float,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = grad_query, grad_key, grad_value = [torch.empty_like(x) for x in (query, key, value)]
    graph, passes = _passes(graph, value.size(1))
    for heads in passes:
        q, k, g = _rows(query, heads), _rows(key, heads), _rows(grad, heads)
        score = _edge_dot(graph, q, k)
        attn = F.leaky_relu(score, negative_slope)
        attn = attn.sub_(log_sum[heads].flatten().index_select(0, graph.row)).exp_()
        grad_attn = _edge_dot(graph, g, _rows(value, heads))
        dropped = attn
        if keep is not None:
            factor = keep[heads].flatten() * keep_scale
            dropped, grad_attn = attn * factor, grad_attn * factor
        by_source = dropped.index_select(0, graph.perm)
        _put(grad_value, heads, _weighted_sum(by_source, g, graph.row_t, graph.ptr_t))
        # through the softmax, then through LeakyReLU
        grad_attn *= attn
        mean = _edge_sum(graph, grad_attn)
        grad_attn -= attn.mul_(mean.index_select(0, graph.row))
        grad_score = torch.where(score > 0, grad_attn, grad_attn * negative_slope)
        _put(grad_query, heads, _weighted_sum(grad_score, k, graph.col, graph.ptr))
        by_source = grad_score.index_select(0, graph.perm)
        _put(grad_key, heads, _weighted_sum(by_source, q, graph.row_t, graph.ptr_t))
    return tuple(grads)


class _NeighborMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, graph: EdgeCSR) -> Tensor:
        adjacency = torch.sparse_csr_tensor(
            graph.ptr,
            graph.col,
            values.new_ones(graph.num_edges),
            (graph.num_targets, graph.num_sources),
            check_invariants=False,
        )
        largest = torch.sparse.mm(adjacency, values, "amax")
        ctx.graph = graph
        ctx.save_for_backward(values, largest)
        return largest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        values, largest = ctx.saved_tensors
        graph, passes = _passes(ctx.graph, values.size(1))
        own = []
        for heads in passes:
            value, maximum, grad = (x[:, heads].T.flatten() for x in (values, largest, grads[0]))
            equal = value.index_select(0, graph.col) == maximum.index_select(0, graph.row)
            edges = equal.nonzero().squeeze(1)
            row, col = (index.index_select(0, edges) for index in (graph.row, graph.col))
            count = torch.bincount(row, minlength=len(maximum)).clamp_min_(1)
            share = (grad / count).index_select(0, row)
            own.append(torch.zeros_like(value).index_add(0, col, share).view(-1, len(values)))
        return torch.cat(own).T, None


def neighbor_max(values: Tensor, graph: EdgeCSR) -> Tensor:
    """Largest value among a target's sources, [S, H] -> [T, H]; ``segment_max`` without its edges.

    Values are non-negative; a target without edges gets 0. Equal maxima share the derivative.
    """
    return cast(Tensor, _NeighborMax.apply(values, graph))
