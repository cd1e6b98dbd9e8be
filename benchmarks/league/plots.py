"""The pictures of the league."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure  # not pyplot, which looks for a display

from benchmarks.league.bodies import BODIES
from benchmarks.league.plan import DEPTHS, WARMUPS, deep, first_grid, rates
from benchmarks.league.results import select
from benchmarks.league.table import TITLES, all_multiples, finished_rows, warmup_title

Record = dict[str, Any]
Cells = list[list[list[Record]]]  # rows, columns, seeds
OURS = "lipsformer"
GRAY = "Gray: a loss near that of guessing, in one seed or more."
IN_SHORT = (
    *("lipsformer", "pre-norm", "plain", "plain + QK-norm"),
    *("LayerScale", "sigmaReparam", "nViT"),
)


def plot_all(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw every picture for which there are cells; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for data, title in TITLES.items():
        if finished_rows(records, data, WARMUPS[0]):
            drawn.append(plot_rates(records, data, title, folder / f"{data}.png"))
    short = [r for r in records if r["body"] in IN_SHORT and r["optimizer"] == "adamw"]
    if finished_rows(short, "cifar10", WARMUPS[0]):
        path = folder / "summary.png"
        drawn.append(plot_rates(short, "cifar10", f"{TITLES['cifar10']}, AdamW", path))
    if deep(records):
        drawn.append(plot_depths(records, folder / "depth.png"))
    if any(first_grid(records, body) for body in BODIES):
        drawn.append(plot_signals(records, folder / "signals.png"))
    return drawn


def plot_rates(records: Sequence[Record], data: str, title: str, path: Path) -> Path:
    """Draw the accuracy of every row at every learning rate, one panel per warmup."""
    order = list(finished_rows(records, data, WARMUPS[0]))
    panels = {}
    for warmup in WARMUPS:
        rows = finished_rows(records, data, warmup)
        if rows:
            panels[warmup_title(warmup)] = [
                [select(rows.get((body, optimizer), []), lr=lr) for lr in rates(optimizer)]
                for body, optimizer in order
            ]
    names = [body if optimizer == "adamw" else f"{body} · {optimizer}" for body, optimizer in order]
    columns = [f"{k:g}×" for k in all_multiples()]
    about = f"{title}: accuracy on held-out images, %. {GRAY}"
    return heatmap(panels, names, columns, "learning rate, times the usual one", about, path)


def plot_depths(records: Sequence[Record], path: Path) -> Path:
    """Draw the accuracy of every body over its number of blocks."""
    found = deep(records)
    bodies = [body for body in BODIES if select(found, body=body)]

    def reached(body: str) -> float:
        return -mean(r["top1"] for r in select(found, body=body))

    bodies.sort(key=reached)
    grid = [[select(found, body=body, blocks=depth) for depth in DEPTHS] for body in bodies]
    columns = [str(depth) for depth in DEPTHS]
    about = f"CIFAR-10, no warmup: held-out accuracy, %. {GRAY}"
    return heatmap({"depth": grid}, bodies, columns, "number of blocks", about, path)


def heatmap(
    panels: dict[str, Cells],
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
    title: str,
    path: Path,
) -> Path:
    """Draw panels of cells colored by accuracy; a cell in which a seed is not stable is gray."""
    height = 0.34 * len(rows) + 1.6
    width = 2.6 + 0.62 * len(columns) * len(panels)
    figure = Figure(figsize=(max(width, 7.0), height), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    flat = [cell for grid in panels.values() for row in grid for cell in row if cell]
    values = [mean(r["top1"] for r in cell) for cell in flat if all(r["stable"] for r in cell)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    for ax, (name, grid) in zip(axes, panels.items(), strict=True):
        for y, row in enumerate(grid):
            for x, cell in enumerate(row):
                _draw_cell(ax, x, y, cell, low, max(high, low + 1e-9))
        ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), title=name)
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticks(range(len(rows)), rows)
        ax.set_xlabel(label)
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)
    for text, row in zip(axes[0].get_yticklabels(), rows, strict=True):
        text.set_fontweight("bold" if row.split(" · ")[0] == OURS else "normal")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    return path


def _draw_cell(ax: Any, x: int, y: int, cell: list[Record], low: float, high: float) -> None:
    if not cell:
        return
    value = mean(r["top1"] for r in cell)
    stable = all(r["stable"] for r in cell)
    share = (value - low) / (high - low)
    color = colormaps["viridis"](share) if stable else "0.85"
    ax.add_patch(_square(x, y, color))
    ink = "0.45" if not stable else "white" if share < 0.6 else "black"
    ax.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=9, color=ink)


def _square(x: int, y: int, color: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=color, linewidth=0)


def plot_signals(records: Sequence[Record], path: Path) -> Path:
    """Draw both signals of every body over the updates, one line per learning rate.

    The smallest entropy and the largest concentration over the blocks are shown: one block is
    enough for a failure. A cross ends a run whose loss was not finite.
    """
    bodies = [body for body in BODIES if first_grid(records, body)]
    per_row = 6
    bands = -(-len(bodies) // per_row)
    figure = Figure(figsize=(2.3 * per_row, 3.4 * bands + 0.6), layout="constrained")
    axes = figure.subplots(2 * bands, per_row, sharex=True, sharey=True, squeeze=False)
    palette = colormaps["plasma"]
    for index in range(bands * per_row):
        band, column = divmod(index, per_row)
        pair = axes[2 * band : 2 * band + 2, column]
        if index >= len(bodies):
            for ax in pair:
                ax.set_visible(False)
            continue
        for record in sorted(first_grid(records, bodies[index]), key=lambda r: r["lr"]):
            place = rates("adamw").index(record["lr"])
            style = {"color": palette(0.9 * place / 5), "lw": 1.5 if record["stable"] else 1.0}
            style["ls"] = "-" if record["stable"] else ":"
            for ax, name, choose in zip(pair, ("entropy", "sec"), (min, max), strict=True):
                points = [(s["update"], choose(s[name])) for s in record["signals"] if s[name]]
                label = f"{all_multiples()[place]:g}× usual rate" if index == 0 else None
                x, y = zip(*points, strict=True)
                ax.plot([1 + value for value in x], y, label=label, **style)
                if record["final_loss"] is None:
                    ax.plot(1 + x[-1], y[-1], "x", color=style["color"])
        pair[0].set_title(bodies[index], fontsize=9)
        for ax in pair:
            ax.set(xscale="log", ylim=(-0.03, 1.03))
            ax.grid(alpha=0.3)
        if column == 0:
            pair[0].set_ylabel("attention entropy,\nsmallest of the blocks", fontsize=8)
            pair[1].set_ylabel("concentration of\nWq^T Wk, largest", fontsize=8)
    for ax in axes[-1]:
        ax.set_xlabel("update + 1", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=9)
    title = "What happens before a run fails (dotted: not stable, cross: loss not finite)"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    return path
