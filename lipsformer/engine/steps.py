"""One optimizer update, one epoch of them, and evaluation.

Nothing here waits for the device except where a log record is due.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lipsformer.engine.distributed import seed_micro_step
from lipsformer.engine.metrics import EvalSums, NonFiniteError, Window
from lipsformer.engine.optim import set_lr, skips_on_device

MicroBatch = tuple[Tensor, Tensor]


class SizedBatches(Protocol):
    """Micro-batches, and how many of them."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[MicroBatch]: ...


class BatchTransform(Protocol):
    """Raw images and labels to the model's input and target probabilities, on the device."""

    def __call__(
        self, images: Tensor, labels: Tensor, *, update: int, micro_step: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Its randomness is a function of (update, micro_step, rank)."""
        ...


class Instrument(Protocol):
    """What watches or steers every update, called by every rank with the updates made so far."""

    def before_step(self, step: int) -> None:
        """Gradients are final, weights unchanged."""
        ...

    def after_step(self, step: int) -> None:
        """Weights have changed, gradients are gone."""
        ...

    def before_eval(self) -> None:
        """The epoch is over, the weights are going to be judged."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What the next update depends on, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes up what `state_dict` gave."""
        ...


@dataclass
class Learner:
    """The parts that an update touches.

    `model` and `optimizer` are the prepared ones; `module` is the model inside the wrappers. The
    EMA is timm's: it averages the tensors of `module` in place, in their order, so that neither
    compilation nor DDP can hide a parameter from it, and its decay is a function of the number of
    updates, so that nothing but its weights needs saving. The `instruments` act in their order
    after each step, before the EMA looks at the weights.
    """

    accelerator: Accelerator
    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Callable[[int], float]
    clip_grad: float | None
    seed: int
    ema: ModelEmaV3 | None = None
    instruments: Sequence[Instrument] = ()

    def update(
        self,
        micro_batches: list[MicroBatch],
        num_samples: int,
        update: int,
        transform: BatchTransform,
    ) -> tuple[Tensor, Tensor]:
        """One optimizer update from this rank's micro-batches.

        The gradient is the mean over all `num_samples` samples of the update, over ranks and
        micro-batches, whatever their sizes: losses are summed and divided once. It is clipped
        after it was synchronised. An update whose gradient is not finite leaves weights and
        moments alone; `Window` counts it.

        Returns:
            the sum of this rank's losses, and the norm of the gradient before clipping.
        """
        accelerator = self.accelerator
        # DDP and FSDP average the ranks' gradients; the product makes it their sum.
        scale = accelerator.num_processes / num_samples
        loss_sum = torch.zeros((), device=accelerator.device)
        for micro_step, (images, labels) in enumerate(micro_batches):
            at = {"update": update, "micro_step": micro_step, "rank": accelerator.process_index}
            images, targets = transform(
                images.to(accelerator.device, non_blocking=True),
                labels.to(accelerator.device, non_blocking=True),
                **at,
            )
            seed_micro_step(accelerator.device, self.seed, **at)
            last = micro_step == len(micro_batches) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                logits = self.model(images).float()
                loss = F.cross_entropy(logits, targets, reduction="sum")
                accelerator.backward(loss * scale)
            loss_sum += loss.detach()

        limit = float("inf") if self.clip_grad is None else self.clip_grad
        grad_norm = accelerator.clip_grad_norm_(self.model.parameters(), limit)
        assert isinstance(grad_norm, Tensor)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        set_lr(self.optimizer, self.schedule(update))
        for instrument in self.instruments:
            instrument.before_step(update)
        self._step(grad_norm)
        self.optimizer.zero_grad()
        for instrument in self.instruments:
            instrument.after_step(update)
        if self.ema is not None:
            self.ema.update(self.module, step=update + 1)
        return loss_sum, grad_norm

    def _step(self, grad_norm: Tensor) -> None:
        """Step the optimizer unless the gradient is not finite.

        The scaler of fp16 and the fused optimizers decide that on the device. With any other
        optimizer the host reads the norm first.
        """
        inner = self.optimizer.optimizer  # pyright: ignore[reportAttributeAccessIssue]
        if self.accelerator.scaler is None:
            if skips_on_device(inner):
                inner.found_inf = (~grad_norm.isfinite()).float()
            elif not grad_norm.isfinite():
                return
        self.optimizer.step()


def shard_ema(ema: ModelEmaV3, accelerator: Accelerator) -> None:
    """Shards the average as FSDP2 shards the model, of which it was copied before; else nothing.

    Accelerate's `prepare` would demand an optimizer for it.
    """
    if accelerator.is_fsdp2:
        ema.module = fsdp2_prepare_model(accelerator, ema.module)


class Stopwatch:
    """Seconds and images since it was read last, and the share spent waiting for data."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts anew; call it after pauses that are not training, such as evaluation."""
        self.started = time.perf_counter()
        self.waited = 0.0
        self.images = 0
        self.updates = 0

    def waiting(self, items: Iterable[Any]) -> Iterator[Any]:
        """Passes items through and times how long each took to arrive."""
        iterator = iter(items)
        while True:
            before = time.perf_counter()
            item = next(iterator, None)
            self.waited += time.perf_counter() - before
            if item is None:
                return
            yield item

    def read(self) -> dict[str, float]:
        """Rates since the last reset, which this is."""
        seconds = time.perf_counter() - self.started
        rates = {
            "images_per_s": self.images / seconds,
            "data_wait": self.waited / seconds,
            "seconds_per_update": seconds / max(self.updates, 1),
        }
        self.reset()
        return rates


def train_epoch(
    learner: Learner,
    updates: Iterable[tuple[list[MicroBatch], int]],
    *,
    first_update: int,
    transform: BatchTransform,
    window: Window,
    stopwatch: Stopwatch,
    after_update: Callable[[int], bool],
) -> int:
    """Trains on the updates of an epoch, or on the rest of it.

    Args:
        learner: what is trained.
        updates: (this rank's micro-batches, samples of the whole update) one after the other.
        first_update: number of the first of them since the start of the run.
        transform: what happens to a batch on the device.
        window: collects loss and gradient norm.
        stopwatch: measures rates.
        after_update: called with the number of updates made so far; true ends the epoch here.

    Returns:
        the number of updates made since the start of the run.
    """
    learner.model.train()
    made = first_update
    for batches, num_samples in stopwatch.waiting(updates):
        loss_sum, grad_norm = learner.update(batches, num_samples, made, transform)
        window.add(made, learner.schedule(made), num_samples, loss_sum, grad_norm)
        stopwatch.images += num_samples
        stopwatch.updates += 1
        made += 1
        if after_update(made):
            break
    return made


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
    """Top-1 and top-5 in percent, mean cross entropy, and the number of images.

    Args:
        accelerator: for device, precision and ranks.
        module: the model without DDP around it, whose ranks may have unequal numbers of batches.
        batches: this rank's share of the data set, every image once over all ranks.
        normalize: uint8 images to the model's input.
        num_images: length of the data set, which must be what was counted.
        interrupted: asked before every batch, equally often on all ranks; true ends it here.

    Returns:
        the figures; None if interrupted.

    Raises:
        NonFiniteError: if the mean loss is not finite.
    """
    module.eval()
    sums = EvalSums()
    own = torch.tensor(len(batches), device=accelerator.device)
    rounds = int(accelerator.gather(own).max())  # pyright: ignore[reportAttributeAccessIssue]
    iterator = iter(batches)
    batch = None
    for step in range(rounds):
        if interrupted():
            return None
        counted = step < len(batches)
        if counted:
            batch = next(iterator)
        elif not isinstance(module, FSDPModule) or batch is None:
            continue  # only sharded models need every rank's company in each forward pass
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
