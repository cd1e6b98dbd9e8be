"""Run the rows of a study, one thread a run, and keep one line of JSON for each finished run.

    python -m benchmarks.study benchmarks/studies/cifar10_choices.yaml --runs /scratch/runs
    python -m benchmarks.study benchmarks/studies/cifar10_choices.yaml --table --plot curves.png

A study is a base config and named rows of `key=value` settings. Every (row, seed) is one run of
`train.py` in its own folder below `--runs`. The queue can be stopped at any moment: the same
command continues interrupted runs exactly and skips finished ones, which are lines of the study's
JSONL file. A run that diverged is finished too, because it would diverge again. `--table` prints
the table of the finished runs and lists what was not run. A message names every finished run that
had other settings than the study has now.

Exit codes: 0 no run failed; 1 a run crashed; 2 a mistake in what was given, or in a run's settings
or data; 75 a signal stopped the queue, after the runs had been saved.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
import yaml

from benchmarks.machine import machine
from benchmarks.records import markdown, spread
from lipsformer._checks import require
from lipsformer._commands import documented_parser, quiet_pipe
from lipsformer._configfile import dump_config, read_config
from lipsformer.analysis.cost import count_parameters, part_costs
from lipsformer.config import Config
from lipsformer.engine.build import build_model
from lipsformer.engine.exits import EXIT_STOPPED, EXIT_USER_ERROR, FINAL
from lipsformer.engine.resume import config_identity
from lipsformer.engine.run_files import read_state
from lipsformer.engine.run_folder import RunFolder
from lipsformer.jsonl import append_jsonl, read_jsonl

ROOT = Path(__file__).parents[1]
MACHINE = ("cpu", "threads", "world_size", "device")  # as the last start of a run found them
LOGS = "logs"  # in the folder of a run: one file for each start
STOPPED = (EXIT_STOPPED, -signal.SIGINT, -signal.SIGTERM)  # the last two before train.py listens
COLUMNS = (
    *("row", "last epoch, %", "seeds", "M parameters"),
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

    def run_config(self, row: str, seed: int) -> Config:
        """Return the config of a run, without its folder.

        Raises:
            ConfigError: If the config is wrong, or the images and products of the run are not those
                of equal updates.
        """
        config = read_config(Config, ROOT / self.config, self.settings(row, seed))
        for key, value, plain in (
            ("train.drop_last", config.train.drop_last, True),
            ("augment.img_sizes", config.augment.img_sizes, ()),
            ("loss.teacher", config.loss.teacher, None),
        ):
            require(value == plain, key, value, f"a study counts costs only with {key}={plain}")
        return config

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the finished runs that the study names."""
        runs = self.runs()
        return [x for x in read_jsonl(ROOT / self.results) if (x["row"], x["seed"]) in runs]


class Processes:
    """Run processes from several threads, and pass SIGTERM and Ctrl-C on to them as SIGTERM.

    On SIGTERM train.py saves its run and ends, so no training outlives a queue that is stopped.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Processes":
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._stop) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], log: IO[str]) -> int:
        """Run a command to its end; return its exit code."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self._started.append(process)
        if self.stopped:  # the signal may have come just before the process was in the list
            process.terminate()
        return process.wait()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        for process in self._started:
            process.terminate()


def train(
    study: Study, row: str, seed: int, folder: Path, processes: Processes
) -> tuple[int, Path]:
    """Train one run to its end in a process of its own; return the exit code and the log.

    The log is named after the time of the start, and its time of change is the end, for `record`.
    If the queue is killed, that is the last line of the training, which may go on without it. The
    lock of the run then refuses a new start.
    """
    where = json.dumps(str(folder))  # quoted, because YAML reads a blank and # as a comment
    settings = [*study.settings(row, seed), f"run.output_dir={where}", "run.report=false"]
    path = folder / LOGS / f"{time.time():.2f}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as log:
        command = [sys.executable, "train.py", "--config", study.config, *settings]
        code = processes.run(command, log)
    path.touch()
    return code, path


def record(study: Study, row: str, seed: int, folder: Path, code: int) -> dict[str, Any]:
    """Return the line of a finished run, with everything that a table of the study needs."""
    config, run = study.run_config(row, seed), RunFolder(folder)
    lines, starts = run.metrics(), run.environment()
    trained = [line for line in lines if line["kind"] == "train" and "images_per_s" in line]
    evaluations = [
        {key: line[key] for key in ("kind", "epoch", "update", "top1", "loss", "images")}
        for line in lines
        if line["kind"] in ("raw", "ema")
    ]
    images = (lines[-1]["update"] if lines else 0) * config.train.global_batch_size
    logs = (folder / LOGS).iterdir()
    return {
        "row": row,
        "seed": seed,
        "exit_code": code,
        "settings": study.settings(row, seed),
        "config": dump_config(config),
        # A run that diverged may have no checkpoint, which tells the number of classes.
        **(costs(config, run, images) if code == 0 else {}),
        "images": images,
        "images_per_s": statistics.median(line["images_per_s"] for line in trained)
        if trained
        else None,
        "wall_seconds": round(sum(log.stat().st_mtime - float(log.stem) for log in logs), 1),
        "starts": len(starts),
        "commit": starts[-1]["git_commit"],
        "machine": machine(torch.device("cpu"))
        | {key: starts[-1][key] for key in MACHINE if key in starts[-1]},  # earlier runs lack some
        "evaluations": evaluations,
    }


