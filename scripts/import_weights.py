"""Convert a checkpoint of the released LipsFormer code to timm's local format.

    python -m scripts.import_weights lipsformer-swin-tiny.pth OUT

writes OUT/model.safetensors and OUT/config.json, and `timm.create_model('local-dir:OUT',
pretrained=True)` (after `import lipsformer`) gives the released model's logits.

Nothing in the file is executed: PyTorch's weights-only reader rebuilds tensors and plain containers
and refuses every other class or function it names. The released files also hold a configuration
node, `yacs.config.CfgNode`; that one name is read as a plain ordered dictionary, and then ignored.
"""

import argparse
import pickle
import shutil
import sys
import tempfile
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

import lipsformer  # noqa: F401  (registers the models)
from lipsformer.models import lipsformer_cswin, lipsformer_swin

StateDict = dict[str, Tensor]


class CheckpointError(ValueError):
    """A file that cannot be converted; the message is for the user."""


def read_checkpoint(path: Path) -> StateDict:
    """Read a released checkpoint, or a plain state dict, without executing anything.

    Raises:
        CheckpointError: If the file is missing, refused or holds no state dict.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            content = safetensors.torch.load_file(path)
        else:
            with torch.serialization.safe_globals([(OrderedDict, "yacs.config.CfgNode")]):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("Please use")[0]
        raise CheckpointError(
            f"{path}: refused, nothing was executed. Only tensors, plain containers and "
            f"yacs.config.CfgNode are read from a pickle, and the reader says: {reason.strip()}"
        ) from None
    except (EOFError, RuntimeError, safetensors.SafetensorError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: not a readable checkpoint ({error})") from None
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise CheckpointError(f"{path}: holds no dictionary of tensors, alone or under 'model'")
    return dict(content)


def swin_arguments(weights: StateDict) -> dict[str, Any]:
    """Constructor arguments of a released Swin checkpoint, from the shapes of its tensors."""
    tables = [
        weights[f"layers.{stage}.blocks.0.attn.relative_position_bias_table"]
        for stage in range(len(_depths(weights, "layers.", ".blocks.")))
    ]
    window = (round(tables[0].shape[0] ** 0.5) + 1) // 2
    return {
        **_common_arguments(weights, weights["patch_embed.proj.weight"], "layers.0.blocks.0"),
        "depths": _depths(weights, "layers.", ".blocks."),
        "num_heads": tuple(table.shape[1] for table in tables),
        "window_size": window,
    }


def cswin_arguments(
    weights: StateDict, num_heads: list[int] | None, split_sizes: list[int] | None
) -> dict[str, Any]:
    """Constructor arguments of a released CSwin checkpoint.

    Heads and stripe widths leave no trace in the shapes: they are those of the registered model
    with the same dimensions, unless given.

    Raises:
        CheckpointError: If no registered model has these dimensions and they are not given, or if
            they do not fit the number of stages.
    """
    depths = _depths(weights, "stage", ".")
    args = {
        **_common_arguments(weights, weights["stage1_conv_embed.0.weight"], "stage1.0"),
        "depths": depths,
    }
    striped = [f"stage{i + 1}.0.attns.1.get_v.weight" in weights for i in range(len(depths))]
    if num_heads is None and split_sizes is None:
        for name in timm.list_models(module="lipsformer_cswin"):
            model = _create(name, args["num_classes"], {}, device="meta")
            same = model.embed_dim == args["embed_dim"] and depths == tuple(
                len(stage.blocks) for stage in model.stages
            )
            if same:
                attns = [stage.blocks[0].attn for stage in model.stages]
                num_heads = [attn.num_heads * attn.num_branches for attn in attns]
                split_sizes = [a.split_size for a in attns if a.split_size is not None]
    if num_heads is None or split_sizes is None:
        raise CheckpointError(
            f"no registered model has embed_dim={args['embed_dim']} and depths={depths}, and the "
            "weights do not tell the heads and the stripe widths: give both --num-heads and "
            "--split-sizes"
        )
    if len(num_heads) != len(depths) or len(split_sizes) != sum(striped):
        raise CheckpointError(
            f"{len(num_heads)} numbers of heads and {len(split_sizes)} stripe widths, but the "
            f"weights have {len(depths)} stages, {sum(striped)} of them with stripes"
        )
    widths = iter(split_sizes)
    args["num_heads"] = tuple(num_heads)
    args["split_sizes"] = tuple(next(widths) if stripes else None for stripes in striped)
    return args


def _common_arguments(weights: StateDict, stem: Tensor, first_block: str) -> dict[str, Any]:
    return {
        "in_chans": stem.shape[1],
        "patch_size": stem.shape[2],
        "embed_dim": stem.shape[0],
        "num_classes": weights["head.weight"].shape[0],
        "mlp_ratio": weights[f"{first_block}.mlp.fc1.weight"].shape[0] / stem.shape[0],
    }


def _depths(weights: StateDict, before: str, between: str) -> tuple[int, ...]:
    """Blocks per stage, from names such as "layers.0.blocks.3.nin.bias" or "stage2.1.nin.bias"."""
    names = [name for name in weights if name.endswith(".nin.bias")]
    stages = Counter(int(name.removeprefix(before).split(between)[0]) for name in names)
    return tuple(stages[stage] for stage in sorted(stages))


def build_model(
    weights: StateDict, num_heads: list[int] | None = None, split_sizes: list[int] | None = None
) -> tuple[nn.Module, str | None]:
    """Build the model that a released checkpoint belongs to, and load it.

    Returns:
        The model, and the name of the registered model that it is, None if there is no such.

    Raises:
        CheckpointError: If the names are not those of a released checkpoint, or tensors are
            missing, of another shape, or left over.
    """
    if "stage1_conv_embed.0.weight" in weights:
        module, fallback = lipsformer_cswin, "lipsformer_tiny"
        args = cswin_arguments(weights, num_heads, split_sizes)
    elif "layers.0.blocks.0.dwconv_layers.0.weight" in weights:
        module, fallback = lipsformer_swin, "lipsformer_swin_tiny"
        if num_heads is not None or split_sizes is not None:
            raise CheckpointError("--num-heads and --split-sizes are for CSwin bodies alone")
        args = swin_arguments(weights)
    else:
        raise CheckpointError(
            "neither a Swin nor a CSwin body of the released code: no layers.0.blocks.0."
            "dwconv_layers.0.weight and no stage1_conv_embed.0.weight among the names, such as "
            + ", ".join(sorted(weights)[:3])
        )
    num_classes = args.pop("num_classes")
    exact = _create(fallback, num_classes, args, device="meta")
    registered = None
    for name in timm.list_models(module=module.__name__.rpartition(".")[2]):
        extra = {} if args["in_chans"] == 3 else {"in_chans": args["in_chans"]}
        if _same_architecture(_create(name, num_classes, extra, device="meta"), exact):
            registered, args = name, extra
    model = _create(registered or fallback, num_classes, args)
    try:
        model.load_state_dict(module.checkpoint_filter_fn(weights, model))
    except RuntimeError as error:
        raise CheckpointError(f"the weights do not fit: {error}") from None
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
    """Convert ``source`` to the folder ``out``, which appears complete or not at all.

    Returns:
        What was written, in one line.

    Raises:
        CheckpointError: If ``out`` exists or ``source`` cannot be converted.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists: choose another folder or remove it")
    model, registered = build_model(read_checkpoint(source), num_heads, split_sizes)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        scratch.chmod(0o755)
        save_for_hf(model, str(scratch), safe_serialization=True)
        scratch.rename(out)
    except BaseException:
        shutil.rmtree(scratch)
        raise
    what = f"it is {registered}" if registered else "no registered model has these dimensions"
    return f"{out}: {what}; load it with timm.create_model('local-dir:{out}', pretrained=True)"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="released .pth, state dict or .safetensors")
    parser.add_argument("out", type=Path, help="folder to be created")
    parser.add_argument("--num-heads", type=int, nargs="+", help="CSwin: heads of every stage")
    parser.add_argument("--split-sizes", type=int, nargs="+", help="CSwin: widths of the stripes")
    return parser


def main(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    try:
        print(import_weights(args.source, args.out, args.num_heads, args.split_sizes))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
