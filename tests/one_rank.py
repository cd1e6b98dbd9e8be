"""A process group of this process alone, with which FSDP2 shards a model."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@contextmanager
def sharded(model: nn.Module, *parts: nn.Module) -> Iterator[None]:
    """Shard the parts of a model, and the rest of it as the root."""
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for part in (*parts, model):
            fully_shard(part, mesh=mesh)
        yield
    finally:
        destroy_process_group()
