"""Deep networks for node classification: a stack of layers between two linear maps.

Every model keeps its layers in ``layers``, each called as ``layer(x, edge_index)``, so that the
diagnostics can look at any of them.
"""

import inspect
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GatedGraphConv, GCNConv

from lipsformer.layers.norm import CenterNorm
from lipsformer.layers.residual import WeightedResidual
from lipsformer.layers.spectral import spectral_init_

from .conv import LipschitzGATConv, LipschitzTransformerConv, ScaledCosineConv
from .norm import NodeNorm, parse_norm

__all__ = [
    "GCN",
    "GGNN",
    "DeepGAT",
    "DeepGraphTransformer",
    "GraphNet",
    "LipsGAT",
    "LipsGraphTransformer",
    "ResidualGAT",
    "ResidualGCN",
    "SpectralScale",
    "create_model",
    "default_bound",
]


class GraphNet(nn.Module):
    """A stack of graph layers between an encoder and a head.

    Shape:
        x: [V, F_in]; edge_index: [2, E]; the logits are [V, out_channels].
    """

    def __init__(
        self,
        encoder: nn.Module,
        layers: Iterable[nn.Module],
        head: nn.Module,
        grad_checkpointing: bool = False,
    ) -> None:
        """Put the parts together.

        Args:
            encoder: Maps the features to the width of the layers.
            layers: Modules called as ``layer(x, edge_index)``.
            head: Maps the last representations to logits.
            grad_checkpointing: Keep only each layer's input in training and compute the rest again
                in the backward pass.
        """
        super().__init__()
        self.encoder = encoder
        self.layers = nn.ModuleList(layers)
        self.head = head
        self.grad_checkpointing = grad_checkpointing

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the logits of all nodes."""
        (last,) = deque(self._states(x, edge_index), maxlen=1)
        return self.head(last)

    def forward_intermediates(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and the representations before the first and after every layer."""
        states = list(self._states(x, edge_index))
        return self.head(states[-1]), states

    def _states(self, x: Tensor, edge_index: Tensor) -> Iterator[Tensor]:
        x = self.encoder(x)
        yield x
        for layer in self.layers:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = typing.cast(Tensor, checkpoint(layer, x, edge_index, use_reentrant=False))
            else:
                x = layer(x, edge_index)
            yield x


class ConvLayer(nn.Module):
    """Dropout, convolution, then activation and normalisation in the model's order."""

    def __init__(
        self,
        conv: nn.Module,
        dropout: float,
        activation: nn.Module,
        norm: NodeNorm,
        norm_first: bool = False,
    ) -> None:
        super().__init__()
        self.conv = conv
        self.dropout = nn.Dropout(dropout)
        self.activation = activation
        self.norm = norm
        self.norm_first = norm_first

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(self.dropout(x), edge_index)
        if self.norm_first:
            return self.activation(self.norm(x, edge_index))
        return self.norm(self.activation(x), edge_index)


class DeepGAT(GraphNet):
    """Graph attention network of any depth, with a choice of normalisations.

    With ``linear_ends`` a linear map to ``hidden_channels``, ``num_layers`` layers of dropout,
    attention with concatenated heads and ELU (none after the last), and a linear head; node
    normalisations follow the ELU. Without, the first and the last attention layer map features and
    logits themselves, as in the original GAT.

    Reference:
        Veličković et al. 2018 (GAT); Dasoulas et al. 2021 for the deep form.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        *,
        heads: int = 4,
        norm: str = "none",
        dropout: float = 0.6,
        attn_dropout: float = 0.3,
        linear_ends: bool = True,
        scale_individually: bool = True,
        released_code: bool = False,
        grad_checkpointing: bool = False,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Channels per head.
            out_channels: Number of classes.
            num_layers: Number of attention layers.
            heads: Number of heads.
            norm: See ``parse_norm``.
            dropout: Dropout probability before every convolution.
            attn_dropout: Dropout probability of the attention weights.
            linear_ends: Linear maps before and after the attention layers.
            scale_individually: See ``LipschitzGATConv``.
            released_code: See ``LipschitzGATConv``.
            grad_checkpointing: See ``GraphNet``.
        """
        score_norm, node_norm = parse_norm(norm)
        width = heads * hidden_channels
        channels = hidden_channels if linear_ends else in_channels
        layers = []
        for index in range(num_layers):
            last = index == num_layers - 1
            to_logits = last and not linear_ends
            conv = LipschitzGATConv(
                channels if index == 0 else width,
                out_channels if to_logits else hidden_channels,
                heads=1 if to_logits else heads,
                dropout=attn_dropout,
                score_norm=score_norm,
                scale_individually=scale_individually,
                released_code=released_code,
            )
            activation = nn.Identity() if last else nn.ELU()
            node = NodeNorm("none" if last else node_norm, width)
            layers.append(ConvLayer(conv, dropout, activation, node))
        encoder = nn.Linear(in_channels, hidden_channels) if linear_ends else nn.Identity()
        head = nn.Linear(width, out_channels) if linear_ends else nn.Identity()
        super().__init__(encoder, layers, head, grad_checkpointing)


class DeepGraphTransformer(GraphNet):
    """Graph Transformer of any depth: dropout, attention with skip, normalisation, ELU.

    Reference:
        Shi et al. 2021 (TransformerConv); Dasoulas et al. 2021 for the deep form.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        *,
        heads: int = 4,
        norm: str = "none",
        dropout: float = 0.5,
        attn_dropout: float = 0.0,
        beta: bool = False,
        released_code: bool = False,
        grad_checkpointing: bool = False,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Channels per head.
            out_channels: Number of classes.
            num_layers: Number of attention layers.
            heads: Number of heads.
            norm: See ``parse_norm``.
            dropout: Dropout probability before every convolution.
            attn_dropout: Dropout probability of the attention weights.
            beta: Gate the skip connection.
            released_code: See ``LipschitzTransformerConv``.
            grad_checkpointing: See ``GraphNet``.
        """
        score_norm, node_norm = parse_norm(norm)
        width = heads * hidden_channels
        layers = [
            ConvLayer(
                LipschitzTransformerConv(
                    hidden_channels if index == 0 else width,
                    hidden_channels,
                    heads,
                    beta=beta,
                    dropout=attn_dropout,
                    score_norm=score_norm,
                    released_code=released_code,
                ),
                dropout,
                nn.ELU(),
                NodeNorm(node_norm, width),
                norm_first=True,
            )
            for index in range(num_layers)
        ]
        encoder, head = nn.Linear(in_channels, hidden_channels), nn.Linear(width, out_channels)
        super().__init__(encoder, layers, head, grad_checkpointing)


class GCN(GraphNet):
    """Graph convolutional network: dropout, convolution, ReLU and a node normalisation.

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
            num_layers: Number of convolutions, the one to the logits included.
            norm: 'none' or one of ``NODE_NORMS``; there are no scores to normalise.
            dropout: Dropout probability before every convolution.
            grad_checkpointing: See ``GraphNet``.

        Raises:
            ValueError: If ``norm`` is unknown or normalises scores.
        """
        score_norm, node_norm = parse_norm(norm)
        if score_norm is not None:
            raise ValueError(f"norm={norm!r} is not for GCN, which has no scores")
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        layers = []
        for index in range(num_layers):
            last = index == num_layers - 1
            conv = GCNConv(widths[index], widths[index + 1])
            activation = nn.Identity() if last else nn.ReLU()
            node = NodeNorm("none" if last else node_norm, widths[index + 1])
            layers.append(ConvLayer(conv, dropout, activation, node))
        super().__init__(nn.Identity(), layers, nn.Identity(), grad_checkpointing)


class GGNN(GraphNet):
    """Gated graph network: linear map, ``num_layers`` gated propagations with one GRU, linear head.

    Reference:
        Li et al. 2016.
    """

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
            num_layers: Number of propagation steps.
            dropout: Dropout probability of the features and of the last state.
        """
        encoder = nn.Sequential(nn.Dropout(dropout), nn.Linear(in_channels, hidden_channels))
        head = nn.Sequential(
            nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden_channels, out_channels)
        )
        super().__init__(encoder, [GatedGraphConv(hidden_channels, num_layers)], head)


def default_bound(num_layers: int) -> float:
    """Bound c for each of ``num_layers`` residual layers: 4 / num_layers, at most 1.

    (1 + c)^L then stays below e^4, the same law as LipsFormer's residual scale 1 / L.
    """
    return min(1.0, 4.0 / num_layers)


class SpectralScale(nn.Module):
    r"""Parametrisation :math:`W \leftarrow c\, W / \sigma_{max}(W)`, exact at every step.

    Reference:
        Park and Kim 2024.
    """

    def __init__(self, bound: float) -> None:
        """Take c, the largest singular value that the weight shall have, > 0."""
        super().__init__()
        self.bound = bound

    def forward(self, weight: Tensor) -> Tensor:
        """Scale ``weight`` ([out, in]); the derivative of sigma is u v^T, its singular vectors."""
        with torch.no_grad():
            _, vectors = torch.linalg.eigh(weight.T @ weight)
            right = vectors[:, -1]
            left = F.normalize(weight @ right, dim=0)
        return weight * (self.bound / (left @ weight @ right).clamp_min(1e-12))


class ResidualLayer(nn.Module):
    """X + ReLU(A X W), with A the normalised adjacency or the attention."""

    def __init__(
        self, conv: GCNConv | GATConv, bound: float | None, residual: bool, dropout: float
    ) -> None:
        super().__init__()
        self.conv = conv
        self.residual = residual
        self.dropout = nn.Dropout(dropout)
        if bound is not None:
            linear = typing.cast(nn.Module, conv.lin)
            parametrize.register_parametrization(linear, "weight", SpectralScale(bound))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        update = F.relu(self.conv(self.dropout(x), edge_index))
        return x + update if self.residual else update


class _ResidualNet(GraphNet):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: list[GCNConv] | list[LipschitzGATConv],
        width: int,
        *,
        weight_norm: str,
        bound: float | None,
        residual: bool,
        dropout: float,
        input_dropout: float,
        grad_checkpointing: bool,
    ) -> None:
        if weight_norm not in ("spectral", "none"):
            raise ValueError(f"weight_norm={weight_norm!r} is not known; choose spectral or none")
        if bound is not None and weight_norm == "none":
            raise ValueError(f"bound={bound} has no effect with weight_norm='none'")
        if bound is not None and bound <= 0:
            raise ValueError(f"bound={bound} must be > 0")
        if weight_norm == "spectral" and bound is None:
            bound = default_bound(len(convs))
        layers = [ResidualLayer(conv, bound, residual, dropout) for conv in convs]
        encoder = nn.Sequential(nn.Dropout(input_dropout), nn.Linear(in_channels, width))
        head = nn.Sequential(nn.Dropout(input_dropout), nn.Linear(width, out_channels))
        super().__init__(encoder, layers, head, grad_checkpointing)


class ResidualGCN(_ResidualNet):
    r"""Residual GCN whose weights keep their largest singular value at c.

    .. math:: X^{(l+1)} = X^{(l)} + \mathrm{ReLU}(\hat A X^{(l)} W^{(l)}),
        \quad W^{(l)} = c\, V^{(l)} / \sigma_{max}(V^{(l)})

    As :math:`|\hat A|_2 \le 1`, each layer's Frobenius Lipschitz constant is at most 1 + c.

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
            num_layers: Number of residual layers.
            weight_norm: 'spectral' or 'none'.
            bound: c > 0; None for ``default_bound(num_layers)``.
            residual: Without it, the plain deep GCN for comparison.
            dropout: Dropout probability inside the layers.
            input_dropout: Dropout probability of the features and of the last representations.
            grad_checkpointing: See ``GraphNet``.

        Raises:
            ValueError: If ``weight_norm`` is unknown, or ``bound`` is not above 0 or has no effect.
        """
        super().__init__(
            in_channels,
            out_channels,
            [GCNConv(hidden_channels, hidden_channels) for _ in range(num_layers)],
            hidden_channels,
            weight_norm=weight_norm,
            bound=bound,
            residual=residual,
            dropout=dropout,
            input_dropout=input_dropout,
            grad_checkpointing=grad_checkpointing,
        )


class ResidualGAT(_ResidualNet):
    r"""Residual GAT whose weights keep their largest singular value at c; see ``ResidualGCN``.

    c bounds W alone: the layer's Lipschitz constant depends on the attention too, which
    ``norm='lipschitznorm'`` bounds.

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
            num_layers: Number of residual layers.
            heads: Number of heads.
            norm: 'none' or 'lipschitznorm'.
            weight_norm: 'spectral' or 'none'.
            bound: c > 0; None for ``default_bound(num_layers)``.
            residual: Without it, the plain deep GAT for comparison.
            dropout: Dropout probability inside the layers.
            attn_dropout: Dropout probability of the attention weights.
            input_dropout: Dropout probability of the features and of the last representations.
            grad_checkpointing: See ``GraphNet``.

        Raises:
            ValueError: If a name is unknown, or ``bound`` is not above 0 or has no effect.
        """
        score_norm, node_norm = parse_norm(norm)
        if node_norm != "none":
            raise ValueError(f"norm={norm!r} is not for ResidualGAT; choose none or lipschitznorm")
        width = heads * hidden_channels
        convs = [
            LipschitzGATConv(
                width, hidden_channels, heads, dropout=attn_dropout, score_norm=score_norm
            )
            for _ in range(num_layers)
        ]
        super().__init__(
            in_channels,
            out_channels,
            convs,
            width,
            weight_norm=weight_norm,
            bound=bound,
            residual=residual,
            dropout=dropout,
            input_dropout=input_dropout,
            grad_checkpointing=grad_checkpointing,
        )


class LipsLayer(nn.Module):
    """CenterNorm, attention and projection, then CenterNorm and MLP; weighted residuals."""

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
        self.proj = _spectral_linear(width, width)
        self.residual = WeightedResidual(width, residual_scale)
        self.dropout = nn.Dropout(dropout)
        self.mlp: nn.Module | None = None
        if mlp_ratio > 0:
            hidden = int(mlp_ratio * width)
            self.mlp = nn.Sequential(
                CenterNorm(width),
                _spectral_linear(width, hidden),
                nn.GELU(),
                _spectral_linear(hidden, width),
            )
            self.mlp_residual = WeightedResidual(width, residual_scale)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        branch = self.proj(self.conv(self.norm(x), edge_index))
        x = self.residual(x, self.dropout(branch))
        if self.mlp is not None:
            x = self.mlp_residual(x, self.dropout(self.mlp(x)))
        return x


class LipsGraphTransformer(GraphNet):
    """Graph Transformer built wholly of LipsFormer's parts.

    Each layer is CenterNorm, scaled cosine attention over the neighbours and a projection, then
    CenterNorm and an MLP, both as weighted residuals; every weight starts at largest singular
    value 1.

    Reference:
        Qi et al. 2023 (LipsFormer), carried over to graphs here.
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
            mlp_ratio: Width of the MLP over that of the layer; 0 for none.
            share_projection: See ``ScaledCosineConv``.
            logit_scale: See ``ScaledCosineConv``.
            value_scale: See ``ScaledCosineConv``; None keeps the lengths of the values.
            residual_scale: Initial weight of every branch; None for 1 / (number of branches).
            dropout: Dropout probability of the branches.
            attn_dropout: Dropout probability of the attention weights.
            input_dropout: Dropout probability of the features and of the last representations.
            grad_checkpointing: See ``GraphNet``.
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
        encoder = nn.Sequential(nn.Dropout(input_dropout), _spectral_linear(in_channels, width))
        head = nn.Sequential(nn.Dropout(input_dropout), _spectral_linear(width, out_channels))
        super().__init__(encoder, layers, head, grad_checkpointing)


