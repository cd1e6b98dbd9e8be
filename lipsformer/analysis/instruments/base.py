"""The contract between the trainer and the instruments, and the state that they share."""

from collections.abc import Mapping

from torch import Tensor

from lipsformer.analysis.sigma import SigmaTracker


class InstrumentBase:
    """Base of the objects that act around every optimizer step and before every evaluation.

    The trainer calls the methods on every rank, in the order of its list of instruments. The
    methods of this class do nothing, except that they save and restore the sigma trackers. The
    trackers keep singular vectors from step to step. The vectors decide the last digits of records
    and of capped weights, so a run that is resumed needs them to continue exactly.

    Example:
        >>> from lipsformer.analysis.instruments import InstrumentBase
        >>> class PrintSteps(InstrumentBase):
        ...     def after_step(self, step):
        ...         print(f"{step + 1} steps are completed")
        >>> PrintSteps().after_step(0)
        1 steps are completed
    """

    trackers: Mapping[str, SigmaTracker] = {}

    def before_step(self, step: int) -> None:
        """Act when the gradients are final and the weights have not changed yet.

        Args:
            step: Number of optimizer steps completed before this one.
        """

    def after_step(self, step: int) -> None:
        """Act when the weights have changed.

        Args:
            step: Number of optimizer steps completed before this one: the same value as in
                `before_step`. `step + 1` steps have been completed.
        """

    def before_eval(self) -> Mapping[str, Mapping[str, float]]:
        """Prepare the weights at the end of an epoch, before they are evaluated or saved.

        An exception stops the run before these weights are saved.

        Returns:
            Figures to add to the records of the evaluation, by kind of weights ("raw" or "ema").
        """
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors on which the next step depends, for a checkpoint."""
        return {
            f"{name}.{key}": vectors
            for name, tracker in self.trackers.items()
            for key, vectors in tracker.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a state. Trackers that are missing in it start anew.

        Args:
            state: The result of `state_dict`.
        """
        for name, tracker in self.trackers.items():
            prefix = f"{name}."
            tracker.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )
