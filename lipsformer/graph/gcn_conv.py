"""Graph convolution as a product with the normalized adjacency, which is stored sparsely."""

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.typing import OptTensor

from lipsformer.graph.edge_attention.csr import SortedEdges, plain_edges
from lipsformer.graph.edge_attention.operator import why_messages

__all__ = ["SparseGCNConv"]


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

    dropout = 0.0  # `why_messages` asks every layer

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
        if edge_weight is not None or not self._multiplies(x, edges):
            return super().forward(x, edges, edge_weight)
        adjacency = SortedEdges.of(edge_index, len(x), len(x)).normalized(x.dtype)
        out = adjacency @ self.lin(x)
        return out if self.bias is None else out + self.bias

    def _multiplies(self, x: Tensor, edges: Tensor) -> bool:
        """Return whether the product gives what the messages would."""
        return (
            isinstance(x, Tensor)  # PyG refuses a pair of inputs in a sentence
            and x.device.type == "cpu"
            and x.dtype in (torch.float32, torch.float64)
            and not torch.is_autocast_enabled("cpu")
            and (self.normalize and self.add_self_loops and not self.improved and not self.cached)
            and why_messages(self, GCNConv, edges, x, x) is None
        )
