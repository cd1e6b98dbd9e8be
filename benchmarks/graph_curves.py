"""Plot values over training for several runs of scripts.train_graph.

    python -m benchmarks.graph_curves --output docs/images/graph_gradients_25.png \
        "GAT=outputs/graph/gradients_25_none/seed0.jsonl" \
        "GAT, LipschitzNorm=outputs/graph/gradients_25/seed0.jsonl"
"""

from pathlib import Path

from lipsformer._commands import documented_parser
from lipsformer.graph.plots import plot_epochs
from lipsformer.jsonl import read_jsonl


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("runs", nargs="+", help="name=path of a seed's JSON lines")
    parser.add_argument("--keys", nargs="+", default=["gradient_norm", "loss"])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    runs = {}
    for run in args.runs:
        name, _, path = run.rpartition("=")
        runs[name] = list(read_jsonl(Path(path)))
        if not runs[name]:
            raise SystemExit(f"{path} holds no records")
    plot_epochs(runs, args.keys, args.output)


if __name__ == "__main__":
    main()
