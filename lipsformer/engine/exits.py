"""How a process ends among its ranks.

An error is printed in one line, whichever rank met it, and all ranks end with the same code.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lipsformer._files import read_json, write_atomically
from lipsformer._ranks import launched_first_here
from lipsformer.engine.run_files import EXIT

# Exit codes. 75 is EX_TEMPFAIL of sysexits.h: the caller shall run the same command again.
EXIT_USER_ERROR = 2
EXIT_NONFINITE = 3
EXIT_STORAGE = 4
EXIT_BOUND = 5
EXIT_STOPPED = 75
# Codes of a training that failed by its own numbers: the same start would lead there again.
FINAL = (EXIT_NONFINITE, EXIT_BOUND)

_CODE = "lipsformer/exit code"
_ENDED = "lipsformer/ended"
_PATIENCE = 2.0  # seconds for which rank 0 keeps the store open, where the other ranks look


def run(work: Callable[[], int], codes: Mapping[type[Exception], int]) -> int:
    """Return the exit code of `work`, and print the errors that users can act on.

    Each such error is printed once, by the first rank that met it. A rank whose communication
    broke because another one has ended takes over that rank's exit code. If rank 0 has ended and
    held the store of the ranks, the others cannot read it and end with 1.

    Args:
        work: Returns an exit code.
        codes: Exit codes of the errors that users can act on. Others keep their traceback.

    Example:
        >>> run(lambda: 0, {ValueError: 2})
        0
    """
    if code := _code_of_last_attempt():
        return code
    try:
        return work()
    except (RepeatedError, *codes) as error:
        code = error.code if isinstance(error, RepeatedError) else code_of(error, codes)
        _end(code, str(error))
        return code
    except Exception as error:
        if isinstance(error, RuntimeError) and (code := _code_of_others()):
            return code
        _end(1, None)
        raise


class RepeatedError(RuntimeError):
    """The run has ended with an error that the same command would meet again."""

    def __init__(self, message: str, *, code: int = 1):
        super().__init__(message)
        self.code = code


def code_of(error: Exception, codes: Mapping[type[Exception], int]) -> int:
    """Return the exit code of an error."""
    return next(code for kind, code in codes.items() if isinstance(error, kind))


def write_exit(
    folder: Path,
    code: int,
    reason: str,
    *,
    config: str | None = None,
    checkpoint: str | None = None,
) -> None:
    """Write how a run ended, for launchers, which do not pass on the codes of their processes.

    Args:
        folder: Folder of the run.
        code: The exit code.
        reason: What the error says; empty without one.
        config: The config, with which the next start compares its own in `refuse_to_repeat`; None
            if it is not known.
        checkpoint: Name of the checkpoint from which the next start would continue, which it
            compares as well; None for a start from the beginning.
    """
    record = {"code": code, "reason": reason, "config": config, "checkpoint": checkpoint}
    with contextlib.suppress(OSError):  # a full disk, or another rank that writes the same
        write_atomically(folder / EXIT, json.dumps(record, indent=1))


def refuse_to_repeat(folder: Path, *, config: str, checkpoint: str | None) -> None:
    """Raise a `RepeatedError` if the same start has ended with a code of `FINAL`.

    Args:
        folder: Folder of the run.
        config: The config of this start.
        checkpoint: Name of the checkpoint of this start; None for one from the beginning.
    """
    path = folder / EXIT
    if not path.exists():
        return
    record = read_json(path)
    same = (record.get("config"), record.get("checkpoint")) == (config, checkpoint)
    if record.get("code") in FINAL and same:
        raise RepeatedError(
            f"this run ended with exit code {record['code']}, and the same start would end so "
            f"again ({record['reason']}); change a setting, or remove {path} to try all the same",
            code=record["code"],
        )


def _exit_of_torchrun() -> Path | None:
    """Return the exit.json that all attempts of a torchrun share on this machine.

    None if torchrun did not start this process.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return None if error_file is None else Path(error_file).parents[2] / EXIT


def _code_of_last_attempt() -> int:
    """Return the code that ended the last attempt if it would end this one too; 0 otherwise.

    torchrun restarts a process whatever its exit code.
    """
    path = _exit_of_torchrun()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not path or not path.exists():
        return 0
    code = json.loads(path.read_text())["code"]
    message = f"not started again, because it ended with exit code {code}"
    if _is_first_here(message):
        print(message, file=sys.stderr, flush=True)  # noqa: T201
    return code


def _is_first_here(message: str) -> bool:
    """Return whether this process shall print a message for all processes of its machine.

    It is the first one with this message, because torchrun ends the others once one has ended.
    Without torchrun it is local rank 0.
    """
    path = _exit_of_torchrun()
    if path is None:
        return launched_first_here()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        path.with_name(f"printed-{attempt}-{_digest(message)}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _digest(message: str) -> str:
    return hashlib.sha256(message.encode()).hexdigest()


def _store() -> dist.Store | None:
    """Return torch's key-value store, which all ranks share; None for a single process."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return None if alone else _get_default_store()


def _end(code: int, message: str | None) -> None:
    """Tell the user, the other ranks and the next attempt how this process ends.

    Args:
        code: The exit code.
        message: What to print; None leaves it to the traceback.
    """
    if (path := _exit_of_torchrun()) and code in (EXIT_USER_ERROR, *FINAL):
        write_exit(path.parent, code, message or "")
    store = _store()
    if store is None:
        # Before the ranks have met, each of them reads the same config.
        if message is not None and _is_first_here(message):
            print(f"error: {message}", file=sys.stderr, flush=True)  # noqa: T201
        return
    rank, first = dist.get_rank(), True
    if rank > 0:
        time.sleep(0.2)  # rank 0 comes first, so that it prints an error that all ranks meet
    try:
        if message is not None:
            first = store.add(f"lipsformer/printed/{_digest(message)}", 1) == 1
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
    time.sleep(0.5)  # a process that ends closes one connection after the other
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, timeout=5).close()
        code = int(store.get(_CODE)) if store.check([_CODE]) else 0
        if code:
            store.add(_ENDED, 1)
        return code
    except (OSError, RuntimeError):
        print(f"rank {dist.get_rank()} ends, because rank 0 has ended", file=sys.stderr)  # noqa: T201
        return 1
