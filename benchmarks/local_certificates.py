"""Local certificates beside the global ones and beside an attack, image by image.

    python -m benchmarks.local_certificates outputs/demo \
        --output benchmarks/results/local_certificates/digits.json
    python -m benchmarks.local_certificates --table benchmarks/results/local_certificates/*.json

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

from benchmarks.league.cell import commit
from benchmarks.machine import machine
from data import Normalize, build_eval_dataset, collate
from lipsformer._commands import documented_parser
from lipsformer.analysis.bounds import image_domain, lipschitz_bound
from lipsformer.analysis.certificates import certified_radius
from lipsformer.analysis.local_certificates import local_certificates
from lipsformer.analysis.robustness import pgd_attack
from lipsformer.engine.run_folder import find_weights, load_model

BATCH = 20
QUARTERS = range(-40, 41)  # powers of 2^(1/4) that the attack tries, by bisection


def attacked_distances(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the smallest distance at which the attack succeeds, [B]; inf if it never does."""

    def shifted(x: Tensor) -> Tensor:  # the attack keeps images in [0, 1], which is wide enough
        return model((x - 0.5) * 200.0)

    found = []
    for image, label in zip(images, labels, strict=True):
        low, high = QUARTERS[0] - 1, QUARTERS[-1] + 1
        while high - low > 1:
            middle = (low + high) // 2
            broken = pgd_attack(
                shifted, image[None] / 200.0 + 0.5, label[None], 2.0 ** (middle / 4) / 200.0
            )
            low, high = (low, middle) if broken else (middle, high)
        found.append(2.0 ** (high / 4) if high <= QUARTERS[-1] else math.inf)
    return torch.tensor(found, dtype=torch.float64)


def measure(run: str, count: int | None) -> dict[str, Any]:
    """Return the record of a run's best weights on its evaluation images."""
    weights = find_weights(run, "best")
    config = weights.config([])
    assert config is not None
    data = config.data
    model = load_model(weights).eval()
    images = build_eval_dataset(data, classes=weights.classes())
    chosen = range(len(images) if count is None else min(count, len(images)))
    bound = lipschitz_bound(
        model, image_domain((data.img_size, data.img_size), data.mean, data.std)
    )
    rows: list[dict[str, Any]] = []
    seconds = 0.0
    for first in range(0, len(chosen), BATCH):
        pixels, labels = collate([images[i] for i in chosen[first : first + BATCH]])
        inputs = Normalize(data.mean, data.std)(pixels)
        started = time.process_time()
        logits, local = local_certificates(model, inputs)
        seconds += time.process_time() - started
        attacked = attacked_distances(model, inputs, logits.argmax(1))
        for values in zip(
            (logits.argmax(1) == labels).tolist(),
            certified_radius(logits, bound).tolist(),
            local.tolist(),
            attacked.tolist(),
            strict=True,
        ):
            rows.append(dict(zip(("correct", "global", "local", "attacked"), values, strict=True)))
    fallen = sum(row["local"] >= row["attacked"] for row in rows)
    return {
        "model": str(config.model.name),
        "weights": str(weights.file.name),
        "data": data.source,
        "images": len(rows),
        "certified_images_that_fell": fallen,
        "bound_log10": bound.log10,
        "cpu_seconds_per_image": seconds / len(rows),
        "commit": commit(),
        "machine": machine(torch.device("cpu")),
        "rows": rows,
    }


def table(records: list[dict[str, Any]]) -> str:
    """Return the medians in markdown."""
    lines = [
        "| model | data | images | global | local | attacked | attacked / local | CPU s an image |",
        "|---" * 8 + "|",
    ]
    for record in records:
        rows = [row for row in record["rows"] if math.isfinite(row["attacked"])]
        medians = [statistics.median(r[key] for r in rows) for key in ("global", "local")]
        attacked = statistics.median(row["attacked"] for row in rows)
        gap = statistics.median(row["attacked"] / row["local"] for row in rows)
        logs = [f"10^{math.log10(value):.1f}" for value in (*medians, attacked, gap)]
        lines.append(
            f"| `{record['model']}` | {record['data']} | {record['images']} | {' | '.join(logs)} "
            f"| {record['cpu_seconds_per_image']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser: argparse.ArgumentParser = documented_parser(
        __doc__, prog="python -m benchmarks.local_certificates"
    )
    parser.add_argument("run", nargs="?", help="folder of a run")
    parser.add_argument("--images", type=int, help="number of images; default: all")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument(
        "--table", nargs="+", type=Path, metavar="JSON", help="only print the table"
    )
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(path.read_text()) for path in options.table]))
        return
    record = measure(options.run, options.images)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record) + "\n")
    print(table([record]))


if __name__ == "__main__":
    main()
