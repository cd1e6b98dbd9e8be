"""Trains an image model.

    python train.py --config configs/demo.yaml                    digits, about 2 minutes on a CPU
    python train.py --config configs/demo.yaml optim.lr=1e-3      any setting as key=value
    python train.py --config configs/demo.yaml --dry-run          only shows what would be done
    accelerate launch train.py --config configs/imagenet/lipsformer_tiny_100ep.yaml

The same command continues a run that was stopped.

Exit codes: 0 done; 2 a mistake in config, data or checkpoint, nothing was written; 3 the loss or
gradient was not finite; 4 a checkpoint could not be written or read; 5 the Lipschitz bound exceeded
lipschitz.bound_limit; 75 stopped by a signal after saving, the same command continues.
"""

import argparse
import difflib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import timm
import torch
from accelerate import Accelerator
from timm.models._hub import save_config_for_hf  # the public save_for_hf writes weights as well
from timm.utils.model_ema import ModelEmaV3
from torch import nn

import lipsformer  # noqa: F401  (registers the models)
from data import (
    DataError,
    Normalize,
    TrainBatches,
    TrainBatchTransform,
    build_datasets,
    eval_loader,
)
from data.dataset import ImageDataset, TrainDataset
from lipsformer._configfile import ConfigError, describe, read_config
from lipsformer.analysis.bounds import Domain, UnknownModuleError, image_domain, lipschitz_bound
from lipsformer.analysis.instruments import (
    BoundCheck,
    BoundExceededError,
    Monitor,
    SpectralCap,
    UpdateLimit,
)
from lipsformer.analysis.plots import plot_monitor
from lipsformer.config import Config, LipschitzConfig
from lipsformer.engine import distributed
from lipsformer.engine.checkpoint import CheckpointError, locate, read_weights
from lipsformer.engine.metrics import NonFiniteError
from lipsformer.engine.optim import make_optimizer
from lipsformer.engine.schedule import CosineSchedule
from lipsformer.engine.steps import Instrument, Learner, shard_ema
from lipsformer.engine.tracking import METRICS, read_metrics
from lipsformer.engine.train_state import load_initial_weights
from lipsformer.engine.trainer import Run, find_start
from scripts.dry_run import describe_run
from scripts.report import write_report

logger = logging.getLogger("lipsformer.train")

MONITOR = "monitor"  # the kind of its records


@dataclass(frozen=True)
class Parts:
    """What a config stands for, on the devices."""

    train_set: TrainDataset
    val_set: ImageDataset
    updates: TrainBatches
    transform: TrainBatchTransform
    learner: Learner
    inspect: Callable[[nn.Module], Mapping[str, float]]
    model_card: str
    micro_batch: tuple[int, int]


def assemble(
    config: Config,
    accelerator: Accelerator,
    write: Callable[[int, Mapping[str, float]], None] = lambda made, record: None,
) -> Parts:
    """Data, model and optimizer of a run before its first update. Writes nothing.

    Args:
        config: of the run.
        accelerator: its processes.
        write: takes the records of the Lipschitz monitor, with the number of updates made.
    """
    samples, steps = distributed.micro_batches(config.train, accelerator.num_processes)
    with accelerator.main_process_first():  # which may have to download
        train_set, val_set = build_datasets(config.data, config.augment, seed=config.train.seed)
    updates = TrainBatches(
        train_set,
        global_batch_size=config.train.global_batch_size,
        batch_size_per_device=samples,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        seed=config.train.seed,
        num_workers=config.data.num_workers,
        drop_last=config.train.drop_last,
        pin_memory=accelerator.device.type == "cuda",
    )

    torch.manual_seed(config.train.seed)
    model = build_model(config, train_set.classes).to(accelerator.device)
    card = model_card(model, train_set.classes)
    domain = bound_domain(config, model)
    if (cap := make_cap(config.lipschitz, model)) is not None:
        cap.before_eval()  # before the average begins with these weights
    decay = config.train.ema_decay
    ema = ModelEmaV3(model, decay, use_warmup=config.train.ema_warmup) if decay else None
    if config.train.compile:
        model.compile()
    prepared, optimizer = accelerator.prepare(model, make_optimizer(model, config.optim))
    if ema is not None:
        shard_ema(ema, accelerator)
    module = accelerator.unwrap_model(prepared)
    learner = Learner(
        accelerator=accelerator,
        model=prepared,
        module=module,
        optimizer=optimizer,
        schedule=CosineSchedule(
            peak=config.optim.lr,
            final=config.schedule.min_lr,
            total_updates=config.train.epochs * updates.updates_per_epoch,
            warmup_updates=round(config.schedule.warmup_epochs * updates.updates_per_epoch),
        ),
        clip_grad=config.optim.clip_grad,
        seed=config.train.seed,
        ema=ema,
        instruments=make_instruments(config, module, val_set, domain, write),
    )
    return Parts(
        train_set=train_set,
        val_set=val_set,
        updates=updates,
        transform=TrainBatchTransform(
            config.data,
            config.augment,
            num_classes=len(train_set.classes),
            seed=config.train.seed,
        ),
        learner=learner,
        inspect=BoundCheck(domain, config.lipschitz.bound_limit) if domain else lambda module: {},
        model_card=card,
        micro_batch=(samples, steps),
    )


