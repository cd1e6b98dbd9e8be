"""What benchmarks share: the command line, the JSON file of the figures, and tables in markdown."""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lipsformer._commands import quiet_pipe


def as_json(record: object) -> str:
    """Return a record as text."""
    return json.dumps(record, indent=1)


def write_record(path: Path | None, record: object) -> None:
    """Write a record as JSON, and its folder if that is missing; do nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(record) + "\n")


def markdown(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in markdown."""
    first, *others = ["| " + " | ".join(map(str, cells)) + " |" for cells in (header, *rows)]
    return "\n".join([first, "|" + "---|" * len(header), *others])


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean and, for several values, the standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


@quiet_pipe()
def run(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    table: Callable[[dict[str, Any]], str] = as_json,
) -> None:
    """Run the command line of a benchmark: measure, or only print what was measured before.

    Args:
        parser: The parser. `--output` and `--table` are added to it.
        measure: Returns the record of the figures for the parsed options.
        table: Returns the text to print for a record.
    """
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tables of JSON files")
    options = parser.parse_args()
    if options.table:
        print("\n\n".join(table(json.loads(path.read_text())) for path in options.table))
        return
    record = measure(options)
    write_record(options.output, record)
    print(table(record))
