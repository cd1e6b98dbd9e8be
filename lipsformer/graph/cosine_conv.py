"""LipsFormer's scaled cosine similarity attention on graphs.

Shapes: V nodes, E edges, H heads, C channels per head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import OptTensor
from torch_geometric.utils import softmax

from lipsformer._arguments import check_count, check_fraction
from lipsformer.graph.edge_attention.csr import SortedEdges, add_one_self_loop, plain_edges
from lipsformer.graph.edge_attention.messages import why_messages
from lipsformer.graph.edge_attention.operator import edge_attention
from lipsformer.layers.cosine_attention import ScaledCosineAttention, cosine_normalize
from lipsformer.layers.spectral import spectral_init_

__all__ = ["ScaledCosineConv"]


class ScaledCosineConv(MessagePassing):
    r"""Apply LipsFormer's scaled cosine similarity attention over the edges of a graph.

    .. math::
        x_i' = \nu \sum_{j \in N(i) \cup \{i\}}
        \mathrm{softmax}_j(\tau\, \tilde q_i \cdot \tilde k_j)\, \tilde v_j, \quad
        \tilde x = x / \sqrt{|x|_2^2 + \epsilon}

    The layer is Lipschitz continuous on the whole space, like the dense form. The largest singular
    value of every weight is 1 at the start.

    The layer runs as one fused pass over sorted edges where that gives the same result, and message
    by message otherwise (`why_messages` names the reason). It sorts a plain `edge_index` at every
    call; pass `SortedEdges` to sort only once.

    Shape:
        x: [V, F_in]. edge_index: [2, E], a `SortedEdges`, or a transposed torch.sparse adjacency as
        in PyG. Output: [V, H * C].

    Example:
        >>> import torch
        >>> from lipsformer.graph import ScaledCosineConv
        >>> conv = ScaledCosineConv(16, 8, heads=4)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 32])

    Reference:
        Qi et al. 2023 (LipsFormer), scaled cosine similarity attention, here on neighborhoods.
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
        """Create the projections with spectral initialization.

        Args:
            in_channels: Number of input channels.
            out_channels: Channels per head.
            heads: Number of heads.
            share_projection: Use one projection for queries, keys and values, as in GAT, instead of
                three.
            logit_scale: tau, in (0, 100].
            value_scale: nu > 0, or None to use the values without normalizing them.
            dropout: Dropout probability of the attention weights in training.

        Raises:
            ValueError: If a number of channels or heads, `logit_scale`, `value_scale` or `dropout`
                is out of range.
        """
        check_count("in_channels", in_channels)  # PyG's layers infer it if it is -1
        check_count("out_channels", out_channels)
        check_count("heads", heads)
        check_fraction("dropout", dropout)
        super().__init__(aggr="add", node_dim=0)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.share_projection = share_projection
        self.dropout = dropout
        self.lin = torch.nn.Linear(
            in_channels, (1 if share_projection else 3) * heads * out_channels
        )
        # annotated Any because the decorator of this class hides its type
        self.attention: Any = ScaledCosineAttention(
            heads, logit_scale=logit_scale, value_scale=value_scale
        )
        self._alpha: OptTensor = None  # the attention weights, for explainers that watch `message`
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every projection with largest singular value 1 and set the biases to zero."""
        super().reset_parameters()
        for weight in self.lin.weight.data.split(self.heads * self.out_channels):
            spectral_init_(weight)
        torch.nn.init.zeros_(self.lin.bias)

    def forward(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Tensor:
        """Attend over each node's neighbors and the node itself.

        Raises:
            ValueError: If x is not one matrix of node features.
        """
        if not isinstance(x, Tensor) or x.dim() != 2:
            kind = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x is {kind}: ScaledCosineConv takes one matrix [V, F]")
        projections = 1 if self.share_projection else 3
        h = self.lin(x).view(x.size(0), projections, self.heads, self.out_channels)
        query, key, value = h.expand(-1, 3, -1, -1).unbind(1)  # each [V, H, C]
        eps = self.attention.eps
        query = cosine_normalize(query, eps, self.attention.tau(), self.training)
        key = cosine_normalize(key, eps, training=self.training)
        if self.attention.value_scale is not None:
            value = cosine_normalize(value, eps, self.attention.value_scale, self.training)
        edges = plain_edges(edge_index)
        if why_messages(self, ScaledCosineConv, edges, x, x):
            edges, _ = add_one_self_loop(edges, num_nodes=x.size(0))
            # propagate_type: (query: Tensor, key: Tensor, value: Tensor)
            out = self.propagate(edges, query=query, key=key, value=value)
            self._alpha = None
        else:
            csr = SortedEdges.of(edge_index, x.size(0), x.size(0)).csr_with_self_loops
            out = edge_attention(
                csr, query, key, value, dropout=self.dropout, training=self.training
            )
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
        """Return the message of each edge, [E, H, C]."""
        self._alpha = softmax((query_i * key_j).sum(-1), index, ptr, size_i)
        attn = F.dropout(self._alpha, p=self.dropout, training=self.training)
        return attn.unsqueeze(-1) * value_j