class LipsGAT(LipsGraphTransformer):
    """Graph attention built wholly of LipsFormer's parts: no MLP, one projection for q, k and v."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        **kwargs: Any,
    ) -> None:
        """Create the network; the arguments are those of ``LipsGraphTransformer``."""
        kwargs = {"mlp_ratio": 0.0, "share_projection": True, **kwargs}
        super().__init__(in_channels, hidden_channels, out_channels, num_layers, **kwargs)


def _spectral_linear(in_channels: int, out_channels: int) -> nn.Linear:
    linear = nn.Linear(in_channels, out_channels)
    spectral_init_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


_MODELS: dict[str, Callable[..., GraphNet]] = {
    "gcn": GCN,
    "ggnn": GGNN,
    "deep_gat": DeepGAT,
    "deep_graph_transformer": DeepGraphTransformer,
    "residual_gcn": ResidualGCN,
    "residual_gat": ResidualGAT,
    "lips_gat": LipsGAT,
    "lips_graph_transformer": LipsGraphTransformer,
}


def create_model(
    name: str,
    in_channels: int,
    hidden_channels: int,
    out_channels: int,
    num_layers: int,
    **kwargs: Any,
) -> GraphNet:
    """Build the model called ``name``.

    Args:
        name: gcn, ggnn, deep_gat, deep_graph_transformer, residual_gcn, residual_gat, lips_gat or
            lips_graph_transformer.
        in_channels: Number of features.
        hidden_channels: Width of the layers, per head where there are heads.
        out_channels: Number of classes.
        num_layers: Number of layers, >= 1.
        **kwargs: Keyword arguments of the model's class.

    Raises:
        ValueError: If the name, an argument or ``num_layers`` is not known or possible.
    """
    if name not in _MODELS:
        raise ValueError(f"model {name!r} is not known; choose one of {', '.join(_MODELS)}")
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers} must be at least 1")
    signature = LipsGraphTransformer if name == "lips_gat" else _MODELS[name]
    allowed = inspect.getfullargspec(signature).kwonlyargs
    for key in kwargs:
        if key not in allowed:
            raise ValueError(f"{name} has no argument {key!r}; it takes {', '.join(allowed)}")
    return _MODELS[name](in_channels, hidden_channels, out_channels, num_layers, **kwargs)
