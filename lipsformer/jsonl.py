"""Read and append to JSON-lines files, which hold one record per line."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["append_jsonl", "read_jsonl"]


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a missing file has none.

    Reading ends at a line that an interruption cut off.
    """
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record to a file, and create the file if it is missing.

    A line that an interruption cut off is removed first.
    """
    text = path.read_bytes() if path.exists() else b""
    if not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])
    with path.open("a") as stream:
        stream.write(json.dumps(record) + "\n")
