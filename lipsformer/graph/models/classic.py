"""Classic graph networks with the additions by which they are strong today."""

from collections.abc import Iterable
from functools import reduce
from itertools import islice

import torch
from torch import Tensor, nn
from torch_geometric.utils import dropout_edge

from lipsformer._arguments import check_count, check_fraction
from lipsformer.graph.dropout import Dropout
from lipsformer.graph.edge_attention.csr import SortedEdges, listed_edges
from lipsformer.graph.gat_conv import LipschitzGATConv
from lipsformer.graph.gcn_conv import SparseGCNConv
from lipsformer.graph.models.stack import GraphNet
from lipsformer.graph.norm import NodeNorm, parse_norm

__all__ = ["ClassicGNN"]


class ClassicLayer(nn.Module):
    """Compute Dropout(ReLU(Norm(conv(X) + X S))), or Norm(X + Dropout(ReLU(conv(X)))) with `post`.

    Args:
        conv: The graph convolution or attention.
        skip: The linear map S, or None for no skip.
        norm: The norm of the nodes.
        dropout: Probability of dropping an entry, in [0, 1].
        post: Compute the second form.

    Example:
        >>> import torch
        >>> from lipsformer.graph import SparseGCNConv
        >>> from lipsformer.graph.models.classic import ClassicLayer
        >>> from lipsformer.graph.norm import NodeNorm
        >>> layer = ClassicLayer(SparseGCNConv(3, 3), None, NodeNorm("none", 3), 0.0, post=False)
        >>> pair = torch.tensor([[0, 1], [1, 0]])  # the nodes average their features
        >>> y = layer(torch.randn(2, 3), pair)
        >>> torch.allclose(y[0], y[1])
        True
    """

    def __init__(
        self, conv: nn.Module, skip: nn.Module | None, norm: NodeNorm, dropout: float, post: bool
    ) -> None:
        super().__init__()
        self.conv = conv
        self.skip = skip
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.post = post

    def forward(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Tensor:
        update = self.conv(x, edge_index)
        if self.post:
            return self.norm(x + self.dropout(update.relu()), edge_index)
        if self.skip is not None:
            update = update + self.skip(x)
        return self.dropout(self.norm(update, edge_index).relu())


class ClassicGNN(GraphNet):
    r"""Stack graph convolutions or attention with skips, a norm, DropEdge and jumping knowledge.

    .. math:: X^{(l)} = \mathrm{Dropout}(\mathrm{ReLU}(\mathrm{Norm}(
        \mathrm{conv}(X^{(l-1)}) + X^{(l-1)} S^{(l)})))

    with `skip='linear'`; without a skip the second summand is missing. `skip='identity'` is the
    order that Transformers call post-norm:

    .. math:: X^{(l)} = \mathrm{Norm}(X^{(l-1)} +
        \mathrm{Dropout}(\mathrm{ReLU}(\mathrm{conv}(X^{(l-1)}))))

    A linear head reads the last layer, or with `jumping_knowledge` the largest value of every
    channel over all layers. These networks are here to compare with, and `lipschitz_bound` has no
    rule for them.

    Example:
        >>> import torch
        >>> from lipsformer.graph import ClassicGNN
        >>> model = ClassicGNN(16, 8, 3, num_layers=3, skip="linear")
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 3])

    Reference:
        Luo et al. 2024 (tuned classic networks, skip='linear' or 'none'); Rong et al. 2020
        (DropEdge); Xu et al. 2018 (jumping knowledge).
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        *,
        conv: str = "gcn",
        heads: int = 1,
        norm: str = "none",
        skip: str = "none",
        jumping_knowledge: bool = False,
        edge_dropout: float = 0.0,
        dropout: float = 0.5,
        input_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        grad_checkpointing: bool = False,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Width of the layers, or of each head.
            out_channels: Number of classes.
            num_layers: Number of convolutions, at least 1, which all come before the linear head.
            conv: 'gcn', or 'gat' for `LipschitzGATConv`.
            heads: Number of heads of 'gat'; must be 1 for 'gcn'.
            norm: Normalization of scores and nodes; see `parse_norm`.
            skip: 'none', 'linear' or 'identity'; see above. With 'identity' a linear map leads from
                the features to the width of the layers.
            jumping_knowledge: Whether the head reads the largest values over all layers.
            edge_dropout: Probability in [0, 1] with which every edge is left out of a training
                step. An edge and its reverse are drawn apart.
            dropout: Dropout probability of what a layer computes.
            input_dropout: Dropout probability of the features.
            attn_dropout: Dropout probability of the attention weights of 'gat'.
            grad_checkpointing: See `GraphNet`.

        Raises:
            ValueError: If a name is unknown, if a setting is out of range, or if 'gcn' gets
                heads, attention dropout or a normalization of scores.
        """
        check_count("num_layers", num_layers)
        score_norm, node_norm = parse_norm(norm)
        if conv not in ("gcn", "gat"):
            raise ValueError(f"conv={conv!r} is not known; choose gcn or gat")
        if skip not in ("none", "linear", "identity"):
            raise ValueError(f"skip={skip!r} is not known; choose none, linear or identity")
        check_fraction("edge_dropout", edge_dropout)
        if conv == "gcn" and (heads != 1 or score_norm is not None):
            raise ValueError(f"heads={heads}, norm={norm!r} are not for gcn, which has no scores")
        if conv == "gcn" and attn_dropout != 0:
            raise ValueError(f"attn_dropout={attn_dropout} has no effect on gcn, without attention")
        width = heads * hidden_channels
        encoder: nn.Module = Dropout(input_dropout)
        if skip == "identity":
            encoder = nn.Sequential(encoder, nn.Linear(in_channels, width))
            in_channels = width
        layers = []
        for index in range(num_layers):
            channels = in_channels if index == 0 else width
            if conv == "gcn":
                module = SparseGCNConv(channels, width)
            else:
                module = LipschitzGATConv(
                    channels, hidden_channels, heads, dropout=attn_dropout, score_norm=score_norm
                )
            linear = nn.Linear(channels, width) if skip == "linear" else None
            norm_layer = NodeNorm(node_norm, width)
            layers.append(ClassicLayer(module, linear, norm_layer, dropout, skip == "identity"))
        super().__init__(encoder, layers, nn.Linear(width, out_channels), grad_checkpointing)
        self.jumping_knowledge = jumping_knowledge
        self.edge_dropout = edge_dropout

    def _read(self, states: Iterable[Tensor]) -> Tensor:
        """Return what the head makes of the last state, or of the largest values of all layers."""
        if not self.jumping_knowledge:
            return super()._read(states)
        return self.head(reduce(torch.maximum, islice(states, 1, None)))

    def _edges(self, edge_index: Tensor | SortedEdges, num_nodes: int) -> Tensor | SortedEdges:
        """Return the edges, in training without those that DropEdge leaves out of this step."""
        if self.training and self.edge_dropout:
            edge_index = dropout_edge(listed_edges(edge_index), self.edge_dropout)[0]
        return super()._edges(edge_index, num_nodes)
