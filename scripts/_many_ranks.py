"""What `train.py --dry-run --world-size N` tells about a run on N devices, on one CPU.

The model trains one step on fake tensors, which have a shape and no content; every tensor that
lives counts. DDP's own function deals the gradients, in the order in which they arrive, into
buckets. The units of FSDP2 are those of Accelerate. The samplers of all ranks deal real epochs.
Neither DDP nor FSDP2 is built: DDP reads addresses, and FSDP2 would cut each fake tensor into as
many pieces as there are ranks.
"""

import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data import DataError, TrainBatches, build_datasets, eval_loader
from data.build import sizes_by_epoch
from lipsformer._errors import ConfigError
from lipsformer.config import Config
from lipsformer.engine.build import build_model
from lipsformer.engine.loss import make_criterion
from lipsformer.engine.optim import make_optimizer
from lipsformer.engine.step_share import StepShare, share_of_step

# Images for training and validation, and classes, for machines without the data.
PUBLISHED = {"imagenet-1k": (1_281_167, 50_000, 1000)}
BUCKET_BYTES = 25 * 2**20  # DDP's default; the first bucket is smaller, so that it starts early
STOP_FLAG_BYTES = 8


def predict_run(config: Config, world_size: int, shard: int = 1) -> dict[str, Any]:
    """Return batch, steps, memory and collectives of one rank, and the samplers of all ranks.

    Args:
        config: The config of the run.
        world_size: Number of ranks.
        shard: Number of ranks over which weights, gradients and moments are sharded: 1 is DDP,
            `world_size` FSDP2, and a divisor of it HSDP.

    Raises:
        ConfigError: If the batch or the shards do not fit the number of ranks.
        DataError: If the data are not there.
    """
    if world_size < 1 or shard < 1 or world_size % shard:
        raise ConfigError(
            f"--shard {shard} must be a divisor of --world-size {world_size}, and both positive"
        )
    step_share = share_of_step(config.train, world_size)
    train_set, val_set, classes, found = _data(config)
    batches = TrainBatches(
        train_set,
        global_batch_size=config.train.global_batch_size,
        batch_size_per_device=config.train.global_batch_size,
        rank=0,
        world_size=1,
        seed=config.train.seed,
        num_workers=0,
        drop_last=config.train.drop_last,
        pin_memory=False,
        repeats=config.augment.repeats,
    )
    step = _fake_step(config, classes, step_share)
    return {
        "model": config.model.name,
        "parameters": sum(parameter.numel() for parameter in step.model.parameters()),
        "precision": config.train.precision,
        "ranks": world_size,
        "shard": shard,
        "engine": "DDP" if shard == 1 else "FSDP2" if shard == world_size else "HSDP",
        "global_batch": config.train.global_batch_size,
        "samples_per_micro_batch": step_share.samples,
        "micro_batches": step_share.micro_batches,
        "steps_per_epoch": batches.updates_per_epoch,
        "steps": batches.updates_per_epoch * config.train.epochs,
        "memory": _memory(config, step, world_size, shard, step_share.micro_batches),
        "collectives": _collectives(config, step, world_size, shard, step_share.micro_batches),
        "samplers": _check_samplers(batches, val_set, world_size, step_share.samples)
        | {"data": "found" if found else f"not found; {config.data.name} as published"},
    }


