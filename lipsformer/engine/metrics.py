"""Numbers of training and evaluation: kept on the device, read when they are logged."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F


class NonFiniteError(RuntimeError):
    """Training met too many non-finite losses or gradients in a row, from update `first` on."""

    def __init__(self, message: str, *, first: int | None = None):
        super().__init__(message)
        self.first = first


@dataclass
class UpdateStats:
    """One update: mean loss over its samples, and the norm of its gradient before clipping."""

    update: int
    lr: float
    num_samples: int
    loss: float
    grad_norm: float

    @property
    def finite(self) -> bool:
        """Whether the update was applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Window:
    """The updates since the last log record.

    `add` keeps device scalars and never waits for them. `read` fetches all of them at once, over
    all ranks, and is what a log record and a checkpoint do.

    Args:
        accelerator: for reducing over ranks.
        max_nonfinite: how many non-finite updates in a row are tolerated.
    """

    def __init__(self, accelerator: Accelerator, *, max_nonfinite: int):
        self.accelerator = accelerator
        self.max_nonfinite = max_nonfinite
        self.stats: list[UpdateStats] = []
        self.nonfinite_streak = 0
        self.nonfinite_total = 0
        self._on_device: list[tuple[int, float, int, Tensor, Tensor]] = []

    def add(
        self, update: int, lr: float, num_samples: int, loss_sum: Tensor, grad_norm: Tensor
    ) -> None:
        """Takes an update: the sum of this rank's losses, and the norm of the whole gradient."""
        self._on_device.append((update, lr, num_samples, loss_sum, grad_norm))

    def read(self) -> list[UpdateStats]:
        """All updates since the last `clear`. Every rank must call it.

        Raises:
            NonFiniteError: after more than `max_nonfinite` non-finite updates in a row.
        """
        if self._on_device:
            losses = torch.stack([loss for *_, loss, _ in self._on_device])
            norms = torch.stack([norm for *_, norm in self._on_device])
            losses = _sum_over_ranks(self.accelerator, losses)
            rows = torch.stack([losses, norms.to(losses)]).tolist()  # the one wait for the device
            for (update, lr, count, _, _), loss, norm in zip(self._on_device, *rows, strict=True):
                self._take(UpdateStats(update, lr, count, loss / count, norm))
            self._on_device.clear()
        return self.stats

    def _take(self, stats: UpdateStats) -> None:
        self.stats.append(stats)
        self.nonfinite_streak = 0 if stats.finite else self.nonfinite_streak + 1
        self.nonfinite_total += not stats.finite
        if self.nonfinite_streak > self.max_nonfinite:
            first = stats.update - self.nonfinite_streak + 1
            span = (
                f"update {first}" if first == stats.update else f"updates {first} to {stats.update}"
            )
            last = [s for s in self.stats if s.finite][-1:]
            before = f"; last finite update {last[0].update}: {_describe(last[0])}" if last else ""
            raise NonFiniteError(
                f"loss or gradient is not finite at {span} ({_describe(stats)}){before}; "
                f"train.max_nonfinite_updates={self.max_nonfinite} in a row are tolerated",
                first=first,
            )

    def clear(self) -> None:
        """Forgets the updates that were logged."""
        self.stats = []

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that the next log record is the uninterrupted run's."""
        return {
            "stats": [asdict(stats) for stats in self.read()],
            "nonfinite_streak": self.nonfinite_streak,
            "nonfinite_total": self.nonfinite_total,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes up what `state` gave."""
        self.stats = [UpdateStats(**stats) for stats in state["stats"]]
        self.nonfinite_streak = state["nonfinite_streak"]
        self.nonfinite_total = state["nonfinite_total"]


def summarise(stats: list[UpdateStats]) -> dict[str, float]:
    """Means over updates: loss by samples, gradient norm by updates; non-finite ones are left out.

    The learning rate is that of the last update.
    """
    finite = [s for s in stats if s.finite]
    samples = sum(s.num_samples for s in finite)
    record = {"lr": stats[-1].lr, "skipped": float(len(stats) - len(finite))}
    if finite:
        record["loss"] = sum(s.loss * s.num_samples for s in finite) / samples
        record["grad_norm"] = sum(s.grad_norm for s in finite) / len(finite)
        record["grad_norm_max"] = max(s.grad_norm for s in finite)
    return record


class EvalSums:
    """Top-1, top-5 and cross entropy over a data set whose images are spread over ranks.

    Counts are integers, losses are summed in float64; ranks may differ in their number of batches.
    """

    def __init__(self) -> None:
        self._batches: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Takes logits [B, K] and labels without waiting for the device.

        Labels are [B], or bool [B, K]: then each of several is right, and the cross entropy is
        that with the uniform distribution over them.
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
        """Means over all images of all ranks, and their number. Every rank must call it."""
        rows = torch.cat([torch.zeros(3, 0), *(batch.cpu() for batch in self._batches)], dim=1)
        sums = torch.cat([rows.double().sum(dim=1), torch.tensor([rows.shape[1]]).double()])
        if accelerator.num_processes > 1:
            sums = _sum_over_ranks(accelerator, sums.to(accelerator.device)).cpu()
        loss, top1, top5, images = sums.tolist()
        return {
            "top1": 100 * top1 / images,
            "top5": 100 * top5 / images,
            "loss": loss / images,
            "images": int(images),
        }


def _sum_over_ranks(accelerator: Accelerator, values: Tensor) -> Tensor:
    total = accelerator.reduce(values, reduction="sum")
    assert isinstance(total, Tensor)
    return total


def _describe(stats: UpdateStats) -> str:
    return f"lr {stats.lr:.3g}, loss {stats.loss:.4g}, gradient norm {stats.grad_norm:.4g}"
