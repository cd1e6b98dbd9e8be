r"""Attention over edges in one pass, without storing a message per edge and channel.

.. math::
    z_{ij} = q_i \cdot k_j, \quad p_i = \mathrm{softmax}_{j \in N(i)}(\mathrm{LeakyReLU}(z_{ij})),
    \quad o_i = \sum_{j \in N(i)} m_{ij}\, p_{ij} v_j

per head, where m is the dropout mask. A dot-product score has slope 1. The additive score of a GAT,
:math:`c_i\,\mathrm{LeakyReLU}(s_j + t_i)` with c_i > 0, has the query :math:`q_i = (c_i, c_i t_i)`
and the key :math:`k_j = (s_j, 1)`. No tensor of E x channels is ever stored, and the only tensor of
E x heads that is kept is the mask: the backward pass computes the weights again from the
largest score and the log of the sum of the softmax.

On the CPU, PyTorch's own sparse kernels compute a few heads per pass. Sums over the edges of a
node are embedding bags. The dot products of the two ends of every edge are a sampled matrix
product. Each head of a pass works on its own copy of the graph. The copies lie node by node, so
that no tensor of nodes x channels is copied. `triton.py` has the CUDA kernels.

`why_messages` decides which calls of a layer take this pass.

Shapes: S sources, T targets, E edges, H heads, D channels of queries and keys, C of values.
"""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch_geometric.nn import MessagePassing, SumAggregation

from lipsformer import kernels
from lipsformer.graph.edge_attention.csr import EdgeCSR
from lipsformer.graph.edge_attention.trial import triton_is_used
from lipsformer.kernels import dispatch
from lipsformer.layers.lipschitz_norm import segment_max, squared_norm

__all__ = [
    "changed_messages",
    "edge_attention",
    "neighbor_max",
    "why_messages",
    "with_squared_norm",
]

_MAX_EDGES = 2**31 - 2**24  # positions are int32, and self loops are added
_STEPS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
_DEVICES = ("cpu", "cuda") if find_spec("triton") else ("cpu",)

# Heads share a pass while it has at most this many edges. Small graphs then need few calls, and the
# arrays of large graphs stay in the cache.
_EDGES_PER_PASS = 2**20


def why_messages(
    conv: Any,
    kind: type[MessagePassing],
    edge_index: Tensor,
    source: Tensor,
    target: Tensor | None,
    *,
    size: tuple[int, int] | None = None,
    edge_features: bool = False,
    attention_weights: bool = False,
) -> str | None:
    """Return why a layer has to compute message by message, or None if one fused pass will do.

    Args:
        conv: The layer.
        kind: The class that defines the layer's messages. Subclasses may override them.
        edge_index: The edges.
        source: Representations of the source nodes.
        target: Representations of the target nodes.
        size: The numbers of source and target nodes that the caller asked for.
        edge_features: Whether the call has edge features.
        attention_weights: Whether the call returns the attention weights.
    """
    return (
        _unsupported_context(source)
        or _unsupported_layer(conv, kind)
        or _unsupported_edges(edge_index, source, target, size)
        or ("edge features enter the scores" if edge_features else None)
        or ("the attention weights are returned" if attention_weights else None)
    )


def _unsupported_context(x: Tensor) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile needs plain operators"
    if (transform := kernels.active_transform()) is not None:
        return transform
    if torch._C._len_torch_dispatch_stack() > 0:
        return "something records the operators or replaces the tensors"
    if x.is_cuda and not dispatch.ENABLED:
        return "LIPSFORMER_NATIVE=0 switches the kernels off"
    if x.device.type not in _DEVICES:
        return f"there is no kernel for {x.device.type}"
    return None


def changed_messages(conv: Any, kind: type[MessagePassing]) -> str | None:
    """Return what makes a layer send other messages than its class, or None.

    Args:
        conv: The layer.
        kind: The class that defines the messages.
    """
    for step in _STEPS:
        if getattr(conv, f"_{step}_forward_hooks") or getattr(conv, f"_{step}_forward_pre_hooks"):
            return f"a hook watches {step}"
        # PyG replaces `propagate` in every class by generated code, so it is not compared
        overridden = getattr(type(conv), step, None) is not getattr(kind, step, None)
        if step != "propagate" and overridden:
            return f"{type(conv).__name__} overrides {step}"
    if conv.explain:
        return "an explainer watches the messages"
    if not isinstance(conv.aggr_module, SumAggregation):
        return "the messages are not summed"
    if conv.flow != "source_to_target":
        return "messages flow from target to source"
    if conv.decomposed_layers != 1:
        return "the layer is decomposed"
    return None


