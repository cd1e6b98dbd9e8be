"""Deep networks of graph attention with a choice of normalizations."""

from torch import nn

from lipsformer._arguments import check_count
from lipsformer.graph.dropout import Dropout
from lipsformer.graph.elu import ELU
from lipsformer.graph.gat_conv import LipschitzGATConv
from lipsformer.graph.models.stack import ConvLayer, GraphNet
from lipsformer.graph.norm import NodeNorm, parse_norm
from lipsformer.graph.transformer_conv import LipschitzTransformerConv

__all__ = ["DeepGAT", "DeepGraphTransformer"]


class DeepGAT(GraphNet):
    r"""Stack graph attention to any depth, with a choice of normalizations.

    .. math:: X^{(l)} = \mathrm{Norm}(\mathrm{ELU}(\mathrm{conv}(\mathrm{Dropout}(X^{(l-1)}))))

    A linear map leads from the features to `encoder_channels`. Then follow `num_layers` layers of
    dropout, attention with concatenated heads, ELU and a node normalization (the last layer has
    neither ELU nor normalization), and a linear head. With `linear_ends=False` the first attention
    layer reads the features and the last one returns the logits, as in the original GAT. Every
    node attends to itself too, unless `add_self_loops` is off.

    Example:
        >>> import torch
        >>> from lipsformer.graph import DeepGAT
        >>> model = DeepGAT(16, 8, 3, num_layers=5, heads=4, norm="lipschitznorm")
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 3])

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
        input_dropout: float = 0.0,
        add_self_loops: bool = True,
        linear_ends: bool = True,
        encoder_channels: int | None = None,
        residual: bool = False,
        att_norm: float = 4.0,
        min_att_norm: float | None = None,
        scale_individually: bool = True,
        released_code: bool = False,
        grad_checkpointing: bool = False,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Channels per head.
            out_channels: Number of classes.
            num_layers: Number of attention layers, at least 1.
            heads: Number of heads.
            norm: Normalization of scores and nodes; see `parse_norm`.
            dropout: Dropout probability before every convolution.
            attn_dropout: Dropout probability of the attention weights.
            input_dropout: Dropout probability of the features, before the first linear map.
            add_self_loops: Whether every node is a neighbor of itself; see `GATConv`.
            linear_ends: Whether linear maps come before and after the attention layers.
            encoder_channels: Channels after the first linear map; None for the width of the layers,
                `heads * hidden_channels`. The authors use `hidden_channels`, which is a bottleneck
                if heads are narrow.
            residual: Add a linear map of the input of each layer to its output, as in `GATConv`.
            att_norm: LipschitzNorm keeps the scores within 1 / att_norm; see `LipschitzGATConv`.
            min_att_norm: Lower limit of a constant that learns; see `LipschitzGATConv`.
            scale_individually: See `LipschitzGATConv`.
            released_code: See `LipschitzGATConv`.
            grad_checkpointing: See `GraphNet`.

        Raises:
            ValueError: If `norm` is unknown, a setting is out of range, or one has no effect.
        """
        check_count("num_layers", num_layers)
        score_norm, node_norm = parse_norm(norm)
        width = heads * hidden_channels
        if encoder_channels is not None and not linear_ends:
            raise ValueError(
                f"encoder_channels={encoder_channels} has no effect with linear_ends=False"
            )
        channels = _encoder_channels(encoder_channels, width) if linear_ends else in_channels
        layers = []
        for index in range(num_layers):
            last = index == num_layers - 1
            to_logits = last and not linear_ends
            conv = LipschitzGATConv(
                channels if index == 0 else width,
                out_channels if to_logits else hidden_channels,
                heads=1 if to_logits else heads,
                dropout=attn_dropout,
                add_self_loops=add_self_loops,
                residual=residual,
                score_norm=score_norm,
                att_norm=att_norm,
                min_att_norm=min_att_norm,
                scale_individually=scale_individually,
                released_code=released_code,
            )
            activation = nn.Identity() if last else ELU()
            node = NodeNorm("none" if last else node_norm, width)
            layers.append(ConvLayer(conv, dropout, activation, node))
        encoder = nn.Linear(in_channels, channels) if linear_ends else nn.Identity()
        if input_dropout != 0:
            encoder = nn.Sequential(Dropout(input_dropout), encoder)
        head = nn.Linear(width, out_channels) if linear_ends else nn.Identity()
        super().__init__(encoder, layers, head, grad_checkpointing)


class DeepGraphTransformer(GraphNet):
    r"""Stack Graph Transformer layers to any depth, between two linear maps.

    .. math:: X^{(l)} = \mathrm{ELU}(\mathrm{Norm}(\mathrm{conv}(\mathrm{Dropout}(X^{(l-1)}))))

    The convolution is `LipschitzTransformerConv`, which has a skip connection of its own.

    Example:
        >>> import torch
        >>> from lipsformer.graph import DeepGraphTransformer
        >>> model = DeepGraphTransformer(16, 8, 3, num_layers=5, heads=4, norm="lipschitznorm")
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 3])

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
        encoder_channels: int | None = None,
        released_code: bool = False,
        grad_checkpointing: bool = False,
    ) -> None:
        """Create the network.

        Args:
            in_channels: Number of features.
            hidden_channels: Channels per head.
            out_channels: Number of classes.
            num_layers: Number of attention layers, at least 1.
            heads: Number of heads.
            norm: Normalization of scores and nodes; see `parse_norm`.
            dropout: Dropout probability before every convolution.
            attn_dropout: Dropout probability of the attention weights.
            beta: Whether a learned gate weighs the skip connection against the attention.
            encoder_channels: See `DeepGAT`.
            released_code: See `LipschitzTransformerConv`.
            grad_checkpointing: See `GraphNet`.

        Raises:
            ValueError: If `norm` is unknown, a setting is out of range, or one has no effect.
        """
        check_count("num_layers", num_layers)
        score_norm, node_norm = parse_norm(norm)
        width = heads * hidden_channels
        channels = _encoder_channels(encoder_channels, width)
        layers = [
            ConvLayer(
                LipschitzTransformerConv(
                    channels if index == 0 else width,
                    hidden_channels,
                    heads,
                    beta=beta,
                    dropout=attn_dropout,
                    score_norm=score_norm,
                    released_code=released_code,
                ),
                dropout,
                ELU(),
                NodeNorm(node_norm, width),
                norm_first=True,
            )
            for index in range(num_layers)
        ]
        encoder, head = nn.Linear(in_channels, channels), nn.Linear(width, out_channels)
        super().__init__(encoder, layers, head, grad_checkpointing)


def _encoder_channels(given: int | None, width: int) -> int:
    if given is not None and given < 1:
        raise ValueError(f"encoder_channels={given} must be at least 1, or None")
    return given or width
