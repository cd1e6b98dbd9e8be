"""The folder of a run: its file names, how it is read, and which of its weights a command uses.

This module has the names of the files of a run; `checkpoint.py` writes checkpoints. A
run holds several sets of weights: each checkpoint has raw weights, and EMA weights if the run
averages. "best" is the evaluated set with the highest top-1, raw or EMA, as the run recorded it.
"last" is the better set of the newest checkpoint; if that was saved between two evaluations, the
EMA weights, or the raw ones without EMA. Every command that takes a run uses "best" unless
`--weights last` is given.

A step of the optimizer is called an update in files, in config keys and in what commands print.
"""

import argparse
import hashlib
import json
import logging
import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lipsformer._configfile import ConfigError, read_config, read_json
from lipsformer._errors import first_line
from lipsformer.config import Config
from lipsformer.jsonl import read_jsonl
from lipsformer.models.pretrained import UNTRAINED

logger = logging.getLogger(__name__)

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

_EXPECTED = "expected .safetensors, or tensors that torch.save has written"

WHICH = ("best", "last")
WHICH_HELP = "of a run: the best evaluated weights (default) or those of the newest checkpoint"
FILES = {"raw": MODEL, "ema": EMA}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which one and why."""


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

    def latest(self) -> str | None:
        """Return the name with the largest number; unlike `newest`, without looking for damage."""
        numbered = self.numbered()
        return numbered[max(numbered)].name if numbered else None

    def newest(self) -> Path | None:
        """Return the newest intact checkpoint; a warning names each damaged one that is newer."""
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
    if not (file.parent / MANIFEST).exists():
        return Weights(file)
    if path.is_dir():
        return _checkpoint_weights(path)
    kinds = {name: kind for kind, name in FILES.items()}
    if path.name not in kinds:
        return Weights(path)
    return _checkpoint_weights(path.parent, kinds[path.name])


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
        figures: The evaluation of each kind, EMA after raw.
    """
    return max(reversed(figures), key=lambda kind: figures[kind]["top1"])


def load_model(source: str | Path | Weights, which: str = "best") -> nn.Module:
    """Build a model and load its weights.

    Args:
        source: A path as `find_weights` takes it, with a config.json in its folder; or weights that
            `find_weights` returned; or the name of a timm model, which keeps its random weights
            unless the name has a tag.
        which: "best" or "last", for a run.

    Raises:
        CheckpointError: If there are no weights, or they do not fit.
        ConfigError: If it is not known which model the weights belong to, or timm cannot build it.

    Example:
        >>> import lipsformer
        >>> load_model("lipsformer_nano").num_classes
        1000
    """
    if isinstance(source, str) and timm.is_model(source):
        return create_model(source, pretrained=has_tag(source))
    if not isinstance(source, Weights):
        if not os.path.exists(source):
            raise ConfigError(f"{str(source)!r} is neither a timm model nor a file or folder")
        source = find_weights(source, which)
    if source.timm_config() is None:
        raise ConfigError(
            f"{source.folder} has no {TIMM_CONFIG}, which says to which model the weights belong"
        )
    # timm builds the model that config.json describes; load_weights fills it from the right file
    model = timm.create_model(f"local-dir:{source.folder}", pretrained=False)
    load_weights(model, source.file)
    return model


def create_model(name: str, **options: Any) -> nn.Module:
    """Build the model with a name of timm, or from a place `local-dir:...` or `hf-hub:...`.

    Args:
        name: The name.
        **options: Arguments of `timm.create_model`.

    Raises:
        ConfigError: If there is no such model, or its weights are missing or damaged.
    """
    try:
        return timm.create_model(name, **options)
    except Exception as error:  # timm raises whatever files and networks make it raise
        raise ConfigError(f"the model {name!r} cannot be built: {first_line(error)}") from error


def has_tag(name: str) -> bool:
    """Return whether the name of a timm model names its weights too, as in `name.tag`."""
    return timm.is_model(name) and name.partition(".")[2] not in ("", UNTRAINED)


def load_weights(model: nn.Module, file: Path, *, new_head: bool = False) -> None:
    """Replace the weights of a model.

    The file passes through the `checkpoint_filter_fn` of the model, as in timm's own loading, so
    that it may use names of earlier versions or of released checkpoints.

    Args:
        model: The model.
        file: The weights.
        new_head: Keep the initial weights of a classifier whose shape differs, for fine-tuning, and
            log that.

    Raises:
        CheckpointError: If anything else is missing, unknown or of another shape.
    """
    weights = read_weights(file)
    try:
        weights = _filter_of(model)(weights, model)
    except Exception as error:  # a filter raises whatever foreign weights make it raise
        raise CheckpointError(f"{file} does not fit the model: {first_line(error)}") from None
    own = model.state_dict()
    heads = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    heads = (heads,) if isinstance(heads, str) else heads
    prefixes = tuple(f"{head}." for head in heads)
    fresh = [
        name
        for name, tensor in own.items()
        if new_head
        and name.startswith(prefixes)
        and name in weights
        and weights[name].shape != tensor.shape
    ]
    taken = {name: tensor for name, tensor in weights.items() if name not in fresh}
    check_fit({name: t for name, t in own.items() if name not in fresh}, taken, str(file))
    model.load_state_dict(taken, strict=False)
    if fresh:
        logger.info("classifier  random, because that of %s has another number of classes", file)


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
            f"{len(wrong)} have another shape {wrong[:3]}; use the model and the arguments with "
            "which these tensors were saved"
        )


def _filter_of(
    model: nn.Module,
) -> Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]]:
    """Return the filter that timm applies to weights of this architecture."""
    architecture = getattr(model, "pretrained_cfg", {}).get("architecture", "")
    if not timm.is_model(architecture):
        return lambda weights, _: weights
    module = sys.modules[timm.model_entrypoint(architecture).__module__]
    return getattr(module, "checkpoint_filter_fn", lambda weights, _: weights)


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or tensors that `torch.save` wrote, as in timm's train script.

    Prefixes that DDP and compilation add to names are removed.

    Raises:
        CheckpointError: If the file does not exist or holds something else.
    """
    try:
        if file.suffix == ".safetensors":
            weights = load_file(file)
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):  # of timm's arguments
                weights = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: there is no such file") from None
    except pickle.UnpicklingError as error:
        refused = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        reason = f"it holds a {refused[1]}, and only tensors are read" if refused else _EXPECTED
        raise CheckpointError(f"{file} is not a file of weights: {reason}") from None
    except Exception as error:  # both readers raise whatever their parsers raise
        raise CheckpointError(f"{file} is not a file of weights: {first_line(error)}") from None
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


def read_state(path: Path) -> dict[str, Any]:
    """Return the JSON part of a checkpoint that `find_fault` has passed."""
    return json.loads((path / STATE).read_text())


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
    """Return size and SHA-256 sum of a file, as the manifest of a checkpoint lists them."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
