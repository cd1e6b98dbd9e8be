"""Read and append to JSON-lines files, which hold one record per line."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["append_jsonl", "read_jsonl"]


def read_jsonl(path: Path, size: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a missing file has none.

    Empty lines are left out, and so is a last line that an interruption cut off.

    Args:
        path: The file.
        size: Number of bytes to read; None for the whole file.

    Raises:
        ValueError: If another line is damaged.
    """
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes()[:size].splitlines(keepends=True), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            if not line.endswith(b"\n"):
                return
            raise ValueError(
                f"line {number} of {path} is no JSON: repair it, or remove it if its record may be "
                "lost"
            ) from None
        yield record


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record to a file, and create the file if it is missing.

    A last line that an interruption cut off is removed first, and a whole one that lacks its
    newline gets it. The lines before are not written anew, because a full disk or a killed process
    would lose them.
    """
    text = path.read_bytes() if path.exists() else b""
    last = text[text.rfind(b"\n") + 1 :]
    if last and not _is_record(last):
        os.truncate(path, len(text) - len(last))
        last = b""
    with path.open("a") as stream:
        stream.write(("\n" if last else "") + json.dumps(record) + "\n")


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
