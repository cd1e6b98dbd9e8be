"""Local certificates beside the global ones and beside an attack, image by image.

    python -m benchmarks.local_certificates outputs/demo \
        --output benchmarks/results/local_certificates/digits.json
    python -m benchmarks.local_certificates outputs/capped --every 10 \
        --output benchmarks/results/local_certificates/cifar10_capped.json
    python -m benchmarks.local_certificates --table benchmarks/results/local_certificates/*.json

The output is written after every 16 images, and the command continues an output that exists.

The distances are 2-norms of the normalized images. The attacked distance is the smallest one, by
bisection over powers of 2^(1/4), at which projected gradient descent finds another class. It is an
upper bound of every true certificate.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from benchmarks.records import markdown
from data import Normalize, build_eval_dataset, collate
from lipsformer._commands import documented_parser
from lipsformer._machine import commit
from lipsformer.analysis.bounds import image_domain, lipschitz_bound
from lipsformer.analysis.certificates import certified_radius
from lipsformer.analysis.local_certificates import local_certificates
from lipsformer.analysis.robustness import pgd_attack
from lipsformer.engine.run_folder import find_weights
from lipsformer.engine.weights import load_model

BATCH = 16  # images that are certified together
QUARTERS = range(-40, 41)  # powers of 2^(1/4) that the attack tries, by bisection


def attacked_distances(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the smallest distance at which the attack succeeds, [B]; inf if it never does."""

    def shifted(x: Tensor) -> Tensor:  # the attack keeps images in [0, 1], which is wide enough
        return model((x - 0.5) * 200.0)

    low = torch.full((len(images), 1, 1, 1), QUARTERS[0] - 1)
    high = torch.full_like(low, QUARTERS[-1] + 1)
    while (high - low).max() > 1:
        middle = (low + high) // 2
        broken = pgd_attack(shifted, images / 200.0 + 0.5, labels, 2.0 ** (middle / 4) / 200.0)
        broken = broken[:, None, None, None]
        low, high = torch.where(broken, low, middle), torch.where(broken, middle, high)
    distances = 2.0 ** (high.flatten().double() / 4)
    return distances.masked_fill(high.flatten() > QUARTERS[-1], math.inf)


def measure(run: str, failure: float, every: int, output: Path) -> dict[str, Any]:
    """Write the record of a run's best weights on its evaluation images, and return it.

    Args:
        run: Folder of the run.
        failure: Probability that the local certificate of an image is wrong.
        every: The first of so many images is measured.
        output: JSON file. Images that it holds are not measured again.

    Raises:
        ValueError: If the file is of other weights, or was made with another `failure` or `every`.
    """
    weights = find_weights(run, "best")
    config = weights.config([])
    assert config is not None
    data = config.data
    model = load_model(weights).eval()
    images = build_eval_dataset(data, classes=weights.classes())
    bound = lipschitz_bound(
        model, image_domain((data.img_size, data.img_size), data.mean, data.std)
    )
    facts = {
        "model": str(config.model.name),
        "data": data.name or data.source,
        "bound_log10": bound.log10,
        "failure": failure,
        "every": every,
    }
    record: dict[str, Any] = {**facts, "rows": []}
    if output.exists():
        record = json.loads(output.read_text())
        if any(record[name] != value for name, value in facts.items()):
            raise ValueError(f"{output} holds another model, other data or other options")
    record |= {"commit": commit(), "machine": machine(torch.device("cpu"))}
    rows = record["rows"]
    chosen = range(0, len(images), every)
    for first in range(len(rows), len(chosen), BATCH):
        pixels, labels = collate([images[i] for i in chosen[first : first + BATCH]])
        inputs = Normalize(data.mean, data.std)(pixels)
        started = time.process_time()
        logits, local = local_certificates(model, inputs, failure)
        seconds = (time.process_time() - started) / len(labels)
        predicted = logits.argmax(1)
        columns = {
            "correct": (predicted == labels).tolist(),
            "global": certified_radius(logits, bound).tolist(),
            "local": local.tolist(),
            "attacked": attacked_distances(model, inputs, predicted).tolist(),
            "cpu_seconds": [seconds] * len(labels),
        }
        rows += [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        output.write_text(json.dumps(record) + "\n")
    return record


def table(records: list[dict[str, Any]]) -> str:
    """Return the medians in markdown."""
    header = ("model", "data", "images", "global", "local", "attacked", "attacked / local")
    lines = []
    for record in records:
        rows = [row for row in record["rows"] if math.isfinite(row["attacked"])]
        medians = [statistics.median(r[key] for r in rows) for key in ("global", "local")]
        attacked = statistics.median(row["attacked"] for row in rows)
        gap = statistics.median(row["attacked"] / row["local"] for row in rows)
        logs = [f"10^{math.log10(value):.1f}" for value in (*medians, attacked, gap)]
        fell = sum(r["local"] >= r["attacked"] for r in record["rows"])
        seconds = f"{statistics.median(r['cpu_seconds'] for r in rows):.1f}"
        name, images = f"`{record['model']}`", len(record["rows"])
        lines.append((name, record["data"], images, *logs, fell, seconds))
    return markdown((*header, "fell", "CPU s an image"), lines)


def main() -> None:
    """Run the command."""
    parser: argparse.ArgumentParser = documented_parser(
        __doc__, prog="python -m benchmarks.local_certificates"
    )
    parser.add_argument("run", nargs="?", help="folder of a run")
    parser.add_argument("--every", type=int, default=1, help="take the first of so many images")
    parser.add_argument(
        "--failure", type=float, default=1e-12, help="probability that a certificate is wrong"
    )
    parser.add_argument("--output", type=Path, help="JSON file, continued if it exists")
    parser.add_argument(
        "--table", nargs="+", type=Path, metavar="JSON", help="only print the table"
    )
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(path.read_text()) for path in options.table]))
        return
    if options.run is None or options.output is None:
        parser.error("RUN and --output are needed")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    print(table([measure(options.run, options.failure, options.every, options.output)]))


if __name__ == "__main__":
    main()
