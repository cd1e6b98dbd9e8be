"""For how long the training loop stands still when it saves a checkpoint.

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
from collections.abc import Callable
from typing import Any

from benchmarks.machine import machine
from benchmarks.records import run
from lipsformer._commands import documented_parser
from lipsformer._configfile import read_config
from lipsformer.config import Config
from lipsformer.engine.distributed import start
from lipsformer.engine.trainer import Trainer
from scripts._assemble import assemble


def measure(config: Config, saves: int) -> dict[str, Any]:
    """Train until so many checkpoints were saved; return seconds."""
    accelerator = start(config)
    trainer = Trainer(config, assemble(config, accelerator, None), None)
    every = config.run.save_every_updates
    assert every is not None
    prepare, prepare_cpu, wait, complete, updates = ({} for _ in range(5))

    def timed(
        function: Callable[..., Any], figures: dict[int, float], clock: Callable[[], float]
    ) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            before, step = clock(), trainer.step
            try:
                return function(*arguments, **options)
            finally:
                figures[step] = clock() - before

        return call

    def after_step(step: int) -> bool:
        updates[step] = time.perf_counter()
        if step == saves * every + 1:
            trainer.stop.received = 1
        return before_step(step)

    before_step, trainer._after_step = trainer._after_step, after_step
    now = time.perf_counter
    trainer._save = timed(timed(trainer._save, prepare_cpu, time.thread_time), prepare, now)
    trainer.state.before_change = timed(trainer.state.before_change, wait, now)
    trainer.writer._save = timed(trainer.writer._save, complete, now)
    trainer.train()
    saved = [step for step in complete if step % every == 0]
    standstill = {step: prepare[step] + wait[step] for step in saved}
    seconds = {step: updates[step] - updates[step - 1] for step in updates if step - 1 in updates}
    copies = trainer.writer._copies.values()
    return {
        "processes": accelerator.num_processes,
        "mib": sum(tensor.numel() * tensor.element_size() for tensor in copies) / 2**20,
        "standstill": {
            "first": standstill[saved[0]],
            "median": statistics.median(standstill.values()),
            "largest_after_the_first": max(standstill[step] for step in saved[1:]),
        },
        "prepare": statistics.median(prepare[step] for step in saved),
        "prepare_cpu": statistics.median(prepare_cpu[step] for step in saved),
        "wait": statistics.median(wait[step] for step in saved),
        "complete": statistics.median(complete[step] for step in saved),
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
            "model.kwargs={}",
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
