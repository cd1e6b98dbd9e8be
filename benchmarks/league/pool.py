"""Run the missing cells of the league in processes of one thread."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.league.cell import Cell, run_cell
from benchmarks.league.images import Images, cache_images, load_images
from benchmarks.league.plan import next_cell
from benchmarks.league.results import append_result, read_results
from data.root import data_root
from scripts._workers import end_with_parent


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
    root = data_root(None)
    pictures = {name: cache_images(name, root, runs) for name in data}
    records = read_results(results)
    running: dict[Future[dict[str, Any]], Cell] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=end_with_parent) as pool:
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
