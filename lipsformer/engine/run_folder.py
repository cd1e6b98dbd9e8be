"""The folder of a run: how it is read, and which of its weights a command uses.

A run holds several sets of weights: each checkpoint has raw weights, and EMA weights if the run
averages. "best" is the evaluated set with the highest top-1, raw or EMA, as the run recorded it.
"last" is the better set of the newest checkpoint; if that was saved between two evaluations, the
EMA weights, or the raw ones without EMA. Every command that takes a run uses "best" unless
`--weights last` is given.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipsformer._configfile import read_config
from lipsformer._errors import ConfigError
from lipsformer._files import read_json
from lipsformer._renamed import renamed
from lipsformer.config import Config
from lipsformer.engine.run_files import (
    CHECKPOINTS,
    CONFIG,
    EMA,
    ENVIRONMENT,
    MANIFEST,
    METRICS,
    MODEL,
    NAME,
    PREFIX,
    SUMMARY,
    TIMM_CONFIG,
    CheckpointError,
    find_fault,
    read_state,
)
from lipsformer.jsonl import read_jsonl

logger = logging.getLogger(__name__)

WHICH = ("best", "last")
WHICH_HELP = "of a run: the best evaluated weights (default) or those of the newest checkpoint"
FILES = {"raw": MODEL, "ema": EMA}


@dataclass(frozen=True)
class Weights:
    """A file of weights, and what its run recorded about it.

    Attributes:
        file: The file.
        kind: "raw" or "ema"; None if the file does not belong to a run.
        step: Number of completed steps; None if the file does not belong to a run.
        epoch: The same in passes over the data.
        figures: The evaluation of these weights by their run; None if there was none.

    Example:
        >>> print(Weights(Path("model.safetensors")))
        weights     model.safetensors
    """

    file: Path
    kind: str | None = None
    step: int | None = None
    epoch: float | None = None
    figures: dict[str, Any] | None = None

    def __str__(self) -> str:
        """Return the line that every command prints."""
        if self.kind is None:
            return f"weights     {self.file}"
        top1 = "not evaluated" if self.figures is None else f"top-1 {self.figures['top1']:.2f} %"
        kind = {"raw": "raw", "ema": "EMA"}[self.kind]
        return f"weights     {self.file} (update {self.step}, epoch {self.epoch:g}, {kind}, {top1})"

    @property
    def folder(self) -> Path:
        """The folder of the file, which may hold the config of the model and of the run."""
        return self.file.parent

    @property
    def run(self) -> "RunFolder":
        """The run of a checkpoint."""
        return RunFolder(self.folder.resolve().parents[1])

    def config(self, overrides: list[str]) -> Config | None:
        """Return the config of the run with `key=value` overrides; None if there is none."""
        path = self.folder / CONFIG
        return read_config(Config, path, overrides) if path.exists() else None

    def timm_config(self) -> dict[str, Any] | None:
        """Return timm's description of the model; None if the folder holds none."""
        path = self.folder / TIMM_CONFIG
        return read_json(path) if path.exists() else None

    def classes(self) -> list[str] | None:
        """Return the names of the classes in the order of the logits; None if unknown."""
        return (self.timm_config() or {}).get("label_names")


