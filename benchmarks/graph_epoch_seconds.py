"""Compare what an epoch on Cora costs in two checkouts, by depth: a GAT with 4 heads x 64.

    python -m benchmarks.graph_epoch_seconds ../earlier --output benchmarks/results/graph/epoch_seconds.json

An epoch is a training step and the evaluation. Both checkouts run `scripts.train_graph` in processes
of their own, in turns, for few and for many epochs; the difference counts. The table shows medians.
"""  # noqa: E501

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.records import markdown, write_record
from lipsformer._commands import documented_parser

HERE = Path(__file__).parents[1]
LAYERS = (2, 5, 11, 20, 30)
FEW = 3  # epochs of the shorter run
SETTINGS = (
    *("model.hidden_channels=64", "model.kwargs.heads=4", "model.kwargs.attn_dropout=0.3"),
    *("model.kwargs.linear_ends=true", "train.patience=1000", "train.seeds=[0]"),
)


def seconds(checkout: Path, layers: int, epochs: int) -> float:
    """Return what a run of so many epochs took in a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "scripts.train_graph"]
        command += ["--config", str(checkout / "configs/graph/cora_lipschitznorm.yaml")]
        command += [*SETTINGS, f"model.num_layers={layers}", f"train.epochs={epochs}"]
        command += [f"run.output_dir={folder}/run", f"data.root={HERE / 'datasets'}"]
        environment = {"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin"}
        subprocess.run(
            command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL
        )
        return json.loads(Path(folder, "run/results.jsonl").read_text())["seconds"]


def table(record: dict[str, Any]) -> str:
    """Return the Markdown table of a record."""
    rows = [
        (layers, f"{before:.3f}", f"{after:.3f}", f"{before / after:.2f}")
        for layers, (before, after) in record["seconds"].items()
    ]
    return markdown(("layers", "before (s)", "after (s)", "speed ratio"), rows)


def main() -> None:
    """Measure, print the table and write the record."""
    parser = documented_parser(__doc__, prog="python -m benchmarks.graph_epoch_seconds")
    parser.add_argument("earlier", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    result = {}
    for layers in LAYERS:
        more = max(10, 100 // layers)
        rounds = [
            [
                (seconds(checkout, layers, FEW + more) - seconds(checkout, layers, FEW)) / more
                for checkout in (args.earlier.resolve(), HERE)
            ]
            for _ in range(args.rounds)
        ]
        result[layers] = [statistics.median(own) for own in zip(*rounds, strict=True)]
        print(layers, rounds, flush=True)
    record = {"machine": machine(torch.device("cpu")), "rounds": args.rounds, "seconds": result}
    write_record(args.output, record)
    print(table(record))


if __name__ == "__main__":
    main()
