"""Checks of the numbers that layers are built with. NaN is out of every range."""

import math
from collections.abc import Sequence


def check_positive(name: str, value: float) -> None:
    """Raise a `ValueError` that names the setting unless its value is positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be > 0 and finite")


def check_fraction(name: str, fraction: float) -> None:
    """Raise a `ValueError` that names the setting unless a share or probability is in [0, 1]."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"{name}={fraction} must be in [0, 1]")


def check_drop_path(name: str, rate: float) -> None:
    """Raise a `ValueError` that names the setting unless a drop path rate is in [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"{name}={rate} must be in [0, 1)")


def check_count(name: str, count: int) -> None:
    """Raise a `ValueError` that names the setting unless its value is at least 1."""
    if count < 1:
        raise ValueError(f"{name}={count} must be at least 1")


def check_depths(depths: Sequence[int]) -> None:
    """Raise a `ValueError` unless stages have at least 0 blocks each and 1 in all."""
    if any(depth < 0 for depth in depths):
        raise ValueError(f"depths={depths} must be at least 0 in every stage")
    check_count("sum(depths)", sum(depths))
