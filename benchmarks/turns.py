"""Measure candidates in turns, so that a busy machine slows all of them alike, and compare them."""

import random
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Measured = TypeVar("Measured")
SPEED = "{speed_ratio:.2f} ({speed_ratio_min:.2f} to {speed_ratio_max:.2f})"  # cell of a table


def take_turns(
    names: Iterable[Name], measure: Callable[[Name], Measured], *, rounds: int, warmup: int
) -> dict[Name, list[Measured]]:
    """Measure every candidate once in every round, in a random order.

    Args:
        names: Names of the candidates.
        measure: Returns the measurement of a candidate.
        rounds: Number of rounds that count.
        warmup: Number of rounds before them.

    Returns:
        The measurements of the rounds that count, by name.
    """
    found: dict[Name, list[Measured]] = {name: [] for name in names}
    for index in range(warmup + rounds):
        for name in random.sample(list(found), len(found)):
            own = measure(name)
            if index >= warmup:
                found[name].append(own)
    return found


def compare(
    seconds: Mapping[Name, Sequence[float]], memory: Mapping[Name, int], base: Name | None = None
) -> dict[Name, dict[str, float]]:
    """Compare speed and memory of candidates with those of one of them.

    Args:
        seconds: Duration of a step in every round, by name.
        memory: Peak memory in bytes, by name.
        base: The candidate that the others are compared with; None for the first one.

    Returns:
        By name, the median, least and largest ratio of the speeds in a round, the peak memory and
        the ratio of the peaks.
    """
    if base is None:
        base = next(iter(seconds))
    compared = {}
    for name, own in seconds.items():
        ratios = [b / s for b, s in zip(seconds[base], own, strict=True)]
        compared[name] = {
            "speed_ratio": statistics.median(ratios),
            "speed_ratio_min": min(ratios),
            "speed_ratio_max": max(ratios),
            "peak_mb": memory[name] / 2**20,
            "memory_ratio": memory[name] / memory[base],
        }
    return compared
