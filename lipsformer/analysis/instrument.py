"""Base class of the instruments that act before and after each optimizer step."""

from collections.abc import Mapping

from torch import Tensor

from lipsformer.analysis.sigma import SigmaTracker


class Instrument:
    """Called by every rank; methods that are not overridden do nothing.

    The class satisfies the protocol `lipsformer.engine.instrument.Instrument`.

    Attributes:
        trackers: By name, what remembers singular vectors from one update to the next. They decide
            the last digits of figures and of capped weights, so that exact resumption needs them.
    """

    trackers: dict[str, SigmaTracker]

    def before_step(self, step: int) -> None:
        """Look at the final gradients and at the weights before they change.

        Args:
            step: Number of steps made so far.
        """

    def after_step(self, step: int) -> None:
        """Look at the changed weights, or change them.

        Args:
            step: Number of steps made before the one that just ended, as in ``before_step``.
        """

    def before_eval(self) -> Mapping[str, Mapping[str, float]]:
        """Prepare the weights for an evaluation; return figures for its records, by kind."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that the next step depends on."""
        return {
            f"{name}.{key}": vectors
            for name, tracker in self.trackers.items()
            for key, vectors in tracker.state().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a state; trackers that it does not hold start anew.

        Args:
            state: As :meth:`state_dict` returned it.
        """
        for name, tracker in self.trackers.items():
            prefix = f"{name}."
            tracker.load_state(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )
