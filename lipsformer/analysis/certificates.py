"""Certificates: how far an input may move without changing its class."""

import math

from torch import Tensor

from lipsformer.analysis.bounds import Bound


def certified_radius(logits: Tensor, bound: Bound) -> Tensor:
    r"""Return how far an input may move, in the 2-norm, without changing its class.

    .. math:: (z_1 - z_2) / (\sqrt 2 L)

    with z the sorted logits: a difference of two logits has the constant :math:`\sqrt 2 L`. Valid
    for moves that stay within the domain of the bound.

    Args:
        logits: [B, classes].
        bound: Of the map from inputs to logits.

    Returns:
        [B], 0 for a tie.
    """
    best = logits.detach().double().topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]) / math.sqrt(2.0) * 10.0**-bound.log10
