"""Export a timm model for deployment, and check what was written against the model.

    python -m scripts.export_model lipsformer_tiny OUT --checkpoint weights.safetensors

writes to the folder OUT, which must not exist, the chosen ones of
    hf     model.safetensors and config.json, for `timm.create_model('local-dir:OUT')`; bit-equal
    torch  model.pt2 of torch.export, for any batch size; logits within 1e-4
    onnx   model.onnx, for any batch size; logits within 1e-4 in onnxruntime
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import timm
import torch
from timm.models import load_checkpoint, save_for_hf
from torch import Tensor, nn

import lipsformer  # noqa: F401  (registers the models)

TOLERANCE = 1e-4


class ExportError(RuntimeError):
    """An export that failed or differs from the model; the message is for the user."""


def export_hf(model: nn.Module, images: Tensor, folder: Path) -> float:
    """Write timm's local format; return the largest difference of the logits."""
    save_for_hf(model, str(folder), safe_serialization=True)
    restored = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return _difference(restored(images), model(images), tolerance=0.0)


def export_torch(model: nn.Module, images: Tensor, folder: Path) -> float:
    """Write a torch.export program with a dynamic batch; return the largest difference."""
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(model, (images[:2],), dynamic_shapes=(batch,))
    torch.export.save(program, folder / "model.pt2")
    restored = torch.export.load(folder / "model.pt2").module()
    return _difference(restored(images), model(images), TOLERANCE)


def export_onnx(model: nn.Module, images: Tensor, folder: Path) -> float:
    """Write ONNX with a dynamic batch; return the largest difference in onnxruntime."""
    import onnxruntime

    path = folder / "model.onnx"
    torch.onnx.export(
        model,
        (images[:2],),
        path,
        dynamo=True,
        external_data=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": images.numpy()})
    return _difference(torch.from_numpy(logits), model(images), TOLERANCE)


EXPORTS = {"hf": export_hf, "torch": export_torch, "onnx": export_onnx}


def _difference(actual: Tensor, expected: Tensor, tolerance: float) -> float:
    difference = (actual - expected).abs().max().item()
    if not difference <= tolerance:
        raise ExportError(f"logits differ by {difference:.3g}, more than {tolerance:g}")
    return difference


@torch.no_grad()
def export_model(
    name: str, out: Path, formats: list[str], *, checkpoint: Path | None, img_size: int | None
) -> dict[str, float]:
    """Export to the folder ``out``, which appears complete or not at all.

    Args:
        name: Any timm model, also `local-dir:` and `hf-hub:`, whose weights are then loaded.
        out: Folder to be created.
        formats: Keys of ``EXPORTS``.
        checkpoint: Weights to load; None keeps the model's own.
        img_size: Side of the images in pixels; None for the model's own.

    Returns:
        Largest difference of the logits from the model's, by format.

    Raises:
        ExportError: If ``out`` exists or an export differs from the model.
    """
    if out.exists():
        raise ExportError(f"{out} exists: choose another folder or remove it")
    model = timm.create_model(name, pretrained=":" in name)
    if checkpoint is not None:
        load_checkpoint(model, str(checkpoint), weights_only=True)
    channels, height, width = model.pretrained_cfg["input_size"]
    if img_size is not None:
        height = width = img_size
        if hasattr(model, "set_input_size"):
            model.set_input_size(img_size=img_size)
    model.eval()
    images = torch.randn(3, channels, height, width)  # exported with two, checked with three
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        scratch.chmod(0o755)
        differences = {key: EXPORTS[key](model, images, scratch) for key in formats}
        scratch.rename(out)
    except BaseException:
        shutil.rmtree(scratch)
        raise
    return differences


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="any timm model, or local-dir:FOLDER")
    parser.add_argument("out", type=Path, help="folder to be created")
    parser.add_argument("--formats", nargs="+", choices=EXPORTS, default=list(EXPORTS))
    parser.add_argument("--checkpoint", type=Path, help="weights of this architecture")
    parser.add_argument("--img-size", type=int, help="side in pixels; default: the model's own")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if ":" not in args.name and not timm.is_model(args.name):
        parser.error(f"{args.name!r} is no timm model; timm.list_models() lists all")
    if args.checkpoint is not None and not args.checkpoint.is_file():
        parser.error(f"--checkpoint {args.checkpoint}: no such file")
    try:
        differences = export_model(
            args.name,
            args.out,
            args.formats,
            checkpoint=args.checkpoint,
            img_size=args.img_size,
        )
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for key, difference in differences.items():
        print(f"{args.out}: {key} exported, logits differ by at most {difference:.2g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
