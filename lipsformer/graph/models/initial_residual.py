"""Deep networks in which every layer sees the first representations again (GCNII)."""

import math

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipsformer._arguments import check_count
from lipsformer.graph.dropout import Dropout
from lipsformer.graph.edge_attention.csr import SortedEdges
from lipsformer.graph.gcn_conv import SparseGCN2Conv
from lipsformer.graph.models.stack import GraphNet
from lipsformer.layers.spectral import SpectralScale

__all__ = ["GCN2"]


class InitialResidualLayer(nn.Module):
    """Compute ReLU(((1 - alpha) A X + alpha X_0) ((1 - beta) I + beta W)).

    A is the normalized adjacency, and X_0 are the first representations.

    Args:
        conv: The convolution, with its alpha and beta.
        dropout: Probability of dropping an entry of X, in [0, 1].

    Example:
        >>> import torch
        >>> from lipsformer.graph.gcn_conv import SparseGCN2Conv
        >>> from lipsformer.graph.models.initial_residual import InitialResidualLayer
        >>> layer = InitialResidualLayer(SparseGCN2Conv(3, alpha=1.0, theta=0.0, layer=1), 0.0)
        >>> x, first = torch.randn(2, 3), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> layer(x, first, torch.tensor([[0, 1], [1, 0]])).tolist()  # X_0 alone
        [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    """

    def __init__(self, conv: SparseGCN2Conv, dropout: float) -> None:
        super().__init__()
        self.conv = conv
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, first: Tensor, edges: Tensor | SortedEdges) -> Tensor:
        return F.relu(self.conv(self.dropout(x), first, edges))


class GCN2(GraphNet):
    r"""Stack graph convolutions that add the first representations, as GCNII does.

    .. math:: X^{(l)} = \mathrm{ReLU}\left(\left((1 - \alpha) \hat A X^{(l-1)} + \alpha
        X^{(0)}\right) \left((1 - \beta_l) I + \beta_l W^{(l)}\right)\right),
        \quad \beta_l = \log(1 + \theta / l)

    With `weight_norm='spectral'` the largest singular value of every W is at most 1. If the graph
    is undirected, the Frobenius Lipschitz constant of all layers together is then at most 1,
    whatever their number. `weight_norm='none'` is GCNII, which has no such bound.

    Example:
        >>> import torch
        >>> from lipsformer.graph import GCN2
        >>> model = GCN2(16, 8, 3, num_layers=64)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 3])

    Reference:
        Chen et al. 2020 (GCNII). The bound is Theorem 34 of docs/theorems.md.
    """

    takes_first = True

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        *,
        alpha: float = 0.1,
        theta: float = 0.5,
        weight_norm: str = "spectral",
        dropout: float = 0.6,
        grad_checkpointing: bool = False,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Width of the layers.
            out_channels: Number of classes.
            num_layers: Number of convolutions, at least 1.
            alpha: Share of the first representations in every layer, in [0, 1].
            theta: Strength of the weights, in (0, e - 1], which keeps every beta in (0, 1].
            weight_norm: 'spectral' or 'none'.
            dropout: Dropout probability of the features, before every convolution, and of the last
                representations.
            grad_checkpointing: See `GraphNet`.

        Raises:
            ValueError: If `weight_norm` is unknown, or if a setting is out of range.
        """
        check_count("num_layers", num_layers)
        if weight_norm not in ("spectral", "none"):
            raise ValueError(f"weight_norm={weight_norm!r} is not known; choose spectral or none")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha} must be in [0, 1]")
        if not 0 < theta <= math.e - 1:
            raise ValueError(f"theta={theta} must be in (0, e - 1]")
        layers = []
        for index in range(num_layers):
            conv = SparseGCN2Conv(hidden_channels, alpha, theta, layer=index + 1)
            if weight_norm == "spectral":
                scale = SpectralScale(1.0, only_shrink=True)
                parametrize.register_parametrization(conv, "weight1", scale)
            layers.append(InitialResidualLayer(conv, dropout))
        encoder = nn.Sequential(
            Dropout(dropout), nn.Linear(in_channels, hidden_channels), nn.ReLU()
        )
        head = nn.Sequential(Dropout(dropout), nn.Linear(hidden_channels, out_channels))
        super().__init__(encoder, layers, head, grad_checkpointing)
