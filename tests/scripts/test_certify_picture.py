"""What is proved about one picture, on a classifier whose distances are known in closed form."""

import itertools
import math

import numpy as np
import pytest
import torch
from timm.layers import SelectAdaptivePool2d
from torch import nn

from lipsformer.config import DataConfig
from scripts._certify_picture import DISTANCES, certify_picture
from scripts._histogram import bars, histogram
from scripts.reporting.certificates import sentences, shares_figure

STD = 0.25


def linear_model() -> nn.Module:
    """One patch and orthonormal rows, so that the distances to all borders are gaps / sqrt(2)."""
    torch.manual_seed(0)
    patch = nn.Conv2d(3, 7, 5, stride=5)
    nn.init.orthogonal_(patch.weight)
    pool = SelectAdaptivePool2d(pool_type="avg", flatten=True)
    return nn.Sequential(patch, pool).requires_grad_(False)


def test_distances_of_a_linear_classifier_are_those_to_its_nearest_border():
    model, data = (
        linear_model(),
        DataConfig(source="folder", img_size=5, mean=(0.5,) * 3, std=(STD,) * 3),
    )
    pixels = torch.randint(96, 160, (3, 5, 5), generator=torch.Generator().manual_seed(1))
    found = certify_picture(model, pixels, data)
    weight = model[0].weight.double().flatten(1)
    logits = model.double()(((pixels.double() / 255 - 0.5) / STD)[None])[0]
    first = int(logits.argmax())
    others = [j for j in range(7) if j != first]
    gaps = torch.stack([logits[first] - logits[j] for j in others])
    borders = gaps / torch.stack([(weight[first] - weight[j]).norm() for j in others]) * STD
    assert found.margin == pytest.approx(gaps.min().item())
    assert found.everywhere == pytest.approx(borders.min().item(), rel=1e-6)
    assert found.everywhere <= borders.min().item()
    assert found.around is None  # local proofs are of LipsFormers
    # The attack searches within powers of the root of two, and may head for another class.
    assert borders.min() <= found.attacked <= 1.5 * borders.max()
    for distance, margin in zip(DISTANCES, found.found, strict=True):
        assert margin >= (gaps - gaps / borders * distance).min().item() - 1e-4
    assert f"no change shorter than {found.everywhere:.2g} changes" in sentences(found)


def test_a_histogram_counts_every_distance_once():
    radii = [0.0, 0.0, 1e-3, 2e-3, 0.1, 0.1, 1.0, 10.0, math.inf]
    counted = histogram(radii)
    edges = counted["edges"]
    assert counted["zero"] == 2 and math.isclose(edges[0], 1e-3) and math.isclose(edges[-1], 10.0)
    inside = [sum(low <= r < high for r in radii) for low, high in itertools.pairwise(edges)]
    inside[-1] += 1  # the largest
    assert counted["images"] == inside
    lines = bars(counted)
    assert [int(line.split()[-2]) for line in lines if "#" in line] == [
        n for n in [2, *inside, 1] if n
    ]
    assert histogram([0.0, math.inf])["infinite"] == histogram([0.0, math.inf])["zero"] == 1


def test_half_of_all_images_have_the_median_that_the_text_states():
    radii, right = [0.1, 0.2, 0.3, 0.4, 0.5], np.array([True, True, False, True, True])
    drawing = shares_figure("run", radii, right)
    assert drawing.text.endswith("have at least 0.2.")  # 0, 0.1, 0.2, 0.4, 0.5
    (line,) = drawing.figure.axes[0].lines
    assert np.allclose(10.0 ** line.get_xdata(), [0.1, 0.2, 0.4, 0.5])
    assert list(line.get_ydata()) == [80.0, 60.0, 40.0, 20.0]
