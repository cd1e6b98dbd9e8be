"""The base class of all models: a stack of graph layers between an encoder and a head."""

import typing
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint

from lipsformer.graph.dropout import Dropout
from lipsformer.graph.edge_attention.csr import SortedEdges
from lipsformer.graph.norm import NodeNorm

__all__ = ["ConvLayer", "GraphNet"]


class GraphNet(nn.Module):
    """Run a stack of graph layers between an encoder and a head.

    The edges are sorted once per forward pass and shared by all layers. Pass a `SortedEdges` to
    share them between passes too.

    Shape:
        x: [V, F_in]. edge_index: [2, E] or a `SortedEdges`. Logits:
        [V, out_channels].

    Example:
        >>> import torch
        >>> from lipsformer.graph.models import GraphNet
        >>> class Mean(torch.nn.Module):
        ...     def forward(self, x, edges):
        ...         return x.mean(0).expand_as(x)
        >>> model = GraphNet(torch.nn.Linear(4, 8), [Mean()], torch.nn.Linear(8, 2))
        >>> model(torch.randn(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 2])
    """

    #: Whether the layers take `SortedEdges`. PyG's own convolutions need the plain `edge_index`.
    takes_sorted_edges: bool = True
    #: Whether the layers are called as `layer(x, first, edges)`, with the output of the encoder.
    takes_first: bool = False
    #: Whether the features may be a sparse CSR matrix: the first operation on them is a linear map,
    #: or dropout and a linear map. Models that begin with another operation set it to False.
    takes_sparse_features: bool = True

    def __init__(
        self,
        encoder: nn.Module,
        layers: Iterable[nn.Module],
        head: nn.Module,
        grad_checkpointing: bool = False,
    ) -> None:
        """Join the parts.

        Args:
            encoder: Maps the features to the width of the layers.
            layers: Modules that are called as `layer(x, edges)`; see `takes_first`.
            head: Maps the last representations to logits.
            grad_checkpointing: Keep only the input of each layer in training, and compute the rest
                again in the backward pass.
        """
        super().__init__()
        self.encoder = encoder
        self.layers = nn.ModuleList(layers)
        self.head = head
        self.grad_checkpointing = grad_checkpointing

    def forward(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Tensor:
        """Return the logits of all nodes."""
        return self._read(self._states(x, edge_index))

    def forward_intermediates(
        self, x: Tensor, edge_index: Tensor | SortedEdges
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and the representations before the first and after every layer."""
        states = list(self._states(x, edge_index))
        return self._read(states), states

    def _states(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Iterator[Tensor]:
        """Yield the representations before the first and after every layer."""
        edges = self._edges(edge_index, x.size(0))
        x = first = self.encoder(x)
        yield x
        for layer in self.layers:
            x = self._run_layer(layer, x, first, edges)
            yield x

    def _read(self, states: Iterable[Tensor]) -> Tensor:
        """Return the logits: the head reads the last of the states."""
        return self.head(deque(states, maxlen=1).pop())

    def _edges(self, edge_index: Tensor | SortedEdges, num_nodes: int) -> Tensor | SortedEdges:
        if isinstance(edge_index, Proxy):
            raise TypeError(
                f"torch.fx, which PyG's to_hetero uses, cannot trace {type(self).__name__}: write "
                "a module that calls the convolutions of lipsformer.graph, and trace that"
            )
        edges = SortedEdges.of(edge_index, num_nodes, num_nodes)
        return edges if self.takes_sorted_edges else edges.edge_index

    def _run_layer(
        self, layer: nn.Module, x: Tensor, first: Tensor, edges: Tensor | SortedEdges
    ) -> Tensor:
        inputs = (x, first, edges) if self.takes_first else (x, edges)
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            return typing.cast(Tensor, checkpoint(layer, *inputs, use_reentrant=False))
        return layer(*inputs)


class ConvLayer(nn.Module):
    """Apply dropout and a convolution, then an activation and a normalization.

    Example:
        >>> import torch
        >>> from lipsformer.graph import LipschitzGATConv
        >>> from lipsformer.graph.models import ConvLayer
        >>> from lipsformer.graph.norm import NodeNorm
        >>> conv = LipschitzGATConv(4, 8)
        >>> layer = ConvLayer(conv, 0.5, torch.nn.ELU(), NodeNorm("layernorm", 8))
        >>> layer(torch.randn(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        conv: nn.Module,
        dropout: float,
        activation: nn.Module,
        norm: NodeNorm,
        norm_first: bool = False,
    ) -> None:
        """Join the parts.

        Args:
            conv: Convolution that is called as `conv(x, edges)`.
            dropout: Dropout probability of the convolution's input.
            activation: Activation function.
            norm: Normalization of the node representations.
            norm_first: Whether to normalize before the activation instead of after it.
        """
        super().__init__()
        self.conv = conv
        self.dropout = Dropout(dropout)
        self.activation = activation
        self.norm = norm
        self.norm_first = norm_first

    def forward(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Tensor:
        """Apply the layer."""
        x = self.conv(self.dropout(x), edge_index)
        if self.norm_first:
            return self.activation(self.norm(x, edge_index))
        return self.norm(self.activation(x), edge_index)
