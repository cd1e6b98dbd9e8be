"""Evaluates a checkpoint: a run, a checkpoint or a file of weights.

    python eval.py --checkpoint outputs/demo
    python eval.py --checkpoint FOLDER --data source=folder root=datasets name=imagenet

Model, class names and preprocessing come from the checkpoint's config.json, the data from its
config.yaml; `--data key=value` replaces settings of the latter. A bare file of weights needs
`--config`. `--set` evaluates on ImageNet's own sets instead: val real v2 a r sketch c, each also as
`name=folder` (docs/data.md). `--certify` adds the share of images that keep their class within a
2-norm distance, proved and under attack (docs/lipschitz.md). Exit code 2 for a mistake.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from torch import Tensor, nn

import lipsformer  # noqa: F401  (registers the models)
from data import DataError, Normalize, build_eval_dataset, eval_loader
from data.evalsets import STANDARD, EvalSet, corruption_summary, find_sets
from lipsformer._configfile import ConfigError, make_config, read_config
from lipsformer.analysis.bounds import UnknownModuleError, image_domain, lipschitz_bound
from lipsformer.analysis.certificates import certified_radius
from lipsformer.analysis.robustness import robust_mask
from lipsformer.config import Config, DataConfig
from lipsformer.engine.checkpoint import EMA, MODEL, CheckpointError, locate, read_weights
from lipsformer.engine.distributed import EXIT_NONFINITE, EXIT_USER_ERROR, make_accelerator
from lipsformer.engine.metrics import NonFiniteError
from lipsformer.engine.steps import SizedBatches, evaluate
from lipsformer.engine.train_state import load_weights
from lipsformer.engine.trainer import CONFIG
from train import build_model


def evaluate_checkpoint(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each set of weights: raw, and EMA if there is one."""
    if options.batch_size is not None and options.batch_size < 1:
        raise ConfigError(f"--batch-size={options.batch_size} must be >= 1")
    eps = [distance(text) for text in options.certify or ()]
    path = locate(Path(options.checkpoint))
    folder = path if path.is_dir() else path.parent
    overrides = [f"data.{override}" for override in options.data]
    config_file = options.config or (folder / CONFIG if (folder / CONFIG).exists() else None)
    config: Config | None = read_config(Config, config_file, overrides) if config_file else None

    if (folder / "config.json").exists():
        card = json.loads((folder / "config.json").read_text())
        data_overrides = ["source=folder", *options.data] if options.set else options.data
        data = config.data if config else data_config(card, data_overrides, origin=str(folder))
        classes, num_classes = card.get("label_names"), card["num_classes"]
        model = timm.create_model(f"local-dir:{folder}", pretrained=False)
    elif config:
        data, classes, num_classes, model = config.data, None, len(STANDARD), None
    else:
        raise ConfigError(f"{path}: no config.json lies beside it; give --config configs/x.yaml")
    if options.set:
        sets = find_sets(options.set, data, classes, num_classes)
    else:
        sets = [EvalSet("data", build_eval_dataset(data, classes=classes))]
    if model is None:
        assert config is not None
        model = build_model(config, STANDARD if options.set else sets[0].dataset.classes)

    accelerator = make_accelerator(config.train.precision if config else "fp32")
    files = [path] if path.is_file() else [f for f in (path / MODEL, path / EMA) if f.exists()]
    batch_size = options.batch_size or (config.train.eval_batch_size if config else 256)
    records = []
    for file in files:
        load_weights(model, read_weights(file), str(file))
        model.to(accelerator.device)
        figures = {
            eval_set.name: evaluate_set(accelerator, model, eval_set, data, batch_size, eps)
            for eval_set in sets
        }
        rows = [{"set": name, **result} for name, result in figures.items()]
        of_file = {"checkpoint": str(path), "weights": file.name}
        records += [{**of_file, **row} for row in rows + corruption_summary(figures)]
    return records


def evaluate_set(
    accelerator: Accelerator,
    model: nn.Module,
    eval_set: EvalSet,
    data: DataConfig,
    batch_size: int,
    eps: Sequence[float],
) -> dict[str, Any]:
    batches = eval_loader(
        eval_set.dataset,
        batch_size=batch_size,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        num_workers=data.num_workers,
    )
    classifier = model if eval_set.outputs is None else Outputs(model, eval_set.outputs)
    result = evaluate(
        accelerator,
        classifier,
        batches,
        normalize=Normalize(data),
        num_images=len(eval_set.dataset),
    )
    assert result is not None
    return {**result, **certify(accelerator, model, classifier, batches, data, eps)}