class Checkpoints:
    """The checkpoints of a run.

    Args:
        path: Their folder, which need not exist.

    Example:
        >>> Checkpoints(Path("outputs/run/checkpoints")).path_of(440).name
        'update-000000440'
    """

    def __init__(self, path: Path):
        self.path = path

    def path_of(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` steps."""
        return self.path / f"{PREFIX}{step:09d}"

    def last_name(self) -> str | None:
        """Return the name with the largest number, or None if there is none.

        Nothing is verified: the files of this checkpoint may be damaged or missing.
        """
        numbered = self.numbered()
        return numbered[max(numbered)].name if numbered else None

    def newest(self) -> Path | None:
        """Return the newest checkpoint whose files were verified, or None if there is none.

        Its manifest, and the presence, sizes and SHA-256 sums of the files, are checked. A warning
        names each damaged checkpoint that is newer.
        """
        for _, path in sorted(self.numbered().items(), reverse=True):
            fault = find_fault(path)
            if fault is None:
                return path
            logger.warning("skipping checkpoint %s: %s", path, fault)
        return None

    def numbered(self) -> dict[int, Path]:
        """Return number of steps -> folder. Other names in the folder are left out.

        A checkpoint that was set aside counts if its process was killed before the new one took its
        place.
        """
        # sorted, so that names with a dot come first and the others replace them
        found = [(NAME.fullmatch(path.name), path) for path in sorted(self.path.glob("*"))]
        return {int(match[1] or match[2]): path for match, path in found if match}


class RunFolder:
    """The output folder of a run of train.py.

    Args:
        path: The folder.

    Example:
        >>> import tempfile
        >>> run = RunFolder(tempfile.mkdtemp())
        >>> run.exists()
        False
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def exists(self) -> bool:
        """Return whether a run has begun here."""
        return (self.path / CONFIG).is_file()

    def checkpoints(self) -> Checkpoints:
        """Return the checkpoints."""
        return Checkpoints(self.path / CHECKPOINTS)

    def config(self, overrides: list[str] | None = None) -> Config:
        """Return the resolved config of the run, with `key=value` overrides."""
        return read_config(Config, self.path / CONFIG, overrides or ())

    def environment(self) -> list[dict[str, Any]]:
        """Return one entry for each start of the process: versions, commit, command, machine."""
        path = self.path / ENVIRONMENT
        return read_json(path, list) if path.exists() else []

    def metrics(self, size: int | None = None) -> list[dict[str, Any]]:
        """Return the records. A last line that a killed process left incomplete is left out.

        Args:
            size: Number of bytes to read; None for the whole file.

        Raises:
            ConfigError: If a line is damaged.
        """
        try:
            return list(read_jsonl(self.path / METRICS, size))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of a run that has ended; None for others."""
        path = self.path / SUMMARY
        return read_json(path) if path.exists() else None

    def weights(self, which: str = "best") -> Weights:
        """Return one set of weights of the run.

        Args:
            which: "best" or "last", as the module says. Before the first evaluation "best" is the
                same as "last".

        Raises:
            ValueError: If `which` is neither.
            CheckpointError: If the checkpoint does not exist or is damaged.
        """
        if which not in WHICH:
            raise ValueError(f"which={which!r} must be {' or '.join(map(repr, WHICH))}")
        newest = self.checkpoints().newest()
        if newest is None:
            raise CheckpointError(f"{self.path} is a run without an intact checkpoint")
        best = read_state(newest)["best"]
        if which == "last" or best is None:
            return _checkpoint_weights(newest)
        return _checkpoint_weights(self.checkpoints().path_of(best["update"]), best["weights"])


def find_weights(path: str | Path, which: str = "best") -> Weights:
    """Find the weights of a run, a checkpoint, a folder in timm's format, or a file.

    Of a checkpoint the better set of weights is taken, and of a folder in timm's format
    model.safetensors. A file of weights in a checkpoint is taken as it is, with what the run
    recorded about it.

    Args:
        path: The file or folder.
        which: "best" or "last", for a run; without effect otherwise.

    Raises:
        CheckpointError: If there are no weights, or they are damaged.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> save_file({"weight": torch.zeros(2)}, file)
        >>> find_weights(file.parent).file == file
        True
    """
    path = Path(path)
    if not os.path.exists(path):  # unlike Path.exists also for names that are too long
        raise CheckpointError(f"{path}: there is no such file or folder")
    if (path / CHECKPOINTS).is_dir():
        return RunFolder(path).weights(which)
    file = path / MODEL if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{path} is neither a run, nor a checkpoint, nor a file of weights")
    kinds = {name: kind for kind, name in FILES.items()}
    if file.name not in kinds or not (file.parent / MANIFEST).exists():
        return Weights(file)
    return _checkpoint_weights(file.parent, None if path.is_dir() else kinds[file.name])


def _checkpoint_weights(folder: Path, kind: str | None = None) -> Weights:
    """Return weights of a checkpoint, by default the better kind, or EMA if it has no evaluation.

    Raises:
        CheckpointError: If the checkpoint is damaged.
    """
    if fault := find_fault(folder):
        raise CheckpointError(f"{folder} cannot be used: {fault}")
    state = read_state(folder)
    step, epoch = state["update"], state["update"] / state["updates_per_epoch"]
    evaluation = next((entry for entry in state["history"] if entry["update"] == step), {})
    if kind is None:
        present = [k for k, name in FILES.items() if (folder / name).exists()]
        # EMA comes after raw in FILES, so the last one present is EMA if there is one
        kind = better_kind({k: evaluation[k] for k in present}) if evaluation else present[-1]
    return Weights(folder / FILES[kind], kind, step, epoch, evaluation.get(kind))


def better_kind(figures: dict[str, dict[str, Any]]) -> str:
    """Return the kind of weights with the higher top-1, and EMA if they are equal.

    Args:
        figures: The evaluation of each kind, with its `top1` in percent; "ema" comes after "raw".

    Example:
        >>> better_kind({"raw": {"top1": 81.0}, "ema": {"top1": 80.0}})
        'raw'
        >>> better_kind({"raw": {"top1": 80.0}, "ema": {"top1": 80.0}})
        'ema'
    """
    return max(reversed(figures), key=lambda kind: figures[kind]["top1"])


def as_best(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation of the history in the form in which a run records its best one.

    Args:
        evaluation: Its epoch, its update and the figures of each kind of weights.
    """
    kind = better_kind({kind: evaluation[kind] for kind in FILES if kind in evaluation})
    return {
        "epoch": evaluation["epoch"],
        "update": evaluation["update"],
        "weights": kind,
        "top1": evaluation[kind]["top1"],
    }


__getattr__ = renamed(__name__)
