"""Graph convolutions that multiply by the normalized adjacency instead of sending messages."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCN2Conv, GCNConv, MessagePassing
from torch_geometric.typing import OptTensor

from lipsformer.graph.edge_attention.csr import SortedEdges, plain_edges
from lipsformer.graph.edge_attention.messages import why_messages
from lipsformer.layers.spectral import draw_scaled_weights_

__all__ = ["SparseGCN2Conv", "SparseGCNConv"]


class SparseGCNConv(GCNConv):
    r"""Compute PyG's `GCNConv` without a message per edge.

    .. math:: X' = D^{-1/2} (A + I) D^{-1/2} X W + b

    D holds the numbers of edges that end in a node, with its self loop. On a CPU the layer
    multiplies by the normalized adjacency as a sparse matrix. Layers that share a `SortedEdges`
    build this matrix once. Other calls send messages as PyG does: on a GPU, under autocast, with
    edge weights, and with other arguments than the default ones.

    Shape:
        x: [V, F_in]. edge_index: [2, E], a `SortedEdges`, or another form that PyG takes. Output:
        [V, F_out].

    Example:
        >>> import torch
        >>> from lipsformer.graph import SparseGCNConv
        >>> conv = SparseGCNConv(16, 8)
        >>> conv(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 8])

    Reference:
        Kipf and Welling 2017.
    """

    propagate = MessagePassing.propagate  # see `LipschitzGATConv`

    def reset_parameters(self) -> None:
        """Draw the weights as `GCNConv` does, also those that a `SpectralScale` scales."""
        super().reset_parameters()
        draw_scaled_weights_(self)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, edge_index: Tensor | SortedEdges, edge_weight: OptTensor = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: Node features, [V, F_in].
            edge_index: The edges; see Shape.
            edge_weight: Weight of each edge, [E]; None for 1.
        """
        edges = plain_edges(edge_index)
        if edge_weight is not None or self.improved or not _multiplies(self, GCNConv, x, edges):
            return super().forward(x, edges, edge_weight)
        adjacency = SortedEdges.of(edge_index, x.size(0), x.size(0)).normalized(x.dtype)
        out = adjacency @ self.lin(x)
        return out if self.bias is None else out + self.bias


class SparseGCN2Conv(GCN2Conv):
    r"""Compute PyG's `GCN2Conv` without a message per edge, as `SparseGCNConv` does for `GCNConv`.

    .. math:: X' = \left((1 - \alpha) \hat A X + \alpha X^{(0)}\right)
        \left((1 - \beta) I + \beta W\right)

    Shape:
        x, x_0: [V, F]. edge_index: [2, E], a `SortedEdges`, or another form that PyG takes. Output:
        [V, F].

    Example:
        >>> import torch
        >>> from lipsformer.graph.gcn_conv import SparseGCN2Conv
        >>> conv, x = SparseGCN2Conv(16, alpha=0.1, theta=0.5, layer=1), torch.randn(3, 16)
        >>> conv(x, x, torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 16])

    Reference:
        Chen et al. 2020 (GCNII).
    """

    propagate = MessagePassing.propagate  # see `LipschitzGATConv`

    def reset_parameters(self) -> None:
        """Draw the weights as `GCN2Conv` does, also those that a `SpectralScale` scales."""
        super().reset_parameters()
        draw_scaled_weights_(self)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        x_0: Tensor,
        edge_index: Tensor | SortedEdges,
        edge_weight: OptTensor = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: Node representations, [V, F].
            x_0: The first representations, [V, F].
            edge_index: The edges; see Shape.
            edge_weight: Weight of each edge, [E]; None for 1.
        """
        edges = plain_edges(edge_index)
        plain = edge_weight is None and self.weight2 is None
        if not plain or not _multiplies(self, GCN2Conv, x, edges):
            return super().forward(x, x_0, edges, edge_weight)
        adjacency = SortedEdges.of(edge_index, x.size(0), x.size(0)).normalized(x.dtype)
        mixed = (1 - self.alpha) * (adjacency @ x) + self.alpha * x_0
        return torch.addmm(mixed, mixed, self.weight1, beta=1 - self.beta, alpha=self.beta)


def _multiplies(conv: Any, kind: type[GCNConv] | type[GCN2Conv], x: Tensor, edges: Tensor) -> bool:
    """Return whether a product with the adjacency gives what the messages of a layer would."""
    return (
        isinstance(x, Tensor)  # PyG refuses a pair of inputs in a sentence
        and x.dim() == 2  # PyG takes several sets of features for one graph
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and (conv.normalize and conv.add_self_loops and not conv.cached)
        and why_messages(conv, kind, edges, x, x) is None
    )
