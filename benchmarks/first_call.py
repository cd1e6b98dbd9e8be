"""Time the first forward pass of a new process against the second one, without a compiler.

    make wheel && python3 -m venv /tmp/bare && /tmp/bare/bin/pip install dist/*.whl
    python -m benchmarks.first_call /tmp/bare/bin/python --output benchmarks/results/first_call.json

The interpreter is that of an environment with an installed wheel. It runs in an empty home folder
and with an empty PATH, so that no compiler is found and no library of an earlier run. Every round
is a new process for each model. Each says whether the compiled kernels were used.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.records import markdown, run
from lipsformer._commands import documented_parser
from lipsformer._machine import commit

MODELS = ("lipsformer_nano", "lipsformer_tiny", "swin_tiny_patch4_window7_224")
CODE = """
import sys, time
import lipsformer, timm, torch
from lipsformer.kernels.build import compiled_library

model = timm.create_model(sys.argv[1]).eval()
images = torch.randn(1, *model.default_cfg["input_size"])
ends = [time.perf_counter()]
for _ in range(2):
    with torch.no_grad():
        model(images)
    ends.append(time.perf_counter())
print(ends[1] - ends[0], ends[2] - ends[1], int(compiled_library() is not None))
"""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run every model in new processes; return the seconds of both passes of each."""
    calls: dict[str, list[list[float]]] = {name: [] for name in MODELS}
    kernels = True
    for _ in range(options.rounds):
        for name in MODELS:
            with tempfile.TemporaryDirectory() as home:
                first, second, found = _fresh_process(options.python, name, home)
                if os.listdir(home):
                    raise SystemExit(f"error: {options.python} compiled or stored something")
            calls[name].append([round(first, 4), round(second, 4)])
            kernels = kernels and bool(found)
    return {
        "machine": machine(torch.device("cpu")),
        "commit": commit(),
        "kernels": kernels,
        "seconds": calls,
    }


def _fresh_process(python: str, name: str, home: str) -> list[float]:
    """Return the seconds of the first and second pass, and 1 if the kernels were there."""
    result = subprocess.run(
        [python, "-c", CODE, name],
        cwd=home,
        env={"PATH": home, "HOME": home},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(word) for word in result.stdout.split()]


def table(record: dict[str, Any]) -> str:
    """Return the medians in milliseconds, and the median and the largest difference."""
    host = record["machine"]
    rows = []
    for name, calls in record["seconds"].items():
        first, second = (1e3 * statistics.median(times) for times in zip(*calls, strict=True))
        later = [1e3 * (one - two) for one, two in calls]
        figures = (first, second, statistics.median(later), max(later))
        rows.append((f"`{name}`", *(f"{figure:.0f}" for figure in figures)))
    header = ("model", "first pass (ms)", "second pass (ms)", "difference (ms)", "largest")
    found = "compiled kernels" if record["kernels"] else "no compiled kernels"
    text = f"{host['cpu']}, torch {host['torch']}, {host['date']}, {found}\n\n"
    return text + markdown(header, rows)


if __name__ == "__main__":
    parser = documented_parser(__doc__, prog="python -m benchmarks.first_call")
    parser.add_argument("python", nargs="?", help="interpreter of an environment with a wheel")
    parser.add_argument("--rounds", type=int, default=7, help="processes for each model")
    run(parser, measure, table)
