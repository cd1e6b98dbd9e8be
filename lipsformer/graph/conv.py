"""Graph attention with Lipschitz-continuous scores, on PyG's convolutions.

Each layer takes one fused pass over the sorted edges (``edge_attention``) where that gives what its
messages would, as ``fusable`` decides, and PyG's messages otherwise.

Shapes: V nodes, E edges, H heads, C channels per head.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv, MessagePassing, TransformerConv
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import OptTensor
from torch_geometric.utils import (
    add_self_loops,
    is_torch_sparse_tensor,
    remove_self_loops,
    softmax,
)
from torch_geometric.utils.sparse import set_sparse_value

from lipsformer.layers.cosine_attention import ScaledCosineAttention, cosine_normalize
from lipsformer.layers.lipschitz_norm import (
    linear_scale,
    quadratic_scale,
    released_linear_scale,
    segment_max,
    squared_norm,
)
from lipsformer.layers.spectral import spectral_init_

from .edge_attention.csr import edge_csr
from .edge_attention.operator import edge_attention, fusable, neighbor_max

__all__ = ["LipschitzGATConv", "LipschitzTransformerConv", "ScaledCosineConv"]


def _check_score_norm(score_norm: str | None, released_code: bool) -> None:
    if score_norm not in (None, "lipschitznorm"):
        raise ValueError(f"score_norm={score_norm!r} is not known; choose 'lipschitznorm' or None")
    if released_code and score_norm is None:
        raise ValueError("released_code=True has no effect without score_norm='lipschitznorm'")


def _optional_norm(x: Tensor | None) -> Tensor | None:
    return None if x is None else squared_norm(x)


class LipschitzGATConv(GATConv):
    r"""PyG's ``GATConv`` with LipschitzNorm on its scores.

    .. math::
        e_{ij} = \mathrm{LeakyReLU}\left(\frac{a_l \cdot h_j + a_r \cdot h_i}
        {c\, |a|_2 \sqrt{\max_{k \in N(i)} |h_k|^2 + |h_i|^2}}\right), \quad a = [a_l \| a_r]

    per head, followed by the softmax over the neighbourhood N(i), the self loop included. With edge
    features, :math:`a` includes their weight and each neighbour's squared norm that of its edge.

    Shape:
        x: [V, F_in], or ([V_s, F_s], [V_t, F_t]) for bipartite graphs; edge_index: [2, E] or a
        torch.sparse adjacency (transposed, as PyG has it); output [V, H * C].

    Reference:
        Dasoulas et al. 2021 (LipschitzNorm for graph attention).
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        *args: Any,
        score_norm: str | None = "lipschitznorm",
        att_norm: float = 4.0,
        scale_individually: bool = True,
        released_code: bool = False,
        **kwargs: Any,
    ) -> None:
        """Create the layer; further arguments are those of PyG's ``GATConv``.

        Args:
            in_channels: Size of the inputs, or of sources and targets, or -1 to infer it.
            out_channels: Channels per head.
            heads: Number of heads.
            *args: Passed on to ``GATConv``.
            score_norm: ``'lipschitznorm'``, or None for ``GATConv`` itself.
            att_norm: The constant c of the formula, > 0.
            scale_individually: One norm of the weights per head, or one over all heads.
            released_code: Compute the maxima as the authors' code does, which mixes up nodes and
                heads; to compare with their results only.
            **kwargs: Passed on to ``GATConv``.

        Raises:
            ValueError: If ``score_norm`` is unknown or ``att_norm`` not above 0.
        """
        _check_score_norm(score_norm, released_code)
        if att_norm <= 0:
            raise ValueError(f"att_norm={att_norm} must be > 0")
        super().__init__(in_channels, out_channels, heads, *args, **kwargs)
        self.score_norm = score_norm
        self.att_norm = att_norm
        self.scale_individually = scale_individually
        self.released_code = released_code

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Compute what ``GATConv.forward`` computes, from normalised scores."""
        raw_source, raw_target = (x, x) if isinstance(x, Tensor) else x
        source = self._project(raw_source, self.lin or self.lin_src)
        if self.lin is not None and raw_target is raw_source:
            target = source
        elif raw_target is not None:
            target = self._project(raw_target, self.lin or self.lin_dst)
        else:
            target = None
        nodes = (source, target)
        no_edge_features = edge_attr is None or self.lin_edge is None
        plain = no_edge_features and not self.released_code and not return_attention_weights
        if plain and fusable(self, LipschitzGATConv, edge_index, *nodes, size):
            assert target is not None
            return self._finish(self._attend(source, target, edge_index), raw_target)

        if self.add_self_loops:
            num_nodes = min(len(h) for h in nodes if h is not None) if size is None else min(size)
            edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
            edge_index, edge_attr = add_self_loops(
                edge_index, edge_attr, fill_value=self.fill_value, num_nodes=num_nodes
            )

        alpha = (
            (source * self.att_src).sum(-1),
            None if target is None else (target * self.att_dst).sum(-1),
        )
        norm_sq = (None, None)
        if self.score_norm is not None:
            source_sq = squared_norm(source)
            norm_sq = (source_sq, source_sq if target is source else _optional_norm(target))
        target_sq = norm_sq[1 if self.flow == "source_to_target" else 0]
        # edge_updater_type: (alpha: OptPairTensor, norm_sq: OptPairTensor, target_sq: OptTensor, edge_attr: OptTensor)  # noqa: E501
        attn = self.edge_updater(
            edge_index,
            alpha=alpha,
            norm_sq=norm_sq,
            target_sq=target_sq,
            edge_attr=edge_attr,
            size=size,
        )
        # propagate_type: (x: OptPairTensor, alpha: Tensor)
        out = self.propagate(edge_index, x=nodes, alpha=attn, size=size)
        out = self._finish(out, raw_target)
        if not return_attention_weights:
            return out
        if is_torch_sparse_tensor(edge_index):
            edge_index = set_sparse_value(edge_index, attn)
        return out, (edge_index, attn)

    def _project(self, x: Tensor, linear: Linear | None) -> Tensor:
        assert linear is not None
        if x.dim() != 2:
            raise ValueError(f"inputs must be [rows, channels], got shape {tuple(x.shape)}")
        return linear(x).view(-1, self.heads, self.out_channels)

    def _attend(self, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
        """What messages would aggregate to, [V, H, C], in one fused pass."""
        num_loops = min(len(source), len(target)) if self.add_self_loops else None
        graph = edge_csr(edge_index, len(source), len(target), num_loops)
        alpha_j = (source * self.att_src).sum(-1)
        alpha_i = (target * self.att_dst).sum(-1)
        scale = torch.ones_like(alpha_i)
        if self.score_norm is not None:
            source_sq = squared_norm(source)
            scale = linear_scale(
                source_sq,
                source_sq if target is source else squared_norm(target),
                torch.cat([self.att_src, self.att_dst], dim=-1).squeeze(0),
                reduce=partial(neighbor_max, graph=graph),
                att_norm=self.att_norm,
                scale_individually=self.scale_individually,
            )
        # LeakyReLU lets the positive scale through
        query = torch.stack([scale, scale * alpha_i], dim=-1)
        key = torch.stack([alpha_j, torch.ones_like(alpha_j)], dim=-1)
        return edge_attention(
            graph,
            query,
            key,
            source,
            negative_slope=self.negative_slope,
            dropout=self.dropout,
            training=self.training,
        )

    def _finish(self, out: Tensor, raw_target: Tensor | None) -> Tensor:
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if self.res is not None and raw_target is not None:
            out = out + self.res(raw_target)
        return out if self.bias is None else out + self.bias

    def edge_update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        alpha_j: Tensor,
        alpha_i: OptTensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        dim_size: int,
        norm_sq_j: OptTensor,
        target_sq: OptTensor,
    ) -> Tensor:
        """Return the attention weights of all edges, [E, H]."""
        score = alpha_j if alpha_i is None else alpha_j + alpha_i
        weights: list[Tensor] = [self.att_src, self.att_dst]
        if edge_attr is not None and self.lin_edge is not None:
            edge_attr = edge_attr.unsqueeze(-1) if edge_attr.dim() == 1 else edge_attr
            edge = self._project(edge_attr, self.lin_edge)
            score = score + (edge * self.att_edge).sum(-1)
            weights.append(self.att_edge)
            if norm_sq_j is not None:
                norm_sq_j = norm_sq_j + squared_norm(edge)
        # in place, and before the positive scale, which LeakyReLU lets through: saves two tensors
        score = F.leaky_relu(score, self.negative_slope, inplace=self.negative_slope >= 0)
        if norm_sq_j is not None:
            weight = torch.cat(weights, dim=-1).squeeze(0)
            score = score * self._scale(norm_sq_j, target_sq, weight, index, dim_size)
        attn = softmax(score, index, ptr, dim_size)
        return F.dropout(attn, p=self.dropout, training=self.training)

    def _scale(
        self,
        norm_sq_j: Tensor,
        target_sq: Tensor | None,
        weight: Tensor,
        index: Tensor,
        num_targets: int,
    ) -> Tensor:
        settings = {"att_norm": self.att_norm, "scale_individually": self.scale_individually}
        if self.released_code:
            return released_linear_scale(norm_sq_j, weight, index, num_targets, **settings)
        reduce = partial(segment_max, index=index, num_segments=num_targets)
        no_target = norm_sq_j.new_zeros(())
        other_sq = no_target if target_sq is None else target_sq
        return linear_scale(norm_sq_j, other_sq, weight, reduce=reduce, **settings).index_select(
            0, index
        )


class LipschitzTransformerConv(TransformerConv):
    r"""PyG's ``TransformerConv`` with LipschitzNorm on its scores.

    .. math::
        e_{ij} = \frac{q_i \cdot k_j}{\sqrt{C} \max(u v_i, u w_i, v_i w_i)}, \quad
        u = |Q|_F, \quad v_i = \max_{j \in N(i)} |k_j|_2, \quad w_i = \max_{j \in N(i)} |v_j|_2

    per head, with Q the queries of all nodes that have a neighbour. Edge features count as parts of
    keys and values, as in ``TransformerConv``. As u runs over the whole layer, scores of a sampled
    batch are larger than those of the whole graph.

    Shape:
        As ``TransformerConv``.

    Reference:
        Dasoulas et al. 2021 (LipschitzNorm for quadratic scores).
    """

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
        """Create the layer; further arguments are those of PyG's ``TransformerConv``.

        Args:
            in_channels: Size of the inputs, or of sources and targets, or -1 to infer it.
            out_channels: Channels per head.
            heads: Number of heads.
            *args: Passed on to ``TransformerConv``.
            score_norm: ``'lipschitznorm'``, or None for ``TransformerConv`` itself.
            released_code: Count a node's query once per edge in u, as the authors' code does.
            **kwargs: Passed on to ``TransformerConv``.

        Raises:
            ValueError: If ``score_norm`` is unknown.
        """
        _check_score_norm(score_norm, released_code)
        super().__init__(in_channels, out_channels, heads, *args, **kwargs)
        self.score_norm = score_norm
        self.released_code = released_code

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Compute what ``TransformerConv.forward`` computes, from normalised scores."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        no_edge_features = edge_attr is None and self.lin_edge is None
        plain = no_edge_features and not self.released_code and return_attention_weights is None
        if not (plain and fusable(self, LipschitzTransformerConv, edge_index, source, target)):
            return super().forward(x, edge_index, edge_attr, return_attention_weights)  # pyright: ignore[reportArgumentType]
        out = self._attend(source, target, edge_index)
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if not self.root_weight:
            return out
        skip = self.lin_skip(target)
        if self.lin_beta is None:
            return out + skip
        beta = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
        return beta * skip + (1 - beta) * out

    def _attend(self, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
        """What messages would aggregate to, [V, H, C], in one fused pass."""
        query, key, value = (
            linear(nodes).view(-1, self.heads, self.out_channels)
            for linear, nodes in (
                (self.lin_query, target),
                (self.lin_key, source),
                (self.lin_value, source),
            )
        )
        graph = edge_csr(edge_index, len(source), len(target))
        scale = 1 / math.sqrt(self.out_channels)
        if self.score_norm is not None:
            norm = quadratic_scale(
                squared_norm(query[graph.ptr.diff() > 0]).sum(0),
                squared_norm(key),
                squared_norm(value),
                reduce=partial(neighbor_max, graph=graph),
            )
            scale = scale * norm.unsqueeze(-1)
        return edge_attention(
            graph,
            query * scale,
            key,
            value,
            dropout=self.dropout,
            training=self.training,
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
        """Return what each edge brings to its target, [E, H, C]."""
        if self.score_norm is not None:
            query_i = query_i * self._scale(query_i, key_j, value_j, edge_attr, index, size_i)
        return super().message(query_i, key_j, value_j, edge_attr, index, ptr, size_i)

    def _scale(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: OptTensor,
        index: Tensor,
        num_targets: int,
    ) -> Tensor:
        if edge_attr is not None and self.lin_edge is not None:
            edge = self.lin_edge(edge_attr).view_as(key_j)
            key_j, value_j = key_j + edge, value_j + edge
        reduce = partial(segment_max, index=index, num_segments=num_targets)
        query_sq = squared_norm(query_i)
        if not self.released_code:
            # all edges of a target hold the same query: their maximum counts it once
            query_sq = reduce(query_sq)
        scale = quadratic_scale(
            query_sq.sum(0), squared_norm(key_j), squared_norm(value_j), reduce=reduce
        )
        return scale.index_select(0, index).unsqueeze(-1)


class ScaledCosineConv(MessagePassing):
    r"""LipsFormer's scaled cosine similarity attention over the edges of a graph.

    .. math::
        x_i' = \nu \sum_{j \in N(i) \cup \{i\}}
        \mathrm{softmax}_j(\tau\, \tilde q_i \cdot \tilde k_j)\, \tilde v_j, \quad
        \tilde x = x / \sqrt{|x|_2^2 + \epsilon}

    Lipschitz on all of space, as the dense form is; every weight starts with largest singular
    value 1.

    Shape:
        x: [V, F_in]; edge_index: [2, E] or a torch.sparse adjacency; output [V, H * C].

    Reference:
        Qi et al. 2023 (LipsFormer), scaled cosine similarity attention, here on neighbourhoods.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        share_projection: bool = False,
        logit_scale: float = 10.0,
        value_scale: float | None = 1.0,
        dropout: float = 0.0,
    ) -> None:
        """Create the projections with spectral initialisation.

        Args:
            in_channels: Size of the inputs.
            out_channels: Channels per head.
            heads: Number of heads.
            share_projection: One projection for queries, keys and values, as in GAT, instead of
                three.
            logit_scale: tau, in (0, 100].
            value_scale: nu > 0, or None to leave the values as they are.
            dropout: Dropout probability of the attention weights in training.
        """
        super().__init__(aggr="add", node_dim=0)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.share_projection = share_projection
        self.dropout = dropout
        self.lin = torch.nn.Linear(
            in_channels, (1 if share_projection else 3) * heads * out_channels
        )
        # the decorator of this class hides its type
        self.attention: Any = ScaledCosineAttention(
            heads, logit_scale=logit_scale, value_scale=value_scale
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every projection with largest singular value 1 and set the biases to zero."""
        super().reset_parameters()
        for weight in self.lin.weight.data.split(self.heads * self.out_channels):
            spectral_init_(weight)
        torch.nn.init.zeros_(self.lin.bias)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Attend over each node's neighbours and itself."""
        h = self.lin(x).view(len(x), -1, self.heads, self.out_channels)
        query, key, value = h.expand(-1, 3, -1, -1).unbind(1)  # each [V, H, C]
        eps = self.attention.eps
        query = cosine_normalize(query, eps, self.attention.tau(), self.training)
        key = cosine_normalize(key, eps, training=self.training)
        if self.attention.value_scale is not None:
            value = cosine_normalize(value, eps) * self.attention.value_scale
        if fusable(self, ScaledCosineConv, edge_index, x, x):
            graph = edge_csr(edge_index, len(x), len(x), num_self_loops=len(x))
            out = edge_attention(
                graph, query, key, value, dropout=self.dropout, training=self.training
            )
            return out.flatten(1)
        edge_index, _ = remove_self_loops(edge_index)
        edge_index, _ = add_self_loops(edge_index, num_nodes=len(x))
        # propagate_type: (query: Tensor, key: Tensor, value: Tensor)
        out = self.propagate(edge_index, query=query, key=key, value=value)
        return out.flatten(1)

    def message(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: int,
    ) -> Tensor:
        """Return what each edge brings to its target, [E, H, C]."""
        attn = softmax((query_i * key_j).sum(-1), index, ptr, size_i)
        attn = F.dropout(attn, p=self.dropout, training=self.training)
        return attn.unsqueeze(-1) * value_j
