r"""Attention over edges in one pass, without storing a message per edge and channel.

.. math::
    z_{ij} = q_i \cdot k_j, \quad p_i = \mathrm{softmax}_{j \in N(i)}(\mathrm{LeakyReLU}(z_{ij})),
    \quad o_i = \sum_{j \in N(i)} m_{ij}\, p_{ij} v_j

per head, where m is the dropout mask. A dot-product score has slope 1. The additive score of a GAT,
:math:`c_i\,\mathrm{LeakyReLU}(s_j + t_i)` with c_i > 0, has the query :math:`q_i = (c_i, c_i t_i)`
and the key :math:`k_j = (s_j, 1)`. No tensor of E x channels is ever stored, and the only tensor of
E x heads that is kept is the mask: the backward pass computes the weights again from the
largest score and the log of the sum of the softmax.

`cpu.py` has the passes on the CPU, `triton.py` those on CUDA. `messages.py` decides which calls of
a layer take them.

Shapes: S sources, T targets, E edges, H heads, D channels of queries and keys, C of values.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer.graph.edge_attention import cpu
from lipsformer.graph.edge_attention.csr import EdgeCSR
from lipsformer.graph.edge_attention.settings import Settings
from lipsformer.graph.edge_attention.trial import triton_passes
from lipsformer.kernels.dispatch import is_batch
from lipsformer.layers.lipschitz_norm import segment_max, squared_norm

__all__ = ["edge_attention", "neighbor_max", "with_squared_norm"]


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

    Example:
        >>> import torch
        >>> from lipsformer.graph import SortedEdges
        >>> from lipsformer.graph.edge_attention.operator import edge_attention
        >>> edges = SortedEdges(torch.tensor([[0, 1], [0, 0]]), num_sources=2)  # both end in node 0
        >>> query = key = torch.zeros(2, 1, 1)  # all scores are 0, so the weights are equal
        >>> edge_attention(edges.csr, query, key, torch.tensor([[[1.0]], [[3.0]]])).flatten()
        tensor([2., 0.])
    """
    if not training or dropout == 0:
        dropout, keep = 0.0, None
    elif keep is None:
        draws = (torch.rand_like(csr.col, dtype=torch.float) for _ in range(query.size(1)))
        keep = torch.stack([draw >= dropout for draw in draws])
    settings = Settings(negative_slope, 1 / (1 - dropout), keep)
    dtype = torch.promote_types(key.dtype, value.dtype)
    if value.device.type == "cpu":
        exact = torch.promote_types(torch.promote_types(dtype, query.dtype), torch.float)
        query, key, value = query.to(exact), key.to(exact), value.to(exact)
    if value.is_cuda and not triton_passes(
        (query, key, value), csr, settings, kernel=_fused, plain=_reference
    ):
        return _reference(csr, query, key, value, settings).to(dtype)
    return _fused(csr, query, key, value, settings).to(dtype)


def _fused(csr: EdgeCSR, query: Tensor, key: Tensor, value: Tensor, settings: Settings) -> Tensor:
    return cast(Tensor, _EdgeAttention.apply(query, key, value, csr, settings))


def _reference(
    csr: EdgeCSR, query: Tensor, key: Tensor, value: Tensor, settings: Settings
) -> Tensor:
    """Compute `edge_attention` from messages; it can be differentiated any number of times."""
    row, col = csr.row.long(), csr.col.long()
    dtype = torch.promote_types(query.dtype, value.dtype)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scores = F.leaky_relu((query[row] * key[col]).sum(-1), settings.negative_slope)
    index = row[:, None].expand_as(scores)
    largest = scores.detach().new_zeros(csr.num_targets, scores.size(1))
    largest = largest.scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
    weight = (scores - largest[row]).exp()
    attn = weight / torch.zeros_like(largest).index_add(0, row, weight)[row]
    if settings.keep is not None:
        attn = attn * settings.keep.T * settings.keep_scale
    out = value.new_zeros(csr.num_targets, *value.shape[1:])
    return out.index_add(0, row, attn.unsqueeze(-1) * value[col])


def _backend(x: Tensor) -> Any:
    """Return what computes the passes: `forward`, `backward`, `max_forward`, `max_backward`."""
    if x.is_cuda:
        from lipsformer.graph.edge_attention import triton  # needs the package triton

        return triton
    return cpu


class _EdgeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        csr: EdgeCSR,
        settings: Settings,
    ) -> Tensor:
        out, *residuals = _backend(value).forward(csr, query, key, value, settings)
        ctx.csr, ctx.settings = csr, settings._replace(keep=None)
        ctx.save_for_backward(query, key, value, settings.keep, *residuals)
        if any(kept is out for kept in residuals):
            return out
        return torch.ops.aten._unsafe_view(out, out.shape)  # no view, so it may be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep, *residuals = ctx.saved_tensors
        inputs, settings = (query, key, value), ctx.settings._replace(keep=keep)
        create_graph = torch.is_grad_enabled()
        if create_graph or is_batch(grads[0]):
            with torch.enable_grad():
                # One input may be computed from another. The gradients end at views of them, so
                # that none includes what flows through another input.
                views = [x.view_as(x) for x in inputs]
                out = _reference(ctx.csr, *views, settings=settings)
            needed = [x for x in views if x.requires_grad]
            found = iter(torch.autograd.grad(out, needed, *grads, create_graph=create_graph))
            own = tuple(next(found) if x.requires_grad else None for x in views)
        else:
            own = _backend(value).backward(ctx.csr, *inputs, *grads, settings, *residuals)
        return *own, None, None


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
        if create_graph or is_batch(grads[0]):
            with torch.enable_grad():
                own = values.view_as(values)
                out = segment_max(own[csr.col], csr.row.long(), csr.num_targets)
            return *torch.autograd.grad(out, own, *grads, create_graph=create_graph), None
        return _backend(values).max_backward(csr, values, largest, *grads), None


def neighbor_max(values: Tensor, csr: EdgeCSR) -> Tensor:
    """Return the largest value among the sources of each target, [S, H] -> [T, H].

    It equals `segment_max` of the values at the edges, but stores nothing per edge. A target
    without edges gets 0. Equal maxima share the derivative evenly.

    Args:
        values: [S, H], none negative.
        csr: The sorted edges.

    Example:
        >>> import torch
        >>> from lipsformer.graph import SortedEdges
        >>> from lipsformer.graph.edge_attention.operator import neighbor_max
        >>> edges = SortedEdges(torch.tensor([[0, 1], [0, 0]]), num_sources=2)  # both end in node 0
        >>> neighbor_max(torch.tensor([[1.0], [3.0]]), edges.csr).flatten()
        tensor([3., 0.])
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
        # the gradient of the norm may overflow in half precision, but its product with x does not
        return torch.addcmul(grad_x, x, (2 * grad_norm).unsqueeze(-1)).to(x.dtype)


def with_squared_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` and its squared norms over the last axis, [..., C] -> [..., C] and [...].

    Use the returned `x` in place of the argument: the backward pass then adds the gradients of both
    results in one pass over the data, and autograd would take four.

    Args:
        x: [..., C].

    Example:
        >>> import torch
        >>> from lipsformer.graph.edge_attention.operator import with_squared_norm
        >>> with_squared_norm(torch.tensor([[3.0, 4.0]]))
        (tensor([[3., 4.]]), tensor([25.]))
    """
    return cast(tuple[Tensor, Tensor], _WithSquaredNorm.apply(x))
