"""Curves of a run, drawn from metrics.jsonl."""

import logging
from pathlib import Path

from lipsformer.engine.tracking import METRICS, read_metrics

logger = logging.getLogger(__name__)

_KINDS = {"train": "training", "raw": "validation", "ema": "validation, EMA weights"}


def plot_curves(output_dir: Path) -> list[Path]:
    """Draws loss, accuracy, learning rate and gradient norm over updates into `plots/`."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display
    except ImportError:
        logger.warning("no curves: matplotlib is missing; pip install 'lipsformer[train]'")
        return []

    records = read_metrics(output_dir / METRICS)
    curves = {
        "loss": [("train", "loss"), ("raw", "loss"), ("ema", "loss")],
        "accuracy": [("raw", "top1"), ("ema", "top1")],
        "lr": [("train", "lr")],
        "grad_norm": [("train", "grad_norm")],
    }
    labels = {"loss": "cross entropy", "accuracy": "top-1 (%)", "lr": "learning rate"}
    folder = output_dir / "plots"
    folder.mkdir(exist_ok=True)
    drawn = []
    for name, lines in curves.items():
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for kind, key in lines:
            points = [(r["update"], r[key]) for r in records if r["kind"] == kind and key in r]
            if points:
                style = {"marker": "o", "markersize": 3} if kind in ("raw", "ema") else {}
                axes.plot(*zip(*points, strict=True), label=_KINDS[kind], **style)
        axes.set(xlabel="update", ylabel=labels.get(name, "gradient norm before clipping"))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        if name == "grad_norm" and axes.lines:
            axes.set_yscale("log")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        drawn.append(path)
    return drawn
