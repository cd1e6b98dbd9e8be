"""Structures of graph layers, against what their documentation claims."""

from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lipsformer.graph.diagnostics import adjacency_norm, gat_attention_bound
from lipsformer.graph.gat_conv import LipschitzGATConv
from lipsformer.graph.models import ResidualGCN
from tests.hunt.cases import Subject, kind

GRAPH = {
    "nodes": st.integers(2, 6),
    "edges": st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8),
    "shape": st.sampled_from(["random", "out of one node", "into one node"]),
    "undirected": st.booleans(),
    "channels": st.sampled_from([2, 1, 3]),
}


def edge_index(nodes: int, edges: Any, shape: str, undirected: bool) -> Tensor:
    """Return the edges [2, E]: the given ones, or a star."""
    others = torch.arange(1, nodes)
    star = torch.stack([torch.zeros_like(others), others])
    index = {
        "random": torch.tensor([(a % nodes, b % nodes) for a, b in edges]).T,
        "out of one node": star,
        "into one node": star.flip(0),
    }[shape]
    return torch.cat([index, index.flip(0)], dim=1) if undirected else index


class OnGraph(nn.Module):
    """A graph layer on a batch of node features: copies of one graph side by side."""

    def __init__(self, layer: nn.Module, edges: Tensor) -> None:
        super().__init__()
        self.layer, self.edges = layer, edges

    def forward(self, x: Tensor) -> Tensor:
        offsets = x.shape[1] * torch.arange(len(x)).repeat_interleave(self.edges.shape[1])
        edges = self.edges.repeat(1, len(x)) + offsets
        return self.layer(x.flatten(0, 1), edges).unflatten(0, x.shape[:2])


def _weights(layer: nn.Module) -> Any:
    return cast(Any, layer)


@kind("ResidualGCN layer", **GRAPH, bound=st.sampled_from([0.5, 1.0, 0.1]))
def _residual(
    nodes: int, edges: Any, shape: str, undirected: bool, channels: int, bound: float
) -> Subject:
    layer = ResidualGCN(channels, channels, 2, 1, bound=bound).layers[0]
    index = edge_index(nodes, edges, shape, undirected)
    largest = 1.0 + bound * adjacency_norm(index, nodes)
    module = OnGraph(cast(nn.Module, layer), index)
    return Subject(module, (nodes, channels), (nodes,), claim=lambda _: largest)


@kind("GAT attention, LipschitzNorm", **GRAPH, c=st.sampled_from([4.0, 1.0, 0.3]))
def _gat(nodes: int, edges: Any, shape: str, undirected: bool, channels: int, c: float) -> Subject:
    conv = LipschitzGATConv(channels, channels, 1, score_norm="lipschitznorm", att_norm=c)
    index = edge_index(nodes, edges, shape, undirected)

    def claim(module: nn.Module) -> float:
        sigma = torch.linalg.matrix_norm(_weights(conv).lin.weight.detach().double(), 2)
        return gat_attention_bound(conv, index, nodes) * sigma.item() + 1e-300

    return Subject(OnGraph(conv, index), (nodes, channels), (nodes,), claim=claim)