def _data(config: Config) -> tuple[Any, Any, Sequence[Any], bool]:
    """Return training set, validation set, classes, and whether the data are here."""
    data = replace(config.data, download=False)
    try:
        train_set, val_set = build_datasets(
            data, config.augment, seed=config.train.seed, epochs=config.train.epochs
        )
    except DataError:
        if data.name not in PUBLISHED or data.skip_list or data.holdout or data.train_share < 1:
            raise
        train, val, classes = PUBLISHED[data.name]
        return range(train), range(val), range(classes), False  # only their lengths are known
    return train_set, val_set, train_set.classes, True


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators return, until they are freed.

    Example:
        >>> with LiveBytes() as live:
        ...     a, b = torch.ones(5), torch.ones(7)
        ...     del a
        >>> live.now, live.peak
        (28, 48)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.hold(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        return result

    def hold(self, *tensors: Tensor) -> None:
        """Count the storages of these tensors too."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                weakref.finalize(storage, self._free, key, size)
                self.now += size
                self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@dataclass(frozen=True)
class _Step:
    """One training step on fake tensors.

    Attributes:
        model: The model.
        arrived: Its parameters in the order in which their gradients are complete.
        weights, moments: Bytes of parameters and buffers, and of the optimizer's state.
        peak: Largest number of bytes at once, with the gradients.
    """

    model: nn.Module
    arrived: list[nn.Parameter]
    weights: int
    moments: int
    peak: int


def _fake_step(config: Config, classes: Sequence[Any], step_share: StepShare) -> _Step:
    sizes = sizes_by_epoch(config.augment.img_sizes, config.train.epochs)
    size = max(sizes or [config.data.img_size])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision)
    autocast = torch.autocast("cpu", dtype, enabled=dtype is not None)
    arrived: list[nn.Parameter] = []
    with FakeTensorMode() as mode, LiveBytes() as live:
        try:
            model = build_model(config, classes)
        except ConfigError:  # some models of timm read values when they are built
            with unset_fake_temporarily():
                model = build_model(config, classes)
            model._apply(mode.from_tensor)
            live.hold(*model.parameters(), *model.buffers())
        model.train()
        optimizer = make_optimizer(model, config.optim)
        criterion = make_criterion(config, len(classes), model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(arrived.append)
        weights, live.peak = live.now, 0
        for _ in range(min(step_share.micro_batches, 2)):  # more than two have the same peak as two
            arrived.clear()
            images = torch.zeros(step_share.samples, 3, size, size, dtype=torch.uint8).float()
            with autocast:
                logits = model(images).float()
            targets = torch.zeros(step_share.samples, len(classes))
            criterion(logits, targets).backward()
            del images, logits, targets
        limit = float("inf") if config.optim.clip_grad is None else config.optim.clip_grad
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        passes, before = live.peak, live.now
        optimizer.step()
        moments = live.now - before
        # The next step begins with the moments of this one.
        peak = max(passes + moments, live.peak)
    return _Step(model, arrived, weights, moments, peak)


def _memory(
    config: Config, step: _Step, world_size: int, shard: int, num_micro_batches: int
) -> dict[str, int]:
    """Return bytes of one rank by purpose; their sum is `peak`.

    With shards it is an estimate, which was not compared with a run.
    """
    learned = sum(p.numel() * p.element_size() for p in step.model.parameters())
    found = {
        "weights": step.weights,
        "moments": step.moments,
        "average of the weights": step.weights if config.train.ema_decay else 0,
        "gradients, activations and temporary": step.peak - step.weights - step.moments,
    }
    if world_size > 1 and shard == 1:
        found["buckets of DDP"] = learned
    if shard > 1:
        for name in ("weights", "moments", "average of the weights"):
            found[name] = -(-found[name] // shard)
        if num_micro_batches == 1:  # FSDP2 shards gradients after the last micro-batch only
            found["gradients, activations and temporary"] -= learned - -(-learned // shard)
        # The unit that computes, the next one on its way, and the gradients of one.
        largest = max(sum(p.numel() for p in unit) for _, unit, _ in _units(step.model))
        found["gathered units of FSDP2"] = 3 * largest * _bytes_in_transit(config)
    return {name: n for name, n in found.items() if n} | {"peak": sum(found.values())}


def _bytes_in_transit(config: Config) -> int:
    """Return the bytes of a number that FSDP2 sends."""
    return 4 if config.train.precision == "fp32" else 2


def _collectives(
    config: Config, step: _Step, world_size: int, shard: int, num_micro_batches: int
) -> list[dict[str, Any]]:
    """Return what one rank sends in one optimizer step: operation, content, bytes, how often."""
    rows: list[tuple[str, str, int, int]] = []
    if shard == 1:
        rows += [("all_reduce", "bucket of gradients", n, 1) for n in buckets(step.arrived)]
    else:
        width = _bytes_in_transit(config)
        for name, unit, resharded in _units(step.model):
            part = sum(-(-p.shape[0] // shard) * p[0].numel() if p.ndim else 1 for p in unit)
            size = shard * part * width
            rows.append(("all_gather", name, size, (1 + resharded) * num_micro_batches))
            rows.append(("reduce_scatter", name, size, 1))
            if shard < world_size:
                rows.append(("all_reduce", f"{name}, over replicas", part * width, 1))
    rows.append(("all_reduce", "request to stop", STOP_FLAG_BYTES, 1))
    names = ("operation", "content", "bytes", "times")
    return [dict(zip(names, row, strict=True)) for row in rows] if world_size > 1 else []


def buckets(arrived: Sequence[Tensor]) -> list[int]:
    """Return the bytes of DDP's buckets from the second step on, in the order of their sending."""
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, BUCKET_BYTES]
    dealt, _ = dist._compute_bucket_assignment_by_size(
        list(arrived), limits, [False] * len(arrived)
    )
    sizes = [parameter.numel() * parameter.element_size() for parameter in arrived]
    return [sum(sizes[index] for index in bucket) for bucket in dealt]


