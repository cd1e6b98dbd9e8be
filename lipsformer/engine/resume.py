"""Which checkpoint a run continues from, and whether it may."""

import dataclasses
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from lipsformer._configfile import ConfigError, read_config
from lipsformer.config import Config
from lipsformer.engine.checkpoint import find_fault, read_state
from lipsformer.engine.distributed import on_main
from lipsformer.engine.preflight import check_folder
from lipsformer.engine.run_folder import CONFIG, METRICS, RunFolder

FORMAT = 2  # of checkpoints; version 1 had other names of parameters

# Settings that do not decide the weights: place, speed and reporting. The number of devices, which
# batch_size_per_device follows, is compared separately and has its own option.
_NOT_IDENTITY = (
    ("data", ("root", "download", "num_workers")),
    ("train", ("eval_batch_size", "batch_size_per_device")),
    ("lipschitz", ("monitor_every", "bound_limit")),
)


def config_identity(config: Config) -> dict[str, Any]:
    """Return the dotted settings that decide the weights of a run."""
    sections = dataclasses.asdict(config)
    del sections["run"]
    for section, names in _NOT_IDENTITY:
        for name in names:
            del sections[section][name]
    return {f"{section}.{key}": v for section, keys in sections.items() for key, v in keys.items()}


def find_start(config: Config, accelerator: Accelerator) -> Path | None:
    """Return the checkpoint to continue from; None starts anew. Nothing is written.

    It is the one that `run.resume` names, or the newest intact one of `run.output_dir`.

    Raises:
        ConfigError: If the output folder belongs to another run, or the checkpoint cannot be used.
    """
    try:
        return on_main(accelerator, lambda: _find_start(config))
    except OSError as error:  # a folder or file of the run that cannot be read
        raise ConfigError(
            f"run.output_dir={config.run.output_dir!r} and run.resume={config.run.resume!r} "
            f"cannot be read: {error}"
        ) from None


def _find_start(config: Config) -> Path | None:
    output_dir, resume = Path(config.run.output_dir), config.run.resume
    check_folder(output_dir)
    run = RunFolder(output_dir)
    if run.exists() and resume != "auto":
        raise ConfigError(
            f"run.output_dir={str(output_dir)!r} already holds a run: continue it with "
            "run.resume=auto or name another folder"
        )
    if resume in ("auto", "none"):
        start = run.checkpoints().newest()
        if start is not None:
            _require_format(start)
        if run.exists():
            _require_same(run.config(), config, str(output_dir))
        if start is not None:
            _require_records(run, start)
        return start
    start = Path(resume)
    if fault := find_fault(start):
        raise ConfigError(f"run.resume={resume!r} is not a usable checkpoint: {fault}")
    _require_format(start)
    _require_same(read_config(Config, start / CONFIG), config, resume)
    return start


def _require_format(start: Path) -> None:
    found = read_state(start)["format"]
    if found != FORMAT:
        raise ConfigError(
            f"{start} has checkpoint format {found} of another version of lipsformer and cannot be "
            f"continued by this one (format {FORMAT}): start a new run from its weights with "
            f"model.checkpoint={start} and another run.output_dir"
        )


def _require_records(run: RunFolder, start: Path) -> None:
    """Refuse to continue a run whose records up to the checkpoint are lost."""
    path = run.path / METRICS
    found = path.stat().st_size if path.exists() else 0
    expected = read_state(start)["metrics_bytes"]
    if found < expected:
        raise ConfigError(
            f"{path} has {found} bytes, but had {expected} at {start.name}: records are lost; "
            "restore the file, or start a new run in another run.output_dir"
        )


def _require_same(before: Config, now: Config, where: str) -> None:
    old, new = config_identity(before), config_identity(now)
    changed = [f"{key} {old[key]!r} -> {new[key]!r}" for key in new if old[key] != new[key]]
    if changed:
        raise ConfigError(
            f"{where} holds a run with another config ({', '.join(changed)}): "
            "set these back to continue it, or name another run.output_dir"
        )
