"""Loss and gradient norm of each step: kept on the device, read when they are logged."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lipsformer._ranks import sum_over_ranks
from lipsformer._renamed import renamed


class NonFiniteError(RuntimeError):
    """A loss, a gradient or a weight is not finite.

    Attributes:
        first: The first of too many non-finite training steps in a row; None if an evaluation or
            the weights of a checkpoint are not finite.
    """

    def __init__(self, message: str, *, first: int | None = None):
        super().__init__(message)
        self.first = first


@dataclass
class StepStats:
    """One step: mean loss over its samples, and the norm of its gradient before clipping.

    Example:
        >>> StepStats(step=0, lr=0.1, num_samples=64, loss=2.3, grad_norm=float("nan")).finite
        False
    """

    step: int
    lr: float
    num_samples: int
    loss: float
    grad_norm: float

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are both finite."""
        return math.isfinite(self.loss) and self.applied

    @property
    def applied(self) -> bool:
        """Whether the step changed the weights, which its gradient alone decides."""
        return math.isfinite(self.grad_norm)


class StepMetrics:
    """The steps since the last log record.

    `add` keeps scalars on the device and never waits for them. `read` fetches all of them at once,
    over all ranks; log records and checkpoints call it.

    Args:
        max_nonfinite: Number of non-finite steps in a row that are tolerated.

    Example:
        >>> metrics = StepMetrics(max_nonfinite=0)
        >>> metrics.add(0, 0.1, 4, loss_sum=torch.tensor(8.0), grad_norm=torch.tensor(1.0))
        >>> metrics.read()[0].loss
        2.0
    """

    def __init__(self, *, max_nonfinite: int):
        self.max_nonfinite = max_nonfinite
        self.stats: list[StepStats] = []
        self.nonfinite_streak = 0
        self.nonfinite_total = 0
        self.last_finite: StepStats | None = None
        self._on_device: list[tuple[int, float, int, Tensor, Tensor]] = []

    def add(
        self, step: int, lr: float, num_samples: int, loss_sum: Tensor, grad_norm: Tensor
    ) -> None:
        """Add a step: the sum of this rank's losses, and the norm of the whole gradient."""
        self._on_device.append((step, lr, num_samples, loss_sum, grad_norm))

    def read(self) -> list[StepStats]:
        """Return all steps since the last `clear`. Every rank must call it.

        Raises:
            NonFiniteError: After more than `max_nonfinite` non-finite steps in a row.
        """
        if self._on_device:
            losses = torch.stack([loss for *_, loss, _ in self._on_device])
            norms = torch.stack([norm for *_, norm in self._on_device])
            losses = sum_over_ranks(losses)
            rows = torch.stack([losses, norms.to(losses)]).tolist()  # the only wait for the device
            for (step, lr, count, _, _), loss, norm in zip(self._on_device, *rows, strict=True):
                self._append(StepStats(step, lr, count, loss / count, norm))
            self._on_device.clear()
        return self.stats

    def _append(self, stats: StepStats) -> None:
        self.stats.append(stats)
        self.last_finite = stats if stats.finite else self.last_finite
        self.nonfinite_streak = 0 if stats.finite else self.nonfinite_streak + 1
        self.nonfinite_total += not stats.finite
        if self.nonfinite_streak > self.max_nonfinite:
            first = stats.step - self.nonfinite_streak + 1
            span = f"update {first}" if first == stats.step else f"updates {first} to {stats.step}"
            last = self.last_finite
            before = f"; last finite update {last.step}: {_describe(last)}" if last else ""
            raise NonFiniteError(
                f"loss or gradient is not finite at {span} ({_describe(stats)}){before}; "
                f"train.max_nonfinite_updates={self.max_nonfinite} allows no more in a row. "
                "You may change this number when you resume. Another optim.lr or optim.clip_grad "
                "needs a new run, which may start from these weights with model.checkpoint",
                first=first,
            )

    def clear(self) -> None:
        """Forget the steps that were logged."""
        self.stats = []

    def state_dict(self) -> dict[str, Any]:
        """Return what the next log record depends on, for a checkpoint."""
        return {
            "stats": [asdict(stats) for stats in self.read()],
            "nonfinite_streak": self.nonfinite_streak,
            "nonfinite_total": self.nonfinite_total,
            "last_finite": None if self.last_finite is None else asdict(self.last_finite),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.stats = [StepStats(**stats) for stats in state["stats"]]
        self.nonfinite_streak = state["nonfinite_streak"]
        self.nonfinite_total = state["nonfinite_total"]
        last = state.get("last_finite")  # older checkpoints have none
        self.last_finite = None if last is None else StepStats(**last)


def summarize(stats: list[StepStats]) -> dict[str, float]:
    """Average over steps: the loss over samples, the gradient norm over steps.

    Non-finite steps are left out.

    Args:
        stats: The steps in their order, at least one.

    Returns:
        `lr` of the last step; `skipped`, the number of steps that did not change the weights. If
        any step was finite also `loss`, `grad_norm` and `grad_norm_max`, the largest norm.

    Example:
        >>> first = StepStats(step=0, lr=0.1, num_samples=1, loss=4.0, grad_norm=2.0)
        >>> second = StepStats(step=1, lr=0.2, num_samples=3, loss=0.0, grad_norm=6.0)
        >>> record = summarize([first, second])
        >>> record["loss"], record["grad_norm"]  # (1 * 4 + 3 * 0) / 4 and (2 + 6) / 2
        (1.0, 4.0)
    """
    finite = [s for s in stats if s.finite]
    samples = sum(s.num_samples for s in finite)
    record = {"lr": stats[-1].lr, "skipped": float(sum(not s.applied for s in stats))}
    if finite:
        record["loss"] = sum(s.loss * s.num_samples for s in finite) / samples
        record["grad_norm"] = sum(s.grad_norm for s in finite) / len(finite)
        record["grad_norm_max"] = max(s.grad_norm for s in finite)
    return record


def _describe(stats: StepStats) -> str:
    return f"lr {stats.lr:.3g}, loss {stats.loss:.4g}, gradient norm {stats.grad_norm:.4g}"


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, rounded to whole seconds.

    Args:
        seconds: The duration, not negative.

    Example:
        >>> duration(3600 + 2 * 60 + 3.2)
        '1:02:03'
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


__getattr__ = renamed(__name__)
