"""Compare time and memory of graph attention layers with PyG's, forward and backward, interleaved.

    python -m benchmarks.graph_layers --graph medium --output benchmarks/results/graph/layers_medium_cpu.json
    python -m benchmarks.graph_layers --graph medium --device cuda --output benchmarks/results/graph/layers_medium_cuda.json
    python -m benchmarks.graph_layers --graph pubmed --features 256 --heads 4 --channels 64
    python -m benchmarks.graph_layers GATConv "LipschitzGATConv, new edges" --graph molecules
    python -m benchmarks.graph_layers --table benchmarks/results/graph/layers_*.json

Each layer maps `--features` to `--heads` x `--channels`. `molecules` is a batch of 1,000 drawn graphs of
20 to 40 nodes with at most 4 bonds per node, mostly 2 or 3. The layers take turns in random order in every
round, so that a busy machine slows all of them alike. The ratio to the first layer is the median over
the rounds. The first rounds warm up. Peak memory is the most that torch's allocator holds at once
beyond inputs and parameters. It includes sorting the edges.

Our layers get `SortedEdges`, which a model builds once per batch for all its layers; "new edges" gets
a plain `edge_index` and sorts it in every step. "sorted edges" means that PyG's layer gets edges that
are sorted by target. "messages" is our layer without its fused pass.
"""  # noqa: E501

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_geometric
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, TransformerConv

from benchmarks.machine import machine, peak_memory, seconds_of
from benchmarks.records import markdown, run
from benchmarks.turns import SPEED, compare, take_turns
from data.graphs import graph_root, load_graph
from lipsformer._commands import documented_parser
from lipsformer.graph import (
    LipschitzGATConv,
    LipschitzTransformerConv,
    ScaledCosineConv,
    SortedEdges,
    SparseGCNConv,
)

COLUMNS = (
    *("layer", "forward ms", "forward + backward ms"),
    *("speed ratio (range)", "peak MB", "ratio"),
)
GRAPHS = {"medium": (100_000, 1_000_000), "large": (1_000_000, 10_000_000)}


def by_messages(layer: type[nn.Module], *widths: int) -> nn.Module:
    """Create one of our layers with a hook, which makes it compute message by message."""
    conv: Any = layer(*widths)
    conv.register_message_forward_hook(lambda *_: None)
    return conv


