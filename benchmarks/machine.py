"""Describe the machine of a measurement, and measure its limits and the steps of a model on it."""

import datetime
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch.profiler import ProfilerActivity, profile

import lipsformer
from lipsformer._machine import cpu_name

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Return the duration of a step, which begins on an idle device and ends when it is idle."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward pass in one of `PRECISIONS`; it changes nothing for fp32."""
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the processor, the device and the versions of a measurement."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "lipsformer": lipsformer.__version__,
        "date": datetime.date.today().isoformat(),
    }


def limits(device: torch.device, precision: str) -> dict[str, float]:
    """Return the FLOP/s of a large matrix product in this precision, and bytes/s of a large copy.

    On the CPU the product is also computed as a 1x1 convolution, for which PyTorch calls oneDNN
    instead of MKL, and the faster one counts. A copy moves its size twice: it reads and writes it.
    """
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 2048
    a, b = torch.randn(2, n, n, device=device, dtype=PRECISIONS[precision])
    source = torch.zeros(2**28 if on_gpu else 2**26, device=device)
    target = torch.empty_like(source)
    products = [best_seconds(lambda: a @ b, device)]
    if not on_gpu:
        image, kernel = a.T.reshape(1, n, n, 1), b[:, :, None, None]
        image = image.contiguous(memory_format=torch.channels_last)
        convolve = lambda: torch.nn.functional.conv2d(image, kernel)  # noqa: E731
        products.append(best_seconds(convolve, device))
    copy = best_seconds(lambda: target.copy_(source), device)
    return {
        "flops_per_s": 2 * n**3 / min(products),
        "bytes_per_s": 2 * source.nbytes / copy,
    }


def best_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest of ten durations of some work, after one call that warms up."""
    work()
    return min(seconds_of(work, device) for _ in range(10))


def peak_memory(step: Callable[[], None], device: torch.device) -> int:
    """Return by how many bytes torch's allocations grow at most during a step."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    held = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
