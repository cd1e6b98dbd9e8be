"""Inference on a CPU: eager, folded and compiled PyTorch, ONNX Runtime and OpenVINO.

    python -m benchmarks.deployment --batch-size 1 --rounds 41 \
        --output benchmarks/results/deployment_cpu.json
    python -m benchmarks.deployment --batch-size 8 32 \
        --output benchmarks/results/deployment_cpu.json
    python -m benchmarks.deployment --table benchmarks/results/deployment_cpu.json
    python -m benchmarks.deployment --accuracy outputs/demo --output benchmarks/results/int8.json
    python -m benchmarks.deployment --accuracy weights/lipsformer_swin_nano.cifar10 \
        --config configs/cifar10/small_40ep.yaml \
        --output benchmarks/results/int8_cifar10.json

A piece of the first two commands is one model at one batch size beside the first model. The forms
of both take turns in random order within every round, so that a busy machine slows all alike. A
call with a single image is so short that it takes many rounds to compare two forms. The JSON file
is written after every piece, and the same command goes on where it was stopped. Exports stay in
--exports.

`--accuracy` takes a trained run instead, and compares what all forms answer to its validation
images. A folder of weights without a config needs `--config`, which names the images.
"""

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import lipsformer  # noqa: F401  (registers the models)
from benchmarks.machine import machine, seconds_of
from benchmarks.records import markdown, run, write_record
from benchmarks.turns import take_turns
from data import Normalize, build_eval_dataset, collate
from lipsformer._commands import documented_parser
from lipsformer._configfile import read_config
from lipsformer._machine import commit
from lipsformer.config import Config
from lipsformer.engine.run_files import manifest_entry
from lipsformer.engine.run_folder import find_weights
from lipsformer.engine.weights import load_model
from scripts._runtimes import (
    FORMATS,
    ExportError,
    Logits,
    autocast,
    fold,
    load,
    require_packages,
    trace,
    write,
)

MODELS = (
    *("swin_tiny_patch4_window7_224", "convnext_tiny", "vit_small_patch16_224"),
    *("lipsformer_swin_tiny", "lipsformer_tiny", "lipsformer_vit_small"),
)
SIZE = 224
RUNTIMES = {  # form: format of the export
    "ONNX Runtime": {"fp32": "onnx", "int8": "onnx-int8"},
    "OpenVINO": {"fp32": "openvino", "bf16": "openvino", "int8": "openvino-int8"},
}
FORMS = ("eager", "folded", "compiled", *RUNTIMES)


