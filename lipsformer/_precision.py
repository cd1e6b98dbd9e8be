"""Computations on weights that keep their precision under autocast and at every scale."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(
    function: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[Tensor, P], R]:
    """Switch autocast off in a function, on the device of its first argument."""

    @functools.wraps(function)
    def in_full_precision(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        if x.is_meta:  # autocast does not know this device
            return function(x, *args, **kwargs)
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args, **kwargs)

    return in_full_precision


def finite_or_zero(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Replace square matrices that are not finite by 0, for which LAPACK does not raise.

    Args:
        gram: [..., n, n].

    Returns:
        The matrices, and which of them were finite, [...].
    """
    finite = gram.isfinite().all(-1).all(-1)
    return torch.where(finite[..., None, None], gram, 0.0), finite


def power_of_two(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the power of two below the largest absolute value over dimensions, which are kept.

    Dividing by it is exact, and neither squares nor their sums under- or overflow then. It is 1 if
    all values are 0 or one is not finite.
    """
    largest = x.abs().amax(dim, keepdim=True)
    largest = torch.where((largest > 0.0) & largest.isfinite(), largest, 1.0)
    return largest / (2.0 * torch.frexp(largest).mantissa)
