"""The pictures of docs/graph.md that are made from the results of sweeps.

    python -m benchmarks.graph_pictures docs/images

It writes `graph_remedies.png`, accuracy over depth, and `graph_trees.png`.
"""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.graph_tables import RESULTS
from lipsformer._commands import documented_parser
from lipsformer.jsonl import read_jsonl

CHANCE = 31.9  # share of Cora's largest class among the test nodes, %
Curves = dict[str, dict[int, float]]


def curves() -> tuple[Curves, Curves]:
    """Return the accuracies by depth, %, of attention with norms and of networks with skips."""
    norms: Curves = {}
    for line in read_jsonl(RESULTS / "depth_gat.jsonl"):
        cell = line["cell"]
        if cell["case"] != "LipschitzNorm, released code" and line["seed"] == 0:
            own = norms.setdefault(cell["case"].replace("none", "no norm"), {})
            own[int(cell["model.num_layers"])] = 100 * line["test_acc"]
    skips: Curves = {}
    for line in read_jsonl(RESULTS / "depth_residual_plateau.jsonl"):
        name, layers = line["cell"]["case"].removesuffix(" layers").split(", ")
        if line["seed"] == 0:
            skips.setdefault(f"{name}, weight norm", {})[int(layers)] = 100 * line["test_acc"]
    for line in read_jsonl(RESULTS / "depth_gcn2.jsonl"):
        layers, weights = line["cell"]["case"], line["cell"]["model.kwargs.weight_norm"]
        if layers.endswith(" layers") and weights == "spectral" and line["seed"] == 0:
            own = skips.setdefault("initial residual, weight norm", {})
            own[int(layers.split()[0])] = 100 * line["test_acc"]
    return norms, skips


def draw(axes: Axes, lines: Curves, title: str) -> None:
    """Draw one line per network over the number of layers."""
    for name, values in lines.items():
        layers = sorted(values)
        axes.plot(layers, [values[n] for n in layers], marker="o", markersize=4, label=name)
    axes.axhline(CHANCE, color="gray", linestyle=":", linewidth=1)
    axes.annotate("always the largest class", (2, CHANCE - 3), fontsize=8, color="gray")
    ticks = sorted({n for values in lines.values() for n in values})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set(xlabel="layers", title=title, ylim=(25, 90))
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 0.2))
    axes.grid(alpha=0.3)


def remedies(path: Path) -> None:
    """Write the picture of accuracy over depth."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    norms, skips = curves()
    draw(left, norms, "Attention with a norm")
    draw(right, skips, "Skips and bounded weights")
    left.set_ylabel("test accuracy on Cora, %")
    figure.savefig(path, dpi=120)


def trees(path: Path) -> None:
    """Write the picture of the training accuracy on trees."""
    results: dict[str, dict[str, float]] = {}
    for line in read_jsonl(RESULTS / "table_trees.jsonl"):
        depth, norm = line["cell"]["case"].split(", ")
        if line["seed"] == 0:
            results.setdefault(norm, {})[depth] = 100 * line["highest_train_acc"]
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    depths = sorted(next(iter(results.values())))
    width = 0.8 / len(results)
    for index, (norm, values) in enumerate(results.items()):
        places = [i + (index - (len(results) - 1) / 2) * width for i in range(len(depths))]
        axes.bar(places, [values[depth] for depth in depths], width, label=norm)
    axes.set_xticks(range(len(depths)), [f"trees of {depth}" for depth in depths])
    axes.set_ylabel("training accuracy, %")
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.22))
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Write both pictures into a folder."""
    parser = documented_parser(__doc__, prog="python -m benchmarks.graph_pictures")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    mpl.use("Agg")
    remedies(folder / "graph_remedies.png")
    trees(folder / "graph_trees.png")


if __name__ == "__main__":
    main()
