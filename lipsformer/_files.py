"""Replace files so that a killed process, a full disk or a power cut loses nothing."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["flush", "replacing", "write_atomically"]


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
        temporary.write_text(text)


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
