"""Compare training on a graph of ogbn-arxiv's size: LipschitzNorm and PyG's layers, full and clusters.

    python -m benchmarks.graph_training --output benchmarks/results/graph/training_arxiv_cpu.json
    python -m benchmarks.graph_training "GATConv, full" "LipschitzNorm, full" --rounds 3
    python -m benchmarks.graph_training --table benchmarks/results/graph/training_arxiv_cpu.json

The graph is `generated-arxiv`, and all models have the width, depth and dropout of the config. An
epoch is one pass over the training nodes with all updates, without the evaluation. The models take
turns in random order in every round, so that a busy machine slows all of them alike. The ratio to the
first model is the median over the rounds; the first rounds warm up. Peak memory is the most that
torch's allocator holds at once in an epoch beyond the graph and the parameters. METIS runs before.
"""  # noqa: E501

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCN2Conv

from benchmarks.machine import machine, peak_memory, seconds_of
from benchmarks.records import markdown, run
from benchmarks.turns import SPEED, compare, take_turns
from lipsformer._commands import documented_parser
from lipsformer._configfile import read_config
from lipsformer.graph import create_model
from lipsformer.graph.batches import prepare_batches
from lipsformer.graph.config import GraphConfig
from lipsformer.graph.edge_attention.csr import plain_edges
from lipsformer.graph.models import ConvLayer, GraphNet
from lipsformer.graph.norm import NodeNorm
from lipsformer.graph.training import Training
from scripts._graph_seed import load_batches

CONFIG = Path(__file__).parents[1] / "configs" / "graph" / "arxiv_gat.yaml"
MODELS = ("GATConv", "GCN2Conv", "LipschitzNorm")
# Settings that differ from the config. Without clusters, their numbers must be the defaults.
LOADERS = {
    "full": ("data.loader=full", "data.num_parts=8", "data.parts_per_step=1"),
    "cluster": (),
}
NAMES = tuple(f"{model}, {loader}" for loader in LOADERS for model in MODELS)
COLUMNS = ("model, loader", "epochs per minute", "speed ratio (range)", "peak MB", "ratio")


class PyGGCN2(GraphNet):
    """GCNII of PyG's layers, which mix the first representations into every layer."""

    takes_sorted_edges = False

    def __init__(self, features: int, width: int, classes: int, depth: int, dropout: float) -> None:
        convs = [GCN2Conv(width, alpha=0.1, theta=0.5, layer=i + 1) for i in range(depth)]
        super().__init__(nn.Linear(features, width), convs, nn.Linear(width, classes))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = first = self.encoder(x).relu()
        for conv in self.layers:
            x = conv(self.dropout(x), first, plain_edges(edge_index)).relu()
        return self.head(x)


class PyGGAT(GraphNet):
    """The config's network with PyG's `GATConv` and without LipschitzNorm."""

    takes_sorted_edges = False

    def __init__(
        self, features: int, channels: int, heads: int, classes: int, depth: int, dropout: float
    ) -> None:
        width = channels * heads
        layers = [
            ConvLayer(
                GATConv(width, channels, heads),
                dropout,
                nn.ELU() if index < depth - 1 else nn.Identity(),
                NodeNorm("layernorm" if index < depth - 1 else "none", width),
            )
            for index in range(depth)
        ]
        super().__init__(nn.Linear(features, width), layers, nn.Linear(width, classes))


def build(name: str, config: GraphConfig, features: int, classes: int) -> GraphNet:
    """Create a model of the width, depth and dropout of the config."""
    own = config.model
    heads, dropout = own.kwargs["heads"], own.kwargs["dropout"]
    if name == "GATConv":
        return PyGGAT(features, own.hidden_channels, heads, classes, own.num_layers, dropout)
    if name == "GCN2Conv":
        return PyGGCN2(features, own.hidden_channels * heads, classes, own.num_layers, dropout)
    return create_model(
        own.name, features, own.hidden_channels, classes, own.num_layers, **own.kwargs
    )


def measure(
    trainings: dict[str, tuple[Training, Any]], device: torch.device, rounds: int, warmup: int
) -> dict[str, Any]:
    """Return epochs per minute over interleaved rounds, and peak memory."""

    def epoch_seconds(name: str) -> float:
        training, batches = trainings[name]
        seconds = seconds_of(lambda: training.train_epoch(batches), device)
        training.optimizer.zero_grad(set_to_none=True)
        return seconds

    seconds = take_turns(trainings, epoch_seconds, rounds=rounds, warmup=warmup)
    memory = {}
    for name, (training, batches) in trainings.items():
        memory[name] = peak_memory(lambda t=training, b=batches: t.train_epoch(b), device)
        training.optimizer.zero_grad(set_to_none=True)
    return {
        name: {"epochs_per_minute": 60 / statistics.median(seconds[name]), **ratios}
        for name, ratios in compare(seconds, memory).items()
    }


def table(record: dict[str, Any]) -> str:
    """Return the figures of one record as a Markdown table."""
    host, graph = record["machine"], record["graph"]
    intro = (
        f"{graph['name']}: {graph['num_nodes']:,} nodes, {graph['num_edges']:,} edges in both "
        f"directions, {graph['num_parts']} clusters, {graph['parts_per_step']} per step, "
        f"{host['device']} ({host['cpu']}, {host['threads']} threads), torch {host['torch']}, PyG "
        f"{host['torch_geometric']}, {record['options']['rounds']} rounds, {host['date']}"
    )
    cells = ("{epochs_per_minute:.1f}", SPEED, "{peak_mb:.0f}", "{memory_ratio:.2f}")
    rows = (
        (name, *(cell.format(**own) for cell in cells)) for name, own in record["models"].items()
    )
    return f"{intro}\n\n{markdown(COLUMNS, rows)}"


def record_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the models."""
    if unknown := set(options.models) - set(NAMES):
        sys.exit(f"error: models {sorted(unknown)} are not known; choose from {list(NAMES)}")
    torch.manual_seed(0)
    random.seed(0)
    device = torch.device(options.device)
    settings = [f"data.name={options.graph}", *options.set]
    config = read_config(GraphConfig, CONFIG, settings)
    batches, trainings = {}, {}
    for name in options.models:
        model, _, loader = name.partition(", ")
        if loader not in batches:
            own_settings = [*settings, *LOADERS[loader]]
            batches[loader] = load_batches(read_config(GraphConfig, CONFIG, own_settings))
        own = batches[loader]
        network = build(model, config, own.num_features, own.num_classes).to(device)
        training = Training(network, config.train, options.device)
        trainings[name] = training, prepare_batches(own.train, network, options.device)
    (graph,) = own.evaluation
    return {
        "machine": machine(device) | {"torch_geometric": torch_geometric.__version__},
        "graph": {
            "name": options.graph,
            "num_nodes": graph.num_nodes,
            "num_edges": graph.num_edges,
            "num_parts": config.data.num_parts,
            "parts_per_step": config.data.parts_per_step,
        },
        "options": {"rounds": options.rounds, "warmup": options.warmup, "set": options.set},
        "models": measure(trainings, device, options.rounds, options.warmup),
    }


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("models", nargs="*", default=list(NAMES), help="the first is the base")
    parser.add_argument("--graph", default="generated-arxiv", help="data.name of the config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1)
    run(parser, record_of, table)


if __name__ == "__main__":
    main()
