"""The lock of a run's folder: one process at a time writes there.

The lock is a file with the owner's name. A link creates it, which is atomic on network disks too.
The owner touches it again and again. Another process takes it over if the owner is dead, or if
nobody touched the file while it watched. No clock is compared with another one.
"""

import contextlib
import json
import logging
import os
import platform
import threading
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lipsformer._errors import ConfigError
from lipsformer._files import flush
from lipsformer.engine.run_files import CheckpointError

logger = logging.getLogger(__name__)

LOCK = "lock.json"
HEARTBEAT = 15.0  # seconds between two touches
PATIENCE = 120.0  # seconds without a touch after which an owner elsewhere counts as dead


class FolderLostError(CheckpointError):
    """Another process has taken the folder over."""


class FolderLock:
    """The right to write into a folder, from `acquire` to `release`.

    Args:
        folder: The folder. `acquire` creates it and its parents. `release` removes it if it is
            empty, and then the parents that were created.
        heartbeat: Seconds between two touches.
        patience: Seconds without a touch after which an owner on another machine counts as dead.

    Example:
        >>> import tempfile
        >>> lock = FolderLock(Path(tempfile.mkdtemp()) / "run")
        >>> lock.acquire()
        >>> lock.release()
    """

    def __init__(self, folder: Path, *, heartbeat: float = HEARTBEAT, patience: float = PATIENCE):
        self.path = folder / LOCK
        self.heartbeat = heartbeat
        self.patience = patience
        self.token = uuid.uuid4().hex
        self._created: list[Path] = []  # parents of the folder, the deepest first
        self._ended = threading.Event()

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: If another process owns it; the message names that process. Also if the
                lock is damaged.
        """
        folder = self.path.parent
        self._created = [parent for parent in folder.parents if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        # long enough to watch an owner elsewhere once, and then to compete for its lock
        deadline = time.monotonic() + 2 * self.patience
        while not self._create(self.path):
            owner = self._read()
            if owner is None:
                continue  # released just now
            if not self._is_dead(owner) or time.monotonic() > deadline:
                raise ConfigError(
                    f"{self.path.parent} is in use by {_describe(owner)}: wait for its end, stop "
                    f"it, or choose another folder; if it is dead, remove {self.path}"
                )
            if self._follow(owner):
                break
            time.sleep(0.1)
        threading.Thread(target=self._beat, daemon=True).start()

    def is_held(self) -> bool:
        """Return whether no other process has taken the folder over."""
        owner = self._read()
        return owner is not None and owner["token"] == self.token

    def check(self) -> None:
        """Raise a `FolderLostError` if another process has taken the folder over."""
        owner = self._read()
        if owner is None or owner["token"] != self.token:
            taken = f"by {_describe(owner)}" if owner else "and left"
            raise FolderLostError(
                f"{self.path.parent} was taken over {taken}; nothing more is written from here"
            )

    def release(self) -> None:
        """Give the lock back if it is still owned, and if the disk lets it."""
        self._ended.set()
        # a broken disk, a damaged lock, or a folder that is not empty
        with contextlib.suppress(OSError, ConfigError):
            if self.is_held():
                self.path.unlink(missing_ok=True)
            for folder in (self.path.parent, *self._created):
                folder.rmdir()

    def _create(self, path: Path) -> bool:
        """Create a file with this owner unless there is one; return whether it was created."""
        temporary = self._write()
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def _follow(self, owner: dict[str, Any]) -> bool:
        """Replace the lock of a dead owner; return whether this process did it, and no other."""
        claim = self.path.with_name(f".{LOCK}-after-{owner['token']}")
        if not self._create(claim):
            return False
        now = self._read()
        if now is None or now["token"] != owner["token"]:  # another process was faster
            claim.unlink()
            return False
        logger.warning("taking %s over from %s, dead", self.path.parent, _describe(owner))
        claim.replace(self.path)
        return True

    def _write(self) -> Path:
        temporary = self.path.with_name(f".{LOCK}-{self.token}")
        try:
            temporary.write_text(json.dumps({"token": self.token, **_own_identity()}, indent=1))
            flush(temporary)  # a power cut must not leave an empty lock
        except OSError:  # a full disk
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _read(self) -> dict[str, Any] | None:
        try:
            return json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            raise ConfigError(
                f"{self.path} is damaged: remove it if no other process trains in its folder"
            ) from None

    def _is_dead(self, owner: dict[str, Any]) -> bool:
        here = _own_identity()
        if owner["place"] == here["place"]:
            return _process_start(owner["pid"]) != owner["process_start"]
        logger.warning(
            "%s is locked by %s; waiting up to %.0f s for a sign of life",
            self.path.parent,
            _describe(owner),
            self.patience,
        )
        before, deadline = self._touched(), time.monotonic() + self.patience
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self.patience / 4))
            if self._touched() != before:
                return False
        return True

    def _touched(self) -> int | None:
        self._read()  # a network disk asks its server for the time of change when a file is opened
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _beat(self) -> None:
        while not self._ended.wait(self.heartbeat):
            with contextlib.suppress(OSError, ConfigError):
                if not self.is_held():
                    return
                os.utime(self.path)


def _own_identity() -> dict[str, Any]:
    pid = os.getpid()
    jobs = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "SKYPILOT_TASK_ID")
    return {
        "host": platform.node(),
        "pid": pid,
        "job": next((os.environ[name] for name in jobs if name in os.environ), None),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "process_start": _process_start(pid),
        "place": f"{platform.node()} {_namespace()}",
    }


def _namespace() -> str:
    """Return the name of the space in which process ids are unique, such as that of a container."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _process_start(pid: int) -> str | None:
    """Return when a process of this machine began, since ids are reused; None if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:  # a system without /proc
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"


def _describe(owner: dict[str, Any]) -> str:
    job = f", job {owner['job']}" if owner["job"] else ""
    return f"process {owner['pid']} on {owner['host']}{job}, which began {owner['started']}"
