"""How the scores of edges become attention weights."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Settings"]


class Settings(NamedTuple):
    """What the passes need besides the graph and the queries, keys and values.

    Attributes:
        negative_slope: Slope of the LeakyReLU on the scores; 1 for none.
        keep_scale: Factor of the weights that dropout keeps, 1 / (1 - probability).
        keep: Boolean mask of the weights to keep, [H, E] with edges by target; None keeps all.

    Example:
        >>> Settings(negative_slope=0.2).keep is None
        True
    """

    negative_slope: float = 1.0
    keep_scale: float = 1.0
    keep: Tensor | None = None