def train(config: Config) -> int:
    """One run; returns the number of the signal that stopped it, 0 at its end."""
    accelerator = distributed.start(config)
    start = find_start(config, accelerator)

    def write(made: int, record: Mapping[str, float]) -> None:
        run.tracking.record(MONITOR, made, made / run.updates_per_epoch, record)

    parts = assemble(config, accelerator, write)
    run = Run(
        config,
        parts.learner,
        train_updates=parts.updates,
        transform=parts.transform,
        eval_batches=eval_loader(
            parts.val_set,
            batch_size=config.train.eval_batch_size,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            num_workers=config.data.num_workers,
        ),
        normalize=Normalize(config.data),
        num_images=len(parts.val_set),
        classes=parts.train_set.classes,
        model_card=parts.model_card,
        micro_batch=parts.micro_batch,
        start=start,
        inspect=parts.inspect,
    )
    if config.data.skip_list is not None and accelerator.is_main_process:
        run.output_dir.mkdir(parents=True, exist_ok=True)
        shutil.copy(config.data.skip_list, run.output_dir / "skipped.txt")
    try:
        stopped = run.execute()
    finally:
        if accelerator.is_main_process:
            draw_monitor(run.output_dir)
    accelerator.state.destroy_process_group()
    if config.run.report and not stopped and accelerator.is_main_process:
        report(run.output_dir)
    return stopped


def dry_run(config: Config) -> str:
    """What a run would do. Writes nothing, and fetches nothing."""
    config = replace(config, data=replace(config.data, download=False))
    accelerator = distributed.start(config)
    start = find_start(config, accelerator)
    text = describe_run(config, assemble(config, accelerator))
    accelerator.state.destroy_process_group()
    return (
        f"{text}\n\nwould start {f'from {start}' if start else 'at update 0'}; nothing was written"
    )


def report(folder: Path) -> None:
    """Writes the run's report.html. The run is complete by now, whatever goes wrong here."""
    try:
        logger.info("report      %s", write_report([folder], folder / "report.html"))
    except ConfigError as error:
        logger.warning("no report: %s", error)
    except Exception:
        again = f"python -m scripts.report {folder}"
        logger.warning("no report was made; %s tries again", again, exc_info=True)


