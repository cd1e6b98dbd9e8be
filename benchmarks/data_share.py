"""How much of a run's time goes into loading and augmenting its images.

    python -m benchmarks.data_share --config configs/cifar10/small.yaml \\
        --output benchmarks/results/data_share_cifar10.json

The engine's own training steps, of one process, get their images in turn from five places: one
batch that is repeated and costs nothing, the files of a folder, memory in a first epoch, which
decodes each image once, memory in a later epoch, and memory in a later epoch with one worker
process. The digits are in memory anyhow, so they have two places. Each turn is one update, and an
epoch must have two more updates than there are turns. The steps are those of the config without the
monitor. Wall time counts, so the machine must do nothing else; a share is the median of the turns'
own shares, because the speed of a machine changes within seconds.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.machine import machine
from benchmarks.records import markdown, run
from data import TrainBatches, build_datasets
from data.loader import Update
from lipsformer._commands import documented_parser
from lipsformer._configfile import read_config
from lipsformer._machine import commit
from lipsformer.config import Config
from lipsformer.engine.distributed import start
from lipsformer.engine.steps import train_step
from scripts._assemble import assemble

REPEATED = "one batch, repeated"


def epoch(
    config: Config, *, in_memory: bool, decoded: bool = False, workers: int = 0
) -> Iterator[Update]:
    """Return the updates of an epoch; a later epoch finds all images decoded."""
    data, size = replace(config.data, in_memory=in_memory), config.train.global_batch_size
    images, _ = build_datasets(data, config.augment, seed=config.train.seed)
    if decoded:
        for index in range(len(images)):
            images.source.load(index)
    batches = TrainBatches(
        images,
        global_batch_size=size,
        batch_size_per_device=size,
        rank=0,
        world_size=1,
        seed=config.train.seed,
        num_workers=workers,
        drop_last=True,
        pin_memory=False,
    )
    return batches.epoch(0)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make updates with images of each kind in turn; return milliseconds per image."""
    config = read_config(Config, options.config, ["lipschitz.monitor_every=null", *options.set])
    parts = assemble(config, start(config), None)
    repeated = next(epoch(config, in_memory=False))
    updates: dict[str, Iterator[Update]] = {REPEATED: itertools.repeat(repeated)}
    if config.data.source == "digits":
        updates["memory"] = epoch(config, in_memory=False)
    else:
        updates |= {
            "files": epoch(config, in_memory=False),
            "memory, first epoch": epoch(config, in_memory=True),
            "memory, later epoch": epoch(config, in_memory=True, decoded=True),
            "memory, later epoch, 1 worker": epoch(config, in_memory=True, decoded=True, workers=1),
        }
    spent: dict[str, list[float]] = {kind: [] for kind in updates}
    steps = itertools.count()
    parts.state.model.train()
    for turn in range(options.turns + 2):
        for kind in updates if turn % 2 else reversed(updates):
            started = time.perf_counter()
            micro_batches, samples = next(updates[kind])
            train_step(parts.state, micro_batches, samples, next(steps), parts.transform)
            if turn > 1:  # the first turns warm up
                spent[kind].append((time.perf_counter() - started) * 1e3 / samples)
    return {
        "config": options.config,
        "settings": options.set,
        "ms_per_image": spent,
        "commit": commit(),
        **machine(parts.state.accelerator.device),
    }


def table(record: dict[str, Any]) -> str:
    """Medians over the turns."""
    spent = record["ms_per_image"]
    rows = []
    for kind, own in spent.items():
        shares = [100 * (1 - free / ms) for free, ms in zip(spent[REPEATED], own, strict=True)]
        rate = 1e3 / statistics.median(own)
        rows.append((kind, f"{rate:.0f}", f"{statistics.median(shares):.1f} %"))
    return markdown(("images from", "images/s", "share of the time"), rows)


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--config", default="configs/cifar10/small.yaml", help="file of the run")
    parser.add_argument("--set", nargs="*", default=[], help="settings as for train.py")
    parser.add_argument("--turns", type=int, default=60, help="updates of each kind")
    run(parser, measure, table)


if __name__ == "__main__":
    main()
