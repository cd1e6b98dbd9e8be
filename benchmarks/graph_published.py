"""Our accuracies on graphs with missing features beside those of Dasoulas et al. 2021, table 1.

    python -m benchmarks.graph_published cora
    python -m benchmarks.graph_published citeseer

The runs are those of configs/graph/table_missing_features_{cora,citeseer}.yaml. The difference is
in standard errors of the difference, with the paper's five runs.
"""

import statistics
from collections import defaultdict
from pathlib import Path

from benchmarks.records import markdown, spread
from lipsformer._commands import documented_parser
from lipsformer.jsonl import read_jsonl

RESULTS = Path(__file__).parent / "results/graph"
PAPERS_RUNS = 5
COLUMNS = (
    *("model (layers), missing", "seeds", "best validation epoch", "last epoch"),
    *("published", "difference", "in standard errors"),
)
# mean and standard deviation, %
PUBLISHED = {
    "cora": {
        "GCN (2), 0 %": (82.5, 1.2),
        "GGNN (2), 0 %": (81.8, 2.0),
        "GAT (2), 0 %": (82.3, 2.3),
        "GAT-PairNorm (4), 0 %": (78.8, 0.6),
        "GAT-LipschitzNorm (5), 0 %": (83.1, 0.5),
        "GCN (2), 100 %": (58.8, 3.5),
        "GGNN (6), 100 %": (68.2, 2.5),
        "GAT (4), 100 %": (65.3, 2.1),
        "GAT-PairNorm (12), 100 %": (73.8, 1.2),
        "GAT-LipschitzNorm (11), 100 %": (75.3, 0.9),
    },
    "citeseer": {
        "GCN (2), 0 %": (69.5, 2.1),
        "GGNN (3), 0 %": (68.5, 1.9),
        "GAT (2), 0 %": (69.3, 1.6),
        "GAT-PairNorm (4), 0 %": (67.2, 0.8),
        "GAT-LipschitzNorm (3), 0 %": (69.1, 1.5),
        "GCN (2), 100 %": (31.3, 2.7),
        "GGNN (5), 100 %": (40.5, 1.4),
        "GAT (4), 100 %": (42.8, 1.6),
        "GAT-PairNorm (10), 100 %": (51.7, 1.1),
        "GAT-LipschitzNorm (9), 100 %": (50.9, 1.9),
    },
}


def table(graph: str) -> str:
    """Return the Markdown table of a graph; rows without at least two seeds are left out."""
    runs = defaultdict(list)
    for line in read_jsonl(RESULTS / f"table_missing_features_{graph}.jsonl"):
        runs[line["cell"]["case"]].append(line)
    rows = []
    for case, (published, deviation) in PUBLISHED[graph].items():
        if len(runs[case]) < 2:
            continue
        best, last = (
            [100 * run[key] for run in runs[case]] for key in ("test_acc", "last_test_acc")
        )
        mean, count = statistics.mean(best), len(best)
        error = (statistics.variance(best) / count + deviation**2 / PAPERS_RUNS) ** 0.5
        difference = mean - published
        ours = (count, spread(best, 1), spread(last, 1))
        compared = (f"{difference:+.1f}", f"{difference / error:+.1f}")
        rows.append((case, *ours, f"{published} ± {deviation}", *compared))
    return markdown(COLUMNS, rows)


if __name__ == "__main__":
    parser = documented_parser(__doc__, prog="python -m benchmarks.graph_published")
    parser.add_argument("graph", choices=sorted(PUBLISHED))
    print(table(parser.parse_args().graph))
