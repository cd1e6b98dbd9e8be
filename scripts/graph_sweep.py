"""Train a grid of graph networks in parallel processes, then write a table and a plot.

    python -m scripts.graph_sweep --config configs/graph/sweep_depth.yaml num_workers=4

    python -m scripts.graph_sweep --config configs/graph/sweep_depth.yaml --table

Every finished run adds one line to `results.jsonl`, or to the config's `results`. Cells of the grid
that have the same settings share one run. Ctrl-C ends the command at once, and so does a run that
fails. The same command runs only what is missing in that file, and continues interrupted runs from
their last checkpoints. It refuses a line of the file whose config has changed since. `--only`
trains the named cases, and `--table` none: it prints the table and what was not run. The table has
every seed that was run, also those that the config no longer names.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from data.errors import DataError
from lipsformer._checks import require
from lipsformer._commands import documented_parser, user_errors
from lipsformer._configfile import dump_config, read_config
from lipsformer._errors import ConfigError
from lipsformer._files import require_writable
from lipsformer.graph.config import GraphConfig, GraphDataConfig, GraphSweepConfig
from lipsformer.graph.plots import plot_sweep
from lipsformer.jsonl import append_jsonl
from scripts._graph_seed import (
    GraphRunData,
    load_batches,
    locked,
    read_results,
    require_machine,
    require_model,
    summarize,
    train_seed,
)
from scripts._workers import end_with_parent

Cell = dict[str, str]
Result = dict[str, Any]


class Point(NamedTuple):
    """A cell of the grid.

    Attributes:
        cell: Its names.
        overrides: Its settings, which identify its lines in the file of results.
        config: The resolved config of its runs.
        config_hash: Hash of that config, and name of the folder in which its runs train.
    """

    cell: Cell
    overrides: list[str]
    config: GraphConfig
    config_hash: str


# The runs to train, by hash of the config and seed, with the cells that share each of them.
Jobs = dict[tuple[str, int], list[Point]]

_SHOWN = ("test_acc", "last_test_acc", "highest_train_acc")


def cells(config: GraphSweepConfig) -> list[tuple[Cell, list[str]]]:
    """Return all cells of the grid with their names and overrides."""
    axes = []
    for entry in config.grid:
        key, _, values = entry.partition("=")
        axes.append([(key, value.strip()) for value in values.split(",")])
    cases = config.cases or {"": ""}
    result = []
    for (case, overrides), point in itertools.product(cases.items(), itertools.product(*axes)):
        cell = {"case": case, **dict(point)} if config.cases else dict(point)
        assignments = [f"{key}={value}" for key, value in point]
        result.append((cell, [*config.overrides, *overrides.split(), *assignments]))
    return result


def sweep(
    path: Path, overrides: list[str], progress: bool, only: list[str], train: bool = True
) -> str:
    """Run what is missing, of the cases `only` if it names any, and return the table of results."""
    config = read_config(GraphSweepConfig, path, overrides)
    unknown = sorted(set(only) - set(config.cases))
    require(not unknown, "--only", unknown, f"must name cases: {', '.join(config.cases)}")
    points = _points(config, path.parent / config.config)
    folder = Path(config.output_dir)
    log = folder / "results.jsonl" if config.results is None else Path(config.results)
    shared = train and config.results is not None  # perhaps with a sweep in another folder
    if shared:
        _require_results(log)
    with (
        locked(folder) if train else nullcontext(),
        locked(log.with_name(f"{log.name}.lock")) if shared else nullcontext(),
    ):
        lines = read_results(log, "overrides")
        results = {_key(line["overrides"], line["seed"]): line for line in lines}
        _refuse_changed_configs(points, results.values(), log)
        if train:
            _run_missing(config, points, log, results, only, progress)
        rows, missing = [], []
        for point in points:
            runs = [line for line in results.values() if line["overrides"] == point.overrides]
            if runs:
                rows.append({"cell": point.cell, **summarize(runs)})
            absent = [
                str(seed) for seed in config.seeds if _key(point.overrides, seed) not in results
            ]
            if absent:
                missing.append(f"- {', '.join(point.cell.values())}: seeds {', '.join(absent)}\n")
        text = table(rows) if rows else ""
        if missing:
            text += "\nNot run:\n\n" + "".join(missing)
        if train:
            (folder / "summary.json").write_text(json.dumps(rows, indent=2) + "\n")
            (folder / "table.md").write_text(text, encoding="utf-8")
            if config.x is not None:
                plot_sweep(rows, config.x, folder / "plot.png", log_x=config.log_x)
    return text


def _points(config: GraphSweepConfig, base: Path) -> list[Point]:
    points = []
    for cell, overrides in cells(config):
        with _named(cell):
            resolved = read_config(GraphConfig, base, overrides)
        # The first hashes are older than data.split_seed, so null must not change them.
        text = dump_config(resolved).replace("  split_seed: null\n", "")
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        points.append(Point(cell, overrides, resolved, digest))
    return points


@contextmanager
def _named(cell: Cell) -> Iterator[None]:
    """Name a cell in the user's mistakes, which are all ValueErrors."""
    try:
        yield
    except ValueError as error:
        names = ", ".join(f"{key}={value}" for key, value in cell.items())
        raise ConfigError(f"{names}: {error}") from error


