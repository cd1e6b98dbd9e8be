"""Graph Transformer attention with LipschitzNorm on its scores.

Shapes: S source nodes, T target nodes, E edges, H heads, C channels per head.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing, TransformerConv
from torch_geometric.typing import OptTensor
from torch_geometric.utils import softmax

from lipsformer._arguments import check_count, check_fraction
from lipsformer.graph.edge_attention.csr import EdgeCSR, SortedEdges, plain_edges
from lipsformer.graph.edge_attention.messages import why_messages
from lipsformer.graph.edge_attention.operator import edge_attention, neighbor_max, with_squared_norm
from lipsformer.graph.norm import check_score_norm
from lipsformer.layers.lipschitz_norm import quadratic_scale, segment_max, squared_norm

__all__ = ["LipschitzTransformerConv"]


class LipschitzTransformerConv(TransformerConv):
    r"""Apply PyG's `TransformerConv` with LipschitzNorm on its scores.

    .. math::
        e_{ij} = \frac{q_i \cdot k_j}{\sqrt{C} \max(u v_i, u w_i, v_i w_i)}, \quad
        u = |Q|_F, \quad v_i = \max_{j \in N(i)} |k_j|_2, \quad w_i = \max_{j \in N(i)} |v_j|_2

    per head, where Q holds the queries of all nodes that have a neighbor. Edge features are added
    to keys and values, as in `TransformerConv`. Because u is a norm over the whole graph, the
    scores of a sampled batch are larger than those of the whole graph.

    The layer runs as one fused pass over sorted edges where that gives the same result, and message
    by message otherwise (`why_messages` names the reason). It sorts a plain `edge_index` at every
    call; pass `SortedEdges` to sort only once.

    Shape:
        x: [V, F_in], or ([S, F_s], [T, F_t]) for bipartite graphs. edge_index: [2, E], a
        `SortedEdges`, or a transposed torch.sparse adjacency as in PyG. Output: [V, H * C].

    Example:
        >>> import torch
        >>> from lipsformer.graph import LipschitzTransformerConv
        >>> conv = LipschitzTransformerConv(16, 8, heads=4)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 32])

    Reference:
        Dasoulas et al. 2021 (LipschitzNorm for quadratic scores).
    """

    propagate = MessagePassing.propagate  # see `LipschitzGATConv`

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        *args: Any,
        score_norm: str | None = "lipschitznorm",
        released_code: bool = False,
        **kwargs: Any,
    ) -> None:
        """Create the layer; further arguments are those of PyG's `TransformerConv`.

        Args:
            in_channels: Number of input channels, a pair for sources and targets, or -1 to infer.
            out_channels: Channels per head.
            heads: Number of heads.
            *args: Passed to `TransformerConv`.
            score_norm: `'lipschitznorm'`, or None for the plain `TransformerConv`.
            released_code: Count a node's query once per edge in u, as the authors' code does.
            **kwargs: Passed to `TransformerConv`.

        Raises:
            ValueError: If `score_norm` is unknown, or if `heads` or the dropout is out of range.
        """
        check_count("heads", heads)
        check_score_norm(score_norm, released_code)
        super().__init__(in_channels, out_channels, heads, *args, **kwargs)
        check_fraction("dropout", self.dropout)
        self.score_norm = score_norm
        self.released_code = released_code

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Tensor | SortedEdges,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Compute what `TransformerConv.forward` computes, with normalized scores."""
        if (edge_attr is None) != (self.lin_edge is None):
            given = "no" if edge_attr is None else "an"
            raise ValueError(f"edge_dim={self.edge_dim} does not fit a call with {given} edge_attr")
        source, target = (x, x) if isinstance(x, Tensor) else x
        needs_messages = why_messages(
            self,
            LipschitzTransformerConv,
            plain_edges(edge_index),
            source,
            target,
            edge_features=edge_attr is not None,
            attention_weights=return_attention_weights is not None,
        )
        if needs_messages:
            edge_index = plain_edges(edge_index)
            return super().forward(x, edge_index, edge_attr, return_attention_weights)  # pyright: ignore[reportArgumentType]
        out = self._attend(
            source, target, SortedEdges.of(edge_index, source.size(0), target.size(0)).csr
        )
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if not self.root_weight:
            return out
        skip = self.lin_skip(target)
        if self.lin_beta is None:
            return out + skip
        beta = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
        return beta * skip + (1 - beta) * out

    def _attend(self, source: Tensor, target: Tensor, csr: EdgeCSR) -> Tensor:
        """Return the weighted sums over all neighborhoods, [T, H, C], in one fused pass."""
        shape = (-1, self.heads, self.out_channels)
        query = self.lin_query(target).view(shape)
        key, value = self.lin_key(source).view(shape), self.lin_value(source).view(shape)
        scale = 1 / math.sqrt(self.out_channels)
        if self.score_norm is not None:
            (query, query_sq), (key, key_sq), (value, value_sq) = map(
                with_squared_norm, (query, key, value)
            )
            without_edges = (csr.ptr.diff() == 0).unsqueeze(-1)
            query_sq = query_sq.masked_fill(without_edges, 0.0).sum(0)
            largest = neighbor_max(torch.cat([key_sq, value_sq], dim=1), csr).chunk(2, dim=1)
            scale = scale * quadratic_scale(query_sq, *largest, reduce=lambda x: x).unsqueeze(-1)
        return edge_attention(
            csr, query * scale, key, value, dropout=self.dropout, training=self.training
        )

    def message(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: int,
    ) -> Tensor:
        """Return the message of each edge, [E, H, C]."""
        if self.lin_edge is not None:
            edge = self.lin_edge(edge_attr).view_as(key_j)
            key_j, value_j = key_j + edge, value_j + edge
        if self.score_norm is not None:
            reduce = partial(segment_max, index=index, num_segments=size_i)
            query_sq = squared_norm(query_i)
            if not self.released_code:
                # all edges of a target hold the same query, so the maximum counts it once
                query_sq = reduce(query_sq)
            norms = (query_sq.sum(0), squared_norm(key_j), squared_norm(value_j))
            scale = quadratic_scale(*norms, reduce=reduce).unsqueeze(-1)
            query_i = query_i * scale.index_select(0, index)  # may overflow in half precision
        score = (query_i * key_j).sum(-1) / math.sqrt(self.out_channels)
        self._alpha = softmax(score, index, ptr, size_i).to(value_j.dtype)  # returned by PyG
        attn = F.dropout(self._alpha, p=self.dropout, training=self.training)
        return value_j * attn.unsqueeze(-1)
