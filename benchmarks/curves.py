"""Training loss and validation accuracy of several runs in one picture.

python -m benchmarks.curves docs/images/imagenette_lr.png outputs/lr_1x outputs/lr_3x ...
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lipsformer._configfile import read_config
from lipsformer.config import Config
from lipsformer.engine.run_folder import RunFolder


def plot_runs(runs: Sequence[Path], output: Path) -> None:
    """Loss over updates and validation accuracy, a line per run."""
    configs = [read_config(Config, run / "config.yaml") for run in runs]
    one_model = len({config.model.name for config in configs}) == 1
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    curves = ((loss, "train", "loss", ""), (accuracy, "raw", "top1", "o"))
    for run, config in zip(runs, configs, strict=True):
        label = (
            f"lr {config.optim.lr:g}" if one_model else f"{config.model.name} {config.optim.lr:g}"
        )
        records = RunFolder(run).metrics()
        for axes, kind, key, marker in curves:
            points = [(r["update"], r[key]) for r in records if r["kind"] == kind]
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=label)
    loss.set(xlabel="update", ylabel="training loss", yscale="log")
    accuracy.set(xlabel="update", ylabel="validation top-1 (%)")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="PNG file to write")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    options = parser.parse_args()
    plot_runs(options.runs, options.output)


if __name__ == "__main__":
    main()