def _refuse_changed_configs(points: list[Point], lines: Iterable[Result], log: Path) -> None:
    """Raise a `ConfigError` if a line is the result of another config than its cell has now."""
    for point, line in itertools.product(points, lines):
        # lines of earlier versions have no hash
        if line["overrides"] == point.overrides and line.get("config_hash") not in (
            None,
            point.config_hash,
        ):
            with _named(point.cell):
                raise ConfigError(
                    f"{log} has a result of seed {line['seed']} that was trained with another "
                    "config; delete that line to train it again, or restore the config"
                )


def _run_missing(
    config: GraphSweepConfig,
    points: list[Point],
    log: Path,
    results: dict[str, Result],
    only: list[str],
    progress: bool,
) -> None:
    """Train every run that `results` lacks, and add its line to `results` and to the file `log`."""
    jobs: Jobs = {}
    for seed, point in itertools.product(config.seeds, points):
        if _key(point.overrides, seed) not in results and (not only or point.cell["case"] in only):
            jobs.setdefault((point.config_hash, seed), []).append(point)
    _check({shared[0].config_hash: shared[0] for shared in jobs.values()}.values())
    folder = Path(config.output_dir)
    (folder / "sweep.yaml").write_text(dump_config(config), encoding="utf-8")
    log.parent.mkdir(parents=True, exist_ok=True)

    def finish(points: list[Point], result: Result) -> None:
        for cell, overrides, _, config_hash in points:
            line = {"cell": cell, "overrides": overrides, "config_hash": config_hash, **result}
            results[_key(overrides, line["seed"])] = line
            append_jsonl(log, line)

    _train_all(jobs, folder / "runs", config.num_workers, finish, progress)


def _require_results(log: Path) -> None:
    """Raise a `ConfigError` if no line can be added to the results."""
    parent = next(path for path in log.absolute().parents if os.path.lexists(path))
    if not parent.is_dir():
        raise ConfigError(f"results {str(log)!r} cannot be written: {parent} is no folder")
    if parent == log.absolute().parent:
        require_writable("results", log)


def _check(points: Iterable[Point]) -> None:
    """Raise a `ConfigError` for a mistake that would end a training at its start.

    Every graph is read here once, so that no two processes download or prepare it.
    """
    loaded: dict[GraphDataConfig, GraphRunData] = {}
    for point in points:
        config = point.config
        with _named(point.cell):
            require_machine(config.run)
            if config.data not in loaded:
                loaded[config.data] = load_batches(config)
            require_model(config, loaded[config.data])


def _train_all(
    jobs: Jobs,
    runs: Path,
    num_workers: int,
    finish: Callable[[list[Point], Result], None],
    progress: bool,
) -> None:
    """Train the jobs in processes, and hand each result to `finish` as soon as it is known.

    If a job fails, or Ctrl-C is pressed, the other processes are ended.
    """
    waiting = iter(jobs.items())
    running: dict[Future[Result], list[Point]] = {}
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(num_workers, spawn, initializer=_start_worker) as pool,
        tqdm(total=len(jobs), disable=not progress) as bar,
    ):
        try:
            while True:
                free = num_workers - len(running)
                for (config_hash, seed), points in itertools.islice(waiting, free):
                    job = pool.submit(_train, points[0].config, seed, runs / config_hash)
                    running[job] = points
                if not running:
                    return
                for job in wait(running, return_when=FIRST_COMPLETED).done:
                    with _named(running[job][0].cell):
                        result = job.result()
                    finish(running[job], result)
                    del running[job]
                    bar.update()
        except BaseException:
            # The pool waits for running jobs, which may take hours. They continue from their
            # checkpoints at the next start.
            for process in multiprocessing.active_children():
                process.terminate()
            for job, points in running.items():
                if job.done() and job.exception() is None:
                    finish(points, job.result())
            raise


def _start_worker() -> None:
    # Ctrl-C reaches all processes of a terminal, and the command ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def _train(config: GraphConfig, seed: int, folder: Path) -> Result:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    return train_seed(config, load_batches(config), seed, folder)


def _key(settings: list[str], seed: int) -> str:
    return json.dumps([settings, seed])


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of summaries with one row per cell and accuracies in percent."""
    names = list(rows[0]["cell"])
    header = [*names, "best-validation test", "last-epoch test", "highest train"]
    header += ["diverged", "seeds"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        accuracies = [_with_std(row, key) for key in _SHOWN]
        values = [*(row["cell"][name] for name in names), *accuracies]
        values += [str(row["diverged"]), str(row["seeds"])]
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def _with_std(row: dict[str, Any], key: str) -> str:
    std = row[f"{key}_std"]
    return f"{row[key]:.1f}" if std is None else f"{row[key]:.1f} ± {std:.1f}"


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument(
        "--config", required=True, type=Path, help="YAML file of a GraphSweepConfig"
    )
    parser.add_argument("--table", action="store_true", help="print the table and train nothing")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="train it only")
    parser.add_argument("overrides", nargs="*", help="key=value")
    return parser


@user_errors(ConfigError, DataError, ValueError)
def main(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command and return its exit code; 2 means that the config or the data are wrong."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    progress = sys.stderr.isatty()
    text = sweep(args.config, args.overrides, progress, args.only, train=not args.table)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
