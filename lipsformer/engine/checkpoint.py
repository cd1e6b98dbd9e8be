"""Checkpoints that survive killed processes, full disks and flipped bits.

A checkpoint is a folder `update-<number>` with tensors as safetensors and everything else as JSON;
nothing is pickled. It is written under a temporary name, flushed to disk, sealed by a manifest of
sizes and SHA-256 sums, and renamed. Older checkpoints are removed only after that. A checkpoint
holds no random state, because there is none: order, augmentation, mixing, drop path and dropout are
functions of the seed, the step, the micro-step and the rank.
"""

import hashlib
import json
import logging
import os
import re
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
PREFIX = "update-"
NAME = re.compile(rf"{PREFIX}(\d{{9}})")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which one and why."""


class CheckpointFolder:
    """The checkpoints of a run.

    Args:
        path: Their folder. The first `save` creates it.
        keep: Number of the newest checkpoints to keep. The best one is always kept.

    Example:
        >>> folder = CheckpointFolder(Path("outputs/run/checkpoints"), keep=2)
        >>> folder.path_of(440).name
        'update-000000440'
    """

    def __init__(self, path: Path, *, keep: int = 1):
        self.path = path
        self.keep = keep

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        texts: Mapping[str, str],
        best_step: int | None,
    ) -> Path:
        """Write a checkpoint and remove those that are no longer needed.

        Args:
            step: Number of steps made, which gives the folder its name.
            tensors: File name -> tensors on the CPU.
            texts: File name -> content.
            best_step: The checkpoint to keep whatever its age.

        Raises:
            CheckpointError: If it cannot be written; the earlier ones are intact.
        """
        final = self.path_of(step)
        temporary = self.path / f".{final.name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for name, content in tensors.items():
                save_file(dict(content), temporary / name)
            for name, content in texts.items():
                (temporary / name).write_text(content)
            manifest = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in (*temporary.iterdir(), temporary):
                _flush(path)
            # A run reaches a step twice if a signal stopped it there before the evaluation, or if
            # its checkpoint of this step was damaged and it continued an earlier one. The old one
            # is set aside, because removing its files one by one takes time.
            aside = self.path / f".{final.name}.old"
            if final.exists():
                final.rename(aside)
            temporary.rename(final)
            _flush(self.path)
            shutil.rmtree(aside, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            last = self.newest()
            raise CheckpointError(
                f"cannot write checkpoint {final}: {error}; "
                f"{f'the last good one is {last}' if last else 'there is no earlier one'}"
            ) from None
        self._prune(step, best_step)
        return final

    def path_of(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` steps."""
        return self.path / f"{PREFIX}{step:09d}"

    def latest(self) -> str | None:
        """Return the name with the largest number; unlike `newest`, without looking for damage."""
        return max((path.name for path in self._numbered().values()), default=None)

    def newest(self) -> Path | None:
        """Return the newest intact checkpoint; a warning names each damaged one that is newer."""
        for _, path in sorted(self._numbered().items(), reverse=True):
            fault = find_fault(path)
            if fault is None:
                return path
            logger.warning("skipping checkpoint %s: %s", path, fault)
        return None

    def _numbered(self) -> dict[int, Path]:
        """Return number of steps -> folder. Other names in the folder are left out."""
        found = {path: NAME.fullmatch(path.name) for path in self.path.glob(f"{PREFIX}*")}
        return {int(match[1]): path for path, match in found.items() if match}

    def _prune(self, step: int, best_step: int | None) -> None:
        """Remove unfinished checkpoints, and all others but the newest `keep` and the best one."""
        numbered = self._numbered()
        # A checkpoint numbered above `step` is damaged: the run continued an earlier one.
        current = sorted(number for number in numbered if number <= step)
        stay = {*current[-self.keep :], best_step}
        unfinished = self.path.glob(f".{PREFIX}*")
        for path in (*unfinished, *(p for number, p in numbered.items() if number not in stay)):
            try:
                # Hidden first: a folder that is removed only in part must not look like a damaged
                # checkpoint.
                hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}")
                shutil.rmtree(path.rename(hidden))
            except OSError as error:
                logger.warning("the old checkpoint %s cannot be removed: %s", path, error)


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint folder; None if all sizes and sums are right."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it is incomplete, {MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    if not isinstance(manifest, dict) or not {MODEL, STATE} <= manifest.keys():
        return f"{MANIFEST} does not list {MODEL} and {STATE}"
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
    """Return the JSON part of a checkpoint that `find_fault` has passed."""
    return json.loads((path / STATE).read_text())


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or a `torch.save` file that holds only tensors.

    Prefixes that DDP and compilation add to names are removed.

    Raises:
        CheckpointError: If the file does not exist or holds something else.
    """
    try:
        if file.suffix == ".safetensors":
            weights = load_file(file)
        else:
            weights = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: there is no such file") from None
    except Exception as error:  # torch.load raises whatever its parsers raise
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{file} is not a file of weights: {reason}") from None
    for key in ("model", "state_dict"):
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        raise CheckpointError(f"{file} does not hold a mapping of names to tensors")
    return {strip_wrappers(name): tensor for name, tensor in weights.items()}


def strip_wrappers(name: str) -> str:
    """Remove the prefixes of DDP (`module.`) and of compilation (`_orig_mod.`) from a name."""
    while name.startswith(("module.", "_orig_mod.")):
        name = name.partition(".")[2]
    return name


def check_fit(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor], origin: str) -> None:
    """Raise a `CheckpointError` unless both have the same names and shapes.

    Args:
        targets: The tensors to fill.
        sources: The tensors that were read.
        origin: Where they were read, for the message.
    """
    missing = [name for name in targets if name not in sources]
    unknown = [name for name in sources if name not in targets]
    wrong = [
        f"{name} {tuple(sources[name].shape)} for {tuple(target.shape)}"
        for name, target in targets.items()
        if name in sources and sources[name].shape != target.shape
    ]
    if missing or unknown or wrong:
        raise CheckpointError(
            f"{origin} does not fit the model: {len(missing)} tensors are missing "
            f"{missing[:3]}, {len(unknown)} are unknown {unknown[:3]}, "
            f"{len(wrong)} have another shape {wrong[:3]}"
        )


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of a file, or leave it unchanged if that fails."""
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
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
