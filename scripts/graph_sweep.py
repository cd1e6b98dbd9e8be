"""Train a grid of graph networks in parallel processes, then write a table and a plot.

    python -m scripts.graph_sweep --config configs/graph/sweep_depth.yaml num_workers=4

    python -m scripts.graph_sweep --config configs/graph/sweep_depth.yaml --table

Every finished run adds one line to `results.jsonl`, or to the config's `results`. The same command
runs only what is missing in that file, and continues interrupted runs from their last checkpoints.
`--only` trains the named cases, and `--table` none: it prints the table and what was not run. The
table has every seed that was run, also those that the config no longer names.
"""

import hashlib
import itertools
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data.errors import DataError
from lipsformer._commands import documented_parser, user_errors
from lipsformer._configfile import ConfigError, dump_config, read_config, require
from lipsformer.graph.config import GraphConfig, GraphSweepConfig
from lipsformer.graph.plots import plot_sweep
from lipsformer.jsonl import append_jsonl, read_jsonl
from scripts._graph_seed import load_batches, summarize, train_seed
from scripts._workers import end_with_parent

Cell = dict[str, str]

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


def _train(path: Path, overrides: list[str], seed: int, runs: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = read_config(GraphConfig, path, overrides)
    folder = runs / hashlib.sha256(dump_config(config).encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return train_seed(config, load_batches(config), seed, folder)


def sweep(
    path: Path, overrides: list[str], progress: bool, only: list[str], train: bool = True
) -> str:
    """Run what is missing, of the cases `only` if it names any, and return the table of results."""
    config = read_config(GraphSweepConfig, path, overrides)
    unknown = sorted(set(only) - set(config.cases))
    require(not unknown, "--only", unknown, f"must name cases: {', '.join(config.cases)}")
    folder = Path(config.output_dir)
    log = folder / "results.jsonl" if config.results is None else Path(config.results)
    results = {_key(line["overrides"], line["seed"]): line for line in read_jsonl(log)}
    if train:
        _run_missing(config, path.parent / config.config, log, results, only, progress)
    rows, missing = [], []
    for cell, settings in cells(config):
        runs = [line for line in results.values() if line["overrides"] == settings]
        if runs:
            rows.append({"cell": cell, **summarize(runs)})
        absent = [str(seed) for seed in config.seeds if _key(settings, seed) not in results]
        if absent:
            missing.append(f"- {', '.join(cell.values())}: seeds {', '.join(absent)}\n")
    text = (table(rows) if rows else "") + ("\nNot run:\n\n" + "".join(missing) if missing else "")
    if train:
        (folder / "summary.json").write_text(json.dumps(rows, indent=2) + "\n")
        (folder / "table.md").write_text(text)
        if config.x is not None:
            plot_sweep(rows, config.x, folder / "plot.png", log_x=config.log_x)
    return text


def _run_missing(
    config: GraphSweepConfig,
    base: Path,
    log: Path,
    results: dict[str, dict[str, Any]],
    only: list[str],
    progress: bool,
) -> None:
    """Train every run that `results` lacks, and add its line to `results` and to the file `log`."""
    folder = Path(config.output_dir)
    grid = cells(config)
    # mistakes show before the first training, and no two processes prepare the same graph
    configs = [read_config(GraphConfig, base, settings) for _, settings in grid]
    for item in {repr(item.data): item for item in configs}.values():
        load_batches(item)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.yaml").write_text(dump_config(config))
    log.parent.mkdir(parents=True, exist_ok=True)
    jobs = [
        (cell, settings, seed)
        for seed in config.seeds
        for cell, settings in grid
        if _key(settings, seed) not in results and (not only or cell["case"] in only)
    ]
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(config.num_workers, spawn, initializer=end_with_parent)
    with pool:
        futures = {
            pool.submit(_train, base, settings, seed, folder / "runs"): (cell, settings)
            for cell, settings, seed in jobs
        }
        for future in tqdm(as_completed(futures), total=len(futures), disable=not progress):
            cell, settings = futures[future]
            line = {"cell": cell, "overrides": settings, **future.result()}
            results[_key(settings, line["seed"])] = line
            append_jsonl(log, line)


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


@user_errors(ConfigError, DataError, ValueError)
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; 2 means that the config or the data are wrong."""
    parser = documented_parser(__doc__)
    parser.add_argument(
        "--config", required=True, type=Path, help="YAML file of a GraphSweepConfig"
    )
    parser.add_argument("--table", action="store_true", help="print the table and train nothing")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="train it only")
    parser.add_argument("overrides", nargs="*", help="key=value")
    args = parser.parse_intermixed_args(argv)
    progress = sys.stderr.isatty()
    text = sweep(args.config, args.overrides, progress, args.only, train=not args.table)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
