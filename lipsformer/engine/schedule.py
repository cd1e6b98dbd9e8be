"""The learning rate as a pure function of the update, so that resuming needs one integer."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CosineSchedule:
    """Half a cosine from `peak` towards `final`, after an optional linear warmup.

    lr(u) = peak (u + 1) / W for u < W, then
    lr(u) = final + (peak - final) (1 + cos(pi (u - W) / (T - W))) / 2.

    Args:
        peak: learning rate of the first update after warmup.
        final: learning rate that is approached, reached at update T.
        total_updates: T, number of updates of the run.
        warmup_updates: W < T, 0 for none.
    """

    peak: float
    final: float
    total_updates: int
    warmup_updates: int = 0

    def __call__(self, update: int) -> float:
        """Learning rate of update number `update`, counted from 0."""
        if update < self.warmup_updates:
            return self.peak * (update + 1) / self.warmup_updates
        done = (update - self.warmup_updates) / (self.total_updates - self.warmup_updates)
        return self.final + (self.peak - self.final) * (1 + math.cos(math.pi * done)) / 2
