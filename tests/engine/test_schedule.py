"""The learning rate at the first, middle and last update, against values worked out by hand."""

import math

import pytest

from lipsformer.engine.schedule import CosineSchedule


@pytest.mark.parametrize(
    ("warmup", "update", "expected"),
    [
        (0, 0, 0.8),  # no warmup: the very first update has the peak
        (0, 2, 0.2 + 0.6 * (1 + math.sqrt(0.5)) / 2),  # a quarter of the way: cos 45 degrees
        (0, 4, 0.5),  # half-way
        (0, 7, 0.2 + 0.3 * (1 + math.cos(7 * math.pi / 8))),
        (0, 8, 0.2),
        (3, 0, 0.8 / 3),
        (3, 1, 1.6 / 3),
        (3, 2, 0.8),
        (3, 3, 0.8),
        (3, 8, 0.2),
    ],
)
def test_the_rate_falls_along_a_cosine_after_an_even_warmup(
    warmup: int, update: int, expected: float
) -> None:
    schedule = CosineSchedule(peak=0.8, final=0.2, total_steps=8, warmup_steps=warmup)
    assert schedule(update) == pytest.approx(expected, rel=1e-12)
