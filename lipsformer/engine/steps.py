"""One optimizer step, one epoch of them, and evaluation.

Nothing here waits for the device except where a log record is due.
"""

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lipsformer._ranks import sum_over_ranks
from lipsformer.engine.metrics import NonFiniteError, StepMetrics
from lipsformer.engine.optim import set_lr, skips_on_device
from lipsformer.engine.train_state import TrainState

MicroBatch = tuple[Tensor, Tensor]


class SizedBatches(Protocol):
    """Micro-batches, and their number.

    Example:
        >>> batches: SizedBatches = [(torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]))]
        >>> len(batches)
        1
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[MicroBatch]: ...


class BatchTransform(Protocol):
    """Turns raw images and labels into inputs and target probabilities, on the device.

    Example:
        >>> def one_hot(images, labels, *, update, micro_step, rank):
        ...     return images / 255.0, F.one_hot(labels, 10).float()
        >>> transform: BatchTransform = one_hot
    """

    def __call__(
        self, images: Tensor, labels: Tensor, *, update: int, micro_step: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Transform a micro-batch; all randomness is a function of (update, micro_step, rank)."""
        ...


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
    """Add the gradient of a rank's micro-batches; return the sum of their losses."""
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
    """Clip the gradient, change the weights, and return the norm of the gradient before that."""
    limit = float("inf") if state.clip_grad is None else state.clip_grad
    grad_norm = state.accelerator.clip_grad_norm_(state.model.parameters(), limit)
    assert isinstance(grad_norm, Tensor)
    if isinstance(grad_norm, DTensor):
        grad_norm = grad_norm.full_tensor()
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


def shard_ema(ema: ModelEmaV3, accelerator: Accelerator) -> None:
    """Shard the average as FSDP2 shards the model; do nothing without FSDP2.

    Accelerate's `prepare` would require an optimizer for it.
    """
    if accelerator.is_fsdp2:
        ema.module = fsdp2_prepare_model(accelerator, ema.module)


class Stopwatch:
    """Measures images per second, and the share of the time spent waiting for data.

    On the CPU the share is the time in which the host waits for the loader. A CUDA device can be
    busy meanwhile. There the share is the time between two events around the wait, on the time line
    of the device: they are apart only if the device has run out of work.

    Args:
        accelerator: Accelerate's, for the device, and for the rank that waits longest.

    Example:
        >>> stopwatch = Stopwatch(Accelerator(cpu=True))
        >>> stopwatch.images = 64
        >>> stopwatch.read()["images_per_s"] > 0
        True
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.reset()

    def reset(self) -> None:
        """Start anew; call it after pauses that are not training, such as evaluation."""
        self.started = time.perf_counter()
        self.images = 0
        self.steps = 0
        self._waits: list[tuple[Any, Any]] = []

    def waiting(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items and measure how long each took to arrive."""
        iterator = iter(items)
        while True:
            before = self._now()
            item = next(iterator, None)
            self._waits.append((before, self._now()))
            if item is None:
                return
            yield item

    def read(self) -> dict[str, float]:
        """Return the rates since the last reset, and reset. Every rank must call it.

        `data_wait` is the largest share over all ranks, because the others wait for that rank.
        """
        device = self.accelerator.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            waited = sum(before.elapsed_time(after) for before, after in self._waits) / 1000
        else:
            waited = sum(after - before for before, after in self._waits)
        seconds = time.perf_counter() - self.started
        share = self.accelerator.gather(torch.tensor(waited / seconds, device=device))
        rates = {
            "images_per_s": self.images / seconds,
            "data_wait": float(share.max()),  # pyright: ignore[reportAttributeAccessIssue]
            "seconds_per_update": seconds / max(self.steps, 1),
        }
        self.reset()
        return rates

    def _now(self) -> Any:
        if self.accelerator.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


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
        stopwatch.images += num_samples
        stopwatch.steps += 1
        step += 1
        if after_step(step):
            break
    return step


class EvalSums:
    """Top-1, top-5 and cross entropy over a data set whose images are spread over ranks.

    Counts are integers and losses are summed in float64. Ranks may have different numbers of
    batches.

    Example:
        >>> sums = EvalSums()
        >>> sums.add(torch.tensor([[0.0, 9.0], [9.0, 0.0]]), torch.tensor([1, 1]))
        >>> result = sums.result(Accelerator(cpu=True))
        >>> result["top1"], result["images"]
        (50.0, 2)
    """

    def __init__(self) -> None:
        self._batches: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits [B, K] and labels without waiting for the device.

        Labels are [B], or bool [B, K] where several classes are right. The cross entropy is then
        the one with the uniform distribution over these classes.
        """
        logits = logits.float()
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices
        if labels.ndim == 2:
            top = labels.gather(1, top)
            labels = labels / labels.sum(dim=1, keepdim=True)
        else:
            top = top == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="none")
        self._batches.append(torch.stack([loss, top[:, 0].float(), top.any(dim=1).float()]))

    def result(self, accelerator: Accelerator) -> dict[str, float | int]:
        """Return means over the images of all ranks, and their number. Every rank must call it."""
        rows = torch.cat([torch.zeros(3, 0), *(batch.cpu() for batch in self._batches)], dim=1)
        sums = torch.cat([rows.double().sum(dim=1), torch.tensor([rows.shape[1]]).double()])
        if accelerator.num_processes > 1:
            sums = sum_over_ranks(sums.to(accelerator.device)).cpu()
        loss, top1, top5, images = sums.tolist()
        return {
            "top1": 100 * top1 / images,
            "top5": 100 * top5 / images,
            "loss": loss / images,
            "images": int(images),
        }


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    module: nn.Module,
    batches: SizedBatches,
    *,
    normalize: Callable[[Tensor], Tensor],
    num_images: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, float | int] | None:
    """Return top-1 and top-5 in percent, mean cross entropy, and the number of images.

    Args:
        accelerator: Accelerate's, for device, precision and ranks.
        module: The model without DDP around it, because ranks may have different numbers of
            batches.
        batches: This rank's share of the data set. Over all ranks, every image comes once.
        normalize: Turns uint8 images into the model's input.
        num_images: Length of the data set, for comparison with the number of images counted.
        interrupted: Called before every batch, equally often on all ranks; true ends it here.

    Returns:
        The figures; None if interrupted.

    Raises:
        NonFiniteError: If the mean loss is not finite.
    """
    module.eval()
    sums = EvalSums()
    own = torch.tensor(len(batches), device=accelerator.device)
    rounds = int(accelerator.gather(own).max())  # pyright: ignore[reportAttributeAccessIssue]
    iterator = iter(batches)
    batch = None
    for index in range(rounds):
        if interrupted():
            return None
        counted = index < len(batches)
        if counted:
            batch = next(iterator)
        elif not isinstance(module, FSDPModule) or batch is None:
            continue  # only a sharded model needs all ranks in each forward pass: repeat a batch
        images, labels = (tensor.to(accelerator.device, non_blocking=True) for tensor in batch)
        with accelerator.autocast():
            logits = module(normalize(images))
        if counted:
            sums.add(logits, labels)
    result = sums.result(accelerator)
    if result["images"] != num_images:
        raise RuntimeError(f"evaluated {result['images']} images of a data set of {num_images}")
    if not math.isfinite(result["loss"]):
        raise NonFiniteError(f"the evaluation loss over {num_images} images is {result['loss']}")
    return result
