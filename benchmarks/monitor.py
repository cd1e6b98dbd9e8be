"""Measure the cost of the Lipschitz monitor at its default interval, and its accuracy.

    python -m benchmarks.monitor --output benchmarks/results/monitor_nano.json

The benchmark trains with the engine's own step on digits and records every few steps, so that there
are many records. The cost of a record does not depend on the interval. The reported share is the
mean CPU time of a record, including the bound in every tenth record, divided by the CPU time of the
steps of one default interval. Every singular value of every record is compared with
`torch.linalg.svdvals` of the weight in float64.
"""

import argparse
import inspect
import os
import platform
import statistics
import time
from collections.abc import Mapping
from typing import Any

import timm
import torch
from accelerate import Accelerator
from timm.task import ClassificationTask
from torch import nn

import lipsformer  # noqa: F401  (registers the models)
from benchmarks.records import run
from data import Normalize, build_eval_dataset, collate
from lipsformer._commands import documented_parser
from lipsformer.analysis.bounds import image_domain
from lipsformer.analysis.instruments import Monitor
from lipsformer.analysis.sigma import operators
from lipsformer.config import DataConfig, OptimConfig
from lipsformer.engine.optim import make_optimizer
from lipsformer.engine.schedule import CosineSchedule
from lipsformer.engine.steps import train_step
from lipsformer.engine.train_state import TrainState

INTERVAL = inspect.signature(Monitor).parameters["every"].default
PROBE = 8  # number of images, as in train.py


class TimedMonitor(Monitor):
    """A monitor that records the CPU seconds that every step spends in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_seconds: list[float] = []

    def before_step(self, step: int) -> None:
        started = time.process_time()
        super().before_step(step)
        self.step_seconds.append(time.process_time() - started)

    def after_step(self, step: int) -> None:
        started = time.process_time()
        super().after_step(step)
        self.step_seconds[-1] += time.process_time() - started


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--model", default="lipsformer_nano")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--updates", type=int, default=51)
    parser.add_argument("--every", type=int, default=5, help="steps from one record to the next")
    run(parser, measure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train; return the figures."""
    torch.manual_seed(0)
    size, half = options.img_size, (0.5, 0.5, 0.5)
    data = DataConfig(source="digits", img_size=size, mean=half, std=half)
    dataset = build_eval_dataset(data, classes=None)
    pixels, labels = collate([dataset[i] for i in range(len(dataset))])
    images = Normalize(data.mean, data.std)(pixels)
    targets = torch.nn.functional.one_hot(labels, 10).float()

    model = timm.create_model(options.model, num_classes=10, img_size=size).train()
    weights = {op.name: op.weight for op in operators(model) if op.is_matrix}
    records: list[Mapping[str, float]] = []
    monitor = TimedMonitor(
        model,
        lambda update, record: records.append(record),
        every=options.every,
        probe=images[:PROBE],
        domain=image_domain((size, size), half, half),
    )
    state = train_state(model, monitor, options)
    updates: list[float] = []
    errors: list[float] = []
    for update in range(options.updates):
        picked = torch.randint(len(images), (options.batch_size,))
        batch = (images[picked], targets[picked])
        started = time.process_time()
        train_step(state, [batch], options.batch_size, update, lambda x, y, **_: (x, y))
        updates.append(time.process_time() - started - monitor.step_seconds[-1])
        if update % options.every == 0:
            for name, weight in weights.items():
                exact = torch.linalg.svdvals(weight.detach().double().flatten(1))[0].item()
                errors.append(abs(records[-1][f"sigma/{name}"] / exact - 1.0))

    spent = monitor.step_seconds[:: options.every]
    timed = [("bound_log10" in r, s) for r, s in zip(records, spent, strict=True)]
    plain = statistics.median(s for bound, s in timed if not bound)
    # The first record also computes the first singular vectors, so it is reported separately.
    with_bound = statistics.median([s for bound, s in timed if bound][1:])
    mean_record = plain + (with_bound - plain) / monitor.bound_every
    per_update = statistics.median(updates)
    return {
        "model": options.model,
        "img_size": size,
        "batch_size": options.batch_size,
        "cpu_ms_per_update": 1000 * per_update,
        "cpu_ms_per_record": 1000 * plain,
        "cpu_ms_with_bound": 1000 * with_bound,
        "cpu_ms_first_record": 1000 * spent[0],
        "interval": INTERVAL,
        "share_percent": 100 * mean_record / (INTERVAL * per_update),
        "records": len(records),
        "matrices": len(weights),
        "largest_relative_error": max(errors),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def train_state(model: nn.Module, monitor: Monitor, options: argparse.Namespace) -> TrainState:
    """Return what the engine's step needs on one CPU."""
    accelerator = Accelerator(cpu=True)
    optim = OptimConfig(lr=options.lr, clip_grad=5.0)
    prepared, optimizer = accelerator.prepare(model, make_optimizer(model, optim))
    return TrainState(
        accelerator=accelerator,
        model=prepared,
        module=model,
        task=ClassificationTask(prepared, nn.CrossEntropyLoss(), verbose=False),
        optimizer=optimizer,
        schedule=CosineSchedule(peak=optim.lr, final=0.0, total_steps=options.updates),
        clip_grad=optim.clip_grad,
        seed=0,
        instruments=[monitor],
    )


if __name__ == "__main__":
    main()
