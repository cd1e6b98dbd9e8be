"""What the Lipschitz monitor adds to training at its default interval, and how exact it is.

    python -m benchmarks.monitor --output benchmarks/results/monitor_nano.json

The engine's own updates on digits, one record every few updates so that there are many. A record
costs the same at any interval; its share is its mean CPU time, with the bound that comes with every
tenth, over that of the updates of one default interval. Every singular value of every record is
compared with `torch.linalg.svdvals` of the weight in float64.
"""

import argparse
import inspect
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import timm
import torch
from accelerate import Accelerator

import lipsformer  # noqa: F401  (registers the models)
from data import Normalize, build_eval_dataset, collate
from lipsformer.analysis.bounds import image_domain
from lipsformer.analysis.instrument import Instrument
from lipsformer.analysis.monitor import Monitor
from lipsformer.analysis.sigma import operators
from lipsformer.config import DataConfig, OptimConfig
from lipsformer.engine.optim import make_optimizer
from lipsformer.engine.schedule import CosineSchedule
from lipsformer.engine.steps import train_step
from lipsformer.engine.train_state import TrainState

INTERVAL = inspect.signature(Monitor).parameters["every"].default
PROBE = 8  # images, as train.py takes


class Timed(Instrument):
    """Another instrument, with the CPU seconds that each update spends in it."""

    def __init__(self, inner: Instrument):
        self.inner = inner
        self.seconds: list[float] = []

    def before_step(self, step: int) -> None:
        started = time.process_time()
        self.inner.before_step(step)
        self.seconds.append(time.process_time() - started)

    def after_step(self, step: int) -> None:
        started = time.process_time()
        self.inner.after_step(step)
        self.seconds[-1] += time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="lipsformer_nano")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--updates", type=int, default=51)
    parser.add_argument("--every", type=int, default=5, help="updates from record to record")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    torch.manual_seed(0)
    half = (0.5, 0.5, 0.5)
    data = DataConfig(source="digits", img_size=options.img_size, mean=half, std=half)
    dataset = build_eval_dataset(data, classes=None)
    pixels, labels = collate([dataset[i] for i in range(len(dataset))])
    images = Normalize(data.mean, data.std)(pixels)
    targets = torch.nn.functional.one_hot(labels, 10).float()

    model = timm.create_model(options.model, num_classes=10, img_size=options.img_size).train()
    weights = {op.name: op.weight for op in operators(model) if op.is_matrix}
    errors: list[float] = []

    def compare(_: int, record: Mapping[str, float]) -> None:
        for name, weight in weights.items():
            exact = torch.linalg.svdvals(weight.detach().double().flatten(1))[0].item()
            errors.append(abs(record[f"sigma/{name}"] / exact - 1.0))

    records: list[tuple[int, Mapping[str, float]]] = []
    domain = image_domain((options.img_size, options.img_size), half, half)
    monitor = Monitor(
        model,
        lambda update, record: records.append((update, record)),
        every=options.every,
        probe=images[:PROBE],
        domain=domain,
    )
    timed = Timed(monitor)
    accelerator = Accelerator(cpu=True)
    optim = OptimConfig(lr=options.lr, clip_grad=5.0)
    prepared, optimizer = accelerator.prepare(model, make_optimizer(model, optim))
    state = TrainState(
        accelerator=accelerator,
        model=prepared,
        module=model,
        optimizer=optimizer,
        schedule=CosineSchedule(peak=optim.lr, final=0.0, total_steps=options.updates),
        clip_grad=optim.clip_grad,
        seed=0,
        instruments=[timed],
    )
    updates = []
    for update in range(options.updates):
        picked = torch.randint(len(images), (options.batch_size,))
        batch = (images[picked], targets[picked])
        started = time.process_time()
        train_step(state, [batch], options.batch_size, update, lambda x, y, **_: (x, y))
        updates.append(time.process_time() - started - timed.seconds[-1])
        if update % options.every == 0:
            compare(*records[-1])

    spent = timed.seconds[:: options.every]
    with_bound = ["bound_log10" in record for _, record in records]
    plain = statistics.median(s for s, bound in zip(spent, with_bound, strict=True) if not bound)
    # the first record of all also starts the singular vectors: it is counted apart
    bounds = [s for s, bound in zip(spent, with_bound, strict=True) if bound][1:]
    mean_record = plain + (statistics.median(bounds) - plain) / monitor.bound_every
    interval = INTERVAL * statistics.median(updates)
    result = {
        "model": options.model,
        "img_size": options.img_size,
        "batch_size": options.batch_size,
        "cpu_ms_per_update": 1000 * statistics.median(updates),
        "cpu_ms_per_record": 1000 * plain,
        "cpu_ms_with_bound": 1000 * statistics.median(bounds),
        "cpu_ms_first_record": 1000 * spent[0],
        "interval": INTERVAL,
        "share_percent": 100 * mean_record / interval,
        "records": len(records),
        "matrices": len(weights),
        "largest_relative_error": max(errors),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
