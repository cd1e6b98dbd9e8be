"""A training step of this checkout beside one of another checkout, in alternating processes.

    git worktree add /tmp/earlier b50f569
    python -m benchmarks.versions /tmp/earlier --no-compiler \
        --output benchmarks/results/versions_fallback.json

Every round is one new process per checkout and model. It times its steps after the first two, and
its median counts. With --no-compiler the processes find no compiler and no kernels of an earlier
run, so they take the operators that are left to such a machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.records import markdown, run
from lipsformer._commands import documented_parser
from lipsformer._machine import commit

ROOT = Path(__file__).parents[1]
MODELS = ("lipsformer_swin_tiny", "lipsformer_tiny")
CODE = """
import statistics, sys, time
import lipsformer, timm, torch

torch.manual_seed(0)
torch.set_num_threads(int(sys.argv[4]))
model = timm.create_model(sys.argv[1], drop_path_rate=0.0)
images, labels = torch.randn(int(sys.argv[2]), 3, 224, 224), torch.zeros(int(sys.argv[2])).long()
seconds = []
for _ in range(int(sys.argv[3]) + 2):
    start = time.perf_counter()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    model.zero_grad()
    seconds.append(time.perf_counter() - start)
print(lipsformer.__file__, statistics.median(seconds[2:]))
"""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both checkouts in turn; return the seconds of a step of each, per model."""
    folders = {"earlier": options.checkout.resolve(), "this": ROOT}
    seconds: dict[str, dict[str, list[float]]] = {
        model: {which: [] for which in folders} for model in MODELS
    }
    for _ in range(options.rounds):
        for model in MODELS:
            for which, folder in folders.items():
                step = _step_seconds(folder, model, options)
                seconds[model][which].append(round(step, 4))
    return {
        "machine": machine(torch.device("cpu")),
        "commits": {which: commit(folder) for which, folder in folders.items()},
        "compiler": not options.no_compiler,
        "batch_size": options.batch_size,
        "seconds": seconds,
    }


def _step_seconds(folder: Path, model: str, options: argparse.Namespace) -> float:
    numbers = (options.batch_size, options.steps, torch.get_num_threads())
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with tempfile.TemporaryDirectory() as empty:
        if options.no_compiler:
            environment |= {"PATH": empty, "CXX": f"{empty}/none", "XDG_CACHE_HOME": empty}
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CODE, model, *map(str, numbers)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        if options.no_compiler and list(Path(empty).rglob("*.so")):
            raise SystemExit(f"error: {folder} found a compiler")
    imported, seconds = result.stdout.split()
    if not Path(imported).is_relative_to(folder):
        raise SystemExit(f"error: {folder} has no lipsformer; {imported} was imported instead")
    return float(seconds)


def table(record: dict[str, Any]) -> str:
    """Return the median step of both in milliseconds, and how many times as fast this one is."""
    host, commits = record["machine"], record["commits"]
    kernels = "compiled kernels" if record["compiler"] else "no compiler"
    text = (
        f"{host['cpu']}, {host['threads']} threads, torch {host['torch']}, batch "
        f"{record['batch_size']}, {kernels}, {host['date']}; commits {commits['earlier']} and "
        f"{commits['this']}\n\n"
    )
    rows = []
    for model, own in record["seconds"].items():
        ratios = [a / b for a, b in zip(own["earlier"], own["this"], strict=True)]
        shown = [f"{1e3 * statistics.median(own[which]):.0f}" for which in ("earlier", "this")]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((f"`{model}`", *shown, spread))
    return text + markdown(("model", "earlier (ms)", "this (ms)", "speed ratio (range)"), rows)


if __name__ == "__main__":
    parser = documented_parser(__doc__, prog="python -m benchmarks.versions")
    parser.add_argument("checkout", type=Path, help="folder of the other checkout")
    parser.add_argument("--no-compiler", action="store_true")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a process")
    parser.add_argument("--rounds", type=int, default=5)
    run(parser, measure, table)
