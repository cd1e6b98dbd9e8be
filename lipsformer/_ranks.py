"""The processes (ranks) that train one model together: exchange, and work that one does for all.

Everything here also works in a single process without a process group.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

__all__ = [
    "gather_from_ranks",
    "launched_first",
    "launched_first_here",
    "on_first_rank",
    "rank_and_count",
    "sum_over_ranks",
]

Result = TypeVar("Result")


def launched_first() -> bool:
    """Return whether this process is the first one of all.

    This is what the launcher says, before the ranks have met. It is true without a launcher.
    """
    return os.environ.get("RANK", "0") == "0"


def launched_first_here() -> bool:
    """Return whether this process is the first one on its machine.

    This is what the launcher says, before the ranks have met. It is true without a launcher.
    """
    return os.environ.get("LOCAL_RANK", "0") == "0"


def rank_and_count() -> tuple[int, int]:
    """Return the rank of this process, from 0, and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Call `work` on rank 0 only; return its result, or raise its error, on every rank.

    Args:
        work: Function without arguments. Its result must be picklable.
    """
    rank, count = rank_and_count()
    if count == 1:
        return work()
    outcome: list[Any] = [None, None]
    if rank == 0:
        try:
            outcome[0] = work()
        except Exception as error:  # the other ranks would wait for the broadcast forever
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; every rank must call it."""
    if rank_and_count()[1] == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def gather_from_ranks(value: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks in order; every rank must call it."""
    count = rank_and_count()[1]
    values: list[Any] = [value] * count
    if count > 1:
        dist.all_gather_object(values, value)
    return values
