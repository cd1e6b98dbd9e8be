"""Run the rows of a study, one thread a run, and keep one line of JSON for each finished run.

    python -m benchmarks.study benchmarks/studies/cifar10_choices.yaml --runs /scratch/runs
    python -m benchmarks.study benchmarks/studies/cifar10_choices.yaml --table --plot curves.png

A study is a base config and named rows of `key=value` settings. Every (row, seed) is one run of
`train.py` in its own folder below `--runs`. The queue can be stopped at any moment: the same
command continues interrupted runs exactly and skips finished ones, which are lines of the study's
JSONL file. `--table` prints the table of the finished runs and lists what was not run.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch

import lipsformer  # noqa: F401  (registers the models)
from benchmarks.machine import machine
from benchmarks.records import markdown
from lipsformer._commands import documented_parser
from lipsformer._configfile import ConfigError, dump_config, read_config, require
from lipsformer.analysis.cost import part_costs
from lipsformer.config import Config
from lipsformer.engine.exits import EXIT_STOPPED, EXIT_USER_ERROR
from lipsformer.engine.run_folder import RunFolder
from lipsformer.jsonl import append_jsonl, read_jsonl

ROOT = Path(__file__).parents[1]
COLUMNS = (
    *("row", "settings", "last epoch, %", "seeds", "M parameters"),
    *("MMACs", "PFLOP", "images/s", "hours"),
)


@dataclass(frozen=True, kw_only=True)
class Study:
    """The rows of a study.

    Args:
        title: Stands above the table.
        config: The base config, relative to the root of the repository.
        results: The JSONL file of the finished runs, relative to the root of the repository.
        overrides: Settings of all rows.
        rows: Name of a row and its settings, separated by blanks.
        seeds: Seeds of every row, unless `row_seeds` names others.
        row_seeds: Seeds of single rows.
    """

    title: str
    config: str
    results: str
    overrides: tuple[str, ...] = ()
    rows: dict[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    row_seeds: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(len(self.rows) > 0, "rows", self.rows, "name at least one")
        unknown = sorted(set(self.row_seeds) - set(self.rows))
        require(not unknown, "row_seeds", unknown, f"must name rows: {', '.join(self.rows)}")

    def runs(self) -> list[tuple[str, int]]:
        """Return (row, seed) of every run, the first seed of every row first."""
        seeds = {row: self.row_seeds.get(row, self.seeds) for row in self.rows}
        rounds = max(len(own) for own in seeds.values())
        return [(row, own[i]) for i in range(rounds) for row, own in seeds.items() if i < len(own)]

    def settings(self, row: str, seed: int) -> list[str]:
        """Return the `key=value` settings of a run."""
        return [*self.overrides, *self.rows[row].split(), f"train.seed={seed}"]


def train(study: Study, name: str, row: str, seed: int, runs: Path) -> dict[str, Any] | None:
    """Train one run to its end in a process of its own; None if it was stopped or could not start.

    The last attempt may still save when the queue is started again; its lock refuses the new one.
    """
    folder = runs / name / f"{row}-seed{seed}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings = [*study.settings(row, seed), f"run.output_dir={folder}", "run.report=false"]
    command = [sys.executable, "train.py", "--config", study.config, *settings]
    started = time.time()
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False
        ).returncode
    if code in (EXIT_STOPPED, EXIT_USER_ERROR, -2, -9, -15):
        return None
    return record(study, row, seed, folder, code, time.time() - started)


def record(
    study: Study, row: str, seed: int, folder: Path, code: int, seconds: float
) -> dict[str, Any]:
    """Return the line of a finished run, with everything that a table of the study needs."""
    config = read_config(Config, ROOT / study.config, study.settings(row, seed))
    lines = RunFolder(folder).metrics()
    trained = [line for line in lines if line["kind"] == "train" and "images_per_s" in line]
    evaluations = [
        {key: line[key] for key in ("kind", "epoch", "update", "top1", "loss", "images")}
        for line in lines
        if line["kind"] in ("raw", "ema")
    ]
    model = timm.create_model(
        config.model.name, num_classes=10, img_size=config.data.img_size, **config.model.kwargs
    )
    image = torch.zeros(1, 3, config.data.img_size, config.data.img_size)
    macs = sum(part.macs for part in part_costs(model, image))
    starts = RunFolder(folder).environment()
    images = (lines[-1]["update"] if lines else 0) * config.train.global_batch_size
    return {
        "row": row,
        "seed": seed,
        "exit_code": code,
        "settings": study.settings(row, seed),
        "config": dump_config(config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "gmacs": macs / 1e9,
        "pflop": 6 * macs * images / 1e15,  # forward, twice that backward; 2 FLOP a MAC
        "images": images,
        "images_per_s": statistics.median(line["images_per_s"] for line in trained)
        if trained
        else None,
        "wall_seconds": round(seconds, 1),
        "starts": len(starts),
        "commit": starts[-1]["git_commit"],
        "machine": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "evaluations": evaluations,
    }


def run(study: Study, name: str, runs: Path, workers: int, only: Sequence[str]) -> None:
    """Train what is missing, `workers` runs at a time, and append a line for each that ends."""
    done = {(line["row"], line["seed"]) for line in read_jsonl(ROOT / study.results)}
    missing = [r for r in study.runs() if r not in done and (not only or r[0] in only)]
    path, lock = ROOT / study.results, threading.Lock()
    path.parent.mkdir(parents=True, exist_ok=True)

    def work(job: tuple[str, int]) -> None:
        line = train(study, name, *job, runs)
        if line is None:
            log = runs / name / f"{job[0]}-seed{job[1]}.log"
            print(f"{job[0]} seed {job[1]} has not ended ({log}); repeat the command", flush=True)
            return
        with lock:
            append_jsonl(path, line)
        print(f"{job[0]} seed {job[1]}: {outcome(line)}", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, missing))


def outcome(line: dict[str, Any]) -> str:
    """Return the last epoch's accuracy, of the raw weights, or why there is none."""
    last = last_evaluation(line)
    if line["exit_code"] != 0 or last is None:
        return f"exit code {line['exit_code']}"
    return f"{last['top1']:.2f} % after epoch {last['epoch']:g}"


