"""Graph Transformers in which every part is one of LipsFormer's."""

from typing import Any

from torch import Tensor, nn

from lipsformer.graph.cosine_conv import ScaledCosineConv
from lipsformer.graph.edge_attention.csr import SortedEdges
from lipsformer.graph.models.stack import GraphNet
from lipsformer.layers.center_norm import CenterNorm
from lipsformer.layers.residual import WeightedResidual
from lipsformer.layers.spectral import spectral_linear

__all__ = ["LipsGAT", "LipsGraphTransformer"]


class LipsLayer(nn.Module):
    """Add attention and an MLP to the input, each after CenterNorm and with a weighted residual."""

    def __init__(
        self,
        conv: ScaledCosineConv,
        width: int,
        mlp_ratio: float,
        residual_scale: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.norm = CenterNorm(width)
        self.conv = conv
        self.proj = spectral_linear(width, width)
        self.residual = WeightedResidual(width, residual_scale)
        self.dropout = nn.Dropout(dropout)
        self.mlp: nn.Module | None = None
        if mlp_ratio > 0:
            hidden = int(mlp_ratio * width)
            self.mlp = nn.Sequential(
                CenterNorm(width),
                spectral_linear(width, hidden),
                nn.GELU(),
                spectral_linear(hidden, width),
            )
            self.mlp_residual = WeightedResidual(width, residual_scale)

    def forward(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Tensor:
        branch = self.proj(self.conv(self.norm(x), edge_index))
        x = self.residual(x, self.dropout(branch))
        if self.mlp is not None:
            x = self.mlp_residual(x, self.dropout(self.mlp(x)))
        return x


class LipsGraphTransformer(GraphNet):
    """Stack Graph Transformer layers in which every part is one of LipsFormer's.

    Each layer has two weighted residual branches: CenterNorm, scaled cosine attention over the
    neighbours and a projection; then CenterNorm and an MLP. The largest singular value of every
    weight is 1 at the start.

    Example:
        >>> import torch
        >>> from lipsformer.graph import LipsGraphTransformer
        >>> model = LipsGraphTransformer(16, 8, 3, num_layers=5, heads=4)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 3])

    Reference:
        Qi et al. 2023 (LipsFormer), applied to graphs here.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        *,
        heads: int = 4,
        mlp_ratio: float = 2.0,
        share_projection: bool = False,
        logit_scale: float = 10.0,
        value_scale: float | None = None,
        residual_scale: float | None = None,
        dropout: float = 0.5,
        attn_dropout: float = 0.3,
        input_dropout: float = 0.6,
        grad_checkpointing: bool = False,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Channels per head.
            out_channels: Number of classes.
            num_layers: Number of layers.
            heads: Number of heads.
            mlp_ratio: Hidden width of the MLP divided by the width of the layer; 0 for no MLP.
            share_projection: See `ScaledCosineConv`.
            logit_scale: See `ScaledCosineConv`.
            value_scale: See `ScaledCosineConv`; None does not normalize the values.
            residual_scale: Initial weight of every branch; None for 1 / (number of branches).
            dropout: Dropout probability of the branches.
            attn_dropout: Dropout probability of the attention weights.
            input_dropout: Dropout probability of the features and of the last representations.
            grad_checkpointing: See `GraphNet`.
        """
        width = heads * hidden_channels
        if residual_scale is None:
            residual_scale = 1 / (num_layers * (2 if mlp_ratio > 0 else 1))
        layers = []
        for _ in range(num_layers):
            conv = ScaledCosineConv(
                width,
                hidden_channels,
                heads,
                share_projection=share_projection,
                logit_scale=logit_scale,
                value_scale=value_scale,
                dropout=attn_dropout,
            )
            layers.append(LipsLayer(conv, width, mlp_ratio, residual_scale, dropout))
        encoder = nn.Sequential(nn.Dropout(input_dropout), spectral_linear(in_channels, width))
        head = nn.Sequential(nn.Dropout(input_dropout), spectral_linear(width, out_channels))
        super().__init__(encoder, layers, head, grad_checkpointing)


class LipsGAT(LipsGraphTransformer):
    """Stack graph attention in which every part is one of LipsFormer's.

    It is `LipsGraphTransformer` without MLPs and with one projection for queries, keys and values.

    Example:
        >>> import torch
        >>> from lipsformer.graph import LipsGAT
        >>> model = LipsGAT(16, 8, 3, num_layers=5, heads=4)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 3])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        *,
        mlp_ratio: float = 0.0,
        share_projection: bool = True,
        **kwargs: Any,
    ) -> None:
        """Create the network; the arguments are those of `LipsGraphTransformer`."""
        super().__init__(
            in_channels,
            hidden_channels,
            out_channels,
            num_layers,
            mlp_ratio=mlp_ratio,
            share_projection=share_projection,
            **kwargs,
        )
