"""Certificates: how far an input may move without changing its predicted class.

There are two statements. *Real* is about the mathematics: the class of the exact network does not
change. *Executed* is about the program: the class that the network computes in float32, or in
float64, does not change. Both follow from the bound, which is rounded outward, and from logits with
a known error.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipsformer.analysis.bounds import Bound
from lipsformer.analysis.bounds.rounding import OUTWARD, norm_bound, outward, power_of_ten

# The unit roundoff of float64 is 2^-29 times that of float32, and its functions are at least as
# exact in units of the last place.
FLOAT64_SHARE = 2.0**-28


def difference_bounds(bound: Bound, num_logits: int) -> Tensor:
    r"""Bound the Lipschitz constants of the differences of two logits.

    If the network ends in a linear layer with the rows :math:`w_i`, behind a network with the
    constant :math:`L_h`, then :math:`z_i - z_j` has the constant :math:`L_h |w_i - w_j|`. In any
    other network with the constant L it has :math:`\sqrt 2 L`.

    Args:
        bound: Bound of the map from inputs to logits.
        num_logits: K.

    Returns:
        [K, K], float64.

    Raises:
        ValueError: If the network has another number of logits.
    """
    if bound.last is None:
        largest = outward(math.sqrt(2.0) * bound.value)
        return torch.full((num_logits, num_logits), largest, dtype=torch.float64)
    log10, weight = bound.last
    if len(weight) != num_logits:
        raise ValueError(f"the bound is of {len(weight)} logits, and the inputs have {num_logits}")
    if log10 == -math.inf:  # all logits are constant
        return torch.zeros(num_logits, num_logits, dtype=torch.float64)
    before = power_of_ten(bound.log10 - log10 + 2.0**-50 * (abs(bound.log10) + abs(log10)))
    rows = weight.detach().double().cpu()
    distances = torch.stack([norm_bound(row - rows, dim=1) for row in rows])
    return distances * before * OUTWARD


def certified_radius(
    logits: Tensor,
    bound: Bound,
    logit_error: float = 0.0,
    outputs: Sequence[int] | None = None,
) -> Tensor:
    r"""Return a distance, in the 2-norm, within which the predicted class cannot change.

    .. math:: \min_j (z_i - z_j - \sqrt 2 e) / L_{ij}, \text{ rounded down}

    Here i is the predicted class, and :math:`L_{ij}` are the constants of `difference_bounds`. The
    certificate holds for inputs within the domain of the bound.

    Args:
        logits: [B, classes].
        bound: Bound of the map from inputs to logits.
        logit_error: Allowance e for the rounding of logits, as a 2-norm: `real_error` or
            `executed_error`. 0 takes the logits as exact.
        outputs: Which of the network's logits the classes are; None for all.

    Returns:
        The distances, [B]; 0 for a tie.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> identity = lipschitz_bound(torch.nn.Identity(), Domain(size=()))
        >>> certified_radius(torch.tensor([[3.0, 1.0]]), identity)
        tensor([1.4142], dtype=torch.float64)
    """
    logits = logits.detach().double().cpu()
    total = logits.shape[1] if outputs is None or bound.last is None else len(bound.last[1])
    constants = difference_bounds(bound, total)
    if outputs is not None and bound.last is not None:
        constants = constants[list(outputs)][:, list(outputs)]
    best = logits.argmax(1, keepdim=True)
    margins = logits.gather(1, best) - logits - outward(math.sqrt(2.0) * logit_error)
    # A distance that no other class can reach is infinite: 0 / 0 is a tie of two constant logits.
    radii = (margins.clamp_min(0.0) / constants[best.squeeze(1)] / OUTWARD).nan_to_num(
        0.0, math.inf
    )
    return radii.scatter(1, best, math.inf).amin(1)


def real_error(bound: Bound) -> float:
    """Return the allowance of the real statement, for logits that were computed in float64.

    Args:
        bound: Bound of the network on a domain whose `error` is known, such as `image_domain`.
    """
    return outward(FLOAT64_SHARE * bound.output.error)


def executed_error(bound: Bound, dtype: torch.dtype = torch.float32) -> float:
    """Return the allowance of the executed statement, for logits that were computed in float64.

    The logits of the other images within the distance are computed by the program. In float32 each
    such image has logits within `bound.output.error` of the exact ones, and in float64 within
    `real_error`.

    Args:
        bound: Bound of the network on a domain whose `error` is known, such as `image_domain`.
        dtype: Data type of the program, float32 or float64.
    """
    program = real_error(bound) if dtype == torch.float64 else bound.output.error
    return outward(program + real_error(bound))
