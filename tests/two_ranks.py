"""Two ranks that train for a few steps, and what they send and hold meanwhile."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.utils._python_dispatch import TorchDispatchMode

from lipsformer._configfile import read_config
from lipsformer.analysis.cost import PeakMemory
from lipsformer.config import Config
from lipsformer.engine.distributed import start
from lipsformer.engine.signals import StopRequest
from lipsformer.engine.steps import train_step
from scripts._assemble import assemble
from scripts._many_ranks import LiveBytes
from tests.launch import CONTEXT, fsdp2_environment

STEPS = 3  # DDP deals its buckets anew after the first


class Sent(TorchDispatchMode):
    """Operation and bytes of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = operator(*args, **(kwargs or {}))
        if operator in collective_ops and operator not in sync_ops:
            name = operator.name().partition("::")[2].strip("_")
            size = CollectiveOp.get_comm_tensor_size(operator, result, args, kwargs)
            self.found.append([name, size])
        return result


def measure(arguments: list[str], file: Path, *, sharded: bool = False) -> dict[str, Any]:
    """Return what rank 0 of two sends in the last step, and the memory that it needs.

    Args:
        arguments: Config file and settings.
        file: Where rank 0 writes it.
        sharded: Use FSDP2, which Accelerate 1.15 would leave out on a CPU.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        CONTEXT.Process(target=_rank, args=(r, port, arguments, file, sharded)) for r in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return json.loads(file.read_text())


def _rank(rank: int, port: int, arguments: list[str], file: Path, sharded: bool) -> None:
    torch.set_num_threads(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, (str(rank), str(rank), "2", "2"), strict=True))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if sharded:
        os.environ |= fsdp2_environment()
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    config = read_config(Config, arguments[0], arguments[1:])
    accelerator = start(config)
    with PeakMemory(torch.device("cpu")) as resident, LiveBytes() as live:
        parts, stop = assemble(config, accelerator, None), StopRequest(signals=())
        live.peak = 0
        batches = iter(parts.train_batches.epoch(0))
        for step in range(STEPS):
            micro_batches, count = next(batches)
            with Sent() as sent:
                train_step(parts.state, micro_batches, count, step, parts.transform)
                stop.stop_signal()
    if rank == 0:
        found = {"sent": sent.found, "peak": live.peak, "resident": resident.peak}
        file.write_text(json.dumps(found))
