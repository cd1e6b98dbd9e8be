"""Pictures of bounds, estimates and monitor records; matplotlib is imported on use."""

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
    """Draw bound, the paper's bound and estimate of blocks in order of depth, and of the whole.

    Args:
        path: Of the PNG.
        title: Of the picture.
        rows: (name, log10 bound, log10 paper bound, log10 estimate).
        total: The same of the whole model.
    """
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    figure = Figure(figsize=(10.0, 4.5), layout="constrained")
    parts, whole = figure.subplots(1, 2, width_ratios=(6, 1))
    for axes, shown in ((parts, rows), (whole, [total])):
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
    whole.set_xlim(-1, 1)
    parts.set_ylabel("log10 Lipschitz constant")
    figure.legend(*parts.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def plot_monitor(folder: Path, records: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Draw every kind of monitored figure over updates and, for the last record, by depth.

    Args:
        folder: Where the PNGs go.
        records: Monitor records with ``update``, in order.

    Returns:
        The files.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    kinds: dict[str, list[str]] = {}
    for key in records[-1]:
        kind, separator, _ = key.partition("/")
        if separator:
            kinds.setdefault(kind, []).append(key)
    drawn = []
    for kind, keys in kinds.items():
        figure = Figure(figsize=(10.0, 4.0), layout="constrained")
        over_time, by_depth = figure.subplots(1, 2, sharey=True)
        for index, key in enumerate(keys):
            line = [(r["update"], r[key]) for r in records if key in r]
            colour = colormaps["viridis"](index / max(len(keys) - 1, 1))
            over_time.plot(*zip(*line, strict=True), color=colour, linewidth=0.8)
        by_depth.plot([records[-1][key] for key in keys], ".-", linewidth=0.6)
        over_time.set(xlabel="update", ylabel=kind, title="over training (dark: first layers)")
        by_depth.set(xlabel="layer, in order of depth", title=f"update {records[-1]['update']}")
        if kind in ("grad_norm", "update_ratio"):
            over_time.set_yscale("log")
        for axes in (over_time, by_depth):
            axes.grid(alpha=0.3)
        folder.mkdir(parents=True, exist_ok=True)
        drawn.append(folder / f"monitor_{kind}.png")
        figure.savefig(drawn[-1], dpi=120)
    return drawn
