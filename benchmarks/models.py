"""Compare the training step and the inference of LipsFormer with those of other models.

    python -m benchmarks.models --output models.json
    python -m benchmarks.models --batch-size 1 8 32 --output benchmarks/results/batch_cpu.json
    python -m benchmarks.models --img-size 160 224 288 --output benchmarks/results/size_cpu.json
    python -m benchmarks.models swin_tiny_patch4_window7_224 lipsformer_swin_tiny \
        --depths 2,2,2,2 2,2,6,2 2,2,18,2 --output benchmarks/results/depth_cpu.json
    python -m benchmarks.models --device cuda --precision bf16 --batch-size 64 128 256 \
        --modes eager regions compiled graphs --output benchmarks/results/models_cuda.json
    python -m benchmarks.models --table benchmarks/results/models_*.json

Every model is measured in all modes, and a LipsFormer in inference also in its folded form. They
take turns in random order within every round, so that a busy machine slows all alike. The ratio
compares with the first model in its fastest mode, and is the median over the rounds. The first
rounds warm up. A model of another repository joins by its import path: `--peer
package.module:function`. The function is called without arguments.

The share of the machine's FLOP/s compares two operations per multiply-add of the model, three times
as many for a training step, with the measured rate of a large matrix product. The share of its
bandwidth compares the bytes that the eager operators read and write with the rate of a large copy.
"""

import argparse
import copy
import importlib
import itertools
import statistics
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lipsformer
from benchmarks.counting import OperatorCounter
from benchmarks.machine import PRECISIONS, autocast, limits, machine, peak_memory, seconds_of
from benchmarks.records import markdown, run, write_record
from benchmarks.turns import SPEED, compare, take_turns
from lipsformer._commands import documented_parser
from lipsformer.analysis.cost import count_parameters, part_costs
from lipsformer.engine.compilation import compile_regions
from lipsformer.models import LipsFormerCSwin, LipsFormerSwin, LipsFormerViT

MODELS = ("swin_tiny_patch4_window7_224", "lipsformer_swin_tiny", "lipsformer_tiny")
# Compiled region by region as a run does, or as a whole in two modes of `torch.compile`.
MODES = {"eager": None, "regions": None, "compiled": "default", "graphs": "reduce-overhead"}
LIPSFORMERS = (LipsFormerCSwin, LipsFormerSwin, LipsFormerViT)
COLUMNS = (
    *("GMACs", "px", "batch", "mode", "images/s", "ratio (range)"),
    *("of FLOP/s", "GB/image", "of bandwidth", "peak MB", "ratio"),
)
PASSES = {"train": 3, "infer": 1}  # a backward pass multiplies as much as two forward passes


