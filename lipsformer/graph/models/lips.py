"""Graph Transformers in which every part is one of LipsFormer's."""

import math
from typing import Any

from torch import Tensor, nn

from lipsformer._arguments import check_count
from lipsformer.graph.cosine_conv import ScaledCosineConv
from lipsformer.graph.dropout import Dropout
from lipsformer.graph.edge_attention.csr import SortedEdges
from lipsformer.graph.models.stack import GraphNet
from lipsformer.layers.center_norm import CenterNorm
from lipsformer.layers.residual import WeightedResidual
from lipsformer.layers.spectral import spectral_linear

__all__ = ["LipsGAT", "LipsGraphTransformer"]


class AttentionBranch(nn.Module):
    """Compute CenterNorm, attention over the neighbors and a projection.

    Args:
        conv: The attention.
        width: Number of channels C.
        dropout: Probability of dropping an entry of the output, in [0, 1].

    Example:
        >>> import torch
        >>> from lipsformer.graph import ScaledCosineConv
        >>> from lipsformer.graph.models.lips import AttentionBranch
        >>> branch = AttentionBranch(ScaledCosineConv(3, 3), width=3, dropout=0.0)
        >>> x = torch.ones(2, 3)  # CenterNorm takes the mean away, so nothing is left
        >>> branch(x, torch.tensor([[0, 1], [1, 0]])).abs().max().item()
        0.0
    """

    def __init__(self, conv: ScaledCosineConv, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = CenterNorm(width)
        self.conv = conv
        self.proj = spectral_linear(width, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Tensor:
        return self.dropout(self.proj(self.conv(self.norm(x), edge_index)))


class LipsLayer(nn.Module):
    """Add attention and an MLP to the input, each after CenterNorm and with a weighted residual.

    Args:
        conv: The attention.
        width: Number of channels C.
        mlp_ratio: Hidden channels of the MLP divided by C; 0 for no MLP.
        residual_scale: Initial weight alpha of both residuals.
        dropout: Probability of dropping an entry of each branch's output, in [0, 1].

    Raises:
        ValueError: If `mlp_ratio` is neither 0 nor gives at least one channel.

    Example:
        >>> import torch
        >>> from lipsformer.graph import ScaledCosineConv
        >>> from lipsformer.graph.models.lips import LipsLayer
        >>> layer = LipsLayer(ScaledCosineConv(3, 3), 3, 2.0, residual_scale=0.0, dropout=0.0)
        >>> x = torch.randn(2, 3)  # with alpha = 0 both branches add nothing
        >>> torch.equal(layer(x, torch.tensor([[0, 1], [1, 0]])), x)
        True
    """

    def __init__(
        self,
        conv: ScaledCosineConv,
        width: int,
        mlp_ratio: float,
        residual_scale: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attn = WeightedResidual(AttentionBranch(conv, width, dropout), width, residual_scale)
        self.mlp: nn.Module = nn.Identity()
        if mlp_ratio != 0:
            if not 1 <= mlp_ratio * width < math.inf:
                raise ValueError(f"mlp_ratio={mlp_ratio} must be 0, or give at least one channel")
            hidden = int(mlp_ratio * width)
            branch = nn.Sequential(
                CenterNorm(width),
                spectral_linear(width, hidden),
                nn.GELU(),
                spectral_linear(hidden, width),
                Dropout(dropout),
            )
            self.mlp = WeightedResidual(branch, width, residual_scale)

    def forward(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Tensor:
        return self.mlp(self.attn(x, edge_index))

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Take over the form of the values, and accept the names of an earlier version.

        What `state_dict()` returned without `value_scale` is of a model with raw values. In a plain
        dictionary, which may hold the parameters alone, the key counts as missing.
        """
        earlier = {
            "residual.": "attn.",
            "mlp_residual.": "mlp.",
            "norm.": "attn.branch.norm.",
            "conv.": "attn.branch.conv.",
            "proj.": "attn.branch.proj.",
            "mlp.": "mlp.branch.",
        }
        from_earlier = prefix + "residual.residual_scale" in state_dict
        if from_earlier:
            for name in [name for name in state_dict if name.startswith(prefix)]:
                first, _, rest = name.removeprefix(prefix).partition(".")
                state_dict[prefix + earlier[first + "."] + rest] = state_dict.pop(name)
        conv: Any = self.attn.branch.conv
        saved = state_dict.get(prefix + "attn.branch.conv.attention.value_scale")
        known = saved is not None or from_earlier or "version" in local_metadata
        known &= prefix + "attn.branch.conv.lin.weight" in state_dict
        if known and (saved is None) != (conv.attention.value_scale is None):
            conv.attention.init_value_scale = None if saved is None else saved.item()
            conv.attention.value_scale = None if saved is None else saved.to(conv.lin.weight)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class LipsGraphTransformer(GraphNet):
    r"""Stack Graph Transformer layers in which every part is one of LipsFormer's.

    .. math:: Y = X + \alpha \odot W\, \mathrm{conv}(\mathrm{CN}(X)), \quad
        X' = Y + \alpha' \odot \mathrm{MLP}(\mathrm{CN}(Y))

    CN is CenterNorm, and conv is scaled cosine attention over the neighbors (`ScaledCosineConv`).
    The largest singular value of every weight is 1 at the start.

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
        value_scale: float | None = 1.0,
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
            num_layers: Number of layers, at least 1.
            heads: Number of heads.
            mlp_ratio: Hidden width of the MLP divided by the width of the layer; 0 for no MLP.
            share_projection: See `ScaledCosineConv`.
            logit_scale: See `ScaledCosineConv`.
            value_scale: See `ScaledCosineConv`. None does not normalize the values; the network
                then has no finite Lipschitz constant on all inputs.
            residual_scale: Initial weight of every branch; None for 1 / (number of branches).
            dropout: Dropout probability of the branches.
            attn_dropout: Dropout probability of the attention weights.
            input_dropout: Dropout probability of the features and of the last representations.
            grad_checkpointing: See `GraphNet`.

        Raises:
            ValueError: If a setting is out of range.
        """
        check_count("num_layers", num_layers)
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
        encoder = nn.Sequential(Dropout(input_dropout), spectral_linear(in_channels, width))
        head = nn.Sequential(Dropout(input_dropout), spectral_linear(width, out_channels))
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
        """Create the network.

        Args:
            in_channels: See `LipsGraphTransformer`, like all other arguments.
            hidden_channels: Channels per head.
            out_channels: Number of classes.
            num_layers: Number of layers.
            mlp_ratio: 0 for no MLP.
            share_projection: Whether queries, keys and values share one projection.
            **kwargs: Further arguments of `LipsGraphTransformer`.

        Raises:
            ValueError: If a setting is out of range.
        """
        super().__init__(
            in_channels,
            hidden_channels,
            out_channels,
            num_layers,
            mlp_ratio=mlp_ratio,
            share_projection=share_projection,
            **kwargs,
        )
