"""Which checkpoint a run continues from, and whether it may."""

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from lipsformer._configfile import dotted, read_config
from lipsformer._errors import ConfigError
from lipsformer._ranks import on_first_rank
from lipsformer.config import Config
from lipsformer.engine.run_files import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    METRICS,
    PLOTS,
    SKIPPED,
    SUMMARY,
    TENSORBOARD,
    find_fault,
    read_state,
)
from lipsformer.engine.run_folder import RunFolder
from lipsformer.engine.step_share import StepShare

logger = logging.getLogger(__name__)

FORMAT = 2  # of checkpoints; version 1 had other names of parameters

# Settings that leave the mathematics of training as it is: place, speed, reporting, evaluation,
# and when to give up. batch_size_per_device depends on the number of devices, which may change with
# run.allow_world_size_change. skip_list and teacher are paths; `_require_same` compares the content
# of the list, and `TrainState.load_checkpoint` the weights of the teacher.
_MAY_CHANGE = {
    "data.root",
    "data.download",
    "data.num_workers",
    "data.exact_eval",
    "data.skip_list",
    "train.eval_batch_size",
    "train.batch_size_per_device",
    "train.compile",
    "train.grad_checkpointing",
    "train.deterministic",
    "train.max_nonfinite_updates",
    "loss.teacher",
    "lipschitz.monitor_every",
    "lipschitz.bound_limit",
}


def config_identity(config: Config) -> dict[str, Any]:
    """Return the settings that decide the weights of a run, under dotted names.

    A run may only be continued with a config that has the same. Settings of place, speed, reporting
    and evaluation are left out.

    Args:
        config: The config of the run.

    Example:
        >>> from lipsformer._configfile import read_config
        >>> identity = config_identity(read_config(Config, "configs/demo.yaml"))
        >>> "optim.lr" in identity, "data.num_workers" in identity
        (True, False)
    """
    return {key: value for key, value in _settings(config).items() if key not in _MAY_CHANGE}


def _settings(config: Config) -> dict[str, Any]:
    return {key: value for key, value in dotted(config).items() if not key.startswith("run.")}


def find_start(config: Config) -> Path | None:
    """Return the checkpoint to continue from; None starts anew. Nothing is written.

    It is the newest intact one of `run.output_dir`, or else the one that `run.resume` names.

    Args:
        config: The config of the run.

    Raises:
        ConfigError: If the output folder belongs to another run, or the checkpoint cannot be used.

    Example:
        >>> import tempfile
        >>> from lipsformer._configfile import read_config
        >>> settings = [f"run.output_dir={tempfile.mkdtemp()}"]  # an empty folder
        >>> find_start(read_config(Config, "configs/demo.yaml", settings)) is None
        True
    """
    try:
        return on_first_rank(lambda: _find_start(config))
    except OSError as error:  # a folder or file of the run that cannot be read
        raise ConfigError(
            f"run.output_dir={config.run.output_dir!r} and run.resume={config.run.resume!r} "
            f"cannot be read: {error}"
        ) from None


def _find_start(config: Config) -> Path | None:
    output_dir, resume = Path(config.run.output_dir), config.run.resume
    _check_folder(output_dir)
    run = RunFolder(output_dir)
    named = None if resume in ("auto", "none") else Path(resume)
    # A repeated command names the checkpoint from which the run began: then the run goes on.
    origin = _origin(run)
    repeated = named is not None and origin is not None and named.resolve() == origin.resolve()
    if run.exists() and not (resume == "auto" or repeated):
        raise ConfigError(
            f"run.output_dir={str(output_dir)!r} already holds a run: continue it with "
            "run.resume=auto or name another folder"
        )
    newest = _newest(run)
    if run.exists():
        _require_same(run.config(), config, str(output_dir), run.path / SKIPPED)
    if newest is not None:
        _require_records(run, newest)
        return newest
    if named is None and origin is not None:
        raise ConfigError(
            f"run.output_dir={str(output_dir)!r} began with {origin}, but holds no checkpoint yet: "
            f"repeat the command with run.resume={origin}, or name another folder"
        )
    if named is not None:
        _require_usable(named, config)
    return named


def _newest(run: RunFolder) -> Path | None:
    """Return the newest intact checkpoint of a run; None if it has no checkpoint at all.

    Raises:
        ConfigError: If it has checkpoints, but cannot continue from one of them.
    """
    checkpoints = run.checkpoints()
    newest = checkpoints.newest()
    if newest is None:
        if checkpoints.numbered():
            raise ConfigError(
                f"{checkpoints.path} holds no intact checkpoint: restore one of them, or remove "
                "them all to train from the beginning"
            )
        return None
    if not run.exists():
        raise ConfigError(
            f"run.output_dir={str(run.path)!r} holds checkpoints, but their {CONFIG} is missing: "
            f"copy it from {newest} to continue them, or name another folder"
        )
    _require_format(newest)
    return newest


def _require_usable(named: Path, config: Config) -> None:
    """Raise unless the checkpoint that `run.resume` names can be continued with a config."""
    resume = config.run.resume
    if not named.is_dir():
        raise ConfigError(f"run.resume={resume!r}: there is no such checkpoint folder")
    if fault := find_fault(named):
        raise ConfigError(f"run.resume={resume!r} is not a usable checkpoint: {fault}")
    _require_format(named)
    skipped = named.resolve().parent.parent / SKIPPED
    _require_same(read_config(Config, named / CONFIG), config, resume, skipped)


