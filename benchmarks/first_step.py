"""Measure the first training step of a compiled model on this CPU, region by region or at once.

    python -m benchmarks.first_step lipsformer_tiny lipsformer_swin_tiny
    python -m benchmarks.first_step lipsformer_tiny --whole

The time is that of one core, with the C++ compiler that Inductor calls, and without any cache.
Other work on the same core makes it larger. A step on a GPU writes Triton instead of C++.
"""

import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache

import lipsformer  # noqa: F401  (registers the models)
from benchmarks.machine import machine
from benchmarks.records import write_record
from lipsformer._commands import documented_parser
from lipsformer._machine import commit
from lipsformer.engine.compilation import compile_regions

RESULTS = Path(__file__).parent / "results" / "first_step.json"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = documented_parser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="names of timm models")
    parser.add_argument("--whole", action="store_true", help="compile the whole model at once")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file that gets the rows")
    options = parser.parse_args(argv)
    rows = json.loads(options.output.read_text()) if options.output.exists() else []
    for name in options.models:
        row = first_step(name, whole=options.whole)
        rows = [r for r in rows if (r["model"], r["whole"]) != (name, options.whole)]
        rows.append({**machine(torch.device("cpu")), "commit": commit(), **row})
        write_record(options.output, rows)
        print(row, flush=True)


def first_step(name: str, *, whole: bool) -> dict[str, Any]:
    """Return the CPU seconds of the first step of two images with drop path, and its graphs."""
    torch.manual_seed(0)
    model: Any = timm.create_model(name, drop_path_rate=0.1).train()
    images = torch.rand(2, *model.default_cfg["input_size"])
    torch.compiler.reset()
    counters.clear()
    with fresh_cache(), config.patch(compile_threads=1):
        if whole:
            model.compile()
        else:
            compile_regions(model, deterministic=False)
        start = _cpu_seconds()
        F.cross_entropy(model(images), torch.tensor([3, 7])).backward()
        seconds = _cpu_seconds() - start
    graphs = counters["stats"]["unique_graphs"]
    return {"model": name, "whole": whole, "cpu_seconds": round(seconds, 1), "graphs": graphs}


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
