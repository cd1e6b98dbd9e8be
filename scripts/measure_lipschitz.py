"""Tabulate proved Lipschitz bounds and measured local constants of a model.

    python -m scripts.measure_lipschitz lipsformer_nano
    python -m scripts.measure_lipschitz outputs/demo --data source=digits --json report.json

MODEL is a timm name (initial weights) or a run, a checkpoint or a folder with config.json. A run
is read with its best evaluated weights. All constants are for the 2-norm over one whole input in
evaluation mode, as log10. Bounds hold for images with pixel values in [0, 1]. Estimates are lower
bounds, at images of --data or at random images. Exit code 2 for a mistake.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from data import DataError, Normalize, build_eval_dataset, collate
from lipsformer._commands import documented_parser, user_errors
from lipsformer._errors import ConfigError
from lipsformer._files import require_writable
from lipsformer.analysis.bounds import (
    Domain,
    UnknownModuleError,
    flatten_bound,
    image_domain,
    lipschitz_bound,
)
from lipsformer.analysis.estimate import adversarial_lipschitz, estimate_submodules
from lipsformer.analysis.plots import plot_bounds
from lipsformer.engine.preflight import try_images
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.run_folder import WHICH, WHICH_HELP, find_weights
from lipsformer.engine.weights import has_tag, load_model
from scripts._data_config import data_config
from scripts._json_output import add_json_option, check_json_target, say, write_json


def load_images(model: nn.Module, settings: Sequence[str], number: int) -> tuple[Tensor, Domain]:
    """Return normalized images, and the domain of all images of their size.

    They are validation images of the data set of the settings, or random images without settings.

    Raises:
        ConfigError: If the data set has fewer images.
    """
    known: Any = model.pretrained_cfg
    channels, height, width = known["input_size"]
    if not settings:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.rand(number, channels, height, width, generator=generator)
        mean, std = (torch.tensor(known[key])[:, None, None] for key in ("mean", "std"))
        domain = image_domain((height, width), known["mean"], known["std"])
        return (pixels - mean) / std, domain
    data = data_config(known, settings, origin="--data")
    images = build_eval_dataset(data, classes=None)
    if number > len(images):
        raise ConfigError(
            f"--images={number} is more than the {len(images)} validation images of --data"
        )
    step = len(images) // number
    picked, _ = collate([images[i] for i in range(0, step * number, step)])
    domain = image_domain((data.img_size, data.img_size), data.mean, data.std)
    return Normalize(data.mean, data.std)(picked), domain


def measure(
    name: str, model: nn.Module, settings: Sequence[str], *, images: int, iters: int, ascent: int
) -> dict[str, Any]:
    """Return a record with the total of the model and a row per module.

    Raises:
        ConfigError: If the model does not take the images.
    """
    model.eval()
    x, domain = load_images(model, settings, images)
    height, width = x.shape[2:]
    refusal = f"{name} does not take images of {height} x {width} pixels (img_size in --data)"
    try_images(model, x[:1], refusal)
    parts = dict(flatten_bound(lipschitz_bound(model, domain)))
    estimates = estimate_submodules(model, parts, x, num_iters=iters)
    if ascent > 0:
        raised, _ = adversarial_lipschitz(model, x, steps=ascent)
        estimates[""] = max(estimates[""], raised.max().item())
    rows = []
    for part, bound in parts.items():
        estimate = -math.inf if estimates[part] == 0.0 else math.log10(estimates[part])
        rows.append(
            {
                "name": part,
                "kind": bound.kind,
                "bound": bound.log10,
                "paper_bound": bound.paper_log10,
                "estimate": estimate,
                "slack": 0.0 if bound.log10 == estimate else bound.log10 - estimate,
            }
        )
    return {
        "model": name,
        "input_size": list(x.shape[1:]),
        "images": images,
        "data": list(settings) or "random images",
        "radius": domain.radius,
        "norm": "2-norm over one input, log10",
        "rows": rows,
    }


def table(record: dict[str, Any], depth: int) -> str:
    """Return the record as text, with modules down to a depth of the tree."""
    header = f"{'module':44} {'type':18} {'bound':>9} {'paper':>9} {'estimate':>9} {'slack':>9}"
    data = record["data"]
    images = data if isinstance(data, str) else f"images of {' '.join(data)}"
    lines = [f"{record['model']}, {record['norm']}; estimates on {images}", header]
    for row in record["rows"]:
        if row["name"].count(".") >= depth:
            continue
        figures = " ".join(
            # + 0.0: no minus before a zero
            f"{round(row[key], 3) + 0.0:9.3f}"
            for key in ("bound", "paper_bound", "estimate", "slack")
        )
        lines.append(f"{row['name'] or 'whole model':44} {row['kind']:18} {figures}")
    return "\n".join(lines)


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw the blocks, the modules between them, and the total."""
    whole, *rows = (
        (row["name"], row["bound"], row["paper_bound"], row["estimate"], row["kind"])
        for row in record["rows"]
    )
    shown = []
    for name, *figures, kind in rows:
        ends = name.rpartition(".")[2] in ("patch_embed", "downsample", "head")
        if kind.endswith("Block") or (ends and kind != "Identity"):
            shown.append((name.replace("stages.", "").replace(".blocks", ""), *figures))
    title = f"{record['model']}: Lipschitz constants, 2-norm over one input"
    plot_bounds(path, title, shown, ("whole model", *whole[1:4]))


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="timm name, run, checkpoint or folder")
    parser.add_argument("--weights", choices=WHICH, default="best", help=WHICH_HELP)
    parser.add_argument("--data", nargs="*", default=[], metavar="key=value", help="source=digits")
    parser.add_argument("--images", type=int, default=4, help="how many to estimate at")
    parser.add_argument("--iters", type=int, default=20, help="power iterations of an estimate")
    parser.add_argument("--ascent", type=int, default=0, help="steps of adversarial ascent")
    parser.add_argument("--depth", type=int, default=5, help="levels of modules in the table")
    parser.add_argument("--plot", metavar="FILE", help="draw the blocks into a PNG")
    add_json_option(parser)
    return parser


@user_errors(ConfigError, DataError, CheckpointError, UnknownModuleError)
def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line; return the exit code."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    if min(args.images, args.iters, args.depth) < 1 or args.ascent < 0:
        raise ConfigError(
            "--images, --iters and --depth must be at least 1, and --ascent at least 0"
        )
    check_json_target(args.json)
    if args.plot:
        if not args.plot.lower().endswith(".png"):
            raise ConfigError(f"--plot {args.plot} must end in .png")
        require_writable("--plot", args.plot)
    kind = "pretrained" if has_tag(args.model) else "initial"
    source, line = args.model, f"weights     {kind} weights of {args.model}"
    if not timm.is_model(source) and Path(source).exists():
        source = line = find_weights(source, args.weights)
    model = load_model(source)
    say(args.json, line)
    record = measure(
        args.model,
        model,
        args.data,
        images=args.images,
        iters=args.iters,
        ascent=args.ascent,
    )
    say(args.json, table(record, args.depth))
    write_json(args.json, record)
    if args.plot:
        plot(record, Path(args.plot))
    return 0


if __name__ == "__main__":
    sys.exit(main())
