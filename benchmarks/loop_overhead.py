"""What the training loop costs beside a bare torch loop with the same model and data.

    python -m benchmarks.loop_overhead --output benchmarks/results/loop_overhead.json

The bare loop does what any training must: forward, cross entropy, backward, clipping, fused AdamW.
The engine's loop does that and all that makes a run trustworthy: seeds of every micro-step,
exact means, skipping of non-finite updates, statistics, log records, stop flag. A third is the
engine's with `train.deterministic`. They take turns on batches held in memory; CPU time counts, so
that a busy machine slows none.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from timm.task import ClassificationTask
from torch import nn
from torch.nn import functional as F

import lipsformer  # noqa: F401  (registers the models)
from lipsformer._commands import documented_parser
from lipsformer.config import OptimConfig
from lipsformer.engine.metrics import StepMetrics, summarize
from lipsformer.engine.optim import make_optimizer
from lipsformer.engine.run_folder import RunFolder
from lipsformer.engine.schedule import CosineSchedule
from lipsformer.engine.signals import StopRequest
from lipsformer.engine.steps import Stopwatch, train_epoch
from lipsformer.engine.tracking import Tracking
from lipsformer.engine.train_state import TrainState

CLASSES = 10
OPTIM = OptimConfig(lr=1e-3, clip_grad=5.0)
LOG_EVERY = 10


def make_batches(count: int, size: int, img_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, 3, img_size, img_size, generator=generator),
            torch.rand(size, CLASSES, generator=generator).softmax(dim=1),
        )
        for _ in range(count)
    ]


def bare_loop(name: str, batches: list) -> Callable[[], None]:
    model = timm.create_model(name, num_classes=CLASSES).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, fused=True)

    def turn() -> None:
        for images, targets in batches:
            loss = F.cross_entropy(model(images), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
            optimizer.step()
            optimizer.zero_grad()

    return turn


def engine_loop(name: str, batches: list, output_dir: Path) -> Callable[[], None]:
    model = timm.create_model(name, num_classes=CLASSES)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, make_optimizer(model, OPTIM))
    state = TrainState(
        accelerator=accelerator,
        model=prepared,
        module=accelerator.unwrap_model(prepared),
        task=ClassificationTask(prepared, nn.CrossEntropyLoss(), verbose=False),
        optimizer=optimizer,
        schedule=CosineSchedule(peak=OPTIM.lr, final=0.0, total_steps=1_000_000),
        clip_grad=OPTIM.clip_grad,
        seed=0,
    )
    metrics, stop = StepMetrics(accelerator, max_nonfinite=0), StopRequest()
    stopwatch = Stopwatch(accelerator)
    tracking = Tracking(
        accelerator,
        RunFolder(output_dir),
        run_id="benchmark",
        step=0,
        next_record=1,
        total_steps=1,
        metrics_bytes=0,
    )
    made = 0

    def after_step(update: int) -> bool:
        if update % LOG_EVERY == 0:
            values = summarize(metrics.read()) | stopwatch.read()
            tracking.record("train", update, 0.0, values)
            metrics.clear()
        return bool(stop.stop_signal())

    def turn() -> None:
        nonlocal made
        made = train_epoch(
            state,
            [([batch], len(batch[0])) for batch in batches],
            first_step=made,
            transform=lambda images, targets, **_: (images, targets),
            metrics=metrics,
            stopwatch=stopwatch,
            after_step=after_step,
        )

    return turn


def deterministic(turn: Callable[[], None]) -> Callable[[], None]:
    def inside() -> None:
        torch.use_deterministic_algorithms(True)
        turn()
        torch.use_deterministic_algorithms(False)

    return inside


def measure(turn: Callable[[], None]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    turn()
    return time.process_time() - cpu, time.perf_counter() - wall


def overhead(loop: list[tuple[float, float]], base: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians over the turns, in percent of the other loop's seconds in the same turn."""
    cpu, wall = (
        [100 * (a[kind] / b[kind] - 1) for a, b in zip(loop, base, strict=True)] for kind in (0, 1)
    )
    return {
        "cpu": statistics.median(cpu),
        "cpu_quartiles": statistics.quantiles(cpu),
        "wall": statistics.median(wall),
    }


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--model", default="lipsformer_nano")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=2, help="small, for short updates")
    parser.add_argument("--updates", type=int, default=10, help="of one turn")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    batches = make_batches(options.updates, options.batch_size, options.img_size)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        engine = engine_loop(options.model, batches, Path(folder))
        loops = {
            "bare": bare_loop(options.model, batches),
            "engine": engine,
            "deterministic": deterministic(engine),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
        for number in range(options.turns + 1):
            order = list(loops) if number % 2 else list(reversed(loops))
            for name in order:
                spent = measure(loops[name])
                if number > 0:  # the first turn warms up
                    seconds[name].append(spent)
    result: dict[str, Any] = {
        "model": options.model,
        "img_size": options.img_size,
        "batch_size": options.batch_size,
        "updates": options.updates * options.turns,
        "threads": torch.get_num_threads(),
        "cpu_ms_per_update": {
            name: 1000 * statistics.median(cpu for cpu, _ in turns) / options.updates
            for name, turns in seconds.items()
        },
        "engine_over_bare_percent": overhead(seconds["engine"], seconds["bare"]),
        "deterministic_over_engine_percent": overhead(seconds["deterministic"], seconds["engine"]),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
