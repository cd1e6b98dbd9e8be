"""AutoAttack (Croce and Hein 2020, `pyautoattack`) against the certificates of a run.

    python eval.py --checkpoint outputs/certified/digits --certify
    python -m benchmarks.autoattack outputs/certified/digits \
        --output benchmarks/results/autoattack_digits.json
    python -m benchmarks.autoattack outputs/certified/cifar10 --data holdout=0 --every 100 \
        --output benchmarks/results/autoattack_cifar10.json
    python -m benchmarks.autoattack outputs/capped --every 1000 \
        --local benchmarks/results/local_certificates/cifar10_capped.json \
        --output benchmarks/results/autoattack_capped.json
    python -m benchmarks.autoattack --table benchmarks/results/autoattack_digits.json

Within the given distances only those images are attacked that are classified rightly and not
certified there. Then every image is attacked within its own certified radius (the executed one).
With --local the radii are those of local certificates, and only the own radii are attacked, in
float64. An image is not attacked again after its class has changed. The command writes the results
of every attack on every batch, and goes on where it was stopped.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pyautoattack import AutoAttack
from torch import Tensor

from benchmarks.machine import machine
from benchmarks.records import markdown
from data import Normalize, build_eval_dataset, collate
from lipsformer._commands import documented_parser
from lipsformer._machine import commit
from lipsformer.config import DataConfig
from lipsformer.engine.run_files import manifest_entry
from lipsformer.engine.run_folder import find_weights
from lipsformer.engine.weights import load_model
from scripts._certificate import FILE
from scripts._certify import parse_distance

OWN = "own radius"
ATTACKS = ("apgd-ce", "apgd-t", "fab-t", "square")  # the standard version
BATCH = 60
SLACK = 1e-5  # of a distance, for the float32 arithmetic of the attack
LEAST = 0.05  # distance that AutoAttack gets at least: its float32 images cannot resolve 1e-6

Function = Callable[[Tensor], Tensor]


def auto_attack(
    function: Function, images: Tensor, labels: Tensor, eps: float, attacks: Sequence[str] = ATTACKS
) -> Tensor:
    """Return which images keep their label under the standard version in the 2-norm, [B].

    Args:
        function: Map from images to at least four logits.
        images: [B, C, H, W], float32, values in [0, 1].
        labels: [B].
        eps: Largest distance.
        attacks: Which of the attacks of the standard version to run.
    """
    with torch.random.fork_rng():
        attack = AutoAttack(function, norm="L2", eps=eps * (1.0 - SLACK), seed=0)
        attack.attacks_to_run = list(attacks)
        moved, _ = attack.run_standard_evaluation(images, labels, batch_size=len(images))
    if (moved - images).flatten(1).norm(dim=1).max() > eps or moved.min() < 0 or moved.max() > 1:
        raise RuntimeError(f"AutoAttack left the ball of radius {eps:g} or the box [0, 1]")
    with torch.no_grad():
        return function(moved).argmax(1) == labels


def attack_own_radii(
    function: Function,
    images: Tensor,
    labels: Tensor,
    radii: Tensor,
    attacks: Sequence[str] = ATTACKS,
) -> Tensor:
    """Return which images keep their label within a radius of their own, [B].

    AutoAttack knows a single distance R: the largest radius, or `LEAST` if that is larger. It sees
    images u, and the network sees x + (u - x) r / R in float64, where x is the attacked image next
    to u and r its radius. Two images must be more than 2 R apart.

    Args:
        function: As for `auto_attack`, for images in float64.
        images: As for `auto_attack`.
        labels: [B].
        radii: [B], > 0.
        attacks: As for `auto_attack`.
    """
    largest, flat = max(radii.max().item(), LEAST), images.flatten(1)
    if len(images) > 1 and torch.pdist(flat).min() <= 2.0 * largest:
        raise ValueError(f"two images are at most {2.0 * largest:g} apart: attack them separately")
    shares = (radii.double() / largest)[:, None, None, None]

    def shrunk(u: Tensor) -> Tensor:
        nearest = torch.cdist(u.detach().flatten(1), flat).argmin(1)
        centers = images[nearest].double()
        return function(centers + (u - centers) * shares[nearest]).to(u.dtype)

    return auto_attack(shrunk, images, labels, largest, attacks)


def claimed_radii(folder: Path, local: Path | None, every: int, data: DataConfig) -> list[float]:
    """Return the radii of the first of every so many images, in pixel values of [0, 1].

    Args:
        folder: Folder of the weights and their certificate.
        local: Record of `benchmarks.local_certificates` to take in its place, or None.
        every: How many images there are for each that is attacked.
        data: The preprocessing.

    Raises:
        ValueError: If the record of local certificates leaves out images that are attacked.
    """
    if local is None:
        return json.loads((folder / FILE).read_text())["sets"]["data"]["executed"][::every]
    record = json.loads(local.read_text())
    step, rest = divmod(every, record["every"])
    if rest != 0:
        raise ValueError(f"--every={every} must be a multiple of {record['every']}, as in {local}")
    return [row["local"] * min(data.std) for row in record["rows"][::step]]


def measure(
    run: str,
    output: Path,
    distances: Sequence[str],
    every: int,
    overrides: Sequence[str],
    local: Path | None,
) -> dict[str, Any]:
    """Attack images of the certificate file of a run's best weights.

    Args:
        run: Folder of the run.
        output: JSON file; goes on if it exists.
        distances: Distances within which images are attacked, such as "36/255".
        every: The first of so many images is attacked.
        overrides: Settings of the data as the certificate was made with, such as "holdout=0".
        local: As for `claimed_radii`. The model then runs in float64.

    Raises:
        ValueError: If the certificate is of other images, or the output of another certificate.
    """
    weights = find_weights(run, "best")
    config = weights.config([f"data.{override}" for override in overrides])
    assert config is not None
    dataset = build_eval_dataset(config.data, classes=weights.classes())
    radii = torch.tensor(claimed_radii(weights.folder, local, every, config.data)).double()
    chosen = range(0, len(dataset), every)
    if len(radii) != len(chosen):
        raise ValueError(
            f"the certificate has {len(radii)} of every {every} images and the data {len(chosen)}: "
            "give the --data that the certificate was made with"
        )
    pixels, labels = collate([dataset[i] for i in chosen])
    images = (pixels / 255.0).contiguous()
    dtype = torch.float32 if local is None else torch.float64
    model = load_model(weights).to(dtype).eval().requires_grad_(False)
    normalize = Normalize(config.data.mean, config.data.std, dtype)

    def logits(pixels: Tensor) -> Tensor:
        return model(normalize(pixels * 255.0))

    with torch.no_grad():
        predicted = logits(images).argmax(1)
    record: dict[str, Any] = {
        "weights_sha256": manifest_entry(weights.file)["sha256"],
        "commit": commit(),
        "machine": machine(torch.device("cpu")),
        "right": (predicted == labels).tolist(),
        "radius": radii.tolist(),
        "attacks": [],
    }
    record = continued(output, record)
    done = {(at["within"], at["attack"], i) for at in record["attacks"] for i in at["images"]}
    tried = {within: attacked(record, within) for within in (*distances, OWN)}
    for within, name in itertools.product(tried, ATTACKS):
        for first in range(0, len(tried[within]), BATCH):
            batch = tried[within][first : first + BATCH]
            of = [i for i in batch if i not in changed(record, within)]
            if len(of) == 0 or (within, name, of[0]) in done:
                continue
            if within == OWN:
                kept = attack_own_radii(logits, images[of], predicted[of], radii[of], [name])
            else:
                kept = auto_attack(logits, images[of], labels[of], parse_distance(within), [name])
            record["attacks"].append(
                {"within": within, "attack": name, "images": of, "kept": kept.tolist()}
            )
            written = output.with_suffix(".part")
            written.write_text(json.dumps(record) + "\n")
            written.replace(output)
    return record


def continued(output: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return the record in the output if it is there, and a new one otherwise.

    Raises:
        ValueError: If the output holds the record of another certificate.
    """
    if not output.exists():
        return record
    known = json.loads(output.read_text())
    if any(known[key] != record[key] for key in ("weights_sha256", "right", "radius")):
        raise ValueError(f"{output} holds the results of another certificate: remove it")
    return known


def attacked(record: dict[str, Any], within: str) -> list[int]:
    """Return which images are attacked: an image with a larger radius is attacked within that."""
    rows = enumerate(zip(record["right"], record["radius"], strict=True))
    if within == OWN:
        return [i for i, (_, radius) in rows if radius > 0.0]
    return [i for i, (right, radius) in rows if right and radius <= parse_distance(within)]


def changed(record: dict[str, Any], within: str) -> set[int]:
    """Return the images whose class an attack changed within a distance."""
    return {
        i
        for at in record["attacks"]
        if at["within"] == within
        for i, kept in zip(at["images"], at["kept"], strict=True)
        if not kept
    }


def accuracy(record: dict[str, Any], within: str) -> float | None:
    """Return the share of images that are right and keep their class, in percent.

    Certified images count as kept. None if an attack on an image is missing.
    """
    lost, tried = changed(record, within), {name: set[int]() for name in ATTACKS}
    for at in record["attacks"]:
        if at["within"] == within:
            tried[at["attack"]] = tried[at["attack"]] | set(at["images"])
    if any(set(attacked(record, within)) - lost - images for images in tried.values()):
        return None
    return 100.0 * (sum(record["right"]) - len(lost)) / len(record["right"])


def table(record: dict[str, Any]) -> str:
    """Return the table of docs/certified.md, of what has been attacked so far."""
    kept: dict[tuple[str, str], list[bool]] = {}
    for at in record["attacks"]:
        kept.setdefault((at["within"], at["attack"]), []).extend(at["kept"])
    rows = (
        (within, name, f"{len(held)} of {len(attacked(record, within))}", held.count(False))
        for (within, name), held in sorted(kept.items(), key=lambda row: (row[0][0] != OWN, row[0]))
    )
    return markdown(("within", "attack", "images tried", "changed their class"), rows)


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__, prog="python -m benchmarks.autoattack")
    parser.add_argument("run", nargs="?", help="folder of a run")
    parser.add_argument("--distances", nargs="*", default=["36/255"], help="e.g. 36/255 0.2")
    parser.add_argument("--every", type=int, default=1, help="attack the first of so many images")
    parser.add_argument("--data", nargs="*", default=[], metavar="key=value", help="as eval.py had")
    parser.add_argument("--local", type=Path, metavar="JSON", help="radii of local certificates")
    parser.add_argument("--output", type=Path, help="JSON file; goes on if it exists")
    parser.add_argument("--table", type=Path, metavar="JSON", help="only print these results")
    options = parser.parse_args()
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
    elif options.run is None or options.output is None:
        parser.error("give a run and --output, or --table")
    else:
        distances = [] if options.local else options.distances
        settings = (distances, options.every, options.data, options.local)
        record = measure(options.run, options.output, *settings)
        print(table(record))
        for within in distances:
            share = accuracy(record, within)
            print(f"accuracy under AutoAttack within {within}: {share} %")


if __name__ == "__main__":
    main()
