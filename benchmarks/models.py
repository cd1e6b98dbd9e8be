"""Training step and inference of LipsFormer beside other models, interleaved in one run.

    python -m benchmarks.models --output benchmarks/results/models_cpu.json
    python -m benchmarks.models --device cuda --precision bf16 --batch-size 128 --compile \
        --output benchmarks/results/models_cuda.json
    python -m benchmarks.models --table benchmarks/results/models_*.json

The models take turns within every round, so that a busy machine slows all alike; the ratio to the
first model is the median over the rounds. The first rounds warm up. A model of another repository
joins by its import path: ``--peer package.module:function`` (called without arguments).
"""

import argparse
import datetime
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import lipsformer

MODELS = ("swin_tiny_patch4_window7_224", "lipsformer_swin_tiny", "lipsformer_tiny")
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Contestant:
    """One model with its optimizer and the two things it is timed at."""

    def __init__(self, name: str, images: Tensor, precision: str, compiled: bool) -> None:
        """Create the model on the device of ``images``."""
        if ":" in name:
            module, function = name.split(":")
            model: nn.Module = getattr(importlib.import_module(module), function)()
        else:
            model = timm.create_model(name, drop_path_rate=0.2)
        self.model = model.to(images.device)
        if images.device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.run = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.images = images
        self.labels = torch.arange(images.shape[0], device=images.device) % 1000
        dtype = PRECISIONS[precision]
        device = images.device.type
        self.autocast = lambda: torch.autocast(device, dtype) if dtype else nullcontext()

    def train(self) -> None:
        """One training step."""
        self.model.train()
        with self.autocast():
            loss = cross_entropy(self.run(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def infer(self) -> None:
        """One forward pass in evaluation."""
        self.model.eval()
        with torch.inference_mode(), self.autocast():
            self.run(self.images)


def peak_memory(step: Callable[[], None], device: torch.device) -> int:
    """Most bytes that torch's allocator holds at once during a step beyond those before it."""
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


def measure(
    contestants: dict[str, Contestant], task: str, rounds: int, warmup: int
) -> dict[str, dict[str, float]]:
    """Times of a task over interleaved rounds, and its peak memory."""
    device = next(iter(contestants.values())).images.device
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(warmup + rounds):
        for name, contestant in contestants.items():
            step = getattr(contestant, task)
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            if index >= warmup:
                seconds[name].append(time.perf_counter() - start)
    base = next(iter(contestants))
    memory = {n: peak_memory(getattr(c, task), device) for n, c in contestants.items()}
    result = {}
    for name, contestant in contestants.items():
        ratios = [b / own for b, own in zip(seconds[base], seconds[name], strict=True)]
        result[name] = {
            "images_per_s": len(contestant.images) / statistics.median(seconds[name]),
            "speed_ratio": statistics.median(ratios),
            "speed_ratio_min": min(ratios),
            "speed_ratio_max": max(ratios),
            "peak_mb": memory[name] / 2**20,
            "memory_ratio": memory[name] / memory[base],
        }
    return result


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> dict[str, Any]:
    """What was measured on."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "lipsformer": lipsformer.__version__,
        "date": datetime.date.today().isoformat(),
    }


def table(record: dict[str, Any]) -> str:
    """The figures of one record as Markdown."""
    options, host = record["options"], record["machine"]
    lines = [
        f"{host['device']} ({host['cpu']}, {host['threads']} threads), torch {host['torch']}, "
        f"{options['precision']}, batch {options['batch_size']}, {options['img_size']} px"
        f"{', compiled' if options['compile'] else ''}, {host['date']}",
        "",
        "| model | training images/s | ratio | peak MB | ratio | inference images/s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, step in record["train"].items():
        infer = record["infer"][name]
        lines.append(
            f"| {name} | {step['images_per_s']:.2f} | {step['speed_ratio']:.2f} | "
            f"{step['peak_mb']:.0f} | {step['memory_ratio']:.2f} | "
            f"{infer['images_per_s']:.2f} | {infer['speed_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help="the first is the base")
    parser.add_argument("--peer", action="append", default=[], metavar="module:function")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tables of JSON files")
    options = parser.parse_args()
    if options.table:
        print("\n\n".join(table(json.loads(path.read_text())) for path in options.table))
        return
    torch.manual_seed(0)
    images = torch.randn(options.batch_size, 3, options.img_size, options.img_size)
    images = images.to(options.device)
    contestants = {
        name: Contestant(name, images, options.precision, options.compile)
        for name in [*options.models, *options.peer]
    }
    kept = ("precision", "batch_size", "img_size", "rounds", "warmup", "compile")
    record: dict[str, Any] = {
        "machine": machine(images.device),
        "options": {name: getattr(options, name) for name in kept},
    }
    for task in ("train", "infer"):
        record[task] = measure(contestants, task, options.rounds, options.warmup)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
