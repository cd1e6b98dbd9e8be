"""Join data, model and engine: the objects that a config describes."""

from pathlib import Path

import torch
from accelerate import Accelerator
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from data import (
    DataError,
    Normalize,
    TrainBatches,
    build_batch_transform,
    build_datasets,
    collate,
    eval_loader,
)
from data.build import sizes_by_epoch
from data.dataset import ImageDataset, TrainDataset
from data.loader import EvalBatches
from lipsformer._checks import require
from lipsformer._errors import ConfigError, first_line
from lipsformer.config import Config
from lipsformer.engine.build import (
    bound_domain,
    build_model,
    describe_model,
    make_instruments,
    timm_config,
)
from lipsformer.engine.compilation import compile_regions, compiles, try_kernels
from lipsformer.engine.distributed import shard_ema
from lipsformer.engine.initial_weights import load_initial_weights
from lipsformer.engine.loss import fingerprint, load_teacher, make_task
from lipsformer.engine.optim import check_sharded, make_optimizer
from lipsformer.engine.parts import DataFacts, PendingRecords, TrainingParts
from lipsformer.engine.preflight import check_model
from lipsformer.engine.schedule import CosineSchedule
from lipsformer.engine.step_share import share_of_step
from lipsformer.engine.train_state import TrainState

PROBES = 8  # validation images at which the monitor reads attention


def assemble(config: Config, accelerator: Accelerator, start: Path | None) -> TrainingParts:
    """Build data, model, optimizer and instruments of a run. Nothing is written.

    Args:
        config: The config of the run.
        accelerator: Accelerate's, with the processes of the run.
        start: The checkpoint that the caller will load. Its weights replace the initial ones, so
            `model.checkpoint` is read only without it.

    Raises:
        ConfigError: If the config, its data and the processes do not fit together.
        DataError: If something of the data is missing or unexpected.
    """
    step_share = share_of_step(config.train, accelerator.num_processes)
    train_set, val_set = _data_sets(config, accelerator)
    classes = train_set.classes
    sizes = check_images(config, train_set, val_set)
    train_batches, eval_batches = _loaders(
        config, accelerator, train_set, val_set, step_share.samples
    )
    check_model(config, classes, sizes, train_batches.smallest_micro_batch())
    teacher = load_teacher(config, classes, sizes)
    normalize = Normalize(config.data.mean, config.data.std)

    torch.manual_seed(config.train.seed)
    model = build_model(config, classes)
    if start is None:
        load_initial_weights(config, model, classes)
    model = model.to(accelerator.device)
    description = timm_config(model, classes)
    domain = bound_domain(config, model)
    compiled = compiles(config.train.compile, accelerator.device, sharded=accelerator.is_fsdp2)
    state = _train_state(config, accelerator, model, teacher, len(classes), train_batches, compiled)
    if compiled and accelerator.device.type == "cuda":
        try_kernels(state.module, accelerator, sizes, step_share.samples)
    pending = PendingRecords()
    state.instruments = make_instruments(
        config.lipschitz,
        state,
        probe=_probe(config, accelerator, val_set, normalize),
        domain=domain,
        write=pending.add,
    )
    return TrainingParts(
        state=state,
        train_batches=train_batches,
        transform=build_batch_transform(
            config.data,
            config.augment,
            num_classes=len(classes),
            seed=config.train.seed,
        ),
        eval_batches=eval_batches,
        normalize=normalize,
        facts=DataFacts(
            classes=list(classes),
            num_train_images=len(train_set),
            num_eval_images=len(val_set),
            train_labels_sha256=train_set.labels_sha256,
            eval_labels_sha256=val_set.labels_sha256,
        ),
        timm_config=description,
        step_share=step_share,
        pending=pending,
    )


def _data_sets(config: Config, accelerator: Accelerator) -> tuple[TrainDataset, ImageDataset]:
    """Build the data sets for training and evaluation, on the first process before the others."""
    with accelerator.main_process_first():  # it may have to download
        train_set, val_set = build_datasets(
            config.data, config.augment, seed=config.train.seed, epochs=config.train.epochs
        )
    # Ranks without an image would not take part in the evaluation, and the others would wait.
    enough = len(val_set) >= accelerator.num_processes or not accelerator.is_fsdp2
    allowed = f"it has {len(val_set)} images, and each process of a sharded model needs one"
    require(enough, "data.val_split", config.data.val_split, allowed)
    return train_set, val_set


