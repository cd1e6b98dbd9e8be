"""One optimizer step, and one epoch of them.

Nothing here waits for the device except where a log record is due.
"""

import contextlib
import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lipsformer._renamed import renamed
from lipsformer._sharding import full_tensor
from lipsformer.engine.metrics import StepMetrics
from lipsformer.engine.optim import set_lr, skips_on_device
from lipsformer.engine.parts import BatchTransform, MicroBatch
from lipsformer.engine.stopwatch import Stopwatch
from lipsformer.engine.train_state import TrainState


def train_step(
    state: TrainState,
    micro_batches: list[MicroBatch],
    num_samples: int,
    step: int,
    transform: BatchTransform,
) -> tuple[Tensor, Tensor]:
    """Make one optimizer step from this rank's micro-batches.

    The gradient is the mean over all `num_samples` samples of the step, over ranks and
    micro-batches, whatever their sizes: losses are summed and divided once. It is clipped after it
    was synchronized. A step whose gradient is not finite changes neither weights nor moments, and
    `StepMetrics` counts it.

    Args:
        state: The model and all that trains it.
        micro_batches: Images and labels of this rank.
        num_samples: Number of samples of the step over all ranks.
        step: Number of completed steps.
        transform: Applied to each micro-batch on the device.

    Returns:
        The sum of this rank's losses, and the norm of the gradient before clipping.
    """
    rank = state.accelerator.process_index
    loss_sum = backward(state, micro_batches, num_samples, step, transform, rank=rank)
    return loss_sum, apply_gradient(state, step)


def backward(
    state: TrainState,
    micro_batches: list[MicroBatch],
    num_samples: int,
    step: int,
    transform: BatchTransform,
    *,
    rank: int,
) -> Tensor:
    """Add the gradient of a rank's micro-batches; return the sum of their losses.

    The arguments are those of `train_step`. `rank` is the rank whose random numbers are drawn,
    which `scripts.replay` sets to that of another process.
    """
    accelerator = state.accelerator
    # DDP and FSDP average the gradients of the ranks; the factor turns the average into the sum.
    scale = accelerator.num_processes / num_samples
    loss_sum = torch.zeros((), device=accelerator.device)
    for micro_step, (images, labels) in enumerate(micro_batches):
        images, targets = transform(
            images.to(accelerator.device, non_blocking=True),
            labels.to(accelerator.device, non_blocking=True),
            update=step,
            micro_step=micro_step,
            rank=rank,
        )
        seed_micro_step(accelerator.device, state.seed, step, micro_step, rank)
        last = micro_step == len(micro_batches) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(state.model):
            loss = state.task(images, targets)["loss"] * len(images)
            accelerator.backward(loss * scale)
        loss_sum += loss.detach()
    return loss_sum


def apply_gradient(state: TrainState, step: int) -> Tensor:
    """Clip the gradient, make the step, and return the norm of the gradient before clipping.

    Args:
        state: The model and all that trains it. The gradient is that of `backward`.
        step: Number of completed steps, which decides the learning rate.
    """
    limit = float("inf") if state.clip_grad is None else state.clip_grad
    grad_norm = state.accelerator.clip_grad_norm_(state.model.parameters(), limit)
    assert isinstance(grad_norm, Tensor)
    grad_norm = full_tensor(grad_norm)
    set_lr(state.optimizer, state.schedule(step))
    state.before_change()
    for instrument in state.instruments:
        instrument.before_step(step)
    step_if_finite(state, grad_norm)
    state.optimizer.zero_grad()
    for instrument in state.instruments:
        instrument.after_step(step)
    if state.ema is not None:
        state.ema.update(state.module, step=step + 1)
    return grad_norm


def step_if_finite(state: TrainState, grad_norm: Tensor) -> None:
    """Step the optimizer unless the gradient is not finite.

    The scaler of fp16 and the fused optimizers decide that on the device. With any other optimizer
    the host reads the norm first.
    """
    inner = state.optimizer.optimizer  # pyright: ignore[reportAttributeAccessIssue]
    if state.accelerator.scaler is None:
        if skips_on_device(inner):
            inner.found_inf = (~grad_norm.isfinite()).float()
        elif not grad_norm.isfinite():
            return
    state.optimizer.step()


def seed_micro_step(device: torch.device, seed: int, step: int, micro_step: int, rank: int) -> None:
    """Make drop path and dropout of a micro-step a function of these four numbers.

    `torch.manual_seed` would do the same, but it also prepares the seeds of devices that the
    process does not use.
    """
    value = random.Random(f"{seed}/{step}/{micro_step}/{rank}").getrandbits(63)
    torch.default_generator.manual_seed(value)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(value)


def train_epoch(
    state: TrainState,
    batches: Iterable[tuple[list[MicroBatch], int]],
    *,
    first_step: int,
    transform: BatchTransform,
    metrics: StepMetrics,
    stopwatch: Stopwatch,
    after_step: Callable[[int], bool],
) -> int:
    """Train on the batches of an epoch, or on the rest of it.

    Args:
        state: The model and all that trains it.
        batches: (this rank's micro-batches, samples of the whole step), one for each step.
        first_step: Number of the first step since the start of the run.
        transform: Applied to each micro-batch on the device.
        metrics: Collects loss and gradient norm.
        stopwatch: Measures rates.
        after_step: Called with the number of completed steps; true ends the epoch here.

    Returns:
        The number of completed steps since the start of the run.
    """
    state.model.train()
    step = first_step
    for micro_batches, num_samples in stopwatch.waiting(batches):
        loss_sum, grad_norm = train_step(state, micro_batches, num_samples, step, transform)
        metrics.add(step, state.schedule(step), num_samples, loss_sum, grad_norm)
        stopwatch.count(num_samples)
        step += 1
        if after_step(step):
            break
    return step


__getattr__ = renamed(__name__)
