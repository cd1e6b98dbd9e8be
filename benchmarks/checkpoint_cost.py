"""Measure for how long the training loop stands still when it saves a checkpoint.

    python -m benchmarks.checkpoint_cost --output benchmarks/results/checkpoint_cost.json

A run of train.py with an EMA saves after every `--every` updates. The standstill of a save is the
time that the loop needs to prepare it (`prepare`; `prepare_cpu` is the CPU time in it, which does
not depend on what else the machine does), and the time that the next optimizer step waits for the
copy (`wait`). `complete` is the time until the checkpoint is on the disk. Updates with and without
a save before them are timed too, because the thread that writes takes time of the CPU.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.records import run
from lipsformer._commands import documented_parser
from lipsformer._configfile import read_config
from lipsformer.config import Config
from lipsformer.engine.distributed import start
from lipsformer.engine.parts import TrainingParts
from lipsformer.engine.trainer import Trainer
from scripts._assemble import assemble


class TimedTrainer(Trainer):
    """A trainer that stops after an update, and notes the times of its updates and saves."""

    def __init__(self, config: Config, parts: TrainingParts, last_step: int) -> None:
        super().__init__(config, parts, None)
        self.last_step = last_step
        # The moments when an update, the preparation of a save and the save itself were complete,
        # by the number of completed updates.
        self.updated: dict[int, float] = {}
        self.prepared: dict[int, float] = {}
        self.written: dict[int, float] = {}
        # The seconds of the parts of a standstill, by the same number.
        self.prepare: dict[int, float] = {}
        self.prepare_cpu: dict[int, float] = {}
        self.wait: dict[int, float] = {}
        self.state.before_change = self.wait_for_copy
        self.write, self.checkpoints.save = self.checkpoints.save, self.write_checkpoint

    def after_step(self, step: int) -> bool:
        self.updated[step] = time.perf_counter()
        if step == self.last_step:
            self.stop.received = 1
        return super().after_step(step)

    def save(self) -> None:
        started, started_cpu = time.perf_counter(), time.thread_time()
        super().save()
        self.prepare_cpu[self.step] = time.thread_time() - started_cpu
        self.prepared[self.step] = time.perf_counter()
        self.prepare[self.step] = self.prepared[self.step] - started

    def wait_for_copy(self) -> None:
        started = time.perf_counter()
        self.writer.wait_for_copy()
        self.wait[self.step] = time.perf_counter() - started

    def write_checkpoint(self, step: int, **content: Any) -> Path:
        path = self.write(step, **content)
        self.written[step] = time.perf_counter()
        return path


def measure(config: Config, saves: int) -> dict[str, Any]:
    """Train until so many checkpoints were saved; return seconds."""
    accelerator = start(config)
    every = config.run.save_every_updates
    assert every is not None
    trainer = TimedTrainer(config, assemble(config, accelerator, None), saves * every + 1)
    trainer.train()
    prepare, wait, updated = trainer.prepare, trainer.wait, trainer.updated
    saved = [step for step in trainer.written if step % every == 0]
    standstill = {step: prepare[step] + wait[step] for step in saved}
    complete = [trainer.written[step] - trainer.prepared[step] for step in saved]
    seconds = {step: updated[step] - updated[step - 1] for step in updated if step - 1 in updated}
    files = trainer.state.state_dict().values()
    return {
        "processes": accelerator.num_processes,
        "mib": sum(tensor.nbytes for file in files for tensor in file.values()) / 2**20,
        "standstill": {
            "first": standstill[saved[0]],
            "median": statistics.median(standstill.values()),
            "largest_after_the_first": max(standstill[step] for step in saved[1:]),
        },
        "prepare": statistics.median(prepare[step] for step in saved),
        "prepare_cpu": statistics.median(trainer.prepare_cpu[step] for step in saved),
        "wait": statistics.median(wait[step] for step in saved),
        "complete": statistics.median(complete),
        "update": statistics.median(s for step, s in seconds.items() if step % every != 1),
        "update_after_a_save": statistics.median(
            s for step, s in seconds.items() if step % every == 1
        ),
        "saves": len(saved),
        "load_average": os.getloadavg()[0],
        **machine(accelerator.device),
    }


def record_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run in a folder that is then removed."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"model.name={options.model}",
            f"data.img_size={options.img_size}",
            f"train.global_batch_size={options.batch_size}",
            "train.ema_decay=0.999",
            "lipschitz.monitor_every=null",
            f"run.save_every_updates={options.every}",
            "run.trackers=[]",
            f"run.output_dir={folder}/run",
        ]
        config = read_config(Config, "configs/demo.yaml", settings)
        sizes = {"img_size": options.img_size, "batch_size": options.batch_size}
        return {"model": options.model, **sizes, **measure(config, options.saves)}


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--model", default="lipsformer_tiny")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--every", type=int, default=3, help="updates between two saves")
    parser.add_argument("--saves", type=int, default=9)
    run(parser, record_of)


if __name__ == "__main__":
    main()
