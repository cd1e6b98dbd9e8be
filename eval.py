"""Evaluate a run, a checkpoint or a file of weights.

    python eval.py --checkpoint outputs/demo
    python eval.py --checkpoint outputs/demo --weights last
    python eval.py --checkpoint FOLDER --data source=folder root=datasets name=imagenet

The best evaluated weights of a run are used, raw or EMA. Model, class names and preprocessing come
from the checkpoint's config.json, the data from its config.yaml; `--data key=value` replaces
settings of config.yaml. `--class-map` renames classes of data that call them otherwise. A file of
weights without a config.json in its folder needs `--config`.
`--set` evaluates on ImageNet's sets instead: val real v2 a r sketch c, each also as `name=folder`
(docs/data.md). `--certify` adds the share of images that keep their class within a 2-norm distance,
proved and under attack, and writes certificate.json beside the weights (docs/lipschitz.md). The
share that it calls certified is the executed statement: the program in float32 (`--precision fp32`,
its default) or float64 (`fp64`), with all of its rounding. Exit codes: 2 a mistake; 3 the loss is
not finite.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from data import DataError
from data.evalsets import STANDARD, corruption_summary
from lipsformer._commands import documented_parser, plain_warnings, quiet_pipe
from lipsformer._configfile import read_config
from lipsformer._errors import ConfigError
from lipsformer._ranks import launched_first
from lipsformer.config import Config
from lipsformer.engine import exits
from lipsformer.engine.build import timm_config
from lipsformer.engine.distributed import make_accelerator
from lipsformer.engine.metrics import NonFiniteError
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.run_folder import WHICH, WHICH_HELP, find_weights
from scripts._certify import BOUNDED_PRECISIONS, DEFAULT_DISTANCE, Certification, parse_distance
from scripts._evaluate import check_model, data_of, evaluate_set, model_of, sets_of, table
from scripts._json_output import add_json_option, check_json_target, say, write_json

EXIT_CODES = {
    ConfigError: exits.EXIT_USER_ERROR,
    DataError: exits.EXIT_USER_ERROR,
    CheckpointError: exits.EXIT_USER_ERROR,
    NonFiniteError: exits.EXIT_NONFINITE,
}


def evaluate_checkpoint(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record for each data set, and those that summarize ImageNet-C."""
    distances = _check_options(args)
    weights = find_weights(args.checkpoint, args.weights)
    overrides = [f"data.{override}" for override in args.data]
    config = (
        read_config(Config, args.config, overrides) if args.config else weights.config(overrides)
    )
    if args.class_map is not None and weights.classes() is None:
        raise ConfigError(
            f"--class-map has no effect, because {weights.folder} names no classes of the model"
        )
    data = data_of(weights, config, args.data, imagenet=bool(args.set))
    sets = sets_of(weights, data, args.set, args.class_map)
    classes = STANDARD if args.set else sets[0].dataset.classes
    model = model_of(weights, config, classes)
    check_model(model, data.img_size, sets)

    usual = config.train.precision if config and not distances else BOUNDED_PRECISIONS[0]
    precision = args.precision or usual
    accelerator = make_accelerator(precision)
    if accelerator.is_main_process:
        say(args.json, weights)
        if weights.classes() is None and not args.set:
            say(args.json, "classes     matched by their order: the weights do not name them")
    model.to(accelerator.device, torch.float64 if precision == "fp64" else None)
    batch_size = args.batch_size or (config.train.eval_batch_size if config else 256)
    proof = None
    if distances:
        attack_every = args.attack_every or 1
        proof = Certification(accelerator, model, data, weights.file, distances, attack_every)
    figures = {s.name: evaluate_set(accelerator, model, s, data, batch_size, proof) for s in sets}
    if proof is not None:
        proof.write(json.loads(timm_config(model, classes)))
    shared = {
        "checkpoint": args.checkpoint,
        "weights": str(weights.file),
        "kind": weights.kind,
        "update": weights.step,
    }
    rows = [{"set": name, **result} for name, result in figures.items()]
    return [{**shared, **row} for row in rows + corruption_summary(figures)]


def _check_options(args: argparse.Namespace) -> list[float]:
    """Check what can be checked without the weights; return the distances of `--certify`.

    Raises:
        ConfigError: If an option has an impossible value, or has no effect beside the others.
    """
    if args.batch_size is not None and args.batch_size < 1:
        raise ConfigError(f"--batch-size={args.batch_size} must be >= 1")
    if launched_first():
        check_json_target(args.json)
    if args.class_map is not None and args.set:
        raise ConfigError("--class-map has no effect with --set, whose classes are ImageNet's")
    distances = [parse_distance(text) for text in args.certify or ()]
    if distances and args.precision not in (None, *BOUNDED_PRECISIONS):
        raise ConfigError(
            f"--certify bounds the rounding of {' and '.join(BOUNDED_PRECISIONS)}, not of "
            f"{args.precision}: use one of them as --precision"
        )
    attack_every = args.attack_every
    if attack_every is not None and not distances:
        raise ConfigError(
            f"--attack-every={attack_every} has no effect without --certify: leave it out, or add "
            "--certify"
        )
    if attack_every is not None and attack_every < 1:
        raise ConfigError(f"--attack-every={attack_every} must be >= 1")
    return distances


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
        help=f"distances in pixel values of [0, 1]; default {DEFAULT_DISTANCE}",
    )
    parser.add_argument(
        "--attack-every",
        type=int,
        metavar="N",
        help="with --certify, attack the first of every N images; default 1, all images",
    )
    parser.add_argument("--config", help="YAML of model and data for a bare file of weights")
    parser.add_argument("--batch-size", type=int, help="of a device; default: of the run's config")
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp64", "bf16", "fp16"),
        help="default: that of the run, or fp32 with --certify",
    )
    add_json_option(parser)
    return parser


@quiet_pipe()
@plain_warnings()
def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line; return the exit code."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    if args.certify == []:
        args.certify = [DEFAULT_DISTANCE]
    return exits.run(lambda: _evaluate(args), EXIT_CODES)


def _evaluate(args: argparse.Namespace) -> int:
    records = evaluate_checkpoint(args)
    if launched_first():
        say(args.json, table(records))
        write_json(args.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
