"""The table of a hunt, and its smallest counterexamples."""

import copy
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from hypothesis import find, settings

from tests.hunt.cases import cases
from tests.hunt.judge import FAULTS, judge

LEAST = 200  # structures that every class with a rule must be tried in


def summary(verdicts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows of the tables: structures by outcome and the largest ratios."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    classes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for verdict in verdicts:
        if verdict["outcome"] != "unusable":
            kinds[verdict["kind"]].append(verdict)
            for name in verdict["classes"]:
                classes[name].append(verdict)
    return {
        "structures": sum(map(len, kinds.values())),
        "kinds": {name: _row(found) for name, found in sorted(kinds.items())},
        "classes": {name: _row(found) for name, found in sorted(classes.items())},
    }


def _row(found: list[dict[str, Any]]) -> dict[str, Any]:
    counts = Counter(verdict["outcome"] for verdict in found)
    held = [verdict for verdict in found if verdict["outcome"] == "holds"]
    exact = [verdict["ratio"] for verdict in held if verdict.get("exact")]
    return {
        "structures": len(found),
        "holds": len(held),
        "refused": counts["refused"],
        "faults": sum(counts[outcome] for outcome in FAULTS),
        "largest": max((verdict["ratio"] for verdict in held), default=0.0),
        "largest_exact": max(exact, default=None),
    }


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of a summary."""
    lines = [
        "| kind | structures | holds | refused | faults | largest ratio | where exact |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found["kinds"].items():
        exact = "" if row["largest_exact"] is None else f"{row['largest_exact']:.6f}"
        counts = (row[key] for key in ("structures", "holds", "refused", "faults"))
        lines.append(_line(name, *counts, f"{row['largest']:.4f}", exact))
    lines += ["", "| class with a rule | structures | holds | refused |", "|---|---|---|---|"]
    for name, row in found["classes"].items():
        lines.append(_line(name, row["structures"], row["holds"], row["refused"]))
    least = min((row["structures"] for row in found["classes"].values()), default=0)
    total = f"{found['structures']:,} structures of {len(found['kinds'])} kinds"
    return "\n".join([*lines, "", f"{total}; at least {least} for every class."])


def _line(*cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


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
