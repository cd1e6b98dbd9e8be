"""Tabulate the costs of timm models: parameters, GMACs, activations, memory, images per second.

    python -m scripts.profile_model lipsformer_swin_tiny swin_tiny_patch4_window7_224 --train

GMACs and activations are those of one image in evaluation; memory and speed those of the batch.
`--precision bf16` and `fp16` are autocast, as in training; every model runs in its own process.
"""

import argparse
import difflib
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn

import lipsformer  # noqa: F401  (registers the models)
from lipsformer._commands import documented_parser, user_errors
from lipsformer._errors import ConfigError
from lipsformer._machine import cpu_name
from lipsformer.analysis.cost import (
    PeakMemory,
    count_parameters,
    median_seconds,
    part_costs,
)
from lipsformer.engine.weights import create_model
from scripts._image_size import resize_input
from scripts._json_output import add_json_option, check_json_target, say, write_json

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def profile_model(
    name: str,
    *,
    img_size: int | None,
    batch_size: int,
    precision: str,
    device: str,
    train: bool,
    repeats: int,
) -> dict[str, Any]:
    """Return the record of one model.

    Raises:
        ConfigError: If the model cannot be built, or not for images of this size.
    """
    target = torch.device(device)
    with PeakMemory(target) as memory:
        model: Any = create_model(name, device=device)
        size = model.pretrained_cfg["input_size"]
        if img_size is not None:
            size = (size[0], img_size, img_size)
            resize_input(model, name, size[0], img_size)
        images = torch.randn(batch_size, *size, device=target)
        step = _step(model, images, PRECISIONS[precision], train)
        seconds = median_seconds(step, target, repeats=repeats)
    parts = part_costs(model, images[:1])  # after the peak was read, because tracing takes memory
    return {
        "model": name,
        "input_size": list(size),
        "parameters": count_parameters(model),
        "gmacs": sum(part.macs for part in parts) / 1e9,
        "activations": sum(part.activations for part in parts),
        "parts": [vars(part) for part in parts],
        "mode": "train" if train else "inference",
        "batch_size": batch_size,
        "precision": precision,
        "images_per_second": batch_size / seconds,
        "peak_memory_bytes": memory.peak,
        "device": torch.cuda.get_device_name(target)
        if target.type == "cuda"
        else f"{cpu_name()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }


def _step(
    model: nn.Module, images: torch.Tensor, dtype: torch.dtype, train: bool
) -> Callable[[], None]:
    """Return a function that runs the model, in training with a backward pass and AdamW's step."""
    model.train(train)
    autocast = torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def inference_step() -> None:
        with torch.inference_mode(), autocast:
            model(images)

    def training_step() -> None:
        optimizer.zero_grad()
        with autocast:
            loss = nn.functional.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()

    return training_step if train else inference_step


def table(record: dict[str, Any]) -> str:
    """Return the record as text: one line per part, then the totals."""
    channels, height, width = record["input_size"]
    lines = [
        f"{record['model']}  {channels}x{height}x{width}",
        f"  {'part':<16} {'parameters':>12} {'GMACs':>9} {'activations':>12}  output",
    ]
    total = {**record, "name": "total", "macs": 1e9 * record["gmacs"], "output": None}
    for part in [*record["parts"], total]:
        output = "x".join(map(str, part["output"] or ()))
        lines.append(
            f"  {part['name']:<16} {part['parameters']:>12,} {part['macs'] / 1e9:>9.4f} "
            f"{part['activations']:>12,}  {output}".rstrip()
        )
    memory = record["peak_memory_bytes"]
    lines.append(
        f"  {record['mode']}, {record['precision']}, batch {record['batch_size']}: "
        f"{record['images_per_second']:.1f} images/s, peak memory "
        + ("not measured" if memory is None else f"{memory / 2**20:.0f} MiB")
    )
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="any timm model")
    parser.add_argument("--img-size", type=int, help="side in pixels; default: the model's own")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--train", action="store_true", help="time training steps")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps")
    add_json_option(parser)
    return parser


@user_errors(ConfigError)
def main(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line."""
    parser = parser or make_parser()
    args = parser.parse_intermixed_args(argv)
    for name in args.names:
        if ":" not in name and not timm.is_model(name):
            close = difflib.get_close_matches(name, timm.list_models(), 1)
            hint = f", did you mean {close[0]!r}" if close else ""
            parser.error(f"{name!r} is no timm model{hint}; timm.list_models() lists all")
    present = ["cpu"]
    if torch.cuda.is_available():
        present += ["cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if args.device not in present:
        parser.error(f"--device {args.device}: PyTorch finds no such device; use one of {present}")
    for option in ("batch_size", "repeats"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)}: must be >= 1")
    check_json_target(args.json)
    options = {k: v for k, v in vars(args).items() if k not in ("names", "json")}
    # One process per model: memory that one model leaves allocated would hide the next one's peak.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        records = []
        for result in [pool.apply_async(profile_model, (name,), options) for name in args.names]:
            records.append(result.get())
            say(args.json, table(records[-1]))
    write_json(args.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
