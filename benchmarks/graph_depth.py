"""GCNII on Cora with and without weight normalization: the search, and the accuracy by depth.

    python -m benchmarks.graph_depth search
    python -m benchmarks.graph_depth depth

The runs are those of configs/graph/{search,depth}_gcn2.yaml. Both tables show %.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from lipsformer._commands import documented_parser
from lipsformer.jsonl import read_jsonl

RESULTS = Path(__file__).parent / "results/graph"
FORMS = {"spectral": "with weight normalization", "none": "GCNII"}

Runs = dict[tuple[str, str], list[dict[str, Any]]]


def search_table() -> str:
    """Return the Markdown table of the validation accuracies of all settings."""
    runs = _runs("search_gcn2.jsonl")
    rows = [f"| setting | {' | '.join(FORMS.values())} |", "|---|---|---|"]
    for case in dict.fromkeys(case for case, _ in runs):
        cells = [_mean(runs.get((case, form), []), "val_acc") for form in FORMS]
        rows.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def depth_table() -> str:
    """Return the Markdown table of the test accuracies of all depths."""
    runs = _runs("depth_gcn2.jsonl")
    rows = [
        "| layers | network | seeds | best validation epoch | last epoch |",
        "|---|---|---|---|---|",
    ]
    cases = dict.fromkeys(case for case, _ in runs)
    for case in sorted(cases, key=lambda case: int(case.split()[0])):
        for form, network in FORMS.items():
            if (case, form) in runs:
                own = runs[case, form]
                cells = [_mean(own, key) for key in ("test_acc", "last_test_acc")]
                layers = case.replace(" layers", "")
                rows.append(f"| {layers} | {network} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _runs(name: str) -> Runs:
    runs: Runs = defaultdict(list)
    for line in read_jsonl(RESULTS / name):
        runs[line["cell"]["case"], line["cell"]["model.kwargs.weight_norm"]].append(line)
    return dict(runs)


def _mean(runs: list[dict[str, Any]], key: str) -> str:
    values = [100 * run[key] for run in runs]
    if len(values) < 2:
        return "".join(f"{value:.1f}" for value in values)
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


TABLES = {"search": search_table, "depth": depth_table}

if __name__ == "__main__":
    parser = documented_parser(__doc__, prog="python -m benchmarks.graph_depth")
    parser.add_argument("table", choices=sorted(TABLES))
    sys.stdout.write(TABLES[parser.parse_args().table]())
