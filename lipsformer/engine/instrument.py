"""The contract between the trainer and the instruments that watch or steer training."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

Figures = Mapping[str, float]


class Instrument(Protocol):
    """An object that acts before and after every optimizer step and before every evaluation.

    The trainer calls the methods on every rank, in the order of its list of instruments. `step` is
    the number of steps that were made before the current one, in `before_step` and `after_step`
    alike. The instruments of this package are in `lipsformer.analysis`.

    Example:
        >>> class PrintSteps:
        ...     def before_step(self, step): pass
        ...     def after_step(self, step): print(f"step {step} was made")
        ...     def before_eval(self): return {}
        ...     def state_dict(self): return {}
        ...     def load_state_dict(self, state): pass
        >>> instrument: Instrument = PrintSteps()
        >>> instrument.after_step(0)
        step 0 was made
    """

    def before_step(self, step: int) -> None:
        """Act when the gradients are final and the weights have not changed yet."""
        ...

    def after_step(self, step: int) -> None:
        """Act when the weights have changed."""
        ...

    def before_eval(self) -> Mapping[str, Figures]:
        """Prepare the weights for an evaluation.

        Returns:
            Figures to add to the records of the evaluation, by kind of weights ("raw" or "ema").
            An exception stops the run before these weights are saved.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that the next step depends on, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        ...
