"""Check, read and replace files; a killed process, a full disk or a power cut loses nothing."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lipsformer._errors import ConfigError

__all__ = ["flush", "read_json", "replacing", "require_writable", "write_atomically"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces the file at `path` after the block.

    If the block raises an error, the file at `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}")
    yield temporary
    flush(temporary)
    temporary.replace(path)


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of a file, or leave it unchanged if that fails."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(option: str, file: str | Path) -> None:
    """Raise a `ConfigError` that names the option unless a file can be written; leave it as it is.

    Commands call it before their work, whose result would be lost otherwise.
    """
    path = Path(file)
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} {str(file)!r} cannot be written: {reason}") from None


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """Return what a JSON file holds.

    Args:
        path: The file.
        kind: What it must hold, a dict or a list.

    Raises:
        ConfigError: If it is damaged; the message is one sentence.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read as JSON: {reason}; restore the file") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{path} holds no JSON {kind.__name__}; restore the file")
    return value
