"""Runs `train.main` in processes of its own, which may be told where to die.

A server process imports everything once and forks the runs, so that starting one takes a fraction
of a second.
"""

import contextlib
import importlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context, set_start_method
from multiprocessing.process import BaseProcess
from pathlib import Path

import matplotlib.figure  # noqa: F401  (imported once, in the server)
import sklearn.datasets  # noqa: F401
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

import train

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.launch"])


def fsdp2_environment(*options: str) -> dict[str, str]:
    """What `accelerate launch --use_fsdp --fsdp_version 2 ...` sets, by its own functions."""
    command = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    command += ["--fsdp_transformer_layer_cls_to_wrap", "Block", *options, "train.py"]
    options_ = launch_command_parser().parse_args(command)
    options_.num_cpu_threads_per_process = 1
    before = dict(os.environ)
    found = prepare_multi_gpu_env(options_)
    return {name: value for name, value in found.items() if before.get(name) != value}


def hsdp_options(replicas: int, shards: int) -> list[str]:
    """The options of `accelerate launch` for replicas that are sharded."""
    sizes = {"replicate": replicas, "shard": shards}
    pairs = ((f"--parallelism_config_dp_{name}_size", str(n)) for name, n in sizes.items())
    return ["--use_parallelism_config", *itertools.chain(*pairs)]


@dataclass(frozen=True)
class Event:
    """The moment just before the `count`-th call of a function of `module`."""

    module: str
    name: str
    count: int


def launch(
    arguments: Sequence[str],
    log: Path,
    *,
    world_size: int = 1,
    event: Event | None = None,
    signal_number: int = signal.SIGKILL,
    sharded: bool = False,
    replicas: int = 1,
) -> list[int]:
    """Runs the command on `world_size` processes and returns their exit codes.

    Args:
        arguments: of train.py.
        log: what the processes print; rank r appends to `log` with suffix `.r`.
        world_size: number of processes.
        event: when the last rank sends `signal_number` to itself. Death by SIGKILL of one rank
            makes the others be killed, as a launcher would.
        signal_number: what it sends.
        sharded: use FSDP2, which Accelerate 1.15 would leave out on a CPU.
        replicas: with more than one, the ranks are replicas of the model, each sharded (HSDP).
    """
    settings = {"world_size": world_size, "event": event, "number": signal_number}
    with running(arguments, log, **settings, sharded=sharded, replicas=replicas) as ranks:
        for rank in reversed(ranks):
            rank.join()
            if rank.exitcode == -signal.SIGKILL:
                break
    return [rank.exitcode or 0 for rank in ranks]


@contextlib.contextmanager
def running(
    arguments: Sequence[str],
    log: Path,
    *,
    world_size: int = 1,
    event: Event | None = None,
    number: int = signal.SIGKILL,
    sharded: bool = False,
    replicas: int = 1,
) -> Iterator[list[BaseProcess]]:
    """The started processes; those left at the end are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        CONTEXT.Process(
            target=_run,
            args=(
                list(arguments),
                str(log),
                rank,
                world_size,
                port,
                event if rank == world_size - 1 else None,
                number,
                sharded,
                replicas,
            ),
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        yield ranks
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()


def _run(
    arguments: list[str],
    log: str,
    rank: int,
    world_size: int,
    port: int,
    event: Event | None,
    number: int,
    sharded: bool,
    replicas: int,
) -> None:
    with open(f"{log}.{rank}", "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # for loader workers; inherited is "forkserver"
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    if sharded:
        mesh = hsdp_options(replicas, world_size // replicas) if replicas > 1 else []
        os.environ |= fsdp2_environment(*mesh)
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    if event is not None:
        owner = importlib.import_module(event.module)
        *path, name = event.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, _counted(getattr(owner, name), event.count, number))
    sys.exit(train.main(arguments))


def _counted(function: Callable, count: int, number: int) -> Callable:
    calls = 0

    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return wrapper
