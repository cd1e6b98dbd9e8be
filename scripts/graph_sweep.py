"""Train a grid of graph networks in parallel processes, then write a table and a plot.

    python -m scripts.graph_sweep --config configs/graph/sweep_depth.yaml num_workers=4

Every finished run adds one line to `results.jsonl`. The same command runs only what is missing in
that file.
"""

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
from lipsformer._commands import documented_parser
from lipsformer._configfile import ConfigError, dump_config, read_config
from lipsformer.graph.config import GraphConfig, GraphSweepConfig
from lipsformer.graph.plots import plot_sweep
from lipsformer.jsonl import append_jsonl, read_jsonl
from scripts._graph_seed import load_batches, summarize, train_seed

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


def _train(path: Path, overrides: list[str], seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train_seed(read_config(GraphConfig, path, overrides), seed)


def sweep(path: Path, overrides: list[str], progress: bool) -> str:
    """Run what is missing, and return the table of all results."""
    config = read_config(GraphSweepConfig, path, overrides)
    base = path.parent / config.config
    folder = Path(config.output_dir)
    grid = cells(config)
    # mistakes show before the first training, and no two processes prepare the same graph
    configs = [read_config(GraphConfig, base, settings) for _, settings in grid]
    for data in {repr(item.data): item.data for item in configs}.values():
        load_batches(data)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.yaml").write_text(dump_config(config))
    log = folder / "results.jsonl"
    results = {_key(line["overrides"], line["seed"]): line for line in read_jsonl(log)}
    jobs = [
        (cell, settings, seed)
        for seed in config.seeds
        for cell, settings in grid
        if _key(settings, seed) not in results
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(config.num_workers, mp_context=spawn) as pool:
        futures = {
            pool.submit(_train, base, settings, seed): (cell, settings)
            for cell, settings, seed in jobs
        }
        for future in tqdm(as_completed(futures), total=len(futures), disable=not progress):
            cell, settings = futures[future]
            line = {"cell": cell, "overrides": settings, **future.result()}
            results[_key(settings, line["seed"])] = line
            append_jsonl(log, line)

    rows = []
    for cell, settings in grid:
        runs = [results[_key(settings, seed)] for seed in config.seeds]
        rows.append({"cell": cell, **summarize(runs)})
    (folder / "summary.json").write_text(json.dumps(rows, indent=2) + "\n")
    text = table(rows)
    (folder / "table.md").write_text(text)
    if config.x is not None:
        plot_sweep(rows, config.x, folder / "plot.png", log_x=config.log_x)
    return text


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


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; 2 means that the config or the data are wrong."""
    parser = documented_parser(__doc__)
    parser.add_argument(
        "--config", required=True, type=Path, help="YAML file of a GraphSweepConfig"
    )
    parser.add_argument("overrides", nargs="*", help="key=value")
    args = parser.parse_intermixed_args(argv)
    try:
        text = sweep(args.config, args.overrides, progress=sys.stderr.isatty())
    except (ConfigError, DataError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
