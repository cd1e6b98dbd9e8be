"""Measure weak scaling: a training step on one process, and on several that exchange gradients.

    python -m benchmarks.scaling --output benchmarks/results/scaling_cpu.json
    python -m benchmarks.scaling --device cuda --processes 8 --precision bf16 --batch-size 128 \
        --output benchmarks/results/scaling_cuda.json
    python -m benchmarks.scaling --table benchmarks/results/scaling_*.json

Every process has the same batch and one GPU, or an equal share of the threads. Within every round
they take turns at

- alone: process 0 steps while the others wait;
- without exchange: all step, each for itself: what is lost to memory and heat that they share;
- after: all step, gradients are averaged when the backward pass is over;
- overlapped: all step, DistributedDataParallel averages them during the backward pass;
- exchange: the gradients are averaged, nothing else.

A round's duration is that of its slowest process; medians are over the rounds.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import PRECISIONS, autocast, machine, seconds_of, synchronize
from benchmarks.records import markdown, run, write_record
from lipsformer._commands import documented_parser
from lipsformer.analysis.cost import count_parameters


def work(rank: int, options: argparse.Namespace, threads: int, store: str, path: Path) -> None:
    """Measure in one of the processes; the first one writes the record."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    cuda = options.device == "cuda"
    device = torch.device(options.device, rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend, size = "nccl" if cuda else "gloo", options.processes
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    # no drop path: every process has the same work
    model = timm.create_model(options.model, device=device).train()
    # gradients are views of the buckets that are exchanged: nothing is copied to overlap
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(options.batch_size, 3, options.img_size, options.img_size, device=device)
    labels = torch.arange(options.batch_size, device=device) % 1000
    gradients = torch.zeros(count_parameters(model), device=device)

    def step(net: Callable[[Tensor], Tensor], finish: Callable[[], None] = lambda: None) -> None:
        with autocast(device, options.precision):
            loss = cross_entropy(net(images), labels)
        loss.backward()
        finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def exchange() -> None:
        dist.all_reduce(gradients)

    turns: dict[str, Callable[[], None]] = {
        "alone": lambda: step(model) if rank == 0 else None,
        "without exchange": lambda: step(model),
        "after": lambda: step(model, exchange),
        "overlapped": lambda: step(parallel),
        "exchange": exchange,
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for index in range(options.warmup + options.rounds):
        for name, turn in turns.items():
            synchronize(device)
            dist.barrier()
            duration = torch.tensor(seconds_of(turn, device), device=device)
            dist.all_reduce(duration, dist.ReduceOp.MAX)
            if index >= options.warmup:
                seconds[name].append(duration.item())
    if rank == 0:
        kept = ("model", "precision", "processes", "batch_size", "img_size", "rounds", "warmup")
        record = {
            "machine": machine(device),
            "options": {name: getattr(options, name) for name in kept},
            "parameters": count_parameters(model),
            "seconds": {name: statistics.median(own) for name, own in seconds.items()},
        }
        write_record(path, record)
    dist.destroy_process_group()


STEPS = {
    "alone": "one process",
    "without exchange": "all processes, no exchange",
    "after": "all processes, gradients exchanged after the backward pass",
    "overlapped": "all processes, gradients exchanged during it (DistributedDataParallel)",
    "exchange": "only the exchange",
}


def table(record: dict[str, Any]) -> str:
    """Return the figures of one record as Markdown."""
    host, options, seconds = record["machine"], record["options"], record["seconds"]
    processes, batch = options["processes"], options["batch_size"]
    intro = (
        f"{options['model']}, {options['precision']}, {processes} processes x batch {batch}, "
        f"{options['img_size']} px, {host['device']} ({host['cpu']}, {host['threads']} threads "
        f"each), {4e-6 * record['parameters']:.0f} MB of gradients, {host['date']}"
    )
    rows = []
    for name, own in seconds.items():
        cells = ["", ""]
        if name == "alone":
            cells = [f"{batch / own:.2f}", ""]
        elif name != "exchange":
            cells = [f"{processes * batch / own:.2f}", f"{seconds['alone'] / own:.2f}"]
        rows.append((STEPS[name], f"{1e3 * own:.0f}", *cells))
    return f"{intro}\n\n{markdown(('step', 'ms', 'images/s', 'efficiency'), rows)}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the processes; return the record of the first."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        threads = max(1, torch.get_num_threads() // options.processes)
        arguments = (options, threads, f"file://{folder}/store", path)
        torch.multiprocessing.spawn(work, arguments, options.processes)
        return json.loads(path.read_text())


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("--model", default="lipsformer_swin_tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--batch-size", type=int, default=4, help="of every process")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    run(parser, measure, table)


if __name__ == "__main__":
    main()
