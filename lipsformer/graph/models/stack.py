"""A stack of graph layers between an encoder and a head, which every model is."""

import typing
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lipsformer.graph.norm import NodeNorm

__all__ = ["ConvLayer", "GraphNet"]


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
        """Apply them."""
        x = self.conv(self.dropout(x), edge_index)
        if self.norm_first:
            return self.activation(self.norm(x, edge_index))
        return self.norm(self.activation(x), edge_index)
