"""Time and memory of LipschitzGATConv beside PyG's GATConv, forward and backward.

    python -m benchmarks.graph_layers --root datasets --output benchmarks/results/graph/layers.json

The layers take turns in random order, so that a busy machine slows all alike; the ratio is that of
the lower quartiles of the times. Memory is what autograd saves for the backward pass, counted once
per storage.
"""

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from torch import Tensor, nn
from torch_geometric.nn import GATConv

from data.graphs import graph_root, load_graph
from lipsformer.graph import LipschitzGATConv

LAYERS = {
    "PyG GATConv": lambda *size: GATConv(*size),
    "without norm": lambda *size: LipschitzGATConv(*size, score_norm=None),
    "LipschitzNorm": lambda *size: LipschitzGATConv(*size),
    "LipschitzNorm, released code": lambda *size: LipschitzGATConv(*size, released_code=True),
}


def saved_bytes(conv: nn.Module, x: Tensor, edge_index: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward one, parameters and inputs left out."""
    inputs = {t.untyped_storage().data_ptr() for t in (x, edge_index, *conv.parameters())}
    sizes: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # a freed address must not be counted twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        conv(x, edge_index)
    return sum(sizes.values())


def measure(edge_index: Tensor, num_nodes: int, rounds: int) -> dict[str, Any]:
    """Time and memory of all layers with 8 heads x 8 channels on one graph."""
    torch.manual_seed(0)
    x = torch.randn(num_nodes, 64, requires_grad=True)
    convs = {name: make(64, 8, 8) for name, make in LAYERS.items()}
    times: dict[str, list[float]] = {name: [] for name in convs}
    for _ in range(rounds):
        for name in random.sample(list(convs), len(convs)):
            start = time.perf_counter()
            convs[name](x, edge_index).square().sum().backward()
            times[name].append(1e3 * (time.perf_counter() - start))
    quartiles = {name: statistics.quantiles(own[1:])[0] for name, own in times.items()}
    base = quartiles["PyG GATConv"]  # the first round warms up
    base_bytes = saved_bytes(convs["PyG GATConv"], x, edge_index)
    result = {}
    for name, conv in convs.items():
        size = saved_bytes(conv, x, edge_index)
        result[name] = {
            "ms": round(quartiles[name], 1),
            "time_ratio": round(quartiles[name] / base, 3),
            "saved_mb": round(size / 2**20, 1),
            "memory_ratio": round(size / base_bytes, 3),
        }
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="datasets")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = load_graph("pubmed-partial", graph_root(args.root))
    record = {
        "machine": f"{platform.machine()}, {args.threads} threads",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "graph": f"PubMed, {data.num_nodes} nodes, {data.num_edges} edges, 8 heads x 8 channels",
        "layers": measure(data.edge_index, data.num_nodes, args.rounds),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
