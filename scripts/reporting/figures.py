"""The figures of a report, drawn by matplotlib as SVG for the page or as PNG."""

import io
import re
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from scripts.reporting.runs import Points, RunLog
from scripts.reporting.theme import COLORS, LIGHT, RIGHT, SERIES, WRONG

STYLE = {
    "font.size": 9.0,
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
    "text.color": LIGHT["text"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.edgecolor": LIGHT["line"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.6,
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "figure.facecolor": "none",
    "svg.fonttype": "none",
}
STYLES = {  # of a kind of record: name, line
    "train": ("training", {"linewidth": 1.1, "alpha": 0.75}),
    "raw": ("validation", {"marker": "o"}),
    "ema": ("validation, EMA", {"marker": "s", "linestyle": "--"}),
}
NO_DATE = {"Date": None, "Creator": None, "Format": None, "Type": None}


def style(more: dict[str, object] | None = None):
    """Return a context, or a decorator, in which matplotlib draws in the style of the page."""
    return matplotlib.rc_context({**STYLE, **(more or {})})


@dataclass(frozen=True)
class Drawing:
    """A figure with its title and its text.

    Attributes:
        name: Name of its file.
        title: The title above it.
        text: A description for screen readers.
        figure: The figure of matplotlib.
    """

    name: str
    title: str
    text: str
    figure: Figure

    def svg(self) -> str:
        """Return an SVG element that uses the colors and the font of the page."""
        with style({"svg.hashsalt": self.name}):
            text = self._saved(format="svg", metadata=NO_DATE).decode()
        text = text[text.index("<svg ") :]
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        text = re.sub(r'<g id="[^"]*">', "<g>", text)  # the ids are the same in every figure
        text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
        for name, (light, _) in COLORS.items():
            text = text.replace(light, f"var(--{name})")
        return re.sub(r"\s*\n\s*", "\n", text)

    def png(self) -> bytes:
        """Return a PNG on the light background."""
        with style():
            return self._saved(format="png", dpi=150, facecolor=LIGHT["background"])

    def _saved(self, **options) -> bytes:
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            # a class name may have letters that matplotlib's font lacks; the page's font has them
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            self.figure.savefig(buffer, **options)
        return buffer.getvalue()


@style()
def training_curves(runs: Sequence[RunLog]) -> list[Drawing]:
    """Draw loss, accuracy, gradient norm, learning rate, throughput and waiting for data."""
    validation = ["raw", "ema"]
    norm, rate = "2-norm before clipping", "images per second"
    share = "% of the training time"
    losses = [value for run in runs for _, value in run.points("train", "loss")]
    leapt = max(losses, default=0.0) > 20.0  # guessing among 1,000 classes costs 6.9
    return [
        _curves(runs, "Loss", "cross entropy", "loss", ["train", *validation], log=leapt),
        _curves(runs, "Top-1 accuracy", "top-1 (%)", "top1", validation),
        _curves(runs, "Gradient norm", norm, "grad_norm", ["train"], log=True),
        _curves(runs, "Learning rate", "learning rate", "lr", ["train"]),
        _curves(runs, "Throughput", rate, "images_per_s", ["train"], floor=0.0),
        _curves(runs, "Waiting for data", share, "data_wait", ["train"], floor=0.0, scale=100.0),
    ]


@style()
def monitor_curves(runs: Sequence[RunLog]) -> list[Drawing]:
    """Draw singular values, residual scales, update sizes and the bound of the model."""
    watched = [run for run in runs if run.monitor]
    drawings = []
    if watched:
        sigma = "largest singular value"
        drawings += [_over_time(watched, "sigma", sigma), _by_layer(watched, "sigma", sigma)]
    if bounded := [run for run in runs if run.bounds]:
        drawings.append(_bound(bounded))
    if weighted := [run for run in watched if _keys(run, "residual_scale")]:
        scale = "residual scale"
        drawings.append(_over_time(weighted, "residual_scale", scale))
        drawings.append(_by_layer(weighted, "residual_scale", scale))
    if watched:
        drawings.append(_over_time(watched, "update_ratio", "relative update", log=True))
    return drawings


@style({"axes.grid": False})
def confusion_figure(run: RunLog, counts: np.ndarray, classes: Sequence[str]) -> Drawing:
    """Draw the confusion matrix; colors show shares of a class, numbers count images.

    More than a hundred classes are joined in groups of neighbors. Mistakes inside a group are then
    left out.

    Args:
        run: The run.
        counts: [K, K]; rows are classes, columns are predictions.
        classes: Names of the K classes.
    """
    group = -(-len(counts) // 100)
    starts = np.arange(0, len(counts), group)
    joined = np.add.reduceat(np.add.reduceat(counts, starts, axis=0), starts, axis=1)
    sizes = joined.sum(1, keepdims=True)
    np.fill_diagonal(joined, np.add.reduceat(counts.diagonal(), starts))
    shares = joined / np.maximum(sizes, 1)
    right = np.eye(len(joined), dtype=bool)
    worst = max(shares[~right].max(initial=0.0), 1e-9)
    cells = np.empty((*joined.shape, 4))
    cells[..., :3] = np.where(right[..., None], to_rgb(RIGHT), to_rgb(WRONG))
    # The root keeps single mistakes visible; text on the colors stays legible up to 0.75.
    cells[..., 3] = 0.75 * np.where(right, shares, np.sqrt(shares / worst))
    figure = Figure(figsize=(4.6, 4.5), layout="constrained")
    axes = figure.subplots()
    edges = (-0.5, len(starts) * group - 0.5)
    axes.imshow(cells, interpolation="none", extent=(*edges, *reversed(edges)))
    if len(classes) <= 20:
        names = [name if len(name) <= 14 else f"{name[:13]}…" for name in classes]
        upright = max(map(len, names)) <= 3
        axes.set_xticks(range(len(names)), names, rotation=0 if upright else 90)
        axes.set_yticks(range(len(names)), names)
        size = min(9.0, 90.0 / len(names))
        for (row, column), count in np.ndenumerate(counts):
            if count > 0:
                axes.text(column, row, str(count), ha="center", va="center", fontsize=size)
    axes.set(xlabel="predicted class", ylabel="class")
    share = 100 * np.trace(counts) / max(counts.sum(), 1)
    text = (
        f"Confusion matrix of {len(classes)} classes and {counts.sum()} images; "
        f"{share:.2f} % lie on the diagonal. The table of confused pairs names the largest others."
    )
    title = "Confusion matrix" if group == 1 else f"Confusion matrix, {group} classes to a cell"
    return Drawing(f"confusion_{run.name.replace('/', '_')}", title, text, figure)


def _curves(
    runs: Sequence[RunLog],
    title: str,
    label: str,
    key: str,
    kinds: Sequence[str],
    *,
    log: bool = False,
    floor: float | None = None,
    scale: float = 1.0,
) -> Drawing:
    figure, axes = _axes(label, log=log)
    handles = _run_handles(runs)
    text = f"Line chart of {label} over updates."
    for kind in kinds:
        series = [[(u, scale * value) for u, value in run.points(kind, key)] for run in runs]
        if not any(series):
            continue
        word, line = STYLES[kind]
        own_color = SERIES[list(STYLES).index(kind)]
        for run, points in zip(runs, series, strict=True):
            _plot(axes, points, color=own_color if runs[0].alone else _color(run), **line)
        if len(kinds) > 1:
            color = own_color if runs[0].alone else LIGHT["muted"]
            handles.append(Line2D([], [], color=color, label=word, **line))
        text += f" {word.capitalize()}: {_ends(runs, series)}"
    if floor is not None:
        axes.set_ylim(bottom=floor)
    _log_ticks(axes)
    _legend(figure, handles)
    return Drawing(key, title, text, figure)


def _over_time(runs: Sequence[RunLog], kind: str, what: str, *, log: bool = False) -> Drawing:
    """Draw the largest, median and smallest value over layers; for several runs the largest."""
    figure, axes = _axes(what, log=log)
    handles = _run_handles(runs)
    tops = []
    for run in runs:
        rows = [(r["update"], [r[key] for key in _keys(run, kind)]) for r in run.monitor]
        tops.append([(update, max(values)) for update, values in rows])
        _plot(axes, tops[-1], color=_color(run))
    if runs[0].alone:
        updates, values = zip(*rows, strict=True)
        low, high = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(updates, low, high, color=SERIES[0], alpha=0.15, linewidth=0)
        axes.plot(updates, [statistics.median(v) for v in values], color=SERIES[1])
        handles = [
            Line2D([], [], color=SERIES[0], label="largest of all layers"),
            Line2D([], [], color=SERIES[1], label="median"),
        ]
    _log_ticks(axes)
    _legend(figure, handles)
    text = f"Line chart of the largest {what} of all layers over updates. {_ends(runs, tops)}"
    return Drawing(f"{kind}_over_time", f"{what.capitalize()} over time", text, figure)


def _by_layer(runs: Sequence[RunLog], kind: str, what: str) -> Drawing:
    """Draw the last values by depth; for a single run also the first ones."""
    figure, axes = _axes(what)
    handles = _run_handles(runs)
    marks = [(run, run.monitor[-1], _color(run)) for run in runs]
    if runs[0].alone:
        marks.insert(0, (runs[0], runs[0].monitor[0], LIGHT["muted"]))
    for run, record, color in marks:
        values = [record[key] for key in _keys(run, kind)]
        (dots,) = axes.plot(values, "o", color=color, markersize=2.5)
        if run.alone:
            dots.set_label(f"update {record['update']}")
            handles.append(dots)
    keys = _keys(runs[0], kind)
    places = _groups([key.partition("/")[2] for key in keys])
    axes.set_xticks(list(places), list(places.values()), rotation=30, ha="right")
    axes.set_xlabel("layers in order of depth")
    _legend(figure, handles)
    last = runs[0].monitor[-1]
    top = max(keys, key=lambda key: last[key])
    text = (
        f"Dots of the {what} of {len(keys)} layers in order of depth. Largest in {runs[0].name}: "
        f"{last[top]:.4g} in {top.partition('/')[2]}."
    )
    return Drawing(f"{kind}_by_layer", f"{what.capitalize()} by layer", text, figure)


def _bound(runs: Sequence[RunLog]) -> Drawing:
    bounds = [run.bounds for run in runs]
    figure, axes = _axes("log10 of the bound")
    for run, points in zip(runs, bounds, strict=True):
        _plot(axes, points, color=_color(run), marker="o")
    _legend(figure, _run_handles(runs))
    text = "Line chart of the decimal logarithm of the proved Lipschitz bound of the model. "
    return Drawing("lipschitz_bound", "Global Lipschitz bound", text + _ends(runs, bounds), figure)


def _groups(names: Sequence[str]) -> dict[int, str]:
    """Return position of the first layer -> numbered part, for parts with room for a label."""
    found: dict[str, int] = {}
    for position, name in enumerate(names):
        part, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if number.isdigit():
            found.setdefault(f"{part}.{number}", position)
    places: dict[int, str] = {}
    for name, position in found.items():
        if not places or position - max(places) > 0.08 * len(names):
            places[position] = name
    return places


def _keys(run: RunLog, kind: str) -> list[str]:
    """Return the keys of a kind in order of depth, which is the order of the gradient norms."""
    record = run.monitor[-1]
    modules = [key.partition("/")[2] for key in record if key.startswith("grad_norm/")]
    depth = {name: position for position, name in enumerate(modules)}

    def position(key: str) -> int:
        name = key.partition("/")[2]  # of a module or of its parameter
        return depth.get(name, depth.get(name.rpartition(".")[0], len(depth)))

    return sorted((key for key in record if key.startswith(f"{kind}/")), key=position)


def _axes(label: str, *, log: bool = False) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(3.9, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="update", ylabel=label)
    if log:
        axes.set_yscale("log")
    return figure, axes


def _log_ticks(axes: Axes) -> None:
    """Label powers of ten with plain numbers, and values between them if there are few."""
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 300 * low else (1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")  # the default writes powers in TeX
        axes.yaxis.set_minor_locator(NullLocator())


def _plot(axes: Axes, points: Points, **line) -> None:
    if len(points) > 60:
        line.pop("marker", None)
    axes.plot([x for x, _ in points], [y for _, y in points], **line)


def _color(run: RunLog) -> str:
    return SERIES[run.position]


def _run_handles(runs: Sequence[RunLog]) -> list[Line2D]:
    if runs[0].alone:
        return []
    return [Line2D([], [], color=_color(run), label=run.name) for run in runs]


def _legend(figure: Figure, handles: list[Line2D]) -> None:
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=3)


def _ends(runs: Sequence[RunLog], series: Sequence[Points]) -> str:
    ends = [
        f"{run.name} ends at {points[-1][1]:.4g}"
        for run, points in zip(runs, series, strict=True)
        if points
    ]
    return "; ".join(ends) + "."