def same(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the edges as they are."""
    return edge_index


def prepared(edge_index: Tensor, num_nodes: int) -> SortedEdges:
    """Return the edges as a model passes them to its layers."""
    return SortedEdges(edge_index, num_nodes)


def by_target(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the edges sorted by target."""
    return edge_index[:, edge_index[1].argsort(stable=True)].contiguous()


# name -> layer by numbers of features, channels and heads, and the form in which it gets the edges
LAYERS: dict[
    str, tuple[Callable[..., nn.Module], Callable[[Tensor, int], Tensor | SortedEdges]]
] = {
    "GATConv": (GATConv, same),
    "GATConv, sorted edges": (GATConv, by_target),
    "TransformerConv": (TransformerConv, same),
    "GCNConv": (lambda features, channels, heads: GCNConv(features, channels * heads), same),
    "SparseGCNConv": (
        lambda features, channels, heads: SparseGCNConv(features, channels * heads),
        prepared,
    ),
    "LipschitzGATConv": (LipschitzGATConv, prepared),
    "LipschitzGATConv, new edges": (LipschitzGATConv, same),
    "LipschitzGATConv without norm": (partial(LipschitzGATConv, score_norm=None), prepared),
    "LipschitzGATConv, messages": (partial(by_messages, LipschitzGATConv), same),
    "LipschitzTransformerConv, messages": (partial(by_messages, LipschitzTransformerConv), same),
    "ScaledCosineConv, messages": (partial(by_messages, ScaledCosineConv), same),
    "LipschitzTransformerConv": (LipschitzTransformerConv, prepared),
    "LipschitzTransformerConv, new edges": (LipschitzTransformerConv, same),
    "ScaledCosineConv": (ScaledCosineConv, prepared),
}


class Candidate:
    """Measure one layer on one graph."""

    def __init__(self, name: str, channels: int, heads: int, x: Tensor, edge_index: Tensor) -> None:
        """Create the layer on the device of `x`."""
        make, self.prepare = LAYERS[name]
        self.conv = make(x.size(1), channels, heads).to(x)
        self.x, self.edge_index = x, edge_index
        self.edges = self.prepare(edge_index, len(x))

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of one forward pass, and of one forward and backward pass together."""
        self.conv.zero_grad()
        self.x.grad = None
        losses: list[Tensor] = []
        forward = seconds_of(
            lambda: losses.append(self.conv(self.x, self.edges).square().sum()), self.x.device
        )
        return forward, forward + seconds_of(losses[0].backward, self.x.device)

    def peak(self) -> int:
        """Return the most bytes held at once beyond inputs and parameters, sorting included."""
        self.conv.zero_grad()
        self.x.grad = None

        def step() -> None:
            edges = self.prepare(self.edge_index, len(self.x))
            self.conv(self.x, edges).square().sum().backward()

        return peak_memory(step, self.x.device)


def measure(candidates: dict[str, Candidate], rounds: int, warmup: int) -> dict[str, Any]:
    """Return times over interleaved rounds, and peak memory."""
    seconds = take_turns(
        candidates, lambda name: candidates[name].seconds(), rounds=rounds, warmup=warmup
    )
    memory = {name: candidate.peak() for name, candidate in candidates.items()}
    forward, step = ({n: [pair[i] for pair in own] for n, own in seconds.items()} for i in (0, 1))
    return {
        name: {
            "forward_ms": 1e3 * statistics.median(forward[name]),
            "step_ms": 1e3 * statistics.median(step[name]),
            **ratios,
        }
        for name, ratios in compare(step, memory).items()
    }


def edges(graph: str, root: str) -> tuple[int, Tensor]:
    """Return the number of nodes and the edges of PubMed, of molecules, or of a random graph."""
    if graph == "molecules":
        return molecules(1000)
    if graph == "pubmed":
        data = load_graph("pubmed-partial", graph_root(root))
        assert data.num_nodes is not None and data.edge_index is not None
        return data.num_nodes, data.edge_index
    num_nodes, num_edges = GRAPHS[graph]
    return num_nodes, torch.randint(num_nodes, (2, num_edges))


def molecules(count: int) -> tuple[int, Tensor]:
    """Draw trees of 20 to 40 nodes with a few rings of six as one graph, with both directions."""
    sizes = torch.randint(20, 41, (count,))
    start = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    node = torch.arange(len(start))
    place = node - start
    # each node but the first has a bond to one of the two before it
    parent = node - torch.minimum(place, torch.randint(1, 3, place.shape))
    bonds = torch.stack([node, parent])[:, place > 0]
    closes = (place % 6 == 5) & (torch.rand(len(place)) < 0.5)
    rings = torch.stack([node, node - 5])[:, closes]
    bonds = torch.cat([bonds, rings], dim=1)
    return len(node), torch.cat([bonds, bonds.flip(0)], dim=1)


def table(record: dict[str, Any]) -> str:
    """Return the figures of one record as a Markdown table."""
    host, graph = record["machine"], record["graph"]
    # records of the time when these were the only widths do not name them
    widths = {"features": 64, "heads": 8, "channels": 8, "dtype": "float32"} | record["options"]
    dtype = "" if widths["dtype"] == "float32" else f"{widths['dtype']}, "
    intro = (
        f"{graph['num_nodes']:,} nodes, {graph['num_edges']:,} edges, {widths['features']} "
        f"features to {widths['heads']} heads x {widths['channels']} channels, {dtype}"
        f"{host['device']} ({host['cpu']}, {host['threads']} threads), torch {host['torch']}, "
        f"PyG {host['torch_geometric']}, {record['options']['rounds']} rounds, {host['date']}"
    )
    cells = ("{forward_ms:.1f}", "{step_ms:.1f}", SPEED, "{peak_mb:.0f}", "{memory_ratio:.2f}")
    rows = (
        (name, *(cell.format(**own) for cell in cells)) for name, own in record["layers"].items()
    )
    return f"{intro}\n\n{markdown(COLUMNS, rows)}"


def record_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the layers on one graph."""
    if unknown := set(options.layers) - set(LAYERS):
        sys.exit(f"error: layers {sorted(unknown)} are not known; choose from {list(LAYERS)}")
    torch.manual_seed(0)
    random.seed(0)
    num_nodes, edge_index = edges(options.graph, options.root)
    edge_index = edge_index.to(options.device)
    placed: Any = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    x = torch.randn(num_nodes, options.features, **placed, requires_grad=True)
    widths = options.channels, options.heads
    candidates = {name: Candidate(name, *widths, x, edge_index) for name in options.layers}
    settings = ("rounds", "warmup", "features", "channels", "heads", "dtype")
    return {
        "machine": machine(x.device) | {"torch_geometric": torch_geometric.__version__},
        "graph": {"name": options.graph, "num_nodes": num_nodes, "num_edges": edge_index.size(1)},
        "options": {name: getattr(options, name) for name in settings},
        "layers": measure(candidates, options.rounds, options.warmup),
    }


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("layers", nargs="*", default=list(LAYERS), help="the first is the base")
    parser.add_argument("--graph", choices=("pubmed", "molecules", *GRAPHS), default="pubmed")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--channels", type=int, default=8, help="of each head")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--root", default="datasets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=2)
    run(parser, record_of, table)


if __name__ == "__main__":
    main()