def build_model(config: Config, classes: Sequence[str]) -> nn.Module:
    """The model of a config, with its initial weights.

    Raises:
        ConfigError: if timm does not know the model or the model does not know an argument.
    """
    name, data = config.model.name, config.data
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.0)
        raise ConfigError(f"model.name={name!r} is not known to timm; near it: {', '.join(near)}")
    try:
        model = timm.create_model(
            name,
            num_classes=len(classes),
            pretrained_cfg_overlay={
                "num_classes": len(classes),
                "input_size": (3, data.img_size, data.img_size),
                "interpolation": data.interpolation,
                "crop_pct": data.crop_pct,
                "mean": data.mean,
                "std": data.std,
            },
            **config.model.kwargs,
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{name} cannot be built: {str(error).splitlines()[0]}") from error
    if config.train.grad_checkpointing:
        model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
    if config.model.checkpoint is not None:
        try:
            path = locate(Path(config.model.checkpoint))
            card = (path if path.is_dir() else path.parent) / "config.json"
            held = json.loads(card.read_text()).get("architecture") if card.exists() else None
            if held not in (None, name):
                raise CheckpointError(f"{path} holds a {held}; set model.name={held}")
            load_initial_weights(model, read_weights(path), config.model.checkpoint)
        except CheckpointError as error:
            raise ConfigError(f"model.checkpoint: {error}") from None
    return model


def draw_monitor(output_dir: Path) -> None:
    """Draws what the monitor saw, and the bound of the weights as trained, into `plots/`."""
    records = [r for r in read_metrics(output_dir / METRICS) if r["kind"] in (MONITOR, "raw")]
    bounds = [(r["update"], r["bound_log10"]) for r in records if "bound_log10" in r]
    if seen := [r for r in records if r["kind"] == MONITOR]:
        try:
            plot_monitor(output_dir / "plots" / "monitor.png", seen, bounds)
        except ImportError as error:
            logger.warning("what the monitor saw is not drawn: %s", error)


def bound_domain(config: Config, model: nn.Module) -> Domain | None:
    """The images that the proved bound speaks about; None if it is not wanted or not known.

    Raises:
        ConfigError: if it is to be checked and not known.
    """
    if config.lipschitz == LipschitzConfig():
        return None
    size, limit = config.data.img_size, config.lipschitz.bound_limit
    domain = image_domain((size, size), config.data.mean, config.data.std)
    try:
        lipschitz_bound(model, domain)
    except UnknownModuleError as error:
        if limit is not None:
            raise ConfigError(f"lipschitz.bound_limit={limit} cannot be checked: {error}") from None
        logger.warning("the Lipschitz bound is not recorded: %s", error)
        return None
    return domain


def make_cap(options: LipschitzConfig, model: nn.Module) -> SpectralCap | None:
    """The cap of a config, if there is one."""
    if options.sigma_cap is options.residual_scale_cap is options.gain_cap is None:
        return None
    return SpectralCap(
        model,
        options.sigma_cap,
        mode=options.cap_mode,
        strength=options.cap_strength,
        residual_scale=options.residual_scale_cap,
        gain=options.gain_cap,
    )


def make_instruments(
    config: Config,
    module: nn.Module,
    val_set: ImageDataset,
    domain: Domain | None,
    write: Callable[[int, Mapping[str, float]], None],
) -> list[Instrument]:
    """What acts around every update: its size is limited, the weights are capped, then seen."""
    options = config.lipschitz
    instruments: list[Instrument] = []
    if options.update_limit is not None:
        instruments.append(UpdateLimit(module, options.update_limit))
    if (cap := make_cap(options, module)) is not None:
        instruments.append(cap)
    if options.monitor_every is not None:
        images = torch.stack([val_set[i * len(val_set) // 8][0] for i in range(8)])
        device = next(module.parameters()).device
        probe = Normalize(config.data)(images.to(device))
        instruments.append(
            Monitor(module, write, every=options.monitor_every, probe=probe, domain=domain)
        )
    return instruments


def model_card(model: nn.Module, classes: Sequence[str]) -> str:
    """timm's config.json, with which `timm.create_model('local-dir:...')` rebuilds the model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        save_config_for_hf(model, str(path), model_config={"label_names": list(classes)})
        return path.read_text()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"settings:\n\n{describe(Config)}",
    )
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show config, model, schedule and memory; no training",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. optim.lr=1e-3")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_intermixed_args(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    # Only the first process of a machine speaks.
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    logging.getLogger("lipsformer").setLevel(logging.INFO if first else logging.CRITICAL)
    try:
        config = read_config(Config, options.config, options.overrides)
        if options.dry_run:
            text, stopped = dry_run(config), 0
            if first:
                print(text)
        else:
            stopped = train(config)
    except (ConfigError, DataError) as error:
        code, message = distributed.EXIT_USER_ERROR, str(error)
    except NonFiniteError as error:
        code, message = distributed.EXIT_NONFINITE, str(error)
    except CheckpointError as error:
        code, message = distributed.EXIT_STORAGE, str(error)
    except BoundExceededError as error:
        code, message = distributed.EXIT_BOUND, str(error)
    else:
        return distributed.EXIT_STOPPED if stopped else 0
    if first:
        print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
