"""Certificates: how far an input may move without changing its predicted class."""

import math

from torch import Tensor

from lipsformer.analysis.bounds import Bound


def certified_radius(logits: Tensor, bound: Bound) -> Tensor:
    r"""Return a distance, in the 2-norm, within which the predicted class cannot change.

    .. math:: (z_1 - z_2) / (\sqrt 2 L)

    Here :math:`z_1 \ge z_2` are the two largest logits and L is the bound. The difference of two
    logits has the Lipschitz constant :math:`\sqrt 2 L`. The certificate holds for inputs within
    the domain of the bound.

    Args:
        logits: [B, classes].
        bound: Bound of the map from inputs to logits.

    Returns:
        The distances, [B]; 0 for a tie.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> identity = lipschitz_bound(torch.nn.Identity(), Domain(size=()))
        >>> certified_radius(torch.tensor([[3.0, 1.0]]), identity)
        tensor([1.4142], dtype=torch.float64)
    """
    best = logits.detach().double().topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]) / math.sqrt(2.0) * 10.0**-bound.log10
