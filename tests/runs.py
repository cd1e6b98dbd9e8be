"""A run small enough to be repeated often, and its parts that must not depend on luck."""

import json
from pathlib import Path
from typing import Any

import yaml

# 1,437 training images of 16 px make 14 updates an epoch.
DIGITS: dict[str, Any] = {
    "model": {
        "name": "vit_tiny_patch16_224",
        "kwargs": {
            "patch_size": 8,
            "embed_dim": 24,
            "depth": 2,
            "num_heads": 2,
            "drop_path_rate": 0.2,
            "proj_drop_rate": 0.1,
        },
    },
    "data": {"source": "digits", "img_size": 16, "num_workers": 0, "crop_pct": 1.0},
    "augment": {"hflip": 0.0, "mixup": 0.4, "reprob": 0.2, "label_smoothing": 0.1},
    "optim": {"lr": 1e-2, "clip_grad": 1.0},
    "schedule": {"min_lr": 1e-4},
    "train": {
        "epochs": 2,
        "global_batch_size": 96,
        "batch_size_per_device": 24,
        "precision": "fp32",
        "ema_decay": 0.9,
        "seed": 1,
    },
    "run": {"log_every": 4, "dense_updates": 5, "save_every_updates": 3, "report": False},
}

TIMED = ("images_per_s", "data_wait", "seconds_per_update", "memory_gib", "seconds")


def write_config(folder: Path, settings: dict[str, Any], output: Path) -> Path:
    """A config file of these settings that writes to `output`."""
    run = {**settings["run"], "output_dir": str(output)}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**settings, "run": run}))
    return path


def outcome(output: Path) -> dict[str, Any]:
    """What two equal runs have in common, byte by byte: tensors of the last checkpoint, records."""
    last = max((output / "checkpoints").iterdir())
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    state = json.loads((last / "state.json").read_text())
    return {
        "tensors": {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))},
        "records": [{k: v for k, v in r.items() if k not in TIMED} for r in records],
        "history": state["history"],
        "update": state["update"],
    }
