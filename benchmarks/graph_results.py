"""Gather the runs of scripts.train_graph and scripts.graph_sweep in one file and one table.

    python -m benchmarks.graph_results outputs/graph \
        --output benchmarks/results/graph/runs.json

The file holds the outcome of every seed with its settings. The command prints one Markdown line per
setting: the test accuracy in % at the best validation epoch / at the last epoch, as mean ± sample
standard deviation.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from benchmarks.records import markdown, spread, write_record
from lipsformer._commands import documented_parser
from lipsformer.jsonl import read_jsonl

_PERCENT = ("test_acc", "last_test_acc", "highest_train_acc", "val_acc")


def gather(folder: Path) -> list[dict[str, Any]]:
    """Return one row per setting of a folder of a run or a sweep, with the seeds in order."""
    if (folder / "sweep.yaml").exists():
        settings = {
            "config": Path(yaml.safe_load((folder / "sweep.yaml").read_text())["config"]).name
        }
    else:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        model, train = config["model"], config["train"]
        settings = {
            "model": {**model.pop("kwargs"), **model},
            "normalize_features": config["data"]["normalize_features"],
            "missing_rate": config["data"]["missing_rate"],
            "train": {key: train[key] for key in ("lr", "weight_decay", "epochs", "patience")},
        }
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in read_jsonl(folder / "results.jsonl"):
        rows.setdefault(json.dumps(line.get("overrides", [])), []).append(line)
    return [
        {"study": folder.name, **settings, "overrides": json.loads(key), **_columns(lines)}
        for key, lines in rows.items()
    ]


def _columns(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    lines = sorted(lines, key=lambda line: line["seed"])
    columns = {
        key: [round(100 * line[key], 1) for line in lines] for key in _PERCENT if key in lines[0]
    }
    for key in ("seed", "best_epoch", "epochs", "diverged", "seconds"):
        columns[key] = [line[key] for line in lines]
    return columns


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of rows that `gather` returned."""
    lines = []
    for row in rows:
        test = " / ".join(spread(row[key], 1) for key in _PERCENT[:2])
        train = spread(row[_PERCENT[2]], 1) if _PERCENT[2] in row else ""
        lines.append((row["study"], " ".join(row["overrides"]), len(row["seed"]), test, train))
    return markdown(("study", "setting", "seeds", "test", "highest train"), lines)


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("root", type=Path, help="folder of output folders")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    folders = sorted(path.parent for path in args.root.glob("*/results.jsonl"))
    rows = [row for folder in folders for row in gather(folder)]
    write_record(args.output, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
