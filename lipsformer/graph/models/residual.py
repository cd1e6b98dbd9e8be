"""Residual networks of hundreds of layers, in which the weights keep a Lipschitz bound."""

import typing
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipsformer._arguments import check_count
from lipsformer.graph.dropout import Dropout
from lipsformer.graph.edge_attention.csr import SortedEdges
from lipsformer.graph.gat_conv import LipschitzGATConv
from lipsformer.graph.gcn_conv import SparseGCNConv
from lipsformer.graph.models.stack import GraphNet
from lipsformer.graph.norm import parse_norm
from lipsformer.layers.spectral import SpectralScale

__all__ = ["ResidualGAT", "ResidualGCN", "default_bound"]


def default_bound(num_layers: int) -> float:
    """Return the bound c of each of `num_layers` residual layers: 4 / num_layers, at most 1.

    (1 + c)^L then stays below e^4. It bounds the layers of `ResidualGCN` together, without encoder
    and head, if the graph is undirected. LipsFormer's residual scale 1 / L follows the same law.
    """
    return min(1.0, 4.0 / num_layers)


class ResidualLayer(nn.Module):
    """Compute X + ReLU(A X W + b), where A is the normalized adjacency or the attention.

    Args:
        conv: Computes A X W + b.
        bound: Largest singular value of W, > 0, at every step; None leaves W free.
        residual: Add X.
        dropout: Probability of dropping an entry of X before the convolution, in [0, 1].

    Example:
        >>> import torch
        >>> from lipsformer.graph import SparseGCNConv
        >>> from lipsformer.graph.models.residual import ResidualLayer
        >>> from lipsformer.layers import largest_singular_value
        >>> layer = ResidualLayer(SparseGCNConv(3, 3), bound=0.5, residual=True, dropout=0.0)
        >>> largest_singular_value(layer.conv.lin.weight).round(decimals=4)
        tensor(0.5000)
    """

    def __init__(
        self,
        conv: SparseGCNConv | LipschitzGATConv,
        bound: float | None,
        residual: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.conv = conv
        self.residual = residual
        self.dropout = Dropout(dropout)
        if bound is not None:
            linear = typing.cast(nn.Module, conv.lin)
            parametrize.register_parametrization(linear, "weight", SpectralScale(bound))
            # PyG's Linear also saves the scaled weight, which cannot be loaded
            linear.register_state_dict_post_hook(_drop_scaled_weight)
            linear.register_load_state_dict_pre_hook(_drop_scaled_weight)

    def forward(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Tensor:
        update = F.relu(self.conv(self.dropout(x), edge_index))
        return x + update if self.residual else update


def _drop_scaled_weight(
    linear: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object
) -> None:
    if parametrize.is_parametrized(linear, "weight"):  # it may have been removed
        state_dict.pop(f"{prefix}weight", None)


def _residual_layers(
    convs: Sequence[SparseGCNConv] | Sequence[LipschitzGATConv],
    weight_norm: str,
    bound: float | None,
    residual: bool,
    dropout: float,
) -> list[ResidualLayer]:
    if weight_norm not in ("spectral", "none"):
        raise ValueError(f"weight_norm={weight_norm!r} is not known; choose spectral or none")
    if bound is not None and weight_norm == "none":
        raise ValueError(f"bound={bound} has no effect with weight_norm='none'")
    if weight_norm == "spectral" and bound is None:
        bound = default_bound(len(convs))
    return [ResidualLayer(conv, bound, residual, dropout) for conv in convs]


def _dropout_linear(dropout: float, in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(Dropout(dropout), nn.Linear(in_channels, out_channels))


class ResidualGCN(GraphNet):
    r"""Stack residual graph convolutions whose weights have the largest singular value c.

    .. math:: X^{(l+1)} = X^{(l)} + \mathrm{ReLU}(\hat A X^{(l)} W^{(l)} + b^{(l)}),
        \quad W^{(l)} = c\, V^{(l)} / \sigma_{max}(V^{(l)})

    The Frobenius Lipschitz constant of each layer is at most :math:`1 + c |\hat A|_2`. If the graph
    is undirected, :math:`|\hat A|_2 = 1` and the constant is at most 1 + c. On a directed graph
    :math:`|\hat A|_2` may be larger, about :math:`\sqrt{n / 2}` for a star of n nodes:
    `lipsformer.graph.operator_bounds.adjacency_sigma_bound` bounds it, and `layer_profile` reports
    :math:`1 + c |\hat A|_2` for every layer.

    Example:
        >>> import torch
        >>> from lipsformer.graph import ResidualGCN
        >>> model = ResidualGCN(16, 8, 3, num_layers=64)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 3])

    Reference:
        Park and Kim 2024.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        *,
        weight_norm: str = "spectral",
        bound: float | None = None,
        residual: bool = True,
        dropout: float = 0.0,
        input_dropout: float = 0.5,
        grad_checkpointing: bool = False,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Width of the layers.
            out_channels: Number of classes.
            num_layers: Number of residual layers, at least 1.
            weight_norm: 'spectral' or 'none'.
            bound: c > 0; None for `default_bound(num_layers)`.
            residual: Whether layers add their input; False gives a plain deep GCN for comparison.
            dropout: Dropout probability inside the layers.
            input_dropout: Dropout probability of the features and of the last representations.
            grad_checkpointing: See `GraphNet`.

        Raises:
            ValueError: If `weight_norm` is unknown, a setting is out of range, or `bound` has no
                effect.
        """
        check_count("num_layers", num_layers)
        convs = [SparseGCNConv(hidden_channels, hidden_channels) for _ in range(num_layers)]
        layers = _residual_layers(convs, weight_norm, bound, residual, dropout)
        encoder = _dropout_linear(input_dropout, in_channels, hidden_channels)
        head = _dropout_linear(input_dropout, hidden_channels, out_channels)
        super().__init__(encoder, layers, head, grad_checkpointing)


class ResidualGAT(GraphNet):
    r"""Stack residual graph attention whose weights have the largest singular value c.

    The formula is that of `ResidualGCN`, with the attention in place of :math:`\hat A`. c bounds
    only W. The Lipschitz constant of a layer also depends on the attention, which
    `norm='lipschitznorm'` bounds.

    Example:
        >>> import torch
        >>> from lipsformer.graph import ResidualGAT
        >>> model = ResidualGAT(16, 8, 3, num_layers=64, norm="lipschitznorm")
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 3])

    Reference:
        Park and Kim 2024.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        *,
        heads: int = 1,
        norm: str = "none",
        att_norm: float = 4.0,
        min_att_norm: float | None = None,
        weight_norm: str = "spectral",
        bound: float | None = None,
        residual: bool = True,
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
        input_dropout: float = 0.5,
        grad_checkpointing: bool = False,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Channels per head.
            out_channels: Number of classes.
            num_layers: Number of residual layers, at least 1.
            heads: Number of heads.
            norm: 'none' or 'lipschitznorm'.
            att_norm: See `LipschitzGATConv`.
            min_att_norm: See `LipschitzGATConv`.
            weight_norm: 'spectral' or 'none'.
            bound: c > 0; None for `default_bound(num_layers)`.
            residual: Whether layers add their input; False gives a plain deep GAT for comparison.
            dropout: Dropout probability inside the layers.
            attn_dropout: Dropout probability of the attention weights.
            input_dropout: Dropout probability of the features and of the last representations.
            grad_checkpointing: See `GraphNet`.

        Raises:
            ValueError: If a name is unknown, a setting is out of range, or `bound` has no effect.
        """
        check_count("num_layers", num_layers)
        score_norm, node_norm = parse_norm(norm)
        if node_norm != "none":
            raise ValueError(f"norm={norm!r} is not for ResidualGAT; choose none or lipschitznorm")
        width = heads * hidden_channels
        convs = [
            LipschitzGATConv(
                width,
                hidden_channels,
                heads,
                dropout=attn_dropout,
                score_norm=score_norm,
                att_norm=att_norm,
                min_att_norm=min_att_norm,
            )
            for _ in range(num_layers)
        ]
        layers = _residual_layers(convs, weight_norm, bound, residual, dropout)
        encoder = _dropout_linear(input_dropout, in_channels, width)
        head = _dropout_linear(input_dropout, width, out_channels)
        super().__init__(encoder, layers, head, grad_checkpointing)
