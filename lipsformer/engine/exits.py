"""How a process ends: one line for each error, whichever rank met it, and the same code on all."""

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_CODE = "lipsformer/exit code"
_ENDED = "lipsformer/ended"
_PATIENCE = 2.0  # seconds for which rank 0 keeps the store open, where the other ranks look


def run(work: Callable[[], int], codes: Mapping[type[Exception], int]) -> int:
    """Return the exit code of `work`, and print the errors that users can act on.

    Each such error is printed once, by the first rank that met it. A rank whose communication
    broke because another one has ended says nothing more and takes over that rank's exit code.

    Args:
        work: Returns an exit code.
        codes: Exit codes of the errors that users can act on. Others keep their traceback.

    Example:
        >>> run(lambda: 0, {ValueError: 2})
        0
    """
    try:
        return work()
    except tuple(codes) as error:
        code = next(code for kind, code in codes.items() if isinstance(error, kind))
        _end(code, str(error))
        return code
    except Exception as error:
        if isinstance(error, RuntimeError) and (code := _code_of_others()):
            return code
        _end(1, None)
        raise


def _store() -> dist.Store | None:
    """Return what the ranks share besides collective operations; None for a single process."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return None if alone else _get_default_store()


def _end(code: int, message: str | None) -> None:
    store = _store()
    if store is None:
        # Before the ranks have met, each of them reads the same config.
        if message is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {message}", file=sys.stderr, flush=True)  # noqa: T201
        return
    rank, first = dist.get_rank(), True
    if rank > 0:
        time.sleep(0.2)  # what all ranks meet is told by rank 0
    try:
        if message is not None:
            name = hashlib.sha256(message.encode()).hexdigest()
            first = store.add(f"lipsformer/said/{name}", 1) == 1
        store.set(_CODE, str(code))
        store.add(_ENDED, 1)
    except RuntimeError:  # rank 0, which may hold the store, has ended
        pass
    if message is not None and first:
        print(f"error: rank {rank}: {message}", file=sys.stderr, flush=True)  # noqa: T201
    if rank == 0:
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):
            while store.add(_ENDED, 0) < dist.get_world_size() and time.monotonic() < deadline:
                time.sleep(0.05)


def _code_of_others() -> int:
    """Return the exit code of a rank that has ended with an error; 0 if none has."""
    store = _store()
    if store is None:
        return 0
    rank = dist.get_rank()
    try:
        code = int(store.get(_CODE)) if store.check([_CODE]) else 0
        if code:
            store.add(_ENDED, 1)
        return code
    except RuntimeError:
        print(f"rank {rank} ends, because rank 0 has ended", file=sys.stderr)  # noqa: T201
        return 1
