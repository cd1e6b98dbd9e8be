"""Structures of graph layers and graph models on small graphs with every oddity."""

from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from lipsformer.graph import LipschitzGATConv, LipschitzTransformerConv, ScaledCosineConv
from lipsformer.graph.models import ConvLayer, GraphNet, create_model
from lipsformer.graph.norm import NodeNorm
from tests.hunt.cases import Subject, kind

GRAPH = {
    "nodes": st.integers(1, 6),
    "edges": st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=10),
    "shape": st.sampled_from(["random", "random", "out of one node", "into one node"]),
    "undirected": st.booleans(),
}
CHANNELS = st.sampled_from([2, 1, 3])
HEADS = st.sampled_from([1, 2])
NORM = st.sampled_from(["lipschitznorm", None])
NODE_NORM = st.sampled_from(["none", "centernorm", "layernorm", "pairnorm"])
GAT = {
    "heads": HEADS,
    "concat": st.booleans(),
    "score_norm": NORM,
    "att_norm": st.sampled_from([4.0, 1.0, 0.3]),
    "min_att_norm": st.sampled_from([None, 0.2]),
    "negative_slope": st.sampled_from([0.2, 0.2, 0.0, -0.5, 3.0]),
    "add_self_loops": st.sampled_from([True, True, False]),
    "scale_individually": st.booleans(),
    "residual": st.booleans(),
}
TRANSFORMER = {
    "heads": HEADS,
    "concat": st.booleans(),
    "score_norm": NORM,
    "root_weight": st.booleans(),
    "beta": st.sampled_from([False, False, False, True]),
}
COSINE = {
    "heads": HEADS,
    "share_projection": st.booleans(),
    "logit_scale": st.sampled_from([10.0, 0.1, 1.0, 100.0]),
    "value_scale": st.sampled_from([1.0, None, 0.1, 7.0]),
}
GRAPH_MODELS = {
    "gcn": {"norm": NODE_NORM},
    "gcn2": {
        "alpha": st.sampled_from([0.1, 0.5, 0.0, 1.0]),
        "theta": st.sampled_from([0.5, 1.7]),
        "weight_norm": st.sampled_from(["spectral", "none"]),
    },
    "deep_gat": {
        "heads": HEADS,
        "norm": st.sampled_from(["lipschitznorm", "none", "lipschitznorm+centernorm"]),
        "linear_ends": st.booleans(),
        "residual": st.booleans(),
    },
    "deep_graph_transformer": {
        "heads": HEADS,
        "norm": st.sampled_from(["lipschitznorm", "none", "centernorm"]),
        "beta": st.sampled_from([False, False, True]),
    },
    "residual_gcn": {
        "bound": st.sampled_from([None, 0.5, 0.1]),
        "residual": st.booleans(),
    },
    "residual_gat": {
        "heads": HEADS,
        "norm": st.sampled_from(["lipschitznorm", "none"]),
        "bound": st.sampled_from([None, 0.5]),
        "residual": st.booleans(),
    },
    "lips_gat": COSINE,
    "lips_graph_transformer": {**COSINE, "mlp_ratio": st.sampled_from([1.0, 2.0])},
}


def edge_index(nodes: int, edges: Any, shape: str, undirected: bool) -> Tensor:
    """Return the edges [2, E]: the given ones, or a star."""
    others = torch.arange(1, nodes)
    star = torch.stack([torch.zeros_like(others), others])
    index = {
        "random": torch.tensor([(a % nodes, b % nodes) for a, b in edges]).long().view(-1, 2).T,
        "out of one node": star,
        "into one node": star.flip(0),
    }[shape]
    return torch.cat([index, index.flip(0)], dim=1) if undirected else index


def on_graph(module: Any, channels: int, graph: dict[str, Any]) -> Subject:
    """Return a module on the features of the nodes of one graph."""
    nodes = graph["nodes"]
    edges = edge_index(nodes, graph["edges"], graph["shape"], graph["undirected"])
    mixes = any(isinstance(part, LipschitzTransformerConv) for part in module.modules())
    return Subject(module, (nodes, channels), (nodes,), edges=edges, mixes_graphs=mixes)


def split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the graph and those of the module."""
    return {name: arguments.pop(name) for name in GRAPH}, arguments


@kind("GCNConv", **GRAPH, channels=CHANNELS, out=CHANNELS, improved=st.booleans())
def _gcn(channels: int, out: int, improved: bool, **arguments: Any) -> Subject:
    graph, _ = split(arguments)
    return on_graph(GCNConv(channels, out, improved=improved), channels, graph)


for _name, _class, _options in (
    ("LipschitzGATConv", LipschitzGATConv, GAT),
    ("LipschitzTransformerConv", LipschitzTransformerConv, TRANSFORMER),
    ("ScaledCosineConv", ScaledCosineConv, COSINE),
):

    def _conv(channels: int, out: int, _class: Any = _class, **arguments: Any) -> Subject:
        graph, options = split(arguments)
        if options.get("score_norm") is None:
            for option in ("att_norm", "min_att_norm", "scale_individually"):
                options.pop(option, None)  # refused, because it has no effect
        return on_graph(_class(channels, out, **options), channels, graph)

    kind(_name, **GRAPH, **_options, channels=CHANNELS, out=st.sampled_from([1, 2]))(_conv)


@kind(
    "ConvLayer",
    **GRAPH,
    alpha=st.sampled_from([1.0, 0.5, 3.0]),
    norm=NODE_NORM,
    norm_first=st.booleans(),
)
def _conv_layer(alpha: float, norm: str, norm_first: bool, **arguments: Any) -> Subject:
    graph, _ = split(arguments)
    conv, node_norm = GCNConv(2, 3), NodeNorm(norm, 3)
    return on_graph(ConvLayer(conv, 0.1, nn.ELU(alpha), node_norm, norm_first), 2, graph)


def model_of(name: str, layers: int, hidden: int, **arguments: Any) -> tuple[GraphNet, Any]:
    """Return a graph model with two features and two classes, and the arguments of its graph."""
    graph, options = split(arguments)
    return create_model(name, 2, hidden, 2, layers, **options), graph


for _name, _options in GRAPH_MODELS.items():

    def _model(_name: str = _name, **arguments: Any) -> Subject:
        model, graph = model_of(_name, **arguments)
        return on_graph(model, 2, graph)

    _drawn = {**GRAPH, **_options, "layers": st.integers(1, 2), "hidden": st.sampled_from([2, 3])}
    kind(_name, **_drawn)(_model)


for _name in ("residual_gcn", "residual_gat", "lips_graph_transformer"):

    def _layer(_name: str = _name, **arguments: Any) -> Subject:
        model, graph = model_of(_name, 1, **arguments)
        head = cast(Any, model.head)
        return on_graph(model.layers[0], head[1].in_features, graph)

    kind(f"{_name}, layer", **GRAPH, **GRAPH_MODELS[_name], hidden=st.sampled_from([2, 3]))(_layer)
