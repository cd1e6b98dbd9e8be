"""A histogram of certified distances, for `eval.py --certify`."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

BINS = 10
WIDTH = 40  # characters of the longest bar


def histogram(radii: Sequence[float]) -> dict[str, Any]:
    """Count distances in ten bins of equal width in log10, those that are 0, and infinite ones.

    Args:
        radii: Certified distances, >= 0.

    Returns:
        `zero`, `edges` (eleven distances, or none), `images` (ten counts, or none) and `infinite`.

    Example:
        >>> histogram([0.0, 1.0, 1.0, 100.0])["images"]
        [2, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    """
    logs = [math.log10(radius) for radius in radii if 0.0 < radius < math.inf]
    counts, edges = np.histogram(logs, bins=BINS) if logs else (np.array([]), np.array([]))
    return {
        "zero": sum(radius == 0.0 for radius in radii),
        "edges": (10.0**edges).tolist(),
        "images": counts.tolist(),
        "infinite": sum(radius == math.inf for radius in radii),
    }


def bars(counted: dict[str, Any]) -> list[str]:
    """Return a histogram as lines of text."""
    edges = counted["edges"]
    names = [
        "0",
        *(f"{low:.2g} to {high:.2g}" for low, high in itertools.pairwise(edges)),
    ]
    counts = [counted["zero"], *counted["images"]]
    if counted["infinite"]:
        names.append("inf")
        counts.append(counted["infinite"])
    most, width = max(*counts, 1), max(map(len, names))
    return [
        f"{name:>{width}}  {count:6d}  {'#' * round(WIDTH * count / most)}".rstrip()
        for name, count in zip(names, counts, strict=True)
    ]
