"""Convert a checkpoint of the released LipsFormer code to timm's local format.

    python -m scripts.import_weights lipsformer-swin-tiny.pth OUT

The command writes OUT/model.safetensors and OUT/config.json. After `import lipsformer`,
`timm.create_model('local-dir:OUT', pretrained=True)` returns a model with the logits of the
released one.

Reading a checkpoint never executes code from it. PyTorch's weights-only reader rebuilds tensors and
plain containers and refuses every other class or function. The released files also contain a
configuration node of the class `yacs.config.CfgNode`. The reader turns it into an ordered
dictionary, which the conversion ignores.
"""

import argparse
import re
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

import lipsformer  # noqa: F401  (registers the models)
from lipsformer._commands import documented_parser, user_errors
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.weights import read_weights
from lipsformer.models import lipsformer_cswin, lipsformer_swin
from scripts._new_folder import new_folder

StateDict = dict[str, Tensor]

SWIN_BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.")
CSWIN_BLOCK = re.compile(r"stage(\d+)\.(\d+)\.")


class ReleasedWeightsError(ValueError):
    """A released checkpoint cannot be converted. The message is shown to the user."""


def read_checkpoint(path: Path) -> StateDict:
    """Read a released checkpoint or a plain state dict without executing code from it.

    Args:
        path: Pickle of PyTorch, or `.safetensors`.

    Returns:
        The weights by name.

    Raises:
        CheckpointError: If the file is missing, is refused, or does not contain weights.
    """
    with torch.serialization.safe_globals([(OrderedDict, "yacs.config.CfgNode")]):
        return read_weights(path)


def swin_arguments(weights: StateDict) -> dict[str, Any]:
    """Return the constructor arguments of a released Swin checkpoint, from its tensors' shapes.

    Args:
        weights: Weights under their released names.

    Raises:
        ReleasedWeightsError: If a tensor that tells an argument is missing or not of the right
            shape.
    """
    depths = _depths(weights, SWIN_BLOCK)
    for name in weights:
        if name.endswith(".relative_position_bias_table"):
            _tensor(weights, name, ndim=2)  # loading interpolates the tables, whatever their shapes
    tables = [
        _tensor(weights, f"layers.{stage}.blocks.0.attn.relative_position_bias_table", ndim=2)
        for stage in range(len(depths))
    ]
    window = (round(tables[0].shape[0] ** 0.5) + 1) // 2
    return {
        **_common_arguments(weights, "patch_embed.proj.weight", "layers.0.blocks.0"),
        "depths": depths,
        "num_heads": tuple(table.shape[1] for table in tables),
        "window_size": window,
    }


def cswin_arguments(
    weights: StateDict, num_heads: list[int] | None, split_sizes: list[int] | None
) -> dict[str, Any]:
    """Return the constructor arguments of a released CSwin checkpoint.

    The shapes of the tensors do not tell the numbers of heads and the widths of the stripes. Unless
    given, they are taken from the registered model with the same dimensions.

    Args:
        weights: Weights under their released names.
        num_heads: Number of heads of every stage; None to look them up.
        split_sizes: Width of the stripes of every stage with stripes; None to look them up.

    Raises:
        ReleasedWeightsError: If only one of the two is given, if none is and no registered model
            has these dimensions, if they do not fit the number of stages, or if a tensor that tells
            an argument is missing or not of the right shape.
    """
    depths = _depths(weights, CSWIN_BLOCK)
    args = {
        **_common_arguments(weights, "stage1_conv_embed.0.weight", "stage1.0"),
        "depths": depths,
    }
    if (num_heads is None) != (split_sizes is None):
        raise ReleasedWeightsError(
            "--num-heads and --split-sizes belong together: pass both, or neither"
        )
    striped = [f"stage{i + 1}.0.attns.1.get_v.weight" in weights for i in range(len(depths))]
    if num_heads is None and split_sizes is None:
        for name in timm.list_models(module="lipsformer_cswin"):
            model: Any = _create(name, args["num_classes"], {}, device="meta")
            same = model.embed_dim == args["embed_dim"] and depths == tuple(
                len(stage.blocks) for stage in model.stages
            )
            if same:
                num_heads = list(model.num_heads)
                split_sizes = [size for size in model.split_sizes if size is not None]
    if num_heads is None or split_sizes is None:
        raise ReleasedWeightsError(
            f"no registered model has embed_dim={args['embed_dim']} and depths={depths}, and the "
            "weights do not tell the numbers of heads and the stripe widths: pass both --num-heads "
            "and --split-sizes"
        )
    if len(num_heads) != len(depths) or len(split_sizes) != sum(striped):
        raise ReleasedWeightsError(
            f"{len(num_heads)} numbers of heads and {len(split_sizes)} stripe widths, but the "
            f"weights have {len(depths)} stages, {sum(striped)} of them with stripes"
        )
    widths = iter(split_sizes)
    args["num_heads"] = tuple(num_heads)
    args["split_sizes"] = tuple(next(widths) if stripes else None for stripes in striped)
    return args


def _common_arguments(weights: StateDict, stem_name: str, first_block: str) -> dict[str, Any]:
    stem = _tensor(weights, stem_name, ndim=4)
    return {
        "in_chans": stem.shape[1],
        "patch_size": stem.shape[2],
        "embed_dim": stem.shape[0],
        "num_classes": _tensor(weights, "head.weight", ndim=2).shape[0],
        "mlp_ratio": _tensor(weights, f"{first_block}.mlp.fc1.weight", ndim=2).shape[0]
        / stem.shape[0],
    }


