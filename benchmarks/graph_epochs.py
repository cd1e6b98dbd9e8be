"""Read from finished sweeps which test accuracy other choices of the epoch would have given.

    python -m benchmarks.graph_epochs table_missing_features_cora outputs/graph/missing_cora

It reads the `seed<n>.jsonl` files of all runs in the sweep's output folder, finds the run of every
line of the sweep's results by its seed, length and last loss, and writes
`benchmarks/results/graph/epochs_<sweep>.jsonl`. `python -m benchmarks.graph_tables epoch_choice`
prints the table. The last choice looks at the test set: it shows what no honest choice can exceed.
"""

import sys
from pathlib import Path
from typing import Any

from lipsformer._commands import documented_parser
from lipsformer.jsonl import append_jsonl, read_jsonl

RESULTS = Path(__file__).parent / "results/graph"


def choices(epochs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the test accuracy at the lowest validation loss, and the highest one."""
    lowest = min(epochs, key=lambda epoch: epoch["val_loss"])
    return {
        "lowest_val_loss": lowest["test_acc"],
        "highest_test": max(epoch["test_acc"] for epoch in epochs),
    }


def main() -> None:
    """Write the file of one sweep."""
    parser = documented_parser(__doc__, prog="python -m benchmarks.graph_epochs")
    parser.add_argument("sweep", help="name of the file of results, without .jsonl")
    parser.add_argument("folder", type=Path, help="output folder of the sweep")
    args = parser.parse_args()
    runs = {}
    for path in args.folder.glob("runs/*/seed*.jsonl"):
        epochs = list(read_jsonl(path))
        runs[path.stem.removeprefix("seed"), len(epochs), epochs[-1]["loss"]] = epochs
    lines = []
    for line in read_jsonl(RESULTS / f"{args.sweep}.jsonl"):
        epochs = runs.get((str(line["seed"]), line["epochs"], line["last_loss"]))
        if epochs is None:
            sys.exit(
                f"error: {args.folder} lacks the run of {line['cell']} with seed {line['seed']}"
            )
        own = {key: line[key] for key in ("cell", "seed", "test_acc")}
        lines.append(own | choices(epochs))
    target = RESULTS / f"epochs_{args.sweep}.jsonl"
    target.unlink(missing_ok=True)
    for line in lines:
        append_jsonl(target, line)


if __name__ == "__main__":
    main()