class Contestant:
    """One model in one mode, with its optimizer and the two steps that are timed."""

    def __init__(self, model: nn.Module, mode: str, images: Tensor, precision: str) -> None:
        """Take over a model on the device of `images`."""
        if images.is_cuda:
            model = model.to(memory_format=torch.channels_last)
        self.model = copy.deepcopy(model) if mode == "regions" else model  # compiled in place
        self.run = torch.compile(model, mode=MODES[mode]) if MODES[mode] else self.model
        # A model that learned its few images would have denormal gradients, which take up to a
        # hundred times as long. AdamW does the same work with any rate.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.images = images
        self.labels = torch.arange(images.shape[0], device=images.device) % 1000
        self.precision = precision

    def train(self) -> None:
        """Make one training step."""
        self.model.train()
        with autocast(self.images.device, self.precision):
            loss = cross_entropy(self.run(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def infer(self) -> None:
        """Make one forward pass in evaluation mode."""
        self.model.eval()
        with torch.no_grad(), autocast(self.images.device, self.precision):
            self.run(self.images)

    def compile_regions(self, task: str) -> None:
        """Compile the model region by region, after a step that tries kernels for GPUs."""
        getattr(self, task)()
        compile_regions(self.model, deterministic=False)


def build(name: str, img_size: int, depths: tuple[int, ...] | None) -> nn.Module:
    """Return a model of timm's, or the peer that `module:function` makes.

    The image size is given when the model is built, so that Swin keeps its windows of 7 tokens;
    `set_input_size` would scale them with the image.
    """
    if ":" in name:
        module, function = name.split(":")
        return getattr(importlib.import_module(module), function)()
    changed: dict[str, Any] = {"depths": depths} if depths else {}
    if timm.get_pretrained_cfg(name).fixed_input_size:  # pyright: ignore[reportOptionalMemberAccess]
        changed["img_size"] = img_size
    return timm.create_model(name, drop_path_rate=0.2, **changed)


def measure(
    contestants: dict[tuple[str, str], Contestant],
    task: str,
    options: argparse.Namespace,
    rates: dict[str, float],
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the speed over interleaved rounds and the memory of every (model, mode)."""
    images = next(iter(contestants.values())).images
    steps = {key: getattr(contestant, task) for key, contestant in contestants.items()}
    seconds = take_turns(
        steps,
        lambda key: seconds_of(steps[key], images.device),
        rounds=options.rounds,
        warmup=options.warmup,
    )
    memory = {key: peak_memory(step, images.device) for key, step in steps.items()}
    medians = {key: statistics.median(own) for key, own in seconds.items()}
    first = next(iter(contestants))[0]
    base = min((key for key in contestants if key[0] == first), key=lambda key: medians[key])
    result = {}
    for key, ratios in compare(seconds, memory, base).items():
        result[key] = {
            "images_per_s": len(images) / medians[key],
            "seconds": [round(own, 4) for own in seconds[key]],
            **ratios,
        }
        if key[1] == "eager":
            with OperatorCounter() as counter:
                steps[key]()
            result[key]["gb_per_image"] = counter.bytes / len(images) / 1e9
            result[key]["bandwidth_share"] = counter.bytes / medians[key] / rates["bytes_per_s"]
    return result


def run_setting(
    options: argparse.Namespace,
    record: dict[str, Any],
    depths: tuple[int, ...] | None,
    img_size: int,
    batch_size: int,
) -> None:
    """Measure one batch size, image size and depth; write the record after each task."""
    images = torch.randn(batch_size, 3, img_size, img_size).to(options.device)
    if images.is_cuda:
        images = images.contiguous(memory_format=torch.channels_last)
    models: dict[str, dict[str, Any]] = {}
    built: dict[str, nn.Module] = {}
    for name in [*options.models, *options.peer]:
        torch.manual_seed(0)
        model = build(name, img_size, depths).to(images.device)
        macs = sum(part.macs for part in part_costs(model, images[:1]))
        models[name] = {"parameters": count_parameters(model), "gmacs": macs / 1e9}
        built[name] = model
    setting = {"batch_size": batch_size, "img_size": img_size, "depths": depths, "models": models}
    record["settings"].append(setting)
    for task in options.tasks:
        contestants = {}
        for name, model in built.items():
            forms = {"": model}
            if task == "infer" and isinstance(model, LIPSFORMERS):
                forms["folded "] = lipsformer.optimize_for_inference(model.eval())
            for form, mode in itertools.product(forms, options.modes):
                contestant = Contestant(forms[form], mode, images, options.precision)
                if mode == "regions":
                    contestant.compile_regions(task)
                contestants[name, form + mode] = contestant
        for (name, mode), own in measure(contestants, task, options, record["limits"]).items():
            flops = 2e9 * models[name]["gmacs"] * PASSES[task] * own["images_per_s"]
            own["flops_share"] = flops / record["limits"]["flops_per_s"]
            models[name].setdefault(task, {})[mode] = own
        torch.compiler.reset()
        write_record(options.output, record)


def table(record: dict[str, Any]) -> str:
    """Return the figures of one record as Markdown."""
    options, host, rates = record["options"], record["machine"], record["limits"]
    parts = [
        f"{host['device']} ({host['cpu']}, {host['threads']} threads), torch {host['torch']}, "
        f"{options['precision']}, {options['rounds']} rounds, {host['date']}; measured limits "
        f"{rates['flops_per_s'] / 1e9:.0f} GFLOP/s, {rates['bytes_per_s'] / 1e9:.1f} GB/s",
    ]
    for task in options["tasks"]:
        header = ("training" if task == "train" else "inference", *COLUMNS)
        rows = []
        for setting in record["settings"]:
            for name, model in setting["models"].items():
                shown = name if setting["depths"] is None else f"{name} {setting['depths']}"
                cells = (shown, f"{model['gmacs']:.2f}", setting["img_size"], setting["batch_size"])
                rows += [(*cells, mode, *figures(own)) for mode, own in model.get(task, {}).items()]
        parts.append(markdown(header, rows))
    return "\n\n".join(parts)


def figures(own: dict[str, float]) -> list[str]:
    """Return the measured cells of a row."""
    moved = ["", ""]
    if "gb_per_image" in own:
        moved = [f"{own['gb_per_image']:.2f}", f"{own['bandwidth_share']:.0%}"]
    return [
        f"{own['images_per_s']:.2f}",
        SPEED.format(**own),
        f"{own['flops_share']:.0%}",
        *moved,
        f"{own['peak_mb']:.0f}",
        f"{own['memory_ratio']:.2f}",
    ]


def record_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all settings, written after each of them."""
    device = torch.device(options.device)
    kept = ("precision", "rounds", "warmup", "tasks")
    record: dict[str, Any] = {
        "machine": machine(device),
        "limits": limits(device, options.precision),
        "options": {name: getattr(options, name) for name in kept},
        "settings": [],
    }
    for setting in itertools.product(options.depths, options.img_size, options.batch_size):
        run_setting(options, record, *setting)
    return record


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help="the first is the base")
    parser.add_argument("--peer", action="append", default=[], metavar="module:function")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument("--tasks", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--batch-size", type=int, nargs="+", default=[8])
    parser.add_argument("--img-size", type=int, nargs="+", default=[224])
    parser.add_argument(
        "--depths",
        nargs="+",
        type=lambda text: tuple(map(int, text.split(","))),
        default=[None],
        help="blocks of each stage, instead of the models' own, as in 2,2,6,2",
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=2)
    run(parser, record_of, table)


if __name__ == "__main__":
    main()
