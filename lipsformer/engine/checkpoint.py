"""Checkpoints that survive what happens to them: kills, full disks, flipped bits.

A checkpoint is a folder `update-<number>` with tensors as safetensors and everything else as JSON;
nothing is pickled. It is written under a temporary name, flushed to disk, sealed by a manifest of
sizes and SHA-256 sums, and renamed; only then are older ones removed. No random state is
saved because there is none: order, augmentation, mixing, drop path and dropout are functions of the
seed, the update, the micro-step and the rank.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model.safetensors"
EMA = "ema.safetensors"
OPTIMIZER = "optimizer.safetensors"
INSTRUMENTS = "instruments.safetensors"
CHECKPOINTS = "checkpoints"
PREFIX = "update-"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which and why."""


class CheckpointFolder:
    """The checkpoints of a run.

    Args:
        path: their folder, created with the first of them.
        keep: how many of the newest stay; the best one stays besides.
    """

    def __init__(self, path: Path, *, keep: int):
        self.path = path
        self.keep = keep

    def save(
        self,
        update: int,
        *,
        tensors: Mapping[str, dict[str, Tensor]],
        texts: Mapping[str, str],
        best_update: int | None,
    ) -> Path:
        """Writes a checkpoint and removes those it makes superfluous.

        Args:
            update: number of updates made, which names it.
            tensors: file name -> tensors on the CPU.
            texts: file name -> content.
            best_update: the checkpoint that must stay whatever its age.

        Raises:
            CheckpointError: if it cannot be written; the earlier ones are intact.
        """
        final = self.path_of(update)
        temporary = self.path / f".{final.name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for name, content in tensors.items():
                save_file(content, temporary / name)
            for name, content in texts.items():
                (temporary / name).write_text(content)
            manifest = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in (*temporary.iterdir(), temporary):
                _flush(path)
            if final.exists():  # left over, broken, from before the run went back
                shutil.rmtree(final)
            temporary.rename(final)
            _flush(self.path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            last = self.newest()
            raise CheckpointError(
                f"cannot write checkpoint {final}: {error}; "
                f"{f'the last good one is {last}' if last else 'there is no earlier one'}"
            ) from None
        self._prune(update, best_update)
        return final

    def path_of(self, update: int) -> Path:
        """Where the checkpoint after `update` updates is."""
        return self.path / f"{PREFIX}{update:09d}"

    def newest(self) -> Path | None:
        """The newest intact checkpoint; newer ones that are not are named in a warning."""
        for path in sorted(self.path.glob(f"{PREFIX}*"), reverse=True):
            fault = find_fault(path)
            if fault is None:
                return path
            logger.warning("skipping checkpoint %s: %s", path, fault)
        return None

    def _prune(self, update: int, best_update: int | None) -> None:
        numbers = {int(p.name.removeprefix(PREFIX)): p for p in self.path.glob(f"{PREFIX}*")}
        # One ahead of the newest is broken: the run went back behind it.
        current = sorted(number for number in numbers if number <= update)
        stay = {*current[-self.keep :], best_update}
        unfinished = self.path.glob(f".{PREFIX}*")
        for path in (*unfinished, *(p for number, p in numbers.items() if number not in stay)):
            shutil.rmtree(path)


def find_fault(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None: every file has its size and its sum."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it is incomplete, {MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name, expected in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if _fingerprint(file) != expected:
            return f"{name} is damaged, its SHA-256 sum does not match"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint that `find_fault` has passed."""
    return json.loads((path / STATE).read_text())


def locate(path: Path) -> Path:
    """The newest intact checkpoint if `path` is a run's folder; else `path`, if it can be one.

    Raises:
        CheckpointError: if it is neither a run, nor a checkpoint, nor a file of weights.
    """
    if path.is_file():
        return path
    if (path / CHECKPOINTS).is_dir():
        newest = CheckpointFolder(path / CHECKPOINTS, keep=1).newest()
        if newest is None:
            raise CheckpointError(f"{path} is a run without an intact checkpoint")
        return newest
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if (path / MANIFEST).exists() and (fault := find_fault(path)):
        raise CheckpointError(f"{path} cannot be used: {fault}")
    if not (path / MODEL).is_file():
        raise CheckpointError(f"{path} is neither a run, nor a checkpoint, nor a file of weights")
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights of a safetensors file or a `torch.save` file of tensors, without wrappers' names.

    Of a checkpoint it takes the EMA's if there is one.

    Raises:
        CheckpointError: if there is none or it is something else.
    """
    if path.is_dir():
        path = path / EMA if (path / EMA).exists() else path / MODEL
    try:
        if path.suffix == ".safetensors":
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except Exception as error:  # torch.load raises whatever its parsers do
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is not a file of weights: {reason}") from None
    for key in ("model", "state_dict"):
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        raise CheckpointError(f"{path} does not hold a mapping of names to tensors")
    return {strip_wrappers(name): tensor for name, tensor in weights.items()}


def strip_wrappers(name: str) -> str:
    """A parameter's name without what DDP (`module.`) and compilation (`_orig_mod.`) put before."""
    while name.startswith(("module.", "_orig_mod.")):
        name = name.partition(".")[2]
    return name


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file's content as a whole, or leaves it as it was."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    _flush(temporary)
    temporary.replace(path)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
