"""Evaluates a checkpoint: `python eval.py --checkpoint <run, checkpoint or weights file>`.

Model, class names and preprocessing come from the checkpoint's config.json, the data from its
config.yaml; `--data key=value` replaces settings of the latter. A bare file of weights needs
`--config`. Exit code 2 for a mistake.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
from accelerate import Accelerator
from torch import nn

import lipsformer  # noqa: F401  (registers the models)
from data import DataError, Normalize, build_eval_dataset, eval_loader
from lipsformer.config import Config, ConfigError, DataConfig, load_config, make_config
from lipsformer.engine.checkpoint import EMA, MODEL, CheckpointError, locate, read_weights
from lipsformer.engine.loop import evaluate
from lipsformer.engine.metrics import NonFiniteError
from lipsformer.engine.run import CONFIG
from lipsformer.engine.runtime import EXIT_NONFINITE, EXIT_USER_ERROR, make_accelerator
from lipsformer.engine.snapshot import load_weights
from train import build_model


def evaluate_checkpoint(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each set of weights: raw, and EMA if there is one."""
    if options.batch_size is not None and options.batch_size < 1:
        raise ConfigError(f"--batch-size={options.batch_size} must be >= 1")
    path = locate(Path(options.checkpoint))
    folder = path if path.is_dir() else path.parent
    overrides = [f"data.{override}" for override in options.data]
    config_file = options.config or (folder / CONFIG if (folder / CONFIG).exists() else None)
    config: Config | None = load_config(config_file, overrides) if config_file else None

    if (folder / "config.json").exists():
        card = json.loads((folder / "config.json").read_text())
        data = config.data if config else data_config(card, options.data, origin=str(folder))
        classes = card.get("label_names")
        model = timm.create_model(f"local-dir:{folder}", pretrained=False)
    elif config:
        data, classes, model = config.data, None, None
    else:
        raise ConfigError(f"{path}: no config.json lies beside it; give --config configs/x.yaml")
    dataset = build_eval_dataset(data, classes=classes)
    if model is None:
        assert config is not None
        model = build_model(config, dataset.classes)

    accelerator = make_accelerator(config.train.precision if config else "fp32")
    files = [path] if path.is_file() else [f for f in (path / MODEL, path / EMA) if f.exists()]
    batch_size = options.batch_size or (config.train.eval_batch_size if config else 256)
    return [
        {
            "checkpoint": str(path),
            "weights": file.name,
            **evaluate_file(accelerator, model, file, dataset, data, batch_size),
        }
        for file in files
    ]


def evaluate_file(
    accelerator: Accelerator,
    model: nn.Module,
    file: Path,
    dataset: Any,
    data: DataConfig,
    batch_size: int,
) -> dict[str, float | int]:
    load_weights(model, read_weights(file), str(file))
    batches = eval_loader(
        dataset,
        batch_size=batch_size,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        num_workers=data.num_workers,
    )
    result = evaluate(
        accelerator,
        model.to(accelerator.device),
        batches,
        normalize=Normalize(data),
        num_images=len(dataset),
    )
    assert result is not None
    return result


def data_config(card: dict[str, Any], overrides: Sequence[str], *, origin: str) -> DataConfig:
    """Preprocessing of a timm config.json, with `overrides` to say which images."""
    known = card["pretrained_cfg"]
    settings = {
        "img_size": known["input_size"][-1],
        **{key: known[key] for key in ("mean", "std", "crop_pct", "interpolation")},
    }
    return make_config(DataConfig, [settings], overrides, origin=f"{origin} with --data")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="run, checkpoint or weights file")
    parser.add_argument("--data", nargs="*", default=[], metavar="key=value", help="e.g. root=/d")
    parser.add_argument("--config", help="YAML of model and data for a bare file of weights")
    parser.add_argument("--batch-size", type=int, help="of a device; default: of the run's config")
    parser.add_argument("--json", metavar="FILE", help="also write the records there; - for stdout")
    return parser.parse_args(argv)


def table(records: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'weights':20} {'top-1 %':>9} {'top-5 %':>9} {'loss':>9} {'images':>8}"]
    for r in records:
        figures = f"{r['top1']:9.3f} {r['top5']:9.3f} {r['loss']:9.5f} {r['images']:8d}"
        lines.append(f"{r['weights']:20} {figures}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        records = evaluate_checkpoint(options)
    except (ConfigError, DataError, CheckpointError) as error:
        code, message = EXIT_USER_ERROR, str(error)
    except NonFiniteError as error:
        code, message = EXIT_NONFINITE, str(error)
    else:
        if os.environ.get("RANK", "0") == "0":
            text = json.dumps(records, indent=1)
            print(text if options.json == "-" else table(records))
            if options.json not in (None, "-"):
                Path(options.json).write_text(text + "\n")
        return 0
    if first:
        print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
