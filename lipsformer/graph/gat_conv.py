"""Graph attention (GAT) with LipschitzNorm on its scores.

Shapes: S source nodes, T target nodes, E edges, H heads, C channels per head.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import OptTensor
from torch_geometric.utils import is_torch_sparse_tensor, softmax
from torch_geometric.utils.sparse import set_sparse_value

from lipsformer import kernels
from lipsformer._arguments import check_count, check_fraction, check_positive
from lipsformer.graph.edge_attention.csr import EdgeCSR, SortedEdges, add_one_self_loop, plain_edges
from lipsformer.graph.edge_attention.messages import why_messages
from lipsformer.graph.edge_attention.operator import edge_attention, neighbor_max
from lipsformer.graph.norm import check_score_norm
from lipsformer.layers.lipschitz_norm import (
    linear_scale,
    released_linear_scale,
    segment_max,
    squared_norm,
)
from lipsformer.layers.spectral import draw_scaled_weights_

__all__ = ["LipschitzGATConv"]


class LipschitzGATConv(GATConv):
    r"""Apply PyG's `GATConv` with LipschitzNorm on its scores.

    .. math::
        e_{ij} = \mathrm{LeakyReLU}\left(\frac{a_l \cdot h_j + a_r \cdot h_i}
        {c\, |a|_2 \sqrt{\max_{k \in N(i)} |h_k|^2 + |h_i|^2}}\right), \quad a = [a_l \| a_r]

    per head, followed by the softmax over the neighborhood N(i), which includes the self loop.
    Edge features extend :math:`a` by their weight, and add the squared norm of each edge to that of
    its neighbor.

    The scores lie within 1 / c. The constant c is `att_norm`. With `min_att_norm` it learns, per
    head, and stays above `min_att_norm`:

    .. math::
        c = c_{\min} + (c_0 - c_{\min})\, e^{\theta}, \quad \theta = 0 \text{ at the start}

    The layer runs as one fused pass over sorted edges where that gives the same result, and message
    by message otherwise (`why_messages` names the reason). It sorts a plain `edge_index` at every
    call; pass `SortedEdges` to sort only once.

    Shape:
        x: [V, F_in], or ([S, F_s], [T, F_t]) for bipartite graphs. edge_index: [2, E], a
        `SortedEdges`, or a transposed torch.sparse adjacency as in PyG. Output: [V, H * C].

    Example:
        >>> import torch
        >>> from lipsformer.graph import LipschitzGATConv
        >>> conv = LipschitzGATConv(16, 8, heads=4)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 32])

    Reference:
        Dasoulas et al. 2021 (LipschitzNorm for graph attention).
    """

    log_att_norm: nn.Parameter | None  # theta, [H]

    # PyG keeps the `propagate` that it finds for explainers. An inherited one may be the code that
    # it has generated for `GATConv`, which ignores the masks of explainers.
    propagate = MessagePassing.propagate

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        *args: Any,
        score_norm: str | None = "lipschitznorm",
        att_norm: float = 4.0,
        min_att_norm: float | None = None,
        scale_individually: bool = True,
        released_code: bool = False,
        **kwargs: Any,
    ) -> None:
        """Create the layer; further arguments are those of PyG's `GATConv`.

        Args:
            in_channels: Number of input channels, a pair for sources and targets, or -1 to infer.
            out_channels: Channels per head.
            heads: Number of heads.
            *args: Passed to `GATConv`.
            score_norm: `'lipschitznorm'`, or None for the plain `GATConv`.
            att_norm: The constant c of the formula, > 0; the initial one if it learns.
            min_att_norm: Lower limit of a constant that learns, in (0, att_norm); None keeps c
                fixed. Weight decay on theta pulls c back to `att_norm`.
            scale_individually: Whether each head divides by the norm of its own weights; otherwise
                all heads divide by one norm over all weights.
            released_code: Compute the maxima as the authors' code does, which reads the maximum of
                a wrong node and head. Use it only to compare with their results.
            **kwargs: Passed to `GATConv`.

        Raises:
            ValueError: If `score_norm` is unknown, if `heads`, the dropout probability, `att_norm`
                or `min_att_norm` is out of range, or if a setting of LipschitzNorm has no effect.
        """
        check_count("heads", heads)
        check_score_norm(score_norm, released_code)
        check_positive("att_norm", att_norm)
        settings = {"att_norm": (att_norm, 4.0), "min_att_norm": (min_att_norm, None)}
        settings["scale_individually"] = (scale_individually, True)
        for name, (value, default) in settings.items():
            if score_norm is None and value != default:
                raise ValueError(f"{name}={value} has no effect without LipschitzNorm")
        if min_att_norm is not None and not 0 < min_att_norm < att_norm:
            raise ValueError(f"min_att_norm={min_att_norm} must lie in (0, att_norm={att_norm})")
        super().__init__(in_channels, out_channels, heads, *args, **kwargs)
        check_fraction("dropout", self.dropout)
        self.score_norm = score_norm
        self.att_norm = att_norm
        self.min_att_norm = min_att_norm
        theta = None if min_att_norm is None else nn.Parameter(torch.zeros(heads))
        self.register_parameter("log_att_norm", theta)
        self.scale_individually = scale_individually
        self.released_code = released_code

    def reset_parameters(self) -> None:
        """Draw the weights as `GATConv` does, and set a constant that learns to `att_norm`.

        Weights that a `SpectralScale` scales are drawn too.
        """
        super().reset_parameters()
        draw_scaled_weights_(self)
        theta = getattr(self, "log_att_norm", None)  # GATConv calls this before theta exists
        if theta is not None:
            nn.init.zeros_(theta)

    def current_att_norm(self, dtype: torch.dtype | None = None) -> Tensor | float:
        """Return c as it is now: a number, or [H] in `dtype` (None for its own) if it learns."""
        if self.log_att_norm is None or self.min_att_norm is None:
            return self.att_norm
        growth = self.log_att_norm.to(dtype or self.log_att_norm.dtype).exp()
        return self.min_att_norm + (self.att_norm - self.min_att_norm) * growth

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Tensor | SortedEdges,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Compute what `GATConv.forward` computes, with normalized scores."""
        raw_source, raw_target = (x, x) if isinstance(x, Tensor) else x
        source = self._project(raw_source, self.lin or self.lin_src)
        target = None
        if self.lin is not None and raw_target is raw_source:
            target = source
        elif raw_target is not None:
            target = self._project(raw_target, self.lin or self.lin_dst)

        needs_messages = why_messages(
            self,
            LipschitzGATConv,
            plain_edges(edge_index),
            source,
            target,
            size=size,
            edge_features=edge_attr is not None and self.lin_edge is not None,
            attention_weights=bool(return_attention_weights),
        )
        if not needs_messages:
            assert target is not None
            edges = SortedEdges.of(edge_index, source.size(0), target.size(0))
            csr = edges.csr_with_self_loops if self.add_self_loops else edges.csr
            return self._finish(self._attend(source, target, csr), raw_target)

        out, edge_index, attn = self._send_messages(
            source, target, plain_edges(edge_index), edge_attr, size
        )
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

    def _score_terms(self, source: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what sources and targets add to the scores of their edges, [S, H] and [T, H]."""
        target_term = None if target is None else (target * self.att_dst).sum(-1)
        return (source * self.att_src).sum(-1), target_term

    def _norm_settings(self, *edge_weight: Tensor) -> dict[str, Any]:
        """Return the arguments of LipschitzNorm that do not depend on the inputs."""
        return {
            "weight": torch.cat([self.att_src, self.att_dst, *edge_weight], dim=-1).squeeze(0),
            "att_norm": self.current_att_norm(torch.promote_types(self.att_src.dtype, torch.float)),
            "scale_individually": self.scale_individually,
        }

    def _attend(self, source: Tensor, target: Tensor, csr: EdgeCSR) -> Tensor:
        """Return the weighted sums over all neighborhoods, [T, H, C], in one fused pass.

        The factor c_i of LipschitzNorm is positive, so LeakyReLU(c_i (s_j + t_i)) is the score, and
        c_i (s_j + t_i) is the dot product of the query (c_i, c_i t_i) and the key (s_j, 1).
        """
        weights = self.att_src, self.att_dst
        if target is source and kernels.usable("node_terms", source, *weights):
            source, source_term, target_term, source_sq = kernels.node_terms(source, *weights)
            target_sq = source_sq
        else:
            source_term, target_term = self._score_terms(source, target)
            source_sq, target_sq = _squared_norms(source, target)
        assert target_term is not None
        scale = torch.ones_like(target_term)
        if self.score_norm is not None:
            reduce = partial(neighbor_max, csr=csr)
            assert target_sq is not None
            scale = linear_scale(source_sq, target_sq, reduce=reduce, **self._norm_settings())
        return edge_attention(
            csr,
            query=torch.stack([scale, scale * target_term], dim=-1),
            key=torch.stack([source_term, torch.ones_like(source_term)], dim=-1),
            value=source,
            negative_slope=self.negative_slope,
            dropout=self.dropout,
            training=self.training,
        )

    def _send_messages(
        self,
        source: Tensor,
        target: Tensor | None,
        edge_index: Tensor,
        edge_attr: Tensor | None,
        size: tuple[int, int] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the sums of `_attend` message by message.

        Returns:
            The sums, [T, H, C], the edges with the self loops, and their attention weights, [E, H].
        """
        nodes = (source, target)
        if self.add_self_loops:
            num_nodes = (
                min(h.size(0) for h in nodes if h is not None) if size is None else min(size)
            )
            edge_index, edge_attr = add_one_self_loop(
                edge_index, edge_attr, num_nodes=num_nodes, fill_value=self.fill_value
            )
        norm_sq = (None, None) if self.score_norm is None else _squared_norms(source, target)
        # edge_updater_type: (alpha: OptPairTensor, norm_sq: OptPairTensor, edge_attr: OptTensor)
        attn = self.edge_updater(
            edge_index,
            alpha=self._score_terms(source, target),
            norm_sq=norm_sq,
            edge_attr=edge_attr,
            size=size,
        )
        # propagate_type: (x: OptPairTensor, alpha: Tensor)
        return self.propagate(edge_index, x=nodes, alpha=attn, size=size), edge_index, attn

    def edge_update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        alpha_j: Tensor,
        alpha_i: OptTensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        dim_size: int,
        norm_sq_j: OptTensor,
        norm_sq_i: OptTensor,
    ) -> Tensor:
        """Return the attention weights of all edges, [E, H]."""
        score = alpha_j if alpha_i is None else alpha_j + alpha_i
        edge_weight: list[Tensor] = []
        if edge_attr is not None and self.lin_edge is not None:
            edge_attr = edge_attr.unsqueeze(-1) if edge_attr.dim() == 1 else edge_attr
            edge = self._project(edge_attr, self.lin_edge)
            score = score + (edge * self.att_edge).sum(-1)
            edge_weight = [self.att_edge]
            if norm_sq_j is not None:
                norm_sq_j = norm_sq_j + squared_norm(edge)
        # LeakyReLU runs in place and before the positive scale, which saves two [E, H] tensors
        dtype = score.dtype  # of the weights too, whatever the precision of the factor
        score = F.leaky_relu(score, self.negative_slope, inplace=self.negative_slope >= 0)
        if norm_sq_j is not None:
            settings = self._norm_settings(*edge_weight)
            if self.released_code:
                scale = released_linear_scale(
                    norm_sq_j, index=index, num_nodes=dim_size, **settings
                )
            else:

                def largest(norm_sq: Tensor) -> Tensor:
                    return segment_max(norm_sq, index, dim_size).index_select(0, index)

                target_sq = 0.0 if norm_sq_i is None else norm_sq_i
                scale = linear_scale(norm_sq_j, target_sq, reduce=largest, **settings)
            score = score * scale
        attn = softmax(score, index, ptr, dim_size).to(dtype)
        return F.dropout(attn, p=self.dropout, training=self.training)

    def _finish(self, out: Tensor, raw_target: Tensor | None) -> Tensor:
        """Join the heads, then add the residual and the bias."""
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if self.res is not None and raw_target is not None:
            out = out + self.res(raw_target)
        return out if self.bias is None else out + self.bias


def _squared_norms(source: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
    source_sq = squared_norm(source)
    if target is source:
        return source_sq, source_sq
    return source_sq, None if target is None else squared_norm(target)
