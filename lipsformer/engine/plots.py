"""Curves of a run, drawn from its metrics."""

import logging

from lipsformer.analysis.plots import plot_monitor
from lipsformer.engine.run_files import PLOTS
from lipsformer.engine.run_folder import RunFolder

logger = logging.getLogger(__name__)

_KINDS = {"train": "training", "raw": "validation", "ema": "validation, EMA weights"}
_CURVES = {
    "loss": ("cross entropy", [("train", "loss"), ("raw", "loss"), ("ema", "loss")]),
    "accuracy": ("top-1 (%)", [("raw", "top1"), ("ema", "top1")]),
    "lr": ("learning rate", [("train", "lr")]),
    "grad_norm": ("gradient norm before clipping", [("train", "grad_norm")]),
}


def plot_run(run: RunFolder) -> None:
    """Draw loss, accuracy, learning rate, gradient norm and monitor records into `plots/`.

    A disk that is full only costs the curves, because what ended the run is said by its own error.
    """
    try:
        _plot(run)
    except (OSError, ValueError) as error:
        logger.warning("no curves: %s", error)


def _plot(run: RunFolder) -> None:
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display
    except ImportError:
        logger.warning("no curves: matplotlib is missing; pip install 'lipsformer[train]'")
        return
    records = run.metrics()
    folder = run.path / PLOTS
    folder.mkdir(exist_ok=True)
    for name, (label, lines) in _CURVES.items():
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for kind, key in lines:
            points = [(r["update"], r[key]) for r in records if r["kind"] == kind and key in r]
            if points:
                style = {} if kind == "train" else {"marker": "o", "markersize": 3}
                axes.plot(*zip(*points, strict=True), label=_KINDS[kind], **style)
        axes.set(xlabel="update", ylabel=label)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        if name == "grad_norm" and axes.lines:
            axes.set_yscale("log")
        figure.savefig(folder / f"{name}.png", dpi=120)
    if watched := [r for r in records if r["kind"] == "monitor"]:
        bounds = [
            (r["update"], r["bound_log10"])
            for r in records
            if r["kind"] in ("monitor", "raw") and "bound_log10" in r
        ]
        plot_monitor(folder / "monitor.png", watched, bounds)
