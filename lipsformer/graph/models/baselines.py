"""Baselines: GCN and the gated graph network."""

from torch import nn
from torch_geometric.nn import GatedGraphConv

from lipsformer._arguments import check_count
from lipsformer.graph.dropout import Dropout
from lipsformer.graph.gcn_conv import SparseGCNConv
from lipsformer.graph.models.stack import ConvLayer, GraphNet
from lipsformer.graph.norm import NodeNorm, parse_norm

__all__ = ["GCN", "GGNN"]


class GCN(GraphNet):
    r"""Stack layers of dropout, graph convolution, ReLU and a node normalization.

    .. math:: X^{(l)} = \mathrm{Norm}(\mathrm{ReLU}(
        \hat A\, \mathrm{Dropout}(X^{(l-1)})\, W^{(l)} + b^{(l)}))

    The last layer, which returns the logits, has neither ReLU nor normalization.

    Example:
        >>> import torch
        >>> from lipsformer.graph import GCN
        >>> model = GCN(16, 8, 3, num_layers=2)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 3])

    Reference:
        Kipf and Welling 2017.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        *,
        norm: str = "none",
        dropout: float = 0.5,
        grad_checkpointing: bool = False,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Width of the layers.
            out_channels: Number of classes.
            num_layers: Number of convolutions, at least 1, including the last one, which returns
                the logits.
            norm: 'none' or one of `NODE_NORMS`; a GCN has no scores to normalize.
            dropout: Dropout probability before every convolution.
            grad_checkpointing: See `GraphNet`.

        Raises:
            ValueError: If `norm` is unknown or normalizes scores, or if a setting is out of range.
        """
        check_count("num_layers", num_layers)
        score_norm, node_norm = parse_norm(norm)
        if score_norm is not None:
            raise ValueError(f"norm={norm!r} is not for GCN, which has no scores")
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        layers = []
        for index in range(num_layers):
            last = index == num_layers - 1
            conv = SparseGCNConv(widths[index], widths[index + 1])
            activation = nn.Identity() if last else nn.ReLU()
            node = NodeNorm("none" if last else node_norm, widths[index + 1])
            layers.append(ConvLayer(conv, dropout, activation, node))
        super().__init__(nn.Identity(), layers, nn.Identity(), grad_checkpointing)


class GGNN(GraphNet):
    r"""Propagate `num_layers` times with one GRU between two linear maps.

    .. math:: X^{(l)} = \mathrm{GRU}\left(\sum_{j \in N(i)} X^{(l-1)}_j W^{(l)},\; X^{(l-1)}\right)

    Example:
        >>> import torch
        >>> from lipsformer.graph import GGNN
        >>> model = GGNN(16, 8, 3, num_layers=2)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 3])

    Reference:
        Li et al. 2016 (gated graph networks).
    """

    takes_sorted_edges = False

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        *,
        dropout: float = 0.5,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Width of the state.
            out_channels: Number of classes.
            num_layers: Number of propagation steps, at least 1.
            dropout: Dropout probability of the features and of the last state.

        Raises:
            ValueError: If a setting is out of range.
        """
        check_count("num_layers", num_layers)
        encoder = nn.Sequential(Dropout(dropout), nn.Linear(in_channels, hidden_channels))
        head = nn.Sequential(nn.ReLU(), Dropout(dropout), nn.Linear(hidden_channels, out_channels))
        super().__init__(encoder, [GatedGraphConv(hidden_channels, num_layers)], head)