def contestants(
    model: nn.Module, images: Tensor, exports: Path, options: argparse.Namespace
) -> dict[tuple[str, str], Logits]:
    """Return (form, precision) -> function, for all forms and precisions that exist.

    Args:
        model: A model in evaluation mode.
        images: At least two images.
        exports: Folder of the model's exports, which are written if they are not there.
        options: `forms`, `precisions` and `threads`.
    """
    found: dict[tuple[str, str], Logits] = {}
    traced = cache(lambda: trace(model, images))
    can_fold = fold(model) is not model
    # A folded model keeps weights of one precision, so each precision has a model of its own.
    eager = {"eager": lambda: model, "folded": lambda: fold(model)}
    eager["compiled"] = lambda: torch.compile(fold(model), dynamic=False)
    for form, precision in itertools.product(options.forms, options.precisions):
        if form in eager and precision != "int8" and (form != "folded" or can_fold):
            found[form, precision] = autocast(eager[form](), precision)
        key = RUNTIMES.get(form, {}).get(precision)
        if key is not None:
            done = exports / f"{key}.done"
            if not done.exists():
                exports.mkdir(parents=True, exist_ok=True)
                write(key, traced, exports)
                done.touch()
            found[form, precision] = load(exports / FORMATS[key].file, precision, options.threads)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time all pieces that the output does not hold yet."""
    _require_packages(options)
    torch.set_num_threads(options.threads)
    record: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "commit": commit(),
        "pieces": [],
    }
    if options.output is not None and options.output.exists():
        record = json.loads(options.output.read_text())
    done = {(piece["model"], piece["batch"]) for piece in record["pieces"]}
    base, *others = options.models
    for name, batch in itertools.product(others, options.batch_size):
        if (name, batch) in done:
            continue
        images = torch.randn(max(batch, 2), 3, SIZE, SIZE)
        torch.manual_seed(0)
        ways = {
            (one, *form): logits
            for one in (base, name)
            for form, logits in contestants(
                timm.create_model(one).eval(), images, options.exports / one, options
            ).items()
        }
        load_before = os.getloadavg()[0]
        seconds = time_rounds(ways, images[:batch], options.rounds)
        piece = {"model": name, "batch": batch, "load": round(load_before, 2)}
        piece["seconds"] = [[*way, [round(t, 5) for t in own]] for way, own in seconds.items()]
        record["pieces"].append(piece)
        torch.compiler.reset()
        write_record(options.output, record)
    return record


def time_rounds(
    ways: dict[tuple[str, str, str], Logits], images: Tensor, rounds: int
) -> dict[tuple[str, str, str], list[float]]:
    """Return the seconds of every round, without two calls that warm up.

    The second call of a folded model records what later calls repeat.
    """
    call_seconds = lambda way: seconds_of(lambda: ways[way](images), images.device)  # noqa: E731
    return take_turns(ways, call_seconds, rounds=rounds, warmup=2)


@torch.no_grad()
def measure_accuracy(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the answers of all forms of a run's best weights on its validation images."""
    _require_packages(options)
    weights = find_weights(options.accuracy, "best")
    if options.config is None:
        config = weights.config([])
    else:
        config = read_config(Config, options.config, [])
    assert config is not None
    model = load_model(weights).eval()
    dataset = build_eval_dataset(config.data, classes=weights.classes())
    count = min(len(dataset), options.images)
    pixels, labels = collate([dataset[i] for i in range(count)])
    images = Normalize(config.data.mean, config.data.std)(pixels).contiguous()
    expected = model(images)
    rows = []
    exports = options.exports / manifest_entry(weights.file)["sha256"][:12]
    ways = contestants(model, images, exports, options)
    for (form, precision), logits in ways.items():
        found = torch.cat([logits(part.contiguous()) for part in images.split(32)])
        rows.append(
            {
                "form": form,
                "precision": precision,
                "top1": 100.0 * (found.argmax(1) == labels).double().mean().item(),
                "changed": int((found.argmax(1) != expected.argmax(1)).sum()),
                "difference": ((found - expected).abs().max() / expected.abs().max()).item(),
            }
        )
    return {
        "machine": machine(torch.device("cpu")),
        "model": config.model.name,
        "data": config.data.name if config.data.source != "digits" else "digits",
        "images": count,
        "accuracy": rows,
    }


def table(record: dict[str, Any]) -> str:
    """Return the tables of one record: speed, or accuracy."""
    host = record["machine"]
    if "accuracy" in record:
        rows = (
            (
                r["form"],
                r["precision"],
                f"{r['top1']:.2f} %",
                r["changed"],
                f"{r['difference']:.1e}",
            )
            for r in record["accuracy"]
        )
        header = ("form", "precision", "top-1", "answers changed", "difference of the logits")
        title = f"`{record['model']}` on {record['images']} images of {record['data']}:\n\n"
        return title + markdown(header, rows)
    loads = [piece["load"] for piece in record["pieces"]]
    title = (
        f"{host['cpu']}, {host['threads']} threads, torch {host['torch']}, {_rounds(record)}, "
        f"{host['date']}; load average at the start of a piece {min(loads):.1f} to "
        f"{max(loads):.1f}\n\n"
    )
    return title + _speed(record) + "\n\n" + _fastest(record)


def _rounds(record: dict[str, Any]) -> str:
    """Return how many rounds there were at every batch size."""
    rounds = {piece["batch"]: len(piece["seconds"][0][-1]) for piece in record["pieces"]}
    if len({*rounds.values()}) == 1:
        return f"{next(iter(rounds.values()))} rounds"
    own = [f"{count} rounds at batch {batch}" for batch, count in sorted(rounds.items())]
    return f"{', '.join(own[:-1])} and {own[-1]}"


