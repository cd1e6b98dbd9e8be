"""Measure where the time of a training step goes, by kind of operator, and the roof of each kind.

    python -m benchmarks.step_parts lipsformer_swin_tiny --output benchmarks/results/parts_cpu.json
    python -m benchmarks.step_parts --table benchmarks/results/parts_*.json

PyTorch's profiler times every operator and every compiled kernel of forward and backward passes on
a CPU, with the caches as the step leaves them. `benchmarks.roofline` times operators alone, with
cold caches.

The roof of a part is its least time with empty caches: the operations of its products divided by
the measured FLOP/s, or its least traffic divided by the measured bandwidth, whichever is longer. A
part can be faster than its roof if its tensors are still in a cache. The row "the rest" is the time
of the profiled step outside its parts: Python, new memory, automatic differentiation, and the
profiler itself.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import timm
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.counting import OperatorCounter
from benchmarks.machine import autocast, limits, machine, seconds_of
from benchmarks.records import markdown, run
from lipsformer._commands import documented_parser
from lipsformer.kernels import bindings

CPU = torch.device("cpu")
COLUMNS = ("part", "calls", "ms", "share", "GFLOP", "MB", "limit", "roof ms", "share of roof")
PRODUCTS = "matrix products"
# An operator belongs to the part of the first of these that its name begins with.
PARTS = {
    "kernel product": PRODUCTS,
    "kernel cosine_windows": "attention between the projections",
    "kernel depthwise": "depthwise convolution",
    "kernel gelu_residual": "residual with GELU",
    "kernel residual": "residual",
    "kernel center": "normalization",
    "kernel elu": "ELU",
    "kernel gelu": "GELU before a linear layer",
    "kernel": "sums of rows, scaled weights",
    "aten::gelu": "GELU before a linear layer",
    "aten::native_layer_norm": "normalization",
    "aten::_softmax": "softmax",
    "aten::add": "sums",
    "aten::copy_": "copies",
    "": "other operators",
}
PRODUCT_OPERATORS = ("linear_pointwise", "::addmm", "::mm", "::bmm", "convolution")


def part_of(name: str) -> str:
    """Return the part of an operator with a name of the profiler's."""
    if name.endswith(PRODUCT_OPERATORS) or "convolution_backward" in name:
        return PRODUCTS
    return next(part for prefix, part in PARTS.items() if name.startswith(prefix))


