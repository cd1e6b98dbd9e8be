"""Draw the figures of graph studies: accuracy over depth, and profiles over layers and epochs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot, which would choose a backend for the user
from matplotlib.ticker import NullFormatter, ScalarFormatter

__all__ = ["plot_epochs", "plot_layers", "plot_sweep", "plot_training"]

BESIDE: dict[str, Any] = {"fontsize": 8, "loc": "upper left", "bbox_to_anchor": (1.02, 1.0)}


def plot_sweep(
    rows: Sequence[Mapping[str, Any]],
    x: str,
    path: Path,
    *,
    log_x: bool = False,
) -> None:
    """Plot accuracy over one setting, with one line for every combination of the others.

    One panel shows the epoch with the best validation accuracy, and the other the last epoch.

    Args:
        rows: Summaries, as `scripts.graph_sweep` writes them. Each has a `cell`, which maps the
            names of settings to their values as text; `test_acc` and `last_test_acc` in percent;
            and the standard deviations `test_acc_std` and `last_test_acc_std`, or None.
        x: Name of the setting on the x axis, whose values are numbers.
        path: PNG file to write; its folder is created.
        log_x: Whether the x axis is logarithmic.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lipsformer.graph.plots import plot_sweep
        >>> means = {"test_acc": 81, "test_acc_std": 1, "last_test_acc": 80, "last_test_acc_std": 2}
        >>> rows = [{"cell": {"model.num_layers": depth}, **means} for depth in ("2", "8", "32")]
        >>> path = Path(tempfile.mkdtemp()) / "sweep.png"
        >>> plot_sweep(rows, "model.num_layers", path, log_x=True)
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    names = {"test_acc": "best validation epoch", "last_test_acc": "last epoch"}
    figure, axes = _panels(len(names), sharey=True)
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        label = ", ".join(value for key, value in row["cell"].items() if key != x and value)
        lines.setdefault(label or "all", []).append(row)
    for axis, (metric, name) in zip(axes, names.items(), strict=True):
        for label, points in lines.items():
            points = sorted(points, key=lambda row: float(row["cell"][x]))
            values = [float(row["cell"][x]) for row in points]
            spread = [row[f"{metric}_std"] or 0.0 for row in points]
            means = [row[metric] for row in points]
            axis.errorbar(values, means, spread, marker="o", markersize=4, capsize=2, label=label)
        if log_x:
            axis.set_xscale("log")
        axis.set_xticks(sorted({float(row["cell"][x]) for row in rows}))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel(x.rpartition(".")[2].replace("_", " "))
        axis.set_title(name, fontsize=10)
    axes[0].set_ylabel("test accuracy in %")
    axes[-1].legend(**BESIDE)
    _save(figure, path, "")


def plot_layers(
    profiles: Mapping[str, Mapping[str, Sequence[float]]],
    keys: Sequence[str],
    path: Path,
    *,
    title: str = "",
) -> None:
    """Plot measures over the layers, one panel per measure and one line per network.

    Args:
        profiles: Results of `layer_profile` by name of the network.
        keys: Measures, such as `gradient_distance_from_mean`. The y axis is logarithmic, so values
            that are not positive leave a gap.
        path: PNG file to write; its folder is created.
        title: Title of the figure.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lipsformer.graph.plots import plot_layers
        >>> path = Path(tempfile.mkdtemp()) / "layers.png"
        >>> profiles = {"GCN": {"mean_cosine": [0.5, 1.0]}, "GAT": {"mean_cosine": [0.5, 0.6]}}
        >>> plot_layers(profiles, ["mean_cosine"], path)
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    figure, axes = _panels(len(keys))
    for axis, key in zip(axes, keys, strict=True):
        for index, (label, profile) in enumerate(profiles.items()):
            style = ("-", "--", ":")[index % 3]  # keeps lines visible that coincide
            axis.plot([_positive(value) for value in profile[key]], style, label=label)
        axis.set_yscale("log")
        axis.set_xlabel("layer")
        axis.set_ylabel(key.replace("_", " "))
    axes[-1].legend(**BESIDE)
    _save(figure, path, title)


def plot_training(records: Sequence[Mapping[str, Any]], path: Path, *, title: str = "") -> None:
    """Plot the gradient norms of all layers over training, with one line per layer.

    No file is written if no record has a `profile`, as in a run that diverged in its first epoch.

    Args:
        records: Records of `fit`; those without a `profile` are skipped.
        path: PNG file to write; its folder is created.
        title: Title of the figure.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lipsformer.graph.plots import plot_training
        >>> path = Path(tempfile.mkdtemp()) / "training.png"
        >>> norms = {"training_gradient_norm": [1.0, 0.1], "gradient_norm": [2.0, 0.2]}
        >>> records = [{"epoch": 0, "profile": norms}, {"epoch": 1}, {"epoch": 2, "profile": norms}]
        >>> plot_training(records, path, title="two layers")
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    keys = ["training_gradient_norm", "gradient_norm"]
    names = ["in training, with dropout", "in evaluation"]
    records = [record for record in records if "profile" in record]
    if not records:
        return
    epochs = [record["epoch"] for record in records]
    num_layers = len(records[0]["profile"][keys[0]])
    colors = colormaps["viridis"]
    figure, axes = _panels(2, sharey=True)
    for axis, key, name in zip(axes, keys, names, strict=True):
        for layer in range(num_layers):
            values = [_positive(record["profile"][key][layer]) for record in records]
            color = colors(layer / max(1, num_layers - 1))
            ends = layer in (0, num_layers - 1)
            axis.plot(epochs, values, color=color, label=f"layer {layer + 1}" if ends else None)
        axis.set_yscale("log")
        axis.set_xlabel("epoch")
        axis.set_title(name, fontsize=10)
    axes[0].set_ylabel("gradient norm")
    axes[1].legend(fontsize=8)
    _save(figure, path, title)


def plot_epochs(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], keys: Sequence[str], path: Path
) -> None:
    """Plot values over training, with one panel per value and one line per run.

    Args:
        runs: Records of `fit` by name of the run.
        keys: Numbers of a record, such as `gradient_norm` (of all parameters) or `test_acc`. The y
            axis is linear for accuracies and logarithmic for all others.
        path: PNG file to write; its folder is created.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lipsformer.graph.plots import plot_epochs
        >>> path = Path(tempfile.mkdtemp()) / "epochs.png"
        >>> records = [{"epoch": 0, "loss": 2.0}, {"epoch": 1, "loss": 0.5}]
        >>> plot_epochs({"lr 0.01": records}, ["loss"], path)
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    figure, axes = _panels(len(keys))
    for axis, key in zip(axes, keys, strict=True):
        linear = key.endswith("acc")
        for label, records in runs.items():
            values = [record[key] if linear else _positive(record[key]) for record in records]
            axis.plot([record["epoch"] for record in records], values, label=label)
        if not linear:
            axis.set_yscale("log")
        axis.set_xlabel("epoch")
        axis.set_ylabel(key.replace("_", " "))
    axes[-1].legend(**BESIDE)
    _save(figure, path, "")


def _panels(count: int, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side, with grids."""
    figure = Figure(figsize=(5.2 * count, 4.2))
    axes = list(figure.subplots(1, count, sharey=sharey, squeeze=False)[0])
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def _positive(value: float) -> float:
    """Return NaN, which leaves a gap, if a logarithmic axis cannot show the value."""
    return value if value > 0 and math.isfinite(value) else math.nan


def _save(figure: Figure, path: Path, title: str) -> None:
    if title:
        figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
