"""What the instruments share."""

from collections.abc import Mapping

from torch import Tensor

from lipsformer.analysis.sigma import SigmaTracker


class InstrumentBase:
    """Base of the instruments: methods that do nothing, and the state of the sigma trackers.

    The trackers keep singular vectors from step to step. The vectors decide the last digits of
    records and of capped weights, so a run that is resumed needs them to continue exactly.

    Example:
        >>> from lipsformer.analysis.instruments.base import InstrumentBase
        >>> class PrintSteps(InstrumentBase):
        ...     def after_step(self, step):
        ...         print(f"{step + 1} steps are completed")
        >>> PrintSteps().after_step(0)
        1 steps are completed
    """

    trackers: Mapping[str, SigmaTracker] = {}

    def before_step(self, step: int) -> None:
        """Act before the optimizer step, when the gradients are final.

        Args:
            step: Number of optimizer steps completed before this one.
        """

    def after_step(self, step: int) -> None:
        """Act after the optimizer step, when the weights have changed.

        Args:
            step: Number of optimizer steps completed before this one: the same value as in
                `before_step`. `step + 1` steps have been completed.
        """

    def before_eval(self) -> Mapping[str, Mapping[str, float]]:
        """Act before the weights are evaluated or saved.

        Returns:
            Figures to add to the records of the evaluation, by kind of weights ("raw" or "ema").
        """
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors on which the next step depends."""
        return {
            f"{name}.{key}": vectors
            for name, tracker in self.trackers.items()
            for key, vectors in tracker.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state. Trackers that are missing in it start anew.

        Args:
            state: The result of `state_dict`.
        """
        for name, tracker in self.trackers.items():
            prefix = f"{name}."
            tracker.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )
