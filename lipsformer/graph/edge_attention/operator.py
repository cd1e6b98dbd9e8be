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

from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing, SumAggregation

from lipsformer.layers.lipschitz_norm import segment_max

from . import cpu as edge_attention_cpu
from .csr import EdgeCSR

__all__ = ["edge_attention", "fusable", "neighbor_max", "reference_edge_attention"]

_STEPS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
_DEVICES = ("cpu", "cuda") if find_spec("triton") else ("cpu",)


def fusable(
    conv: Any,
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
        and edge_index.dim() == 2
        and len(edge_index) == 2
        and 0 < edge_index.size(1) < 2**31 - 2**24  # positions are int32, self loops included
        and target is not None
        and (size is None or tuple(size) == (len(source), len(target)))
        and source.device.type in _DEVICES
        and conv.dropout < 1
        and conv.flow == "source_to_target"
        and isinstance(conv.aggr_module, SumAggregation)
        and not conv.explain
        and conv.decomposed_layers == 1
        and all(getattr(type(conv), step, None) is getattr(kind, step, None) for step in _STEPS[1:])
        and not any(
            getattr(conv, f"_{step}_forward{when}_hooks")
            for step in _STEPS
            for when in ("", "_pre")
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
    training: bool = True,
    keep: Tensor | None = None,
) -> Tensor:
    """Attend from every target to its sources.

    Args:
        graph: At least one edge.
        query: [T, H, D], scaled.
        key: [S, H, D].
        value: [S, H, C].
        negative_slope: Slope of the scores' LeakyReLU; 1 for none.
        dropout: Probability in [0, 1) of dropping an attention weight in training.
        training: Whether to drop any.
        keep: Boolean mask of the weights that stay, [H, E], edges by target; None draws it.

    Returns:
        [T, H, C]; zero for targets without an edge.
    """
    if not training or dropout == 0:
        dropout, keep = 0.0, None
    elif keep is None:
        draws = (torch.rand_like(graph.col, dtype=torch.float) for _ in range(query.size(1)))
        keep = torch.stack([draw >= dropout for draw in draws])
    dtype = torch.promote_types(query.dtype, value.dtype)
    if value.device.type == "cpu":
        exact = torch.promote_types(dtype, torch.float)
        query, key, value = query.to(exact), key.to(exact), value.to(exact)
    out = _EdgeAttention.apply(query, key, value, graph, negative_slope, 1 / (1 - dropout), keep)
    return cast(Tensor, out).to(dtype)


def reference_edge_attention(
    graph: EdgeCSR,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negative_slope: float,
    keep_scale: float,
    keep: Tensor | None,
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


def _backend(x: Tensor) -> ModuleType:
    if x.is_cuda:
        from . import triton as edge_attention_triton

        return edge_attention_triton
    return edge_attention_cpu


class _EdgeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: EdgeCSR,
        *settings: Any,
    ) -> Tensor:
        out, *residuals = _backend(value).forward(graph, query, key, value, *settings)
        *ctx.settings, keep = settings
        ctx.graph = graph
        ctx.save_for_backward(query, key, value, keep, *residuals)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep, *residuals = ctx.saved_tensors
        inputs, settings = (query, key, value), (*ctx.settings, keep)
        if torch.is_grad_enabled():  # create_graph=True
            out = reference_edge_attention(ctx.graph, query, key, value, *ctx.settings, keep=keep)
            own = torch.autograd.grad(out, inputs, *grads, create_graph=True)
        else:
            own = _backend(value).backward(ctx.graph, *inputs, *grads, *settings, *residuals)
        return *own, None, *(None for _ in settings)


class _NeighborMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, graph: EdgeCSR) -> Tensor:
        ctx.graph = graph
        largest = _backend(values).max_forward(graph, values)
        ctx.save_for_backward(values, largest)
        return largest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        values, largest = ctx.saved_tensors
        graph: EdgeCSR = ctx.graph
        if torch.is_grad_enabled():
            out = segment_max(values[graph.col], graph.row.long(), graph.num_targets)
            return *torch.autograd.grad(out, values, *grads, create_graph=True), None
        return _backend(values).max_backward(graph, values, largest, *grads), None


def neighbor_max(values: Tensor, graph: EdgeCSR) -> Tensor:
    """Largest value among a target's sources, [S, H] -> [T, H]; ``segment_max`` without its edges.

    Values are non-negative; a target without edges gets 0. Equal maxima share the derivative.
    """
    return cast(Tensor, _NeighborMax.apply(values, graph))