def kernel_cost(kernel: str, arguments: tuple[Any, ...]) -> tuple[int, int]:
    """Return the operations of a kernel's products, and the bytes that it has to move at least.

    Args:
        kernel: A key of `lipsformer.kernels.bindings.SIGNATURES`.
        arguments: As `lipsformer.kernels.bindings.run` takes them.
    """
    moved = sum(x.nbytes for x in arguments if isinstance(x, Tensor))
    if kernel.startswith("cosine_windows"):  # its tensors stand for whole maps
        backward = "backward" in kernel
        batch, height, width, heads, dim, h, w = arguments[-7:]
        maps = 7 if backward else 4
        moved = maps * batch * height * width * heads * dim * arguments[0].itemsize
        tokens = batch * -(-height // h) * -(-width // w) * h * w
        return tokens * heads * dim * h * w * (10 if backward else 4), moved
    if kernel.startswith("depthwise"):
        side = arguments[-1] if "parameters" in kernel else arguments[-2]
        return 2 * arguments[0].numel() * side**2, moved
    if kernel.startswith("gelu_gradient"):
        moved += arguments[1].nbytes  # is read and written
    return 0, moved


@contextmanager
def watched_kernels() -> Iterator[dict[str, Counter[str]]]:
    """Show every compiled kernel to the profiler, and sum operations and bytes by part."""
    function = bindings._function
    costs: dict[str, Counter[str]] = {"flops": Counter(), "bytes": Counter()}

    def watched(kernel: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            with record_function(f"kernel {kernel}"):
                function(kernel)(*arguments)
            flops, moved = kernel_cost(kernel, arguments[:-1])
            costs["flops"][part_of(f"kernel {kernel}")] += flops
            costs["bytes"][part_of(f"kernel {kernel}")] += moved

        return call

    with mock.patch.object(bindings, "_function", watched):
        yield costs


def measure(step: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Return the seconds of a step, and what each part of it takes, computes and moves."""
    with OperatorCounter() as counter:
        step()
    seconds = statistics.median(seconds_of(step, CPU) for _ in range(repeats))
    with watched_kernels() as costs, profile(activities=[ProfilerActivity.CPU]) as recorded:
        profiled = sum(seconds_of(step, CPU) for _ in range(repeats)) / repeats
    parts: dict[str, dict[str, float]] = {}
    for event in recorded.key_averages():
        if event.key.startswith(("aten::", "mkldnn::", "kernel ")):
            own = parts.setdefault(part_of(event.key), {"calls": 0, "seconds": 0.0})
            own["calls"] += event.count / repeats
            own["seconds"] += event.self_cpu_time_total / 1e6 / repeats
    for name, own in parts.items():
        own["flops"] = counter.products if name == PRODUCTS else costs["flops"][name] / repeats
        own["bytes"] = costs["bytes"][name] / repeats
    ordered = sorted(parts.items(), key=lambda item: -item[1]["seconds"])
    return {"step_seconds": seconds, "profiled_seconds": profiled, "parts": dict(ordered)}


def table(record: dict[str, Any]) -> str:
    """Return the figures of one record as Markdown."""
    host, rates, options = record["machine"], record["limits"], record["options"]
    seconds, parts = record["profiled_seconds"], record["parts"]
    intro = (
        f"{options['model']}, {options['precision']}, batch {options['batch_size']}, "
        f"{options['img_size']} px, {host['cpu']}, {host['threads']} threads, {host['date']}: "
        f"forward and backward {1e3 * record['step_seconds']:.0f} ms, with the profiler "
        f"{1e3 * seconds:.0f} ms; limits "
        f"{rates['flops_per_s'] / 1e9:.0f} GFLOP/s, {rates['bytes_per_s'] / 1e9:.1f} GB/s"
    )
    rows = []
    for part, own in parts.items():
        cells = [part, f"{own['calls']:.0f}", f"{1e3 * own['seconds']:.0f}"]
        cells.append(f"{own['seconds'] / seconds:.0%}")
        compute, memory = (own[x] / rates[f"{x}_per_s"] for x in ("flops", "bytes"))
        if (roof := max(compute, memory)) > 0.0:
            cells += [
                f"{own['flops'] / 1e9:.1f}",
                f"{own['bytes'] / 1e6:.0f}" if own["bytes"] else "",
                "FLOP/s" if compute == roof else "bandwidth",
                f"{1e3 * roof:.0f}",
                f"{roof / own['seconds']:.0%}",
            ]
        rows.append([*cells, *[""] * (len(COLUMNS) - len(cells))])
    rest = seconds - sum(own["seconds"] for own in parts.values())
    empty = [""] * (len(COLUMNS) - 4)
    rows.append(["the rest", "", f"{1e3 * rest:.0f}", f"{rest / seconds:.0%}", *empty])
    return f"{intro}\n\n{markdown(COLUMNS, rows)}"


def record_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one model."""
    torch.manual_seed(0)
    # no drop path: it would change the shapes from one step to the next
    model = timm.create_model(options.model).train()
    images = torch.randn(options.batch_size, 3, options.img_size, options.img_size)

    def step() -> None:
        model.zero_grad()
        with autocast(CPU, options.precision):
            loss = model(images).float().square().mean()
        loss.backward()

    before = limits(CPU, options.precision)
    measured = measure(step, options.repeats)
    after = limits(CPU, options.precision)
    kept = ("model", "precision", "batch_size", "img_size", "repeats")
    return {
        "machine": machine(CPU),
        "limits": {name: max(before[name], after[name]) for name in before},
        "options": {name: getattr(options, name) for name in kept},
        **measured,
    }


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("model", nargs="?", default="lipsformer_swin_tiny")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=7)
    run(parser, record_of, table)


if __name__ == "__main__":
    main()
