"""Draw structures with hypothesis and judge each: the same seed draws the same structures."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings, target

from tests.hunt import attentions, graphs, layers, models  # noqa: F401  (they register kinds)
from tests.hunt.cases import KINDS, Case, cases
from tests.hunt.judge import judge


def hunt(name: str, number: int, start: int = 0, **effort: int) -> Iterator[dict[str, Any]]:
    """Yield the verdicts on `number` structures of a kind.

    Hypothesis draws them and, told the ratio that each reached, mutates those that came closest to
    their bound.

    Args:
        name: Name of the kind.
        number: Number of structures.
        start: Seed.
        **effort: Passed on to `judge`.
    """
    found: list[dict[str, Any]] = []

    @seed(start)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.target],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(cases(name))
    def attack(case: Case) -> None:
        verdict = judge(case, **effort)
        found.append(verdict)
        if verdict["outcome"] == "holds" and not verdict.get("exact"):
            target(verdict["ratio"], label="ratio")

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attack()
    yield from found


def kinds() -> list[str]:
    """Return the names of all kinds."""
    return list(KINDS)