def last_evaluation(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the last epoch's evaluation of the raw weights, None without one."""
    raw = [entry for entry in line["evaluations"] if entry["kind"] == "raw"]
    return raw[-1] if raw else None


def table(study: Study) -> str:
    """Return a markdown table of means over seeds, and the runs that are missing."""
    results = list(read_jsonl(ROOT / study.results))
    lines = []
    for row, settings in study.rows.items():
        own = [line for line in results if line["row"] == row]
        finished = [line for line in own if line["exit_code"] == 0]
        if not own:
            continue
        if not finished:
            codes = ", ".join(str(line["exit_code"]) for line in own)
            lines.append((row, f"`{settings}`", f"exit code {codes}", len(own), *5 * ("",)))
            continue
        last = [last_evaluation(line) for line in finished]
        first = finished[0]
        cells = [
            row,
            f"`{settings}`" if settings else "",
            spread([entry["top1"] for entry in last if entry is not None]),
            str(len(finished)),
            f"{first['parameters'] / 1e6:.2f}",
            f"{first['gmacs'] * 1e3:.1f}",
            f"{first['pflop']:.3f}",
            f"{statistics.median(line['images_per_s'] for line in finished):.0f}",
            f"{sum(line['wall_seconds'] for line in finished) / 3600:.2f}",
        ]
        lines.append(cells)
    text = markdown(COLUMNS, lines)
    done = {(line["row"], line["seed"]) for line in results}
    if missing := [f"{row} seed {seed}" for row, seed in study.runs() if (row, seed) not in done]:
        text += f"\n\nNot run: {', '.join(missing)}."
    return text


def spread(values: Sequence[float]) -> str:
    """Return mean and, for several values, standard deviation."""
    mean = statistics.mean(values)
    return f"{mean:.2f}" if len(values) == 1 else f"{mean:.2f} ± {statistics.stdev(values):.2f}"


def plot(study: Study, path: Path) -> None:
    """Draw the accuracy of every finished run over its epochs."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    rows = list(study.rows)
    results = list(read_jsonl(ROOT / study.results))
    for row in rows:
        for index, line in enumerate(own for own in results if own["row"] == row):
            raw = [entry for entry in line["evaluations"] if entry["kind"] == "raw"]
            style = ("-", "--", ":")[rows.index(row) // 10 % 3]
            axes.plot(
                [entry["epoch"] for entry in raw],
                [entry["top1"] for entry in raw],
                style,
                color=f"C{rows.index(row) % 10}",
                label=row if index == 0 else None,
            )
    axes.set(xlabel="epoch", ylabel="accuracy, %", title=study.title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = documented_parser(__doc__)
    parser.add_argument("study", type=Path, help="YAML file of the study")
    parser.add_argument("--runs", type=Path, default=Path("outputs/studies"), help="run folders")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="only these rows")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the curves")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 is a mistake in what was given."""
    options = make_parser().parse_args(argv)
    try:
        study = read_config(Study, options.study)
        for row, seed in study.runs():  # every config is read before the first run starts
            read_config(Config, ROOT / study.config, study.settings(row, seed))
        unknown = sorted(set(options.only) - set(study.rows))
        require(not unknown, "--only", unknown, f"must name rows: {', '.join(study.rows)}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.plot is not None:
        plot(study, options.plot)
    if options.table:
        print(table(study))
    if not options.table and options.plot is None:
        run(study, options.study.stem, options.runs.resolve(), options.workers, options.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
