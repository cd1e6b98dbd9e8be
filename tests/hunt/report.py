"""The table of a hunt, and its smallest counterexamples."""

import copy
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hypothesis import find, settings

from tests.hunt.cases import cases
from tests.hunt.judge import FAULTS, judge

COLUMNS = ("holds", "refused", *FAULTS)


def table(verdicts: Iterable[dict[str, Any]]) -> str:
    """Return one row per kind: structures by outcome and the largest ratio."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for verdict in verdicts:
        if verdict["outcome"] != "unusable":
            rows[verdict["kind"]].append(verdict)
    head = ["kind", "structures", *COLUMNS, "largest ratio", "exact cases"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in sorted(rows):
        found = rows[name]
        counts = [sum(v["outcome"] == outcome for v in found) for outcome in COLUMNS]
        largest = max(v["ratio"] for v in found)
        exact = [v["ratio"] for v in found if v.get("exact") and v["outcome"] == "holds"]
        share = f"{max(exact):.6f}" if exact else ""
        cells = [name, len(found), *counts, f"{largest:.4g}", share]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    total = sum(map(len, rows.values()))
    return "\n".join([*lines, f"\n{total} structures, {len(rows)} kinds"])


def simplicity(verdict: dict[str, Any]) -> tuple[float, ...]:
    """Order counterexamples: unchanged modules first, then short descriptions."""
    case = verdict["case"]
    plain = {"training": False, "double": True, "scale": None, "change": None}
    return (
        sum(case[name] != value for name, value in plain.items()),
        len(json.dumps(case)),
        -verdict["ratio"] if math.isfinite(verdict["ratio"]) else 0.0,
    )


def shrink(verdict: dict[str, Any]) -> dict[str, Any]:
    """Make a counterexample plainer, one part after the other, while its outcome stays."""
    plain = {"change": None, "scale": None, "training": False, "double": True, "radius": None}
    simplest = find(cases(verdict["kind"]), lambda _: True, settings=settings(database=None))
    options = [(None, name, value) for name, value in plain.items()]
    options += [
        (group, name, value)
        for group in ("weights", "args")
        for name, value in simplest[group].items()
    ]
    for group, name, value in options * 2:
        case = copy.deepcopy(verdict["case"])
        place = case if group is None else case[group]
        if place[name] != value:
            place[name] = value
            simpler = judge(case, input_steps=10, weight_steps=0)
            if simpler["outcome"] == verdict["outcome"]:
                verdict = simpler
    return verdict


def smallest(verdicts: Iterable[dict[str, Any]]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Group the faults by kind, outcome and change, the simplest first."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for verdict in verdicts:
        if verdict["outcome"] in FAULTS:
            change = verdict["case"]["change"]
            what = "" if change is None else change["what"]
            groups[verdict["kind"], verdict["outcome"], what].append(verdict)
    return {key: sorted(found, key=simplicity) for key, found in sorted(groups.items())}
