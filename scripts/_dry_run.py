"""The text of `train.py --dry-run`: config, model, schedule and memory."""

from dataclasses import replace

import torch

from lipsformer._configfile import dump_config
from lipsformer._errors import ConfigError
from lipsformer.analysis.cost import count_parameters, part_costs, training_bytes
from lipsformer.config import Config
from lipsformer.engine import distributed
from lipsformer.engine.parts import TrainingParts
from lipsformer.engine.resume import find_start
from scripts._assemble import assemble

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the run, at which the learning rate is shown


def dry_run(config: Config) -> str:
    """Return what a run would do. Nothing is written and nothing is downloaded."""
    config = replace(config, data=replace(config.data, download=False))
    accelerator = distributed.start(config)
    start = find_start(config)
    parts = assemble(config, accelerator, start)
    try:
        text = describe_run(config, parts)
    except RuntimeError as error:
        # torch.OutOfMemoryError on a GPU; on a CPU torch has only a text
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"data.img_size={config.data.img_size} is too large for this machine, whose memory "
            "three images already exceed: lower it, or choose a smaller model"
        ) from None
    accelerator.state.destroy_process_group()
    place = f"from {start}" if start else "at update 0"
    return f"{text}\n\nwould start {place}; nothing was written"


def describe_run(config: Config, parts: TrainingParts) -> str:
    """Return sections of text; the model runs forward on three images of noise."""
    device = parts.state.accelerator.device.type.upper()
    sections = {
        "config": dump_config(config).rstrip(),
        "model": _model(config, parts),
        "data and schedule": _schedule(config, parts),
        f"memory of one process on a {device}, estimated": _memory(config, parts),
    }
    return "\n\n".join(f"# {name}\n{text}" for name, text in sections.items())


def _model(config: Config, parts: TrainingParts) -> str:
    module, size = parts.state.module, config.data.img_size
    images = torch.zeros(1, 3, size, size, device=parts.state.accelerator.device)
    costs = part_costs(module, images)
    total = (count_parameters(module), sum(part.macs for part in costs))
    rows = [(part.name, part.parameters, part.macs) for part in costs]
    lines = [f"{'part':20} {'parameters':>12} {'GMACs':>8}"]
    for name, parameters, macs in [*rows, (f"all of {config.model.name}", *total)]:
        lines.append(f"{name:20} {parameters:12,} {macs / 1e9:8.3f}")
    return "\n".join(lines)


def _schedule(config: Config, parts: TrainingParts) -> str:
    updates, schedule = parts.train_batches.updates_per_epoch, parts.state.schedule
    last = config.train.epochs * updates - 1
    facts, share = parts.facts, parts.step_share
    processes = parts.state.accelerator.num_processes
    lines = [
        f"{facts.num_train_images:,} training images, {facts.num_eval_images:,} validation images, "
        f"{len(facts.classes)} classes",
        f"{config.train.epochs} epochs x {updates} updates; global batch "
        f"{config.train.global_batch_size} = {processes} processes x {share.samples} x "
        f"{share.micro_batches}",
    ]
    lines += [f"lr at update {round(s * last):8}  {schedule(round(s * last)):.3e}" for s in SHARES]
    return "\n".join(lines)


def _memory(config: Config, parts: TrainingParts) -> str:
    state, size = parts.state, config.data.img_size
    device = state.accelerator.device
    found = training_bytes(
        state.module,
        torch.randn(3, 3, size, size, device=device),
        micro_batch=parts.step_share.samples,
        ema=state.ema is not None,
        autocast=state.accelerator.autocast,
    )
    if state.accelerator.num_processes > 1:
        found["gradients in transit"] = found["gradients"]
    if (teacher := getattr(state.task, "teacher", None)) is not None:
        found["weights of the teacher"] = sum(p.nbytes for p in teacher.parameters())
    lines = [f"{bytes_ / 2**30:8.3f} GiB  {name}" for name, bytes_ in found.items()]
    lines.append(
        f"{sum(found.values()) / 2**30:8.3f} GiB  together; peaks measured on a CPU were 1.2 times "
        "this at 224 px and 1.7 times at 32 px, libraries come on top"
    )
    if device.type == "cpu":
        lines.append(
            "A GPU keeps more for the backward pass, because it lacks the kernels for CPUs: "
            "--dry-run --world-size N shows the memory without them."
        )
    return "\n".join(lines)
