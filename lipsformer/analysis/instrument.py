"""The interface of what is hung around every optimizer step, to watch training or to steer it."""

from torch import Tensor

from lipsformer.analysis.sigma import SigmaTracker


class Instrument:
    """Called around every update by every rank; the methods that are not overridden do nothing.

    Attributes:
        trackers: By name, what remembers singular vectors from one update to the next. They decide
            the last digits of figures and of capped weights, so that exact resumption needs them.
    """

    trackers: dict[str, SigmaTracker]

    def before_step(self, update: int) -> None:
        """Look at the final gradients and at the weights before they change.

        Args:
            update: Number of updates made so far.
        """

    def after_step(self, update: int) -> None:
        """Look at the changed weights, or change them.

        Args:
            update: Number of updates made before the one that just ended, as in ``before_step``.
        """

    def enforce(self) -> None:
        """Make exact what holds to a tolerance in training, before weights are judged."""

    def state(self) -> dict[str, Tensor]:
        """Return what the next update depends on."""
        return {
            f"{name}.{key}": vectors
            for name, tracker in self.trackers.items()
            for key, vectors in tracker.state().items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take up a state; trackers that it does not hold start anew.

        Args:
            state: As :meth:`state` returned it.
        """
        for name, tracker in self.trackers.items():
            prefix = f"{name}."
            tracker.load_state(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )
