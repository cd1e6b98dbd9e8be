"""Evaluate a run, a checkpoint or a file of weights.

    python eval.py --checkpoint outputs/demo
    python eval.py --checkpoint outputs/demo --weights last
    python eval.py --checkpoint FOLDER --data source=folder root=datasets name=imagenet

A run stands for its best evaluated weights, raw or EMA. Model, class names and preprocessing come
from the checkpoint's config.json, the data from its config.yaml; `--data key=value` replaces
settings of config.yaml. `--class-map` renames classes of data that call them otherwise. A file of
weights without a config.json in its folder needs `--config`.
`--set` evaluates on ImageNet's sets instead: val real v2 a r sketch c, each also as `name=folder`
(docs/data.md). `--certify` adds the share of images that keep their class within a 2-norm distance,
proved and under attack, and writes certificate.json beside the weights (docs/lipschitz.md). The
share that it calls certified is the executed statement: the float32 program, with all of its
rounding. Exit code 2 for a mistake.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from data import DataError, build_eval_dataset, build_eval_sets
from data.evalsets import STANDARD, EvalSet, corruption_summary
from lipsformer._commands import documented_parser
from lipsformer._configfile import ConfigError, read_config, require_writable
from lipsformer.config import Config, DataConfig
from lipsformer.engine import distributed
from lipsformer.engine.build import build_model, timm_config
from lipsformer.engine.metrics import NonFiniteError
from lipsformer.engine.run_folder import (
    WHICH,
    WHICH_HELP,
    CheckpointError,
    Weights,
    find_weights,
    load_model,
    load_weights,
)
from scripts._assemble import data_config
from scripts._certify import DEFAULT, Certification, parse_distance
from scripts._evaluate import evaluate_set, table

EXIT_CODES = {
    ConfigError: distributed.EXIT_USER_ERROR,
    DataError: distributed.EXIT_USER_ERROR,
    CheckpointError: distributed.EXIT_USER_ERROR,
    NonFiniteError: distributed.EXIT_NONFINITE,
}


def evaluate_checkpoint(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record for each data set."""
    if options.batch_size is not None and options.batch_size < 1:
        raise ConfigError(f"--batch-size={options.batch_size} must be >= 1")
    if options.json not in (None, "-") and os.environ.get("RANK", "0") == "0":
        require_writable("--json", options.json)
    if options.class_map is not None and options.set:
        raise ConfigError("--class-map has no effect with --set, whose classes are ImageNet's")
    distances = [parse_distance(text) for text in options.certify or ()]
    weights = find_weights(options.checkpoint, options.weights)
    overrides = [f"data.{override}" for override in options.data]
    config = (
        read_config(Config, options.config, overrides)
        if options.config
        else weights.config(overrides)
    )
    data = _data(options, weights, config)
    sets = _sets(options, weights, data)
    classes = STANDARD if options.set else sets[0].dataset.classes
    model = _model(weights, config, classes)

    accelerator = distributed.make_accelerator(
        options.precision or (config.train.precision if config else "fp32")
    )
    if accelerator.is_main_process:
        print(weights, file=sys.stderr if options.json == "-" else sys.stdout)
    model.to(accelerator.device)
    batch_size = options.batch_size or (config.train.eval_batch_size if config else 256)
    proof = Certification(accelerator, model, data, weights.file, distances) if distances else None
    figures = {s.name: evaluate_set(accelerator, model, s, data, batch_size, proof) for s in sets}
    if proof is not None:
        proof.write(json.loads(timm_config(model, classes)))
    rows = [{"set": name, **result} for name, result in figures.items()]
    shared = {
        "checkpoint": options.checkpoint,
        "weights": str(weights.file),
        "kind": weights.kind,
        "update": weights.step,
    }
    return [{**shared, **row} for row in rows + corruption_summary(figures)]


def _data(options: argparse.Namespace, weights: Weights, config: Config | None) -> DataConfig:
    """Return the data to evaluate on.

    They are those of the config. A folder of timm's format, which no run wrote, has none: there
    --data names the images, and timm's description of the model gives their preprocessing.
    """
    if config is not None:
        return config.data
    known = weights.timm_config()
    if known is None:
        raise ConfigError(
            f"{weights.file}: its folder has no config.json; give --config configs/x.yaml"
        )
    settings = ["source=folder", *options.data] if options.set else options.data
    origin = f"{weights.folder} with --data"
    return data_config(known["pretrained_cfg"], settings, origin=origin)


def _sets(options: argparse.Namespace, weights: Weights, data: DataConfig) -> list[EvalSet]:
    """Return ImageNet's sets that --set names, or else the validation set of the data."""
    classes = weights.classes()
    if not options.set:
        dataset = build_eval_dataset(data, classes=classes, class_map=options.class_map)
        return [EvalSet("data", dataset)]
    known = weights.timm_config()
    num_classes = known["num_classes"] if known else len(STANDARD)
    return build_eval_sets(options.set, data, classes, num_classes)


def _model(weights: Weights, config: Config | None, classes: Sequence[str]) -> nn.Module:
    """Return the model that config.json describes, or else the config, with its weights."""
    if weights.timm_config() is not None:
        return load_model(weights)
    assert config is not None
    model = build_model(config, classes)
    load_weights(model, weights.file)
    return model


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument(
        "--checkpoint", required=True, help="run, checkpoint, timm's folder or weights file"
    )
    parser.add_argument("--weights", choices=WHICH, default="best", help=WHICH_HELP)
    parser.add_argument("--data", nargs="*", default=[], metavar="key=value", help="e.g. root=/d")
    parser.add_argument(
        "--set", nargs="+", metavar="name[=folder]", help="ImageNet's val real v2 a r sketch c"
    )
    parser.add_argument(
        "--class-map",
        metavar="FILE",
        help='JSON {"class of the data": "class of the model"}, where the names differ',
    )
    parser.add_argument(
        "--certify",
        nargs="*",
        metavar="EPS",
        help=f"distances in pixel values of [0, 1]; default {DEFAULT}",
    )
    parser.add_argument("--config", help="YAML of model and data for a bare file of weights")
    parser.add_argument("--batch-size", type=int, help="of a device; default: of the run's config")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="default: that of the run",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the records there; - for stdout")
    return parser


def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line; return the exit code."""
    options = (parser or make_parser()).parse_intermixed_args(argv)
    if options.certify == []:
        options.certify = [DEFAULT]
    return distributed.run(lambda: _evaluate(options), EXIT_CODES)


def _evaluate(options: argparse.Namespace) -> int:
    records = evaluate_checkpoint(options)
    if os.environ.get("RANK", "0") == "0":
        text = json.dumps(records, indent=1)
        print(text if options.json == "-" else table(records))
        if options.json not in (None, "-"):
            Path(options.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