def _loaders(
    config: Config,
    accelerator: Accelerator,
    train_set: TrainDataset,
    val_set: ImageDataset,
    samples: int,
) -> tuple[TrainBatches, EvalBatches]:
    """Return the loaders of this process, with `samples` training images per forward pass."""
    share = {
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "num_workers": config.data.num_workers,
    }
    train_batches = TrainBatches(
        train_set,
        global_batch_size=config.train.global_batch_size,
        batch_size_per_device=samples,
        seed=config.train.seed,
        drop_last=config.train.drop_last,
        pin_memory=accelerator.device.type == "cuda",
        repeats=config.augment.repeats,
        **share,
    )
    return train_batches, eval_loader(val_set, batch_size=config.train.eval_batch_size, **share)


def _probe(
    config: Config, accelerator: Accelerator, val_set: ImageDataset, normalize: Normalize
) -> Tensor | None:
    """Return the validation images at which the monitor reads attention; None without monitor."""
    if config.lipschitz.monitor_every is None:
        return None
    images, _ = collate([val_set[i * len(val_set) // PROBES] for i in range(PROBES)])
    return normalize(images.to(accelerator.device))


def _train_state(
    config: Config,
    accelerator: Accelerator,
    model: nn.Module,
    teacher: nn.Module | None,
    num_classes: int,
    train_batches: TrainBatches,
    compiled: bool,
) -> TrainState:
    """Prepare a model with its initial weights, and build what trains it, without instruments."""
    if accelerator.is_fsdp2:
        check_sharded(config.optim, accelerator.device)
    decay = config.train.ema_decay
    ema = ModelEmaV3(model, decay, use_warmup=config.train.ema_warmup) if decay else None
    if compiled:
        compile_regions(model, deterministic=config.train.deterministic)
    optimizer = make_optimizer(model, config.optim)
    try:
        prepared, optimizer = accelerator.prepare(model, optimizer)
    except ValueError as error:  # FSDP2 shards no scalars, and the launcher may name another block
        reason = f"{describe_model(config)} cannot be distributed: {first_line(error)}"
        raise ConfigError(reason) from None
    if ema is not None:
        shard_ema(ema, accelerator)
    per_epoch = train_batches.updates_per_epoch
    return TrainState(
        accelerator=accelerator,
        model=prepared,
        module=accelerator.unwrap_model(prepared),
        task=make_task(config, prepared, accelerator, teacher=teacher, num_classes=num_classes),
        optimizer=optimizer,
        schedule=CosineSchedule(
            peak=config.optim.lr,
            final=config.schedule.min_lr,
            total_steps=config.train.epochs * per_epoch,
            warmup_steps=_warmup_steps(config.schedule.warmup_epochs, per_epoch),
        ),
        clip_grad=config.optim.clip_grad,
        seed=config.train.seed,
        ema=ema,
        teacher=None if teacher is None else fingerprint(teacher),
    )


def _warmup_steps(epochs: float, per_epoch: int) -> int:
    steps = round(epochs * per_epoch)
    allowed = f"must be 0, or more than half an update, {0.5 / per_epoch:.2g}"
    require(steps > 0 or epochs == 0, "schedule.warmup_epochs", epochs, allowed)
    return steps


def check_images(config: Config, train_set: TrainDataset, val_set: ImageDataset) -> list[int]:
    """Check the first images after their transforms; return the sizes of the training images.

    Raises:
        ConfigError: If the transforms cannot make images of the config's size.
        DataError: If one of the two images cannot be read.
    """
    size = config.data.img_size
    sizes = sizes_by_epoch(config.augment.img_sizes, config.train.epochs) or [size]
    first = {train_size: sizes.index(train_size) for train_size in sizes}
    try:
        images = [(size, val_set[0][0])]
        images += [(train_size, train_set[epoch, 0][0]) for train_size, epoch in first.items()]
    except DataError:
        raise
    except Exception as error:  # Pillow, OpenCV and torch raise whatever sizes make them raise
        raise ConfigError(
            f"an image cannot be made with data.img_size={size}, augment.img_sizes="
            f"{config.augment.img_sizes}, data.crop_pct={config.data.crop_pct}, augment.scale="
            f"{config.augment.scale} and augment.ratio={config.augment.ratio}: {first_line(error)}"
        ) from None
    for expected, image in images:
        if image.shape != (expected, expected, 3):
            raise ConfigError(f"data.img_size={expected}: an image became {tuple(image.shape)}")
    return list(first)
