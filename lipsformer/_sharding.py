"""Tensors that FSDP2 may have sharded: their full values, and writing full values into them.

Every rank must call these functions, because they exchange values. A tensor that is not sharded is
handled as a plain one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full values of a tensor, without a gradient.

    They share the memory of a tensor that is not sharded.
    """
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distribute_like(values: Tensor, tensor: Tensor, *, src_data_rank: int | None = 0) -> Tensor:
    """Return full values on the device of a tensor and sharded like it, or as they are.

    Args:
        values: The full values.
        tensor: The values are returned as they are if this tensor is not sharded.
        src_data_rank: The rank whose values all ranks get; None if all ranks have the same values,
            which need not be sent then.
    """
    if not isinstance(tensor, DTensor):
        return values
    return distribute_tensor(
        values.to(tensor.device),
        tensor.device_mesh,
        tensor.placements,
        src_data_rank=src_data_rank,
    )


@torch.no_grad()
def assign(weight: Tensor, values: Tensor) -> None:
    """Write full values into a weight.

    Args:
        weight: The parameter, changed in place.
        values: Its new values, in the full shape; the same on every rank.
    """
    weight.copy_(distribute_like(values.to(weight.dtype), weight, src_data_rank=None))


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Shard a model again at the end, for forward passes that no backward pass follows.

    Until the backward pass FSDP2 leaves the parameters of the outermost module gathered. These are
    not the parameters of the optimizer, and do not follow when an instrument changes the shards.

    Args:
        model: The model; nothing is done for one that is not sharded.
    """
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
