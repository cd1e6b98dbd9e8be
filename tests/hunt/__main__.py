# ruff: noqa: T201  (a command prints)
"""Hunt for structures that exceed their proved bound: `python -m tests.hunt --output FILE`.

Every structure is one line of JSON. A hunt that was stopped goes on where it was; the table is
printed at the end. `--summary` writes the figures of docs/hunt.md. See docs/hunt.md.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.hunt.report import LEAST, markdown, shrink, smallest, summary
from tests.hunt.run import hunt, kinds

BATCH = 25


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__)
    parser.add_argument("--structures", type=int, default=20_000, help="usable ones, all kinds")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, added to")
    parser.add_argument("--kinds", nargs="*", default=kinds(), help="all by default; none to print")
    parser.add_argument("--input-steps", type=int, default=6, help="gradient steps in the input")
    parser.add_argument("--weight-steps", type=int, default=4, help="random steps in the weights")
    parser.add_argument("--summary", type=Path, help="JSON file for the figures of the tables")
    parser.add_argument("--smallest", action="store_true", help="shrink one fault of every sort")
    return parser.parse_args()


def read(path: Path) -> tuple[list[dict[str, Any]], set[tuple[str, int]]]:
    """Return the verdicts of the finished batches, and the batches' names and numbers."""
    if not path.exists():
        return [], set()
    verdicts: list[dict[str, Any]] = []
    done: set[tuple[str, int]] = set()
    for line in path.read_text().splitlines():
        batch = json.loads(line)
        verdicts += batch["verdicts"]
        done.add((batch["kind"], batch["number"]))
    return verdicts, done


def main() -> int:
    """Hunt until every kind has its share; return 1 if a bound is at fault."""
    options = _arguments()
    verdicts, done = read(options.output)
    share = max(LEAST, -(-options.structures // max(1, len(options.kinds))))
    usable = dict.fromkeys(options.kinds, 0)
    for verdict in verdicts:
        usable[verdict["kind"]] = usable.get(verdict["kind"], 0) + _usable(verdict)
    effort = {"input_steps": options.input_steps, "weight_steps": options.weight_steps}
    number = 0
    while any(usable[name] < share for name in options.kinds):
        for name in options.kinds:
            if usable[name] >= share or (name, number) in done:
                continue
            found = list(hunt(name, BATCH, number, **effort))
            with options.output.open("a") as file:
                batch = {"kind": name, "number": number, "verdicts": found}
                file.write(json.dumps(batch) + "\n")
            verdicts += found
            usable[name] += sum(map(_usable, found))
            print(f"{name}: {usable[name]}/{share}", file=sys.stderr, flush=True)
        number += 1
    figures = summary(verdicts)
    print(markdown(figures))
    if options.summary is not None:
        options.summary.write_text(json.dumps(figures, indent=1) + "\n")
    faults = smallest(verdicts)
    for key, found in faults.items():
        first = shrink(found[0]) if options.smallest else found[0]
        print(json.dumps({"fault": key, "number": len(found), **first}))
    return 1 if faults else 0


def _usable(verdict: dict[str, Any]) -> bool:
    return verdict["outcome"] != "unusable"


if __name__ == "__main__":
    sys.exit(main())
