"""Plots of bounds, estimates and monitor records. Matplotlib is imported when they are drawn."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_bounds(
    path: Path,
    title: str,
    rows: Sequence[tuple[str, float, float, float]],
    total: tuple[str, float, float, float],
) -> None:
    """Plot the bound, the paper's bound and the estimate of every block and of the whole model.

    Args:
        path: Path of the PNG file. Its folder is created if it does not exist.
        title: Title of the figure.
        rows: (name, log10 bound, log10 paper bound, log10 estimate) of the blocks, by depth.
        total: The same for the whole model.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lipsformer.analysis.plots import plot_bounds
        >>> path = Path(tempfile.mkdtemp(), "plots", "bounds.png")
        >>> rows = [("blocks.0", 0.5, 2.0, 0.1)]
        >>> plot_bounds(path, "one block", rows, total=("model", 0.7, 2.5, 0.2))
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    from matplotlib.figure import Figure  # pyplot would look for a display

    figure = Figure(figsize=(10.0, 4.5), layout="constrained")
    blocks, model = figure.subplots(1, 2, width_ratios=(6, 1))
    for axes, shown in ((blocks, rows), (model, [total])):
        series = {
            "theorem of the paper": ([row[2] for row in shown], "s--"),
            "proved here": ([row[1] for row in shown], "o-"),
            "measured": ([row[3] for row in shown], "^-"),
        }
        for label, (values, style) in series.items():
            points = [(i, value) for i, value in enumerate(values) if math.isfinite(value)]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, markersize=5)
        names = [row[0] for row in shown]
        axes.set_xticks(range(len(shown)), names, rotation=60, ha="right", fontsize=8)
        axes.grid(alpha=0.3)
    model.set_xlim(-1, 1)
    blocks.set_ylabel("log10 Lipschitz constant")
    figure.legend(*blocks.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


_LABELS = {
    "sigma": "norm of the operator",
    "update_ratio": "norm of the update / of the weight",
    "grad_norm": "gradient norm",
    "residual_scale": "largest residual scale",
    "gain": "largest gain of CenterNorm",
    "attn_entropy": "attention entropy (nats)",
    "max_score": "largest attention score",
}


def plot_monitor(
    path: Path, records: Sequence[Mapping[str, Any]], bounds: Sequence[tuple[int, float]]
) -> None:
    """Plot every kind of monitored figure over time and over depth, and the bound over time.

    Args:
        path: Path of the PNG file. Its folder is created if it does not exist.
        records: Records of the monitor with the key `update`, in order, at least one. The last one
            has a figure such as `sigma/<name>` for every line to draw.
        bounds: (update, log10 bound of the model), in order; may be empty.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lipsformer.analysis.plots import plot_monitor
        >>> path = Path(tempfile.mkdtemp(), "plots", "monitor.png")
        >>> records = [{"update": 0, "sigma/head": 1.0}, {"update": 50, "sigma/head": 1.5}]
        >>> plot_monitor(path, records, bounds=[(0, 2.0), (50, 2.2)])
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    kinds = {kind: [k for k in records[-1] if k.startswith(f"{kind}/")] for kind in _LABELS}
    kinds = {kind: keys for kind, keys in kinds.items() if keys}
    rows = len(kinds) + bool(bounds)
    figure = Figure(figsize=(11.0, 2.6 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False)
    chosen = {"first": records[0], "middle": records[len(records) // 2], "last": records[-1]}
    for (over_time, by_depth), (kind, keys) in zip(panels, kinds.items(), strict=False):
        for index, key in enumerate(keys):
            line = [(r["update"], r[key]) for r in records if key in r]
            color = colormaps["viridis"](0.9 * index / max(len(keys) - 1, 1))
            over_time.plot(*zip(*line, strict=True), color=color, linewidth=0.9)
        for index, record in enumerate(chosen.values()):
            values = [record.get(key, math.nan) for key in keys]
            label = f"update {record['update']}"
            by_depth.plot(values, ".-", linewidth=0.7, label=label, color=f"{0.7 - 0.35 * index}")
        over_time.set_ylabel(_LABELS[kind], fontsize=8)
        for axes in (over_time, by_depth):
            axes.set_yscale("log" if kind in ("grad_norm", "update_ratio") else "linear")
            axes.grid(alpha=0.3)
        by_depth.xaxis.set_major_locator(MaxNLocator(integer=True))
    if bounds:
        panels[-1, 0].plot(*zip(*bounds, strict=True), "k.-")
        panels[-1, 0].set_ylabel("log10 proved bound", fontsize=8)
        panels[-1, 0].grid(alpha=0.3)
        panels[-1, 1].axis("off")
    panels[0, 0].set_title("over training (dark: first layers, light: last)", fontsize=10)
    panels[0, 1].set_title("by depth, in the order of the modules", fontsize=10)
    panels[0, 1].legend(fontsize=8)
    panels[-1, 0].set_xlabel("update")
    panels[len(kinds) - 1, 1].set_xlabel("layer")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