def _check_folder(output_dir: Path) -> None:
    """Check that a run can write into a folder, and leave nothing in it.

    Permission bits do not tell: root ignores them, and a mount can be read-only. Therefore a folder
    is made in the nearest folder that exists, and removed at once.

    Raises:
        ConfigError: If the folder cannot be made, read or written.
    """
    where = f"run.output_dir={str(output_dir)!r}"
    try:
        for name in (CHECKPOINTS, PLOTS, TENSORBOARD):
            if (path := output_dir / name).exists() and not path.is_dir():
                raise ConfigError(f"{where} cannot be used: {path} is not a folder")
        for name in (CONFIG, ENVIRONMENT, METRICS, SUMMARY):
            if (path := output_dir / name).exists() and not path.is_file():
                raise ConfigError(f"{where} cannot be used: {path} is not a file")
        existing = output_dir
        while not existing.exists():
            existing = existing.parent
        if existing.is_dir():
            os.listdir(existing)
        os.rmdir(tempfile.mkdtemp(prefix=".lipsformer-", dir=existing))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where} cannot be written: {reason}; name another folder") from None


def _origin(run: RunFolder) -> Path | None:
    """Return the checkpoint that the first start of a run continued; None if it began anew."""
    first = next(iter(run.environment()), {}).get("from")
    return None if first is None else Path(first)


def _require_format(start: Path) -> None:
    found = read_state(start)["format"]
    if found != FORMAT:
        raise ConfigError(
            f"{start} has checkpoint format {found} of another version of lipsformer and cannot be "
            f"continued by this one (format {FORMAT}): start a new run from its weights with "
            f"model.checkpoint={start} and another run.output_dir"
        )


def _require_records(run: RunFolder, start: Path) -> None:
    """Refuse to continue a run whose records up to the checkpoint are lost or damaged."""
    path = run.path / METRICS
    found = path.stat().st_size if path.exists() else 0
    expected = read_state(start)["metrics_bytes"]
    if found < expected:
        raise ConfigError(
            f"{path} has {found} bytes, but had {expected} at {start.name}: records are lost; "
            f"restore the file, or continue without them by run.resume={start} and another "
            "run.output_dir"
        )
    run.metrics(expected)


def _require_same(before: Config, now: Config, where: str, skipped: Path) -> None:
    """Raise unless both configs describe the same training; log what else has changed.

    Args:
        before: The config of the run.
        now: The config that shall continue it.
        where: Folder of the run, for messages.
        skipped: The list of images that the run leaves out, if it has one.
    """
    old, new = _settings(before), _settings(now)
    changed = {key: f"{key} {old[key]!r} -> {new[key]!r}" for key in new if old[key] != new[key]}
    refused = [text for key, text in changed.items() if key not in _MAY_CHANGE]
    if old["data.skip_list"] and new["data.skip_list"] and skipped.exists():
        file = Path(new["data.skip_list"])  # building the data reports a missing one
        same_list = not file.exists() or file.read_bytes() == skipped.read_bytes()
    else:
        same_list = old["data.skip_list"] == new["data.skip_list"]
    if not same_list:
        refused.append(changed.get("data.skip_list", "the content of data.skip_list"))
    if refused:
        raise ConfigError(
            f"{where} holds a run with another config ({', '.join(refused)}): "
            "set these back to continue it, or name another run.output_dir"
        )
    changed.pop("train.batch_size_per_device", None)  # `require_same_world` speaks of it
    if changed:
        logger.warning(
            "continuing %s with %s; this does not change the mathematics of training",
            where,
            ", ".join(changed.values()),
        )


def require_same_data(start: Path, state: dict[str, Any], **own: Any) -> None:
    """Check that a checkpoint was made with the data that this run has.

    Args:
        start: The checkpoint, for the message.
        state: Its state.
        **own: Values of this run that follow from the data, under their names in the state.

    Raises:
        ConfigError: If the state has another value.
    """
    for name, value in own.items():
        if state.get(name, value) != value:  # older checkpoints lack all but the classes
            raise ConfigError(
                f"{start} was made with other data: {name} {state[name]} there, {value} here; "
                "restore the data, or name another run.output_dir"
            )


def require_same_world(
    start: Path, state: dict[str, Any], *, world_size: int, share: StepShare, allowed: bool
) -> None:
    """Check that a checkpoint was made with as many processes, or that another number is allowed.

    Args:
        start: The checkpoint.
        state: Its state.
        world_size: Number of processes.
        share: The share of each process in a step.
        allowed: Whether to log a difference instead of raising an error.

    Raises:
        ConfigError: If they differ and that is not allowed.
    """
    before = (state["world_size"], *state["micro_batch"])
    now = (world_size, *share)
    if before == now:
        return
    template = "{} processes x {} samples x {} micro-batches before, {} x {} x {} now"
    text = template.format(*before, *now)
    if not allowed:
        raise ConfigError(
            f"{start}: {text}; set run.allow_world_size_change=true to continue all the same"
        )
    logger.warning(
        "%s: the order of samples, their augmentation, the global batch and the lr stay; "
        "mixup, erasing and drop path draw differently, and sums round differently",
        text,
    )
