"""The files of a run and of its checkpoints: their names, and whether a checkpoint is intact.

A step of the optimizer is called an update in files, in config keys and in what commands print.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

CONFIG = "config.yaml"  # the resolved config, in the run and in each of its checkpoints
TIMM_CONFIG = "config.json"  # timm's description of the model, in each checkpoint
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
REPLAY = "replay.json"
EXIT = "exit.json"
SKIPPED = "skipped.txt"
REPORT = "report.html"
PLOTS = "plots"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model.safetensors"
EMA = "ema.safetensors"
OPTIMIZER = "optimizer.safetensors"
INSTRUMENTS = "instruments.safetensors"
PREFIX = "update-"
# A checkpoint, or one that was set aside so that another of the same step could take its place.
NAME = re.compile(rf"{PREFIX}(\d{{9}})|\.{PREFIX}(\d{{9}})\.old")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which one and why."""


def read_state(path: Path) -> dict[str, Any]:
    """Return the JSON part of a checkpoint in which `find_fault` found no fault.

    Args:
        path: Folder of the checkpoint.

    Example:
        >>> import tempfile
        >>> checkpoint = Path(tempfile.mkdtemp())
        >>> _ = (checkpoint / "state.json").write_text('{"update": 440}')
        >>> read_state(checkpoint)["update"]
        440
    """
    return json.loads((path / STATE).read_text())


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if all sizes and SHA-256 sums are right.

    Args:
        path: Folder of the checkpoint.

    Example:
        >>> import tempfile
        >>> find_fault(Path(tempfile.mkdtemp()))
        'it is incomplete, manifest.json is missing'
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it is incomplete, {MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    if not isinstance(manifest, dict) or not {MODEL, STATE} <= manifest.keys():
        return f"{MANIFEST} does not list {MODEL} and {STATE}"
    keys = {"bytes", "sha256"}
    if not all(isinstance(entry, dict) and entry.keys() == keys for entry in manifest.values()):
        return f"{MANIFEST} does not give bytes and sha256 of every file"
    for name, expected in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if manifest_entry(file) != expected:
            return f"{name} is damaged, its SHA-256 sum does not match"
    return None


def manifest_entry(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 sum of a file, as the manifest of a checkpoint lists them.

    Args:
        path: The file.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> file.touch()
        >>> manifest_entry(file)  # of an empty file
        {'bytes': 0, 'sha256': 'e3b0c442...'}
    """
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