def costs(config: Config, run: RunFolder, images: int) -> dict[str, float]:
    """Return what the model of a run costs, for one image and for all images of the training."""
    model = build_model(config, read_state(run.weights("last").folder)["classes"])
    image = torch.zeros(1, 3, config.data.img_size, config.data.img_size)
    macs = sum(part.macs for part in part_costs(model, image))
    return {
        "parameters": count_parameters(model),
        "gmacs": macs / 1e9,
        "pflop": 6 * macs * images / 1e15,  # forward, twice that backward; 2 FLOP a MAC
    }


def run(study: Study, name: str, runs: Path, workers: int, only: Sequence[str]) -> int:
    """Train what is missing, `workers` runs at a time, and append a line for each that finishes.

    Returns:
        The exit code of the command.
    """
    done = {(line["row"], line["seed"]) for line in study.lines()}
    missing = [r for r in study.runs() if r not in done and (not only or r[0] in only)]
    path, lock = ROOT / study.results, threading.Lock()
    path.parent.mkdir(parents=True, exist_ok=True)

    def work(job: tuple[str, int]) -> int:
        if processes.stopped:
            return 0
        title, folder = f"{job[0]} seed {job[1]}", runs / name / f"{job[0]}-seed{job[1]}"
        code, log = train(study, *job, folder, processes)
        if code in STOPPED:
            print(f"{title} has not ended ({log}); repeat the command", flush=True)
            return 0
        if code not in (0, *FINAL):
            last = log.read_text().strip().rpartition("\n")[2]
            print(f"{title} failed with exit code {code}, and {log} ends with: {last}", flush=True)
            return EXIT_USER_ERROR if code == EXIT_USER_ERROR else 1
        line = record(study, *job, folder, code)
        with lock:
            append_jsonl(path, line)
        print(f"{title}: {outcome(line)}", flush=True)
        return 0

    with Processes() as processes, ThreadPoolExecutor(workers) as pool:
        failed = max(pool.map(work, missing), default=0)
    return failed or (EXIT_STOPPED if processes.stopped else 0)


def stale(study: Study) -> list[str]:
    """Return a sentence for every finished run that had other settings than the study has now.

    Settings that leave the training as it is do not count, nor do those that are newer than the
    line of the run.
    """
    sentences = []
    for line in study.lines():
        row, seed = line["row"], line["seed"]
        config = study.run_config(row, seed)
        then, now = yaml.safe_load(line["config"]), yaml.safe_load(dump_config(config))
        keys = [key.split(".") for key in config_identity(config)]
        changed = [
            f"{section}.{key}={then[section][key]!r}, and is now {now[section][key]!r}"
            for section, key in keys
            if key in then.get(section, {}) and then[section][key] != now[section][key]
        ]
        if changed:
            sentences.append(
                f"{row} seed {seed} was trained with {', '.join(changed)}: to train it again, "
                f"remove its line from {study.results} and the folder of the run"
            )
    return sentences


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
    """Return a markdown table of means over complete runs, and the runs that are missing.

    The column of the seeds names the exit codes of runs that ended early, such as diverged ones.
    """
    results = study.lines()
    lines = []
    for row in study.rows:
        own = [line for line in results if line["row"] == row]
        finished = [line for line in own if line["exit_code"] == 0]
        failed = ", ".join(f"exit code {c}" for line in own if (c := line["exit_code"]) != 0)
        if not own:
            continue
        if not finished:
            lines.append((row, failed, len(own), *5 * ("",)))
            continue
        last = [last_evaluation(line) for line in finished]
        first = finished[0]
        cells = [
            row,
            spread([entry["top1"] for entry in last if entry is not None], 2),
            f"{len(finished)}, and {failed}" if failed else str(len(finished)),
            f"{first['parameters'] / 1e6:.2f}",
            f"{first['gmacs'] * 1e3:.1f}",
            f"{first['pflop']:.3f}",
            f"{statistics.median(line['images_per_s'] for line in finished):.0f}",
            f"{sum(line['wall_seconds'] for line in finished) / 3600:.2f}",
        ]
        lines.append(cells)
    text = markdown(COLUMNS, lines)
    done = {(line["row"], line["seed"]) for line in results}
    missing = [f"`{row}` (seed {seed})" for row, seed in study.runs() if (row, seed) not in done]
    if missing:
        text += f"\n\nNot run: {', '.join(missing)}."
    return text


def plot(study: Study, path: Path) -> None:
    """Draw the accuracy of every finished run over its epochs."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    rows = list(study.rows)
    results = study.lines()
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


@quiet_pipe()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(argv)
    try:
        study = read_config(Study, options.study)
        for row, seed in study.runs():  # every config is read before the first run starts
            study.run_config(row, seed)
        unknown = sorted(set(options.only) - set(study.rows))
        require(options.workers >= 1, "--workers", options.workers, "must be >= 1")
        require(not unknown, "--only", unknown, f"must name rows: {', '.join(study.rows)}")
        changed = stale(study)
    except ValueError as error:  # a `ConfigError`, or of `read_jsonl`
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    for sentence in changed:
        print(sentence, file=sys.stderr)
    if options.plot is not None:
        plot(study, options.plot)
    if options.table:
        print(table(study))
    if options.table or options.plot is not None:
        return 0
    return run(study, options.study.stem, options.runs.resolve(), options.workers, options.only)


if __name__ == "__main__":
    sys.exit(main())
