"""Measure on a GPU what was predicted for it."""

import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_predictions.table import REFERENCE, peak_gigabytes
from benchmarks.machine import seconds_of
from benchmarks.records import markdown
from lipsformer.engine.compilation import compile_regions

Record = dict[str, Any]
ROUNDS = 20
MODES = ("eager", "compiled", "regions")  # as a whole, or region by region as a run does


class Row(NamedTuple):
    """A figure of a model: what was predicted and what was measured; None without one of them."""

    model: str
    figure: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


def predicted(record: Record, gpu: str) -> dict[str, float]:
    """Return the figures of a prediction that `measure` measures; times are lower limits.

    Args:
        record: A file of `benchmarks/predictions`.
        gpu: "A100", "H100" or "B200".
    """
    figures = {
        "saved MB per image, eager": record["eager"]["saved_bytes"] / record["batch_size"] / 1e6
    }
    if compiled := record.get("compiled"):
        figures |= {
            "kernels of a step, compiled": compiled["forward_kernels"]
            + compiled["backward_kernels"]
            + record["eager"]["operators"]["optimizer"],
            "GB at the peak, compiled": peak_gigabytes(record, record["batch_size"]),
            "ms of a step, compiled": 1e3 * compiled["least_seconds"][gpu],
        }
    return figures


def measure(record: Record, device: str = "cuda", modes: Iterable[str] = MODES) -> dict[str, float]:
    """Measure the figures of a prediction, and those of the modes for which nothing is predicted.

    Args:
        record: A file of `benchmarks/predictions`. It names model, batch and image size.
        device: A CPU can run this too, slowly and without counts of kernels or memory.
        modes: Those of `MODES` that are measured.
    """
    figures: dict[str, float] = {}
    for mode in modes:
        figures |= _measure(record, mode, torch.device(device))
        torch.compiler.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return figures


def _measure(record: Record, mode: str, device: torch.device) -> dict[str, float]:
    size = record["image_size"]
    model = timm.create_model(record["model"], drop_path_rate=0.0).train().to(device)
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.rand(record["batch_size"], 3, size, size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (len(images),), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    saved: dict[int, int] = {}
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    known.add(images.untyped_storage().data_ptr())

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    # Kernels are tried where they first run, which the compiler cannot do.
    figures = {f"s of the first eager step, {mode}": seconds_of(step, device)}
    if mode == "compiled":
        model.compile()
    elif mode == "regions":
        compile_regions(model, deterministic=False)
    figures[f"s of the first step, {mode}"] = seconds_of(step, device)
    for _ in range(3):
        step()
    times = [seconds_of(step, device) for _ in range(ROUNDS)]
    figures[f"ms of a step, {mode}"] = 1e3 * statistics.median(times)
    if mode == "eager":
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step()
        figures["saved MB per image, eager"] = sum(saved.values()) / len(images) / 1e6
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        figures[f"GB at the peak, {mode}"] = torch.cuda.max_memory_allocated() / 1e9
        kernels = _kernels(step)
        copies = ("Memcpy", "Memset")
        figures[f"kernels of a step, {mode}"] = sum(
            kernel.count for kernel in kernels if not kernel.key.startswith(copies)
        )
        figures[f"ms of the GPU in a step, {mode}"] = 1e-3 * sum(
            kernel.device_time_total for kernel in kernels
        )
    return figures


def _kernels(step: Callable[[], None]) -> list[Any]:
    """Return the profiler's averages of what the GPU does in a step, by kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    # The calls that launch kernels are events of the host.
    return [e for e in profiler.key_averages() if e.device_type == DeviceType.CUDA]


def compare(
    predictions: Iterable[Record], gpu: str, measured: Callable[[Record], dict[str, float]]
) -> tuple[list[Row], dict[str, str]]:
    """Measure all predictions of models.

    Returns:
        A row for every figure, and the errors by model. A model that fails does not stop others.
    """
    rows, errors = [], {}
    for record in predictions:
        name, expected = record["model"], predicted(record, gpu)
        try:
            found = measured(record)
        except Exception as error:  # out of memory, or whatever a driver raises
            errors[name] = f"{type(error).__name__}: {error}"
            found = {}
        figures = sorted({*expected, *found})
        rows += [Row(name, key, expected.get(key), found.get(key)) for key in figures]
        print(table(rows[-len(figures) :]), flush=True)
    return rows, errors


def step_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the time of a compiled step over Swin-Tiny's, which is what the page predicts."""
    times = {row.model: row for row in rows if row.figure == "ms of a step, compiled"}
    base = times.get(REFERENCE)
    if base is None:
        return []
    divide = lambda a, b: a / b if a and b else None  # noqa: E731
    return [
        Row(
            name,
            "compiled step over Swin-Tiny's",
            divide(row.predicted, base.predicted),
            divide(row.measured, base.measured),
        )
        for name, row in times.items()
    ]


def table(rows: Iterable[Row]) -> str:
    """Return rows as Markdown."""
    cells = []
    for row in rows:
        numbers = (row.predicted, row.measured, row.ratio)
        shown = ("" if x is None else f"{x:.4g}" for x in numbers)
        cells.append((f"`{row.model}`", row.figure, *shown))
    return markdown(("model", "figure", "predicted", "measured", "measured / predicted"), cells)