def _tensor(weights: StateDict, name: str, ndim: int) -> Tensor:
    """Return a tensor that tells an argument of the model, or raise a `ReleasedWeightsError`."""
    if name not in weights:
        raise ReleasedWeightsError(f"the checkpoint is incomplete: it contains no {name}")
    if weights[name].ndim != ndim:
        shape = list(weights[name].shape)
        raise ReleasedWeightsError(f"{name} has the shape {shape}, but must have {ndim} dimensions")
    return weights[name]


def _depths(weights: StateDict, block: re.Pattern[str]) -> tuple[int, ...]:
    """Count the blocks of every stage by names such as "layers.0.blocks.3.nin.bias"."""
    blocks = {match.groups() for name in weights if (match := block.match(name))}
    stages = Counter(int(stage) for stage, _ in blocks)
    return tuple(stages[stage] for stage in sorted(stages))


def build_model(
    weights: StateDict, num_heads: list[int] | None = None, split_sizes: list[int] | None = None
) -> tuple[nn.Module, str | None]:
    """Build the model of a released checkpoint and load its weights.

    Args:
        weights: Weights under their released names.
        num_heads: Numbers of heads of a CSwin checkpoint; None to look them up.
        split_sizes: Stripe widths of a CSwin checkpoint; None to look them up.

    Returns:
        The model, and the name of the registered model with the same architecture, or None.

    Raises:
        ReleasedWeightsError: If the names are not those of a released checkpoint, if there is no
            model with these arguments, or if tensors are missing, left over, or of another shape.
    """
    if "stage1_conv_embed.0.weight" in weights:
        module, fallback = lipsformer_cswin, "lipsformer_tiny"
        args = cswin_arguments(weights, num_heads, split_sizes)
    elif "layers.0.blocks.0.dwconv_layers.0.weight" in weights:
        module, fallback = lipsformer_swin, "lipsformer_swin_tiny"
        if num_heads is not None or split_sizes is not None:
            raise ReleasedWeightsError(
                "--num-heads and --split-sizes apply to CSwin checkpoints only"
            )
        args = swin_arguments(weights)
    else:
        raise ReleasedWeightsError(
            "neither a Swin nor a CSwin checkpoint of the released code: it contains no "
            "layers.0.blocks.0.dwconv_layers.0.weight and no stage1_conv_embed.0.weight, but names "
            "such as " + ", ".join(sorted(weights)[:3])
        )
    num_classes = args.pop("num_classes")
    try:
        exact = _create(fallback, num_classes, args, device="meta")
    except ValueError as error:  # such as a number of heads that does not divide the channels
        raise ReleasedWeightsError(f"the model cannot be built: {error}") from None
    registered = None
    extra = {} if args["in_chans"] == 3 else {"in_chans": args["in_chans"]}
    for name in timm.list_models(module=module.__name__.rpartition(".")[2]):
        if _same_architecture(_create(name, num_classes, extra, device="meta"), exact):
            registered, args = name, extra
    model = _create(registered or fallback, num_classes, args)
    try:
        model.load_state_dict(module.checkpoint_filter_fn(weights, model))
    # interpolating a table of biases gives an AttributeError if the model lacks its block, and a
    # ValueError if the table is of no square window
    except (AttributeError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())  # PyTorch lists the names on lines of their own
        raise ReleasedWeightsError(f"the weights do not fit: {reason}") from None
    return model, registered


def _create(name: str, num_classes: int, args: dict[str, Any], **kwargs: Any) -> nn.Module:
    args = {**args, "official_compat": True}
    return timm.create_model(name, num_classes=num_classes, **args, **kwargs)


def _same_architecture(first: nn.Module, second: nn.Module) -> bool:
    shapes = [{n: t.shape for n, t in model.state_dict().items()} for model in (first, second)]
    return shapes[0] == shapes[1] and str(first) == str(second)


def import_weights(
    source: Path,
    out: Path,
    num_heads: list[int] | None = None,
    split_sizes: list[int] | None = None,
) -> str:
    """Convert a checkpoint to a folder. If anything fails, the folder is not created.

    Args:
        source: Released checkpoint.
        out: Folder to create.
        num_heads: Numbers of heads of a CSwin checkpoint; None to look them up.
        split_sizes: Stripe widths of a CSwin checkpoint; None to look them up.

    Returns:
        A message of one line that says what was written.

    Raises:
        CheckpointError: If `source` is missing, is refused, or does not contain weights.
        ReleasedWeightsError: If `out` exists or `source` cannot be converted.
    """
    if out.exists():
        raise ReleasedWeightsError(f"{out} exists already: choose another folder or remove it")
    model, registered = build_model(read_checkpoint(source), num_heads, split_sizes)
    try:
        with new_folder(out) as folder:
            save_for_hf(model, str(folder), safe_serialization=True)
    except OSError as error:
        raise ReleasedWeightsError(f"{out} cannot be written: {error}") from None
    what = f"it is {registered}" if registered else "no registered model has these dimensions"
    return f"{out}: {what}; load it with timm.create_model('local-dir:{out}', pretrained=True)"


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("source", type=Path, help="released .pth or .safetensors file")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--num-heads", type=int, nargs="+", help="CSwin: heads of every stage")
    parser.add_argument(
        "--split-sizes",
        type=int,
        nargs="+",
        help="CSwin: widths of the stripes",
    )
    return parser


@user_errors(CheckpointError, ReleasedWeightsError)
def main(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    print(import_weights(args.source, args.out, args.num_heads, args.split_sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