def certify(
    accelerator: Accelerator,
    model: nn.Module,
    classifier: nn.Module,
    batches: SizedBatches,
    data: DataConfig,
    eps: Sequence[float],
) -> dict[str, Any]:
    """Certified and attacked accuracy in percent, in float32, distances in pixel values of [0, 1].

    Raises:
        ConfigError: if the model has no proved bound.
    """
    if not eps:
        return {}
    try:
        domain = image_domain((data.img_size, data.img_size), data.mean, data.std)
        bound = lipschitz_bound(model, domain)
    except UnknownModuleError as error:
        raise ConfigError(f"--certify: {error}") from None
    normalize, generator = Normalize(data), torch.Generator().manual_seed(0)

    def logits(pixels: Tensor) -> Tensor:
        return classifier(normalize(pixels * 255.0))

    counts = torch.zeros(len(eps), 2, dtype=torch.long, device=accelerator.device)
    images_seen = torch.zeros((), dtype=torch.long, device=accelerator.device)
    for images, labels in batches:
        pixels = images.to(accelerator.device) / 255.0
        labels = labels.to(accelerator.device)
        with torch.no_grad():
            # the normalisation stretches distances by at most 1 / min(std)
            radius = certified_radius(logits(pixels), bound) * min(data.std)
        for row, distance in zip(counts, eps, strict=True):
            held = robust_mask(logits, pixels, labels, distance, radius, generator=generator)
            row += torch.stack([part.sum() for part in held])
        images_seen += len(labels)
    counts, images_seen = accelerator.reduce((counts, images_seen), reduction="sum")  # pyright: ignore[reportGeneralTypeIssues]
    shares = (100.0 * counts.double() / images_seen).tolist()
    return {
        "pixel_bound_log10": bound.log10 - math.log10(min(data.std)),
        "robustness": [
            {"eps": distance, "certified": certified, "pgd": attacked}
            for distance, (certified, attacked) in zip(eps, shares, strict=True)
        ],
    }


def distance(text: str) -> float:
    """A distance such as 36/255 or 0.14."""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if value <= 0.0:
        raise ConfigError(f"--certify={text} must be a number > 0 such as 36/255 or 0.14")
    return value


class Outputs(nn.Module):
    """The model with some of its logits only."""

    def __init__(self, model: nn.Module, outputs: Sequence[int]):
        super().__init__()
        self.model = model
        self.outputs = list(outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[:, self.outputs]


def data_config(card: dict[str, Any], overrides: Sequence[str], *, origin: str) -> DataConfig:
    """Preprocessing of a timm config.json, with `overrides` to say which images."""
    known = card["pretrained_cfg"]
    settings = {
        "img_size": known["input_size"][-1],
        **{key: known[key] for key in ("mean", "std", "crop_pct", "interpolation")},
    }
    return make_config(DataConfig, [settings], overrides, origin=f"{origin} with --data")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="run, checkpoint or weights file")
    parser.add_argument("--data", nargs="*", default=[], metavar="key=value", help="e.g. root=/d")
    parser.add_argument(
        "--set", nargs="+", metavar="name[=folder]", help="ImageNet's val real v2 a r sketch c"
    )
    parser.add_argument(
        "--certify",
        nargs="*",
        metavar="EPS",
        help="distances in pixel values of [0, 1]; default 36/255",
    )
    parser.add_argument("--config", help="YAML of model and data for a bare file of weights")
    parser.add_argument("--batch-size", type=int, help="of a device; default: of the run's config")
    parser.add_argument("--json", metavar="FILE", help="also write the records there; - for stdout")
    return parser


def table(records: Sequence[dict[str, Any]]) -> str:
    width = max(len(r["set"]) for r in records)
    head = f"{'weights':20} {'set':{width}} {'top-1 %':>9} {'top-5 %':>9} {'loss':>9} {'images':>8}"
    lines = [head]
    for r in records:
        figures = f"{r['top1']:9.3f} {r['top5']:9.3f} {r['loss']:9.5f} {r['images']:8d}"
        lines.append(f"{r['weights']:20} {r['set']:{width}} {figures}")
        if "mce" in r:
            mce = "none, as not all 15 are there" if r["mce"] is None else f"{r['mce']:.2f} %"
            lines.append(f"c is the mean of {r['corruptions']} corruptions; mCE: {mce}")
    for r in records:
        for at in r.get("robustness", ()):
            lines.append(
                f"{r['weights']:20} {r['set']:{width}} within {at['eps']:.4f} (2-norm): certified "
                f"{at['certified']:.3f} %, under PGD {at['pgd']:.3f} %, "
                f"log10 bound {r['pixel_bound_log10']:.3f}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    if options.certify == []:
        options.certify = ["36/255"]
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        records = evaluate_checkpoint(options)
    except (ConfigError, DataError, CheckpointError) as error:
        code, message = EXIT_USER_ERROR, str(error)
    except NonFiniteError as error:
        code, message = EXIT_NONFINITE, str(error)
    else:
        if os.environ.get("RANK", "0") == "0":
            text = json.dumps(records, indent=1)
            print(text if options.json == "-" else table(records))
            if options.json not in (None, "-"):
                Path(options.json).write_text(text + "\n")
        return 0
    if first:
        print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
