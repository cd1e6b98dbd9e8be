"""Measure how much more the training loop costs than a bare torch loop of the same training.

    OMP_NUM_THREADS=1 python -m benchmarks.loop_overhead --processes 2 \\
        --output benchmarks/results/loop_overhead.json

All loops train on the digits, with the same loader, augmentation, mixup, erasing, EMA and DDP. They
take turns of one epoch, and each turn saves a checkpoint in its middle. The bare loop does what any
training must, and saves by `torch.save`. The engine's loop is that of train.py, with all that makes
a run trustworthy: seeds of every micro-step, exact means, skipping of non-finite updates, records,
TensorBoard, agreement on signals, checkpoints that are copied, summed and flushed. A third loop is
the engine's with `train.deterministic`. Evaluation is left out. The CPU time of all processes
counts, so that a busy machine slows none of the loops.
"""

import itertools
import os
import socket
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.utils.model_ema import ModelEmaV3
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.machine import machine
from benchmarks.records import as_json, write_record
from lipsformer._commands import documented_parser
from lipsformer._configfile import read_config
from lipsformer._ranks import on_first_rank
from lipsformer.config import Config
from lipsformer.engine.build import build_model
from lipsformer.engine.distributed import start
from lipsformer.engine.parts import TrainingParts
from lipsformer.engine.trainer import Trainer
from scripts._assemble import assemble

Turn = Callable[[], None]


def bare_loop(config: Config, parts: TrainingParts, file: Path) -> Turn:
    """Return one epoch of a loop as it is usually written by hand."""
    accelerator, per_epoch = parts.state.accelerator, parts.train_batches.updates_per_epoch
    model = build_model(config, parts.classes).train()
    assert config.train.ema_decay is not None and config.optim.clip_grad is not None
    ema, limit = ModelEmaV3(model, config.train.ema_decay), config.optim.clip_grad
    parallel = DistributedDataParallel(model) if accelerator.num_processes > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    scheduler = CosineAnnealingLR(optimizer, config.train.epochs * per_epoch)
    epochs, rank = itertools.count(), accelerator.process_index

    def turn() -> None:
        batches = parts.train_batches.epoch(next(epochs))
        for step, (((images, labels),), _) in enumerate(batches, start=1):
            at = {"update": step, "micro_step": 0, "rank": rank}
            images, targets = parts.transform(images, labels, **at)
            loss = F.cross_entropy(parallel(images), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema.update(model)
            if step == per_epoch // 2 and rank == 0:
                holders = {"model": model, "optimizer": optimizer, "ema": ema.module}
                torch.save({name: held.state_dict() for name, held in holders.items()}, file)

    return turn


def engine_loop(trainer: Trainer) -> Turn:
    """Return one epoch of the loop of train.py, which ends when its checkpoint is on the disk."""

    def turn() -> None:
        trainer.train_epoch()
        on_first_rank(trainer.writer.wait)
        if trainer.stopped:
            raise KeyboardInterrupt

    return turn


def deterministic(turn: Turn) -> Turn:
    def inside() -> None:
        torch.use_deterministic_algorithms(True)
        turn()
        torch.use_deterministic_algorithms(False)

    return inside


def cpu_and_wall_seconds(turn: Turn) -> tuple[float, float]:
    """Return the CPU seconds of this process, and the wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    turn()
    return time.process_time() - cpu, time.perf_counter() - wall


def overhead(loop: torch.Tensor, base: torch.Tensor) -> dict[str, Any]:
    """Return the medians over the turns, in percent of the base's seconds in the same turn."""
    cpu, wall = (100 * (loop / base - 1)).T.tolist()
    return {
        "cpu": statistics.median(cpu),
        "cpu_quartiles": statistics.quantiles(cpu),
        "wall": statistics.median(wall),
    }


def measure(options: Namespace, folder: Path) -> dict[str, Any]:
    """Let the loops take turns on the processes of this group; return their figures."""
    settings = [
        f"model.name={options.model}",
        "augment={mixup: 0.8, reprob: 0.25, label_smoothing: 0.1}",
        f"train.global_batch_size={options.batch_size}",
        f"train.epochs={2 * (options.turns + 1)}",
        f"data.holdout={options.holdout}",
        "train.ema_decay=0.999",
        "lipschitz.monitor_every=null",
        f"run.output_dir={folder}/run",
    ]
    config = read_config(Config, "configs/demo.yaml", settings)
    accelerator = start(config)
    parts = assemble(config, accelerator, None)
    every = parts.train_batches.updates_per_epoch // 2
    config = read_config(
        Config, "configs/demo.yaml", [*settings, f"run.save_every_updates={every}"]
    )
    trainer = Trainer(config, parts, None)
    engine = engine_loop(trainer)
    loops = {
        "bare": bare_loop(config, parts, folder / "bare.pt"),
        "engine": engine,
        "deterministic": deterministic(engine),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for number in range(options.turns + 1):
        for name in loops if number % 2 else reversed(loops):
            accelerator.wait_for_everyone()
            spent = cpu_and_wall_seconds(loops[name])
            if number > 0:  # the first turn warms up
                seconds[name].append(spent)
    trainer.tracking.close()
    trainer.close()
    processes = accelerator.num_processes
    total = {
        name: accelerator.gather(torch.tensor(turns)[None]).double().sum(dim=0)  # pyright: ignore
        for name, turns in seconds.items()
    }
    return {
        "model": options.model,
        "processes": processes,
        "global_batch_size": options.batch_size,
        "updates": 2 * every * options.turns,
        "updates_per_save": 2 * every,
        "cpu_ms_per_update": {
            name: 1000 * float(turns[:, 0].median()) / (2 * every) / processes
            for name, turns in total.items()
        },
        "engine_over_bare_percent": overhead(total["engine"], total["bare"]),
        "deterministic_over_engine_percent": overhead(total["deterministic"], total["engine"]),
        "load_average": os.getloadavg()[0],
        **machine(accelerator.device),
    }


def work(rank: int, port: int, options: Namespace, folder: Path) -> None:
    if options.processes > 1:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        ranks = (rank, rank, options.processes, options.processes)
        os.environ |= dict(zip(names, map(str, ranks), strict=True))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["ACCELERATE_USE_CPU"] = "true"
    record = measure(options, folder)
    if rank == 0:
        print(as_json(record))
        write_record(options.output, record)


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--model", default="lipsformer_nano")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=14,
        help="of all processes; small, for short updates, and such that their number is even",
    )
    parser.add_argument("--turns", type=int, default=20, help="epochs of each loop")
    parser.add_argument(
        "--holdout", type=float, default=0.0, help="share of the images left out, for short epochs"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            work, args=(port, options, Path(folder)), nprocs=options.processes
        )


if __name__ == "__main__":
    main()
