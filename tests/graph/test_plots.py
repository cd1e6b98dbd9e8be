"""What the figures of graph studies show."""

import math
from pathlib import Path

import pytest

from lipsformer.graph import plots


@pytest.fixture
def figures(monkeypatch) -> list:
    """The figures that are drawn, in place of files."""
    drawn: list = []
    monkeypatch.setattr(plots, "_save", lambda figure, path, title: drawn.append(figure))
    return drawn


def test_only_a_logarithmic_axis_leaves_out_a_zero(figures):
    records = [{"epoch": 0, "test_acc": 0.0, "loss": 2.0}, {"epoch": 1, "test_acc": 0.5, "loss": 0}]
    plots.plot_epochs({"run": records}, ["test_acc", "loss"], Path("unused.png"))
    accuracy, loss = (axis.lines[0].get_ydata() for axis in figures[0].axes)
    assert list(accuracy) == [0.0, 0.5]
    assert loss[0] == 2.0 and math.isnan(loss[1])
