"""Predict operators, kernels, traffic, memory and the least time of a training step on a GPU.

    python -m benchmarks.gpu_predictions lipsformer_swin_tiny swin_tiny_patch4_window7_224
    python -m benchmarks.gpu_predictions lipsformer_tiny --extend 2
    python -m benchmarks.gpu_predictions --triton
    python -m benchmarks.gpu_predictions --batches
    python -m benchmarks.gpu_predictions --table

No GPU is needed and nothing is measured: see docs/gpu.md. Each model writes one file. A model of
the size of Swin-Tiny takes some minutes of one core.
"""

import datetime
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import triton
from torch import nn

from benchmarks.gpu_predictions import batches
from benchmarks.gpu_predictions.cubins import ARCHITECTURES, generated
from benchmarks.gpu_predictions.devices import DEVICES, step_seconds
from benchmarks.gpu_predictions.host import compiled_regions
from benchmarks.gpu_predictions.inductor import Kernel, schedule
from benchmarks.gpu_predictions.table import page
from benchmarks.gpu_predictions.trace import build, cuda_step, eager, graphs
from benchmarks.gpu_predictions.triton_kernels import all_resources
from lipsformer._commands import documented_parser
from lipsformer._machine import commit

RESULTS = Path(__file__).parents[1] / "predictions"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = documented_parser(__doc__, prog="python -m benchmarks.gpu_predictions")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of timm models")
    parser.add_argument("--batch-size", type=int, default=128, help="images per step")
    parser.add_argument("--triton", action="store_true", help="compile the Triton kernels")
    parser.add_argument(
        "--extend", type=int, metavar="STAGE", help="extend the figures of a deep stage"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="leave out the others"
    )
    parser.add_argument(
        "--architectures",
        type=int,
        nargs="*",
        choices=ARCHITECTURES,
        default=[90],
        help="compile the kernels that Inductor writes for these GPUs",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--table", action="store_true", help="print the tables of all results")
    parser.add_argument(
        "--batches", action="store_true", help="state in the ImageNet configs which batches fit"
    )
    options = parser.parse_args(argv)
    unknown = [name for name in options.models if not timm.is_model(name)]
    if unknown:
        parser.error(f"timm has no model {unknown[0]!r}; timm.list_models() shows all")
    for name in options.models:
        path = options.results / f"{name}.json"
        record = json.loads(path.read_text()) if path.exists() else {}
        for part in options.parts:
            record |= versions() | PARTS[part](name, options)
            record["commits"] = {**record.get("commits", {}), part: record["commit"]}
            _write(path, record)
    if options.triton:
        record = {**versions(), "kernels": all_resources()}
        _write(options.results / "triton.json", record)
    records = [json.loads(path.read_text()) for path in options.results.glob("*.json")]
    if options.batches:
        batches.write({record["model"]: record for record in records if "model" in record})
    if options.table:
        print(page(records))


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(path, flush=True)


def predict(name: str, options: Namespace) -> dict[str, Any]:
    """Return the setting of a training step and what it costs without compilation."""
    (*short, model), times = lengths(name, options.extend)
    shape = (options.batch_size, *model.default_cfg["input_size"])
    found = []
    for each in short or [model]:
        with cuda_step(each, shape) as traced:
            found.append({"parameters": traced.parameters, "eager": eager(traced)})
    return {
        "model": name,
        "batch_size": options.batch_size,
        "image_size": shape[-1],
        "precision": "bf16 autocast",
        **(extended(found[0], found[1], times) if short else found[0]),
    }


def predict_regions(name: str, options: Namespace | None = None) -> dict[str, Any]:
    """Return how many graphs a run compiles region by region, and where they break."""
    model: Any = build(name, drop_path_rate=0.1)
    images = torch.empty(2, *model.default_cfg["input_size"], device="meta")
    return {"regions": compiled_regions(model, images)}


def predict_compiled(name: str, options: Namespace) -> dict[str, Any]:
    """Return what a training step costs after compilation.

    Args:
        name: Name of a timm model.
        options: The number of images `batch_size`. With `extend`, a stage of equal blocks, the
            compiler sees this stage with two and with four blocks, and every figure goes on in a
            straight line to the depth of the stage. The kernels that Inductor writes are compiled
            for the GPUs of `architectures`.
    """
    (*short, model), times = lengths(name, options.extend)
    shape = (options.batch_size, *model.default_cfg["input_size"])
    found, sources = zip(*(compile_step(each, shape) for each in short or [model]), strict=True)
    figures = extended(found[0], found[1], times) if short else found[0]
    record = {"extended_stage": options.extend, **figures}
    return {"compiled": {**record, "generated": generated(sources[-1], options.architectures)}}


def compile_step(model: nn.Module, shape: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """Compile a training step of a model on the meta device.

    Returns:
        What the kernels do, and the source of each different kernel that Inductor writes.
    """
    with cuda_step(model, shape) as traced:
        found, parameters = graphs(traced), traced.parameters
    saved = sum(tensor.numel() * tensor.itemsize for tensor in found.saved())
    forward = schedule(found.forward, backward=False)
    backward = schedule(found.backward, backward=True)
    kernels = forward.kernels + backward.kernels
    sources = list(dict.fromkeys(forward.sources + backward.sources))
    figures = {
        "forward_kernels": len(forward.kernels),
        "backward_kernels": len(backward.kernels),
        "kernels_by_name": _sums(kernels, lambda kernel: 1),
        "bytes": sum(kernel.bytes for kernel in kernels),
        "bytes_by_name": _sums(kernels, lambda kernel: kernel.bytes),
        "products": sum(kernel.products for kernel in kernels),
        "saved_bytes": saved,
        "peak_bytes": max(forward.peak_bytes, backward.peak_bytes),
        "least_seconds": {
            name: step_seconds(kernels, parameters, device) for name, device in DEVICES.items()
        },
    }
    return figures, sources


def lengths(name: str, extend: int | None) -> tuple[list[Any], float]:
    """Build a model, and before it the same with two and with four blocks in a deep stage.

    Blocks of Swin alternate, so that two are the least that can repeat.

    Returns:
        The models, and how often the difference of the first two must be added to the first.
    """
    model: Any = build(name)
    if extend is None:
        return [model], 0.0
    stages = getattr(model, "stages", None) or model.layers  # timm's Swin has layers
    depths = [len(stage.blocks) for stage in stages]
    short = [build(name, depths=(*depths[:extend], n, *depths[extend + 1 :])) for n in (2, 4)]
    return [*short, model], (depths[extend] - 2) / 2


def extended(one: Any, two: Any, times: float) -> Any:
    """Return one + times * (two - one) for all numbers of two records."""
    if isinstance(one, dict):
        return {key: extended(one[key], two[key], times) for key in one}
    number = one + times * (two - one)
    return number if isinstance(one, float) else round(number)


PARTS = {"eager": predict, "regions": predict_regions, "compiled": predict_compiled}


def _sums(kernels: Sequence[Kernel], figure: Callable[[Kernel], int]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for kernel in kernels:
        sums[kernel.name] += figure(kernel)
    return dict(sums.most_common())


def versions() -> dict[str, Any]:
    """Return the date, the commit and the packages that a prediction depends on."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "timm": timm.__version__,
    }


if __name__ == "__main__":
    main()
