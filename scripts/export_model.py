"""Export a timm model for deployment, and check what was written against the model.

    python -m scripts.export_model outputs/demo OUT --formats hf
    python -m scripts.export_model lipsformer_tiny OUT --checkpoint weights.safetensors

The command writes the chosen formats to the folder OUT, which must not exist:
    hf             model.safetensors and config.json, for transformers and for
                   `timm.create_model('local-dir:OUT', pretrained=True)`; for a run also README.md,
                   a model card with its figures, and train.yaml, the config that repeats the run
    torch-export   model.pt2, for torch.export.load
    onnx           model.onnx, for ONNX Runtime
    onnx-int8      model-int8.onnx, its matrix products in 8 bits
    openvino       model.xml and model.bin
    openvino-int8  model-int8.xml and model-int8.bin, its weights in 8 bits

A model from `hf` gives the same bits. The other formats hold the model folded for inference and
take any number of images. Their logits differ by at most 1e-4 of the largest one, in 8 bits by 0.1.
OpenVINO needs `pip install 'lipsformer[deploy]'`.
"""

import argparse
import json
import os
import sys
from functools import cache
from pathlib import Path

import timm
import torch
from safetensors import SafetensorError
from timm.models import save_for_hf
from torch import Tensor, nn

import lipsformer  # noqa: F401  (registers the models)
from lipsformer._commands import documented_parser, user_errors
from lipsformer._errors import ConfigError
from lipsformer.engine.run_files import TIMM_CONFIG, CheckpointError
from lipsformer.engine.run_folder import WHICH, WHICH_HELP, find_weights
from lipsformer.engine.weights import create_model, has_tag, load_model, load_weights
from scripts._hub_card import TRAINING, model_card, training_config
from scripts._image_size import resize_input
from scripts._new_folder import new_folder
from scripts._runtimes import FORMATS, ExportError, load, require_packages, trace, write

DEFAULT = ["hf", "torch-export", "onnx"]  # what the extra `export` suffices for


def export_hf(model: nn.Module, images: Tensor, folder: Path) -> float:
    """Write timm's local format; return the difference of the logits."""
    labels = model.pretrained_cfg.get("label_names")
    save_for_hf(model, str(folder), safe_serialization=True, model_config={"label_names": labels})
    config = json.loads((folder / TIMM_CONFIG).read_text())
    config.get("model_args", {}).pop("num_classes", None)  # transformers gives it from the root
    config["pretrained_cfg"].pop("tag", None)  # it is that of the weights from which the run began
    (folder / TIMM_CONFIG).write_text(json.dumps(config, indent=2))
    restored = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return _difference(restored(images), model(images), tolerance=0.0)


def _difference(actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """Return the largest difference, relative to the largest expected value."""
    difference = (actual - expected).abs().max().item()
    if difference > 0.0:  # two outputs of zeros are equal
        difference /= expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny).item()
    if not difference <= tolerance:
        raise ExportError(
            f"logits differ by {difference:.3g} of the largest, more than {tolerance:g}"
        )
    return difference


def is_folder(name: str) -> bool:
    """Return whether a model is named by its folder; names of timm come first."""
    return not timm.is_model(name) and os.path.isdir(name)


@torch.no_grad()
def export_model(
    name: str,
    out: Path,
    formats: list[str],
    *,
    checkpoint: Path | None,
    img_size: int | None,
    which: str = "best",
    note: str | None = None,
) -> dict[str, float]:
    """Export to the folder `out`, which appears complete or not at all.

    Args:
        name: Any timm model. Its weights are loaded if the name has a tag, `local-dir:` or
            `hf-hub:`. Or the folder of a run or of a checkpoint of a run.
        out: Folder to be created.
        formats: "hf" and keys of `FORMATS`.
        checkpoint: Weights to load; None keeps the model's own.
        img_size: Side of the images in pixels; None for the model's own.
        which: Which weights of a run, "best" or "last".
        note: A paragraph for the model card of a run.

    Returns:
        Largest difference from the model's logits, relative to the largest, by format.

    Raises:
        ExportError: If `out` exists or cannot be written, a package is missing, or an export
            differs from the model.
        CheckpointError: If a run has no usable weights.
        ConfigError: If the model is not known, or the run did not evaluate the weights.
    """
    if os.path.exists(out):  # Path.exists raises if the name is too long
        raise ExportError(f"{out} exists: choose another folder or remove it")
    require_packages(formats)
    weights = None
    if is_folder(name):
        weights = find_weights(name, which)
        print(weights)
        model = load_model(weights)
    else:
        pretrained = ":" in name or has_tag(name)
        model = create_model(name, pretrained=pretrained)
        if checkpoint is None:
            print(f"weights     {'pretrained' if pretrained else 'initial'} weights of {name}")
    if checkpoint is not None:
        load_weights(model, checkpoint)
    channels, height, width = model.pretrained_cfg["input_size"]
    if img_size is not None:
        height = width = img_size
        resize_input(model, name, channels, img_size)
        model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (channels, height, width)}
    texts = {}
    if "hf" in formats and weights is not None and weights.kind is not None:
        texts["README.md"] = model_card(model, weights, which=which, note=note)
        texts[TRAINING] = training_config(weights)
    if note is not None and not texts:
        raise ConfigError(
            "--note has no effect without a model card: leave it out, or export a run with the "
            "format hf"
        )
    model.eval()
    # Exported with two, checked with three; the same ones in every call.
    images = torch.randn(3, channels, height, width, generator=torch.Generator().manual_seed(0))
    differences = {}
    try:
        with new_folder(out) as folder:
            traced = cache(lambda: trace(model, images))
            for key in formats:
                if key == "hf":
                    differences[key] = export_hf(model, images, folder)
                else:
                    logits = load(write(key, traced, folder))(images)
                    differences[key] = _difference(logits, model(images), FORMATS[key].tolerance)
            for file, text in texts.items():
                (folder / file).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise ExportError(
            f"{out} cannot be written: {error}; make room on the disk or choose another folder"
        ) from None
    return differences


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("name", help="a run, its checkpoint, or any timm model")
    parser.add_argument("out", type=Path, help="folder to be created")
    parser.add_argument("--formats", nargs="+", choices=["hf", *FORMATS], default=DEFAULT)
    parser.add_argument("--weights", choices=WHICH, default="best", help=WHICH_HELP)
    parser.add_argument("--note", help="a paragraph for the model card of a run")
    parser.add_argument("--checkpoint", type=Path, help="weights of this architecture")
    parser.add_argument("--img-size", type=int, help="side in pixels; default: the model's own")
    return parser


@user_errors(ExportError, CheckpointError, ConfigError)
def main(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line."""
    parser = parser or make_parser()
    args = parser.parse_intermixed_args(argv)
    if not (":" in args.name or timm.is_model(args.name) or is_folder(args.name)):
        parser.error(f"{args.name!r} is no folder and no timm model; timm.list_models() lists all")
    if is_folder(args.name) and args.checkpoint is not None:
        parser.error("--checkpoint has no effect on a run, whose weights are used: leave it out")
    if args.checkpoint is not None and not args.checkpoint.is_file():
        parser.error(f"--checkpoint {args.checkpoint}: no such file")
    if not is_folder(args.name) and args.weights != "best":
        parser.error("--weights chooses between weights of a run: leave it out")
    differences = export_model(
        args.name,
        args.out,
        args.formats,
        checkpoint=args.checkpoint,
        img_size=args.img_size,
        which=args.weights,
        note=args.note,
    )
    for key, difference in differences.items():
        print(f"{args.out}: {key} exported, logits differ by {difference:.2g} of the largest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
