"""Gradient oversmoothing and expansion on Cora before training, layer by layer.

    python -m benchmarks.graph_gradients --root datasets

Writes benchmarks/results/graph/gradients_<depth>.json and docs/images/graph_gradients_<depth>.png.
"""

import json
import math
from pathlib import Path

import torch

from data.graphs import graph_root, load_graph
from lipsformer._commands import documented_parser
from lipsformer.graph import create_model
from lipsformer.graph.diagnostics import layer_profile
from lipsformer.graph.plots import plot_layers

NETWORKS = {
    "GCN, no residual": ("residual_gcn", {"weight_norm": "none", "residual": False}),
    "residual GCN": ("residual_gcn", {"weight_norm": "none"}),
    "residual GCN, weight norm": ("residual_gcn", {}),
    "residual GAT": ("residual_gat", {"weight_norm": "none"}),
    "residual GAT, weight norm": ("residual_gat", {}),
    "LipsGAT": ("lips_gat", {"heads": 8}),
    "LipsGAT, raw values": ("lips_gat", {"heads": 8, "value_scale": None}),
}


KEYS = ["gradient_distance_from_mean", "distance_from_mean", "gradient_norm", "mean_cosine"]


def _rounded(value: float) -> float | str:
    """Return three digits, or a text, because JSON has no number for an overflow."""
    return float(f"{value:.3g}") if math.isfinite(value) else "not finite"


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("--root", default="datasets")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/graph"))
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    parser.add_argument("--depths", type=int, nargs="+", default=[64, 256])
    args = parser.parse_args()
    data = load_graph("cora", graph_root(args.root))
    args.results.mkdir(parents=True, exist_ok=True)
    for depth in args.depths:
        profiles = {}
        for name, (model, kwargs) in NETWORKS.items():
            torch.manual_seed(0)
            width = 8 if "heads" in kwargs else 64
            net = create_model(model, data.num_features, width, 7, depth, **kwargs)
            profiles[name] = layer_profile(net, data.x, data.edge_index, data.y, data.train_mask)
            first, last = (profiles[name][KEYS[0]][i] for i in (0, -1))
            print(f"{depth} layers, {name}: {KEYS[0]} {first:.2g} ... {last:.2g}")
        rounded = {
            name: {key: [_rounded(value) for value in profile[key]] for key in KEYS}
            for name, profile in profiles.items()
        }
        (args.results / f"gradients_{depth}.json").write_text(json.dumps(rounded) + "\n")
        plot_layers(
            profiles,
            KEYS[:2],
            args.images / f"graph_gradients_{depth}.png",
            title=f"{depth} layers on Cora before training",
        )


if __name__ == "__main__":
    main()
