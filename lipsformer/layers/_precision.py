"""Computations on weights that keep their precision in a region of autocast."""

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