def _unsupported_layer(conv: Any, kind: type[MessagePassing]) -> str | None:
    reason = changed_messages(conv, kind)
    if reason is not None:
        return reason
    if getattr(conv, "dropout", 0.0) >= 1:
        return "every attention weight is dropped"
    if getattr(conv, "released_code", False):
        return "released_code computes the maxima per edge"
    return None


def _unsupported_edges(
    edge_index: Tensor, source: Tensor, target: Tensor | None, size: tuple[int, int] | None
) -> str | None:
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided:
        return "the edges are not a dense tensor"
    if edge_index.dtype is not torch.int64 or edge_index.dim() != 2 or len(edge_index) != 2:
        return "the edges are not [2, E] in int64"
    if not 0 < edge_index.size(1) < _MAX_EDGES:
        return f"there are {edge_index.size(1)} edges"
    if target is None:
        return "the targets have no representations"
    if size is not None and tuple(size) != (len(source), len(target)):
        return f"size={size} is not the number of inputs"
    return None


def edge_attention(
    csr: EdgeCSR,
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
        csr: The sorted edges; there must be at least one.
        query: [T, H, D], already multiplied by the scale of the scores. It may be more precise than
            the others, because LipschitzNorm's factor can overflow in half precision.
        key: [S, H, D].
        value: [S, H, C].
        negative_slope: Slope of the LeakyReLU on the scores; 1 for none.
        dropout: Probability in [0, 1) of dropping an attention weight in training.
        training: Whether to apply dropout.
        keep: Boolean mask of the weights to keep, [H, E] with edges by target; None draws one.

    Returns:
        [T, H, C] in the type that key and value share; zero for targets without an edge.
    """
    if not training or dropout == 0:
        dropout, keep = 0.0, None
    elif keep is None:
        draws = (torch.rand_like(csr.col, dtype=torch.float) for _ in range(query.size(1)))
        keep = torch.stack([draw >= dropout for draw in draws])
    dtype = torch.promote_types(key.dtype, value.dtype)
    if value.device.type == "cpu":
        exact = torch.promote_types(torch.promote_types(dtype, query.dtype), torch.float)
        query, key, value = query.to(exact), key.to(exact), value.to(exact)
    settings = (negative_slope, 1 / (1 - dropout), keep)
    if value.is_cuda and not triton_is_used(
        (query, key, value), csr, settings, kernel=_fused, plain=_reference
    ):
        return _reference(csr, query, key, value, *settings).to(dtype)
    return _fused(csr, query, key, value, *settings).to(dtype)


def _fused(csr: EdgeCSR, query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> Tensor:
    return cast(Tensor, _EdgeAttention.apply(query, key, value, csr, *settings))


def _reference(
    csr: EdgeCSR,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negative_slope: float,
    keep_scale: float,
    keep: Tensor | None,
) -> Tensor:
    """Compute `edge_attention` from messages; it can be differentiated any number of times."""
    row, col = csr.row.long(), csr.col.long()
    dtype = torch.promote_types(query.dtype, value.dtype)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scores = F.leaky_relu((query[row] * key[col]).sum(-1), negative_slope)
    index = row[:, None].expand_as(scores)
    largest = scores.detach().new_zeros(csr.num_targets, scores.size(1))
    largest = largest.scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
    weight = (scores - largest[row]).exp()
    attn = weight / torch.zeros_like(largest).index_add(0, row, weight)[row]
    if keep is not None:
        attn = attn * keep.T * keep_scale
    out = value.new_zeros(csr.num_targets, *value.shape[1:])
    return out.index_add(0, row, attn.unsqueeze(-1) * value[col])


def _backend(x: Tensor) -> Any:
    """Return what computes the passes: `forward`, `backward`, `max_forward`, `max_backward`."""
    if x.is_cuda:
        from lipsformer.graph.edge_attention import triton  # needs the package triton

        return triton
    return _CPU


def _is_batch(grad: Tensor) -> bool:
    """Return whether autograd hands over a batch of gradients, which no kernel takes."""
    return is_batchedtensor(grad) or is_legacy_batchedtensor(grad)


class _EdgeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        csr: EdgeCSR,
        *settings: Any,
    ) -> Tensor:
        out, *residuals = _backend(value).forward(csr, query, key, value, *settings)
        *ctx.settings, keep = settings
        ctx.csr = csr
        ctx.save_for_backward(query, key, value, keep, *residuals)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep, *residuals = ctx.saved_tensors
        inputs, settings = (query, key, value), (*ctx.settings, keep)
        create_graph = torch.is_grad_enabled()
        if create_graph or _is_batch(grads[0]):
            with torch.enable_grad():
                # One input may be computed from another. The gradients end at views of them, so
                # that none includes what flows through another input.
                views = [x.view_as(x) for x in inputs]
                out = _reference(ctx.csr, *views, *ctx.settings, keep=keep)
            needed = [x for x in views if x.requires_grad]
            found = iter(torch.autograd.grad(out, needed, *grads, create_graph=create_graph))
            own = tuple(next(found) if x.requires_grad else None for x in views)
        else:
            own = _backend(value).backward(ctx.csr, *inputs, *grads, *settings, *residuals)
        return *own, None, *(None for _ in settings)


class _NeighborMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, csr: EdgeCSR) -> Tensor:
        ctx.csr = csr
        largest = _backend(values).max_forward(csr, values)
        ctx.save_for_backward(values, largest)
        return largest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        values, largest = ctx.saved_tensors
        csr: EdgeCSR = ctx.csr
        create_graph = torch.is_grad_enabled()
        if create_graph or _is_batch(grads[0]):
            with torch.enable_grad():
                own = values.view_as(values)
                out = segment_max(own[csr.col], csr.row.long(), csr.num_targets)
            return *torch.autograd.grad(out, own, *grads, create_graph=create_graph), None
        return _backend(values).max_backward(csr, values, largest, *grads), None


def neighbor_max(values: Tensor, csr: EdgeCSR) -> Tensor:
    """Return the largest value among the sources of each target, [S, H] -> [T, H].

    It equals `segment_max` of the values at the edges, but stores nothing per edge. The values must
    not be negative. A target without edges gets 0. Equal maxima share the derivative evenly.
    """
    return cast(Tensor, _NeighborMax.apply(values, csr))


class _WithSquaredNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.view_as(x), squared_norm(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x, grad_norm = grads
        return torch.addcmul(grad_x, x, (2 * grad_norm).unsqueeze(-1).to(x.dtype))


def with_squared_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` for further use and its squared norms over the last axis.

    One pass adds the gradients of both, where autograd takes four.
    """
    return cast(tuple[Tensor, Tensor], _WithSquaredNorm.apply(x))


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


def _forward(
    csr: EdgeCSR,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negative_slope: float,
    keep_scale: float,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the shift and the log of the sum of the softmax for `backward`.

    The shift is the largest score, or 0 where no score needs one. The two are not added: a large
    score would swallow the logarithm.
    """
    count = _heads_per_pass(csr, value.size(1))
    csr = csr.copies(count)
    query, key, value = (_by_pass(x, count) for x in (query, key, value))
    masks = _keep_by_pass(keep, csr, len(value))
    out = value.new_empty(len(value), csr.num_targets, value.size(-1))
    shift, log_sum = value.new_zeros(2, len(value), csr.num_targets)
    for i in range(len(value)):
        weight = F.leaky_relu_(_edge_dot(csr, query[i], key[i]), negative_slope)
        least, largest = weight.aminmax()
        if not (-30 < least and largest < 30):  # exponentials or their sums could overflow
            shift[i] = torch.segment_reduce(weight, "max", offsets=csr.ptr.long())
            weight -= shift[i].index_select(0, csr.row)
        total = _edge_sum(csr, weight.exp_())
        torch.log(total, out=log_sum[i])
        mask = masks[i]
        if mask is not None:
            weight *= mask
        # a target without edges has total 0
        scale = keep_scale / total.clamp_min_(torch.finfo(total.dtype).tiny)
        sums = _weighted_sum(weight, value[i], csr.col, csr.ptr)
        torch.mul(sums, scale.unsqueeze(1), out=out[i])
    return _from_passes(out, count), shift, log_sum


def _backward(
    csr: EdgeCSR,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    negative_slope: float,
    keep_scale: float,
    keep: Tensor | None,
    shift: Tensor,
    log_sum: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    count = _heads_per_pass(csr, value.size(1))
    csr = csr.copies(count)
    maps = query, key, value, grad = tuple(_by_pass(x, count) for x in (query, key, value, grad))
    masks = _keep_by_pass(keep, csr, len(value))
    passes = (
        _pass_gradients(
            csr,
            tuple(x[i] for x in maps),
            masks[i],
            shift[i],
            log_sum[i],
            negative_slope,
            keep_scale,
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
    mask: Tensor | None,
    shift: Tensor,
    log_sum: Tensor,
    negative_slope: float,
    keep_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, grad = maps
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


def _max_forward(csr: EdgeCSR, values: Tensor) -> Tensor:
    """Return the maxima, [T, H]."""
    ones = values.new_ones(csr.num_edges)
    return torch.sparse.mm(csr.adjacency(ones), values, "amax")


def _max_backward(csr: EdgeCSR, values: Tensor, largest: Tensor, grad: Tensor) -> Tensor:
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


_CPU = SimpleNamespace(
    forward=_forward, backward=_backward, max_forward=_max_forward, max_backward=_max_backward
)