def _units(model: nn.Module) -> list[tuple[str, list[nn.Parameter], bool]]:
    """Return name, parameters and resharding after the forward pass of each unit of FSDP2.

    Accelerate makes units of the launcher's classes (here all blocks if it names none), of the last
    norm, and of the rest.
    """
    named = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")
    units: list[tuple[str, list[nn.Parameter], bool]] = []
    taken: set[nn.Parameter] = set()

    def take(name: str, module: nn.Module, resharded: bool) -> None:
        unit = [p for p in module.parameters() if p not in taken]
        taken.update(unit)
        if unit:
            units.append((name, unit, resharded))

    for name, module in reversed(list(model.named_modules())):
        kind = type(module).__name__
        if name and (kind in named if any(named) else kind.endswith("Block")):
            take(name, module, True)
    norms = [child for child in model.named_children() if "Norm" in type(child[1]).__name__]
    for name, module in norms[-1:]:
        take(name, module, False)
    take("(rest)", model, False)
    return units


def _check_samplers(
    batches: TrainBatches, val_set: Any, world_size: int, samples: int
) -> dict[str, Any]:
    """Deal two epochs to all ranks, and compare them with one rank."""
    images = len(batches.dataset)
    count = images * batches.repeats
    once = same = True
    for epoch in (0, 1):
        update_of = np.full(count, -1)
        for update in range(batches.updates_per_epoch):
            update_of[batches.samples(epoch, update)] = update
        times = np.zeros(count, int)
        for rank in range(world_size):
            dealt = batches.of_rank(rank, world_size, samples).deal(epoch)
            own = np.concatenate([part for update in dealt for part in update])
            updates = np.repeat(np.arange(len(dealt)), [sum(map(len, u)) for u in dealt])
            np.add.at(times, own, 1)
            same &= bool((update_of[own] == updates).all())
        once &= bool((times == (update_of >= 0)).all())
    seen: Counter[int] = Counter()
    for rank in range(world_size):
        share = eval_loader(val_set, batch_size=1, rank=rank, world_size=world_size, num_workers=0)
        seen.update(share.indices)
    used = len(np.unique(np.flatnonzero(update_of >= 0) // batches.repeats))
    return {
        "ranks": world_size,
        "images": used,
        "left_out": images - used,
        "each_image_once": once,
        "updates_as_on_one_rank": same,
        "each_validation_image_once": seen == Counter(range(len(val_set))),
    }


def run_table(found: dict[str, Any]) -> str:
    """Return the figures as one table."""
    samplers = found["samplers"]
    shards = {"DDP": "", "FSDP2": ", all sharded", "HSDP": f", shards of {found['shard']} ranks"}
    lines = [
        f"{found['model']}, {found['parameters']:,} parameters, {found['precision']}, "
        f"{found['engine']} on {found['ranks']} ranks{shards[found['engine']]}",
        f"global batch {found['global_batch']} = {found['ranks']} ranks x "
        f"{found['samples_per_micro_batch']} x {found['micro_batches']}; "
        f"{found['steps_per_epoch']} updates per epoch, {found['steps']} in all",
        "",
        "memory of one rank without the kernels for CPUs, as on a GPU; libraries come on top",
        *(f"{size / 2**20:12,.1f} MiB  {name}" for name, size in found["memory"].items()),
        "",
        "sent by one rank in each update",
    ]
    groups: dict[tuple[str, int], list[int]] = {}
    for row in found["collectives"]:
        groups.setdefault((row["operation"], row["bytes"]), []).append(row["times"])
    lines += [
        f"{size / 2**20:12,.3f} MiB  {name} x {sum(times)}"
        for (name, size), times in groups.items()
    ]
    total = sum(row["bytes"] * row["times"] for row in found["collectives"])
    lines += [f"{total / 2**20:12,.3f} MiB  together", "", "samplers of all ranks, two epochs"]
    lines += [f"{value!s:>16}  {name.replace('_', ' ')}" for name, value in samplers.items()]
    return "\n".join(lines)