def _speed(record: dict[str, Any]) -> str:
    """Return one row per model, form and precision: ms, and the ratio to the base's first form."""
    batches = sorted({piece["batch"] for piece in record["pieces"]})
    cells: dict[tuple[str, str, str], dict[int, tuple[float, float]]] = {}
    for piece in record["pieces"]:
        seconds = _seconds(piece)
        base = next(iter(seconds))
        for way, own in seconds.items():  # the base takes part in every piece; its first one counts
            figures = (1e3 * statistics.median(own), _ratio(seconds[base], own))
            cells.setdefault(way, {}).setdefault(piece["batch"], figures)
    rows = (
        (
            f"`{name}`",
            *(form, precision),
            *(f"{own[b][0]:.1f}" if b in own else "" for b in batches),
            *(f"{own[b][1]:.2f}" if b in own else "" for b in batches),
        )
        for (name, form, precision), own in cells.items()
    )
    header = ("model", "form", "precision")
    columns = [f"{what}, batch {batch}" for what in ("ms", "ratio") for batch in batches]
    return markdown((*header, *columns), rows)


def _fastest(record: dict[str, Any]) -> str:
    """Return the fastest form of each model and precision over the base's fastest form."""
    batches = sorted({piece["batch"] for piece in record["pieces"]})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for name, precision, batch, ratio, forms in fastest_ratios(record):
        cells.setdefault((name, precision), {})[batch] = f"{ratio:.2f} ({' / '.join(forms)})"
    rows = (
        (f"`{name}`", precision, *(own.get(batch, "") for batch in batches))
        for (name, precision), own in cells.items()
    )
    return markdown(("model", "precision", *(f"batch {batch}" for batch in batches)), rows)


def fastest_ratios(record: dict[str, Any]) -> Iterator[tuple[str, str, int, float, list[str]]]:
    """Yield model, precision, batch size, the ratio of the fastest forms, and these two forms."""
    for piece in record["pieces"]:
        seconds = _seconds(piece)
        base = next(iter(seconds))[0]
        for precision in dict.fromkeys(way[2] for way in seconds):
            own, reference = (
                min(
                    (way for way in seconds if (way[0], way[2]) == (name, precision)),
                    key=lambda way: statistics.median(seconds[way]),
                )
                for name in (piece["model"], base)
            )
            ratio = _ratio(seconds[reference], seconds[own])
            yield piece["model"], precision, piece["batch"], ratio, [own[1], reference[1]]


def eager_ratios(record: dict[str, Any]) -> Iterator[tuple[str, str, int, float]]:
    """Yield model, precision, batch size and the ratio of the models in eager PyTorch."""
    for piece in record["pieces"]:
        seconds = _seconds(piece)
        base = next(iter(seconds))[0]
        for name, form, precision in seconds:
            if (name, form) == (piece["model"], "eager"):
                own, reference = seconds[name, form, precision], seconds[base, form, precision]
                yield name, precision, piece["batch"], _ratio(reference, own)


def _seconds(piece: dict[str, Any]) -> dict[tuple[str, str, str], list[float]]:
    return {(name, form, precision): own for name, form, precision, own in piece["seconds"]}


def _ratio(base: list[float], own: list[float]) -> float:
    """Return how many times as fast as the base, the median over the rounds."""
    return statistics.median(b / t for b, t in zip(base, own, strict=True))


def _require_packages(options: argparse.Namespace) -> None:
    ways = itertools.product(options.forms, options.precisions)
    keys = (RUNTIMES.get(form, {}).get(precision) for form, precision in ways)
    try:
        require_packages(key for key in keys if key is not None)
    except ExportError as error:
        raise SystemExit(f"error: {error}; or leave the runtime out of --forms") from None


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__, prog="python -m benchmarks.deployment")
    parser.add_argument("models", nargs="*", default=MODELS, help="the first is the base")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "int8"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--exports", type=Path, default=Path("outputs/deployment"))
    parser.add_argument("--accuracy", metavar="RUN", help="a run whose accuracy is compared")
    parser.add_argument("--config", help="YAML file of the images, for weights without one")
    parser.add_argument("--images", type=int, default=10_000, help="at most, with --accuracy")
    run(parser, lambda o: measure_accuracy(o) if o.accuracy else measure(o), table)


if __name__ == "__main__":
    main()
