"""The stability league: train every body at every learning rate, then make tables and plots.

    python -m benchmarks.league --runs /scratch/league --workers 2
    python -m benchmarks.league --table --plot docs/images/league

The command can be stopped at any moment: finished cells are lines of the results, and the same
command goes on with the rest. A cell that was interrupted starts again; one takes about half a
minute of one core. `--runs` holds the decoded pictures.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.league.bodies import BODIES
from benchmarks.league.cell import ROOT, Cell, run_cell
from benchmarks.league.images import FOLDERS, Images, cache_images, load_images
from benchmarks.league.plan import next_cell
from benchmarks.league.plots import plot_all
from benchmarks.league.results import append_result, read_results
from benchmarks.league.table import page


@cache
def _images(path: Path) -> Images:
    return load_images(path)


def work(cell: Cell, pictures: Path) -> dict[str, Any]:
    """Run a cell in a process of the pool, on one thread."""
    torch.set_num_threads(1)
    return run_cell(cell, _images(pictures))


def run(
    runs: Path, results: Path, workers: int, data: Sequence[str], only: Sequence[str] = ()
) -> None:
    """Run the missing cells, `workers` at a time, and append a line for each that ends.

    Args:
        runs: Folder of the decoded pictures.
        results: Folder of the results.
        workers: Number of processes.
        data: Data sets to run.
        only: Names of bodies to run; empty for all.
    """
    root = Path(os.environ.get("LIPSFORMER_DATA", ROOT / "datasets"))
    pictures = {name: cache_images(name, root, runs) for name in data}
    records = read_results(results)
    running: dict[Future[dict[str, Any]], Cell] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        while True:
            while len(running) < workers:
                cell = next_cell(records, set(running.values()), data, only)
                if cell is None:
                    break
                running[pool.submit(work, cell, pictures[cell.data])] = cell
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell, record = running.pop(future), future.result()
                append_result(results, record)
                records.append(record)
                outcome = f"{record['top1']:.1f} %" + ("" if record["stable"] else ", not stable")
                print(f"{len(records)}: {cell}: {outcome}", flush=True)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.league",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=Path, default=Path("outputs/league"), help="scratch folder")
    parser.add_argument("--workers", type=int, default=1, help="cells at a time, one thread each")
    parser.add_argument("--data", nargs="+", choices=FOLDERS, default=list(FOLDERS))
    parser.add_argument("--only", nargs="+", choices=BODIES, default=[], help="only these bodies")
    results = ROOT / "benchmarks" / "results" / "league"
    parser.add_argument("--results", type=Path, default=results, help="folder of the JSON lines")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="only draw the pictures")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 means that the data are missing."""
    options = make_parser().parse_args(argv)
    if options.table:
        print(page(read_results(options.results)))
    if options.plot is not None:
        for path in plot_all(read_results(options.results), options.plot):
            print(path)
    if not options.table and options.plot is None:
        try:
            run(options.runs, options.results, options.workers, options.data, options.only)
        except FileNotFoundError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
