"""The learning rate as a pure function of the step, so that resuming needs one integer."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CosineSchedule:
    """Half a cosine from `peak` towards `final`, after an optional linear warmup.

    lr(s) = peak (s + 1) / W for s < W, then
    lr(s) = final + (peak - final) (1 + cos(pi (s - W) / (T - W))) / 2.

    Args:
        peak: Learning rate of the first step after warmup.
        final: Learning rate that the schedule approaches; step T would have it.
        total_steps: T, the number of steps of the run.
        warmup_steps: W < T; 0 for no warmup.

    Example:
        >>> schedule = CosineSchedule(peak=0.1, final=0.0, total_steps=100)
        >>> schedule(0), schedule(50)
        (0.1, 0.05)
    """

    peak: float
    final: float
    total_steps: int
    warmup_steps: int = 0

    def __call__(self, step: int) -> float:
        """Return the learning rate of step number `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.final + (self.peak - self.final) * (1 + math.cos(math.pi * done)) / 2
