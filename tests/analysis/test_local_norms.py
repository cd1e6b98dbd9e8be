"""Bounds of the norms of matrices and Jacobians are never below the norms."""

import math

import pytest
import torch
from torch import Tensor

from lipsformer.analysis import local_norms
from lipsformer.analysis.local_norms import (
    gram_sigma_bound,
    jacobian_sigma_bound,
    largest_sigma_bound,
    missed_share,
    probed_sigma_bound,
)


def test_norms_are_bounded_from_above(monkeypatch):
    torch.manual_seed(0)
    flat = torch.linalg.qr(torch.randn(11, 11, dtype=torch.float64)).Q
    for matrices in (torch.randn(7, 5, 13, dtype=torch.float64), flat[None], torch.zeros(1, 3, 2)):
        exact = torch.linalg.matrix_norm(matrices.double(), 2)
        for limit in (64, 2):  # Gram iteration, and Cholesky
            monkeypatch.setattr(local_norms, "MAX_ITERATED", limit)
            found = gram_sigma_bound(matrices.double())
            assert (found >= exact * (1 - 1e-12)).all() and (found <= 1.04 * exact + 1e-9).all()


def test_a_norm_that_power_iteration_misses_is_found():
    """The start of the iteration is orthogonal to the direction of the largest eigenvalue."""
    size = local_norms.MAX_ITERATED + 3
    hidden = torch.zeros(size, dtype=torch.float64)
    hidden[:2] = torch.tensor([1.0, -1.0])
    matrix = torch.eye(size, dtype=torch.float64) + torch.outer(hidden, hidden)
    assert 3.0 <= gram_sigma_bound(matrix).item() <= 3.04  # all other singular values are 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_has_no_finite_norm(value):
    for size in (5, local_norms.MAX_ITERATED + 3):
        matrices = torch.eye(size, dtype=torch.float64).repeat(2, 1, 1)
        matrices[0, 1, 2] = value
        found = gram_sigma_bound(matrices)
        assert not found[0].isfinite() and 1.0 <= found[1] <= 1.04


def test_the_largest_norm_needs_few_channels():
    """It is that of all channels, whichever of them the first bounds let pass."""
    torch.manual_seed(0)
    matrices = torch.randn(17, 11, 5, 7, dtype=torch.float64)
    all_norms, measured = gram_sigma_bound(matrices), []

    def channels(chosen: Tensor) -> Tensor:
        measured.append(chosen)
        return matrices[torch.arange(17), chosen]

    above = all_norms * (1.0 + 0.2 * torch.rand(17, 11, dtype=torch.float64))
    assert torch.equal(largest_sigma_bound(channels, above), all_norms.amax(1))
    assert len(measured) < 11


def test_probes_bound_jacobians_with_the_stated_probability(monkeypatch):
    """The bound fails as often as it may at the spectrum that is worst for it, and no more."""
    torch.manual_seed(0)
    size = 41
    for steps, least in ((1, 0.07), (3, 0.01)):
        monkeypatch.setattr(local_norms, "LANCZOS_STEPS", steps)
        share = missed_share(steps, size, 0.1)
        angles = (2 * torch.arange(size - 1) % (2 * steps) + 1) * math.pi / (4 * steps - 2)
        values = torch.cat((torch.ones(1), math.sqrt(1.0 - share) * angles.cos())).double()
        x = torch.zeros(4000, size, dtype=torch.float64)
        wrong = (probed_sigma_bound(lambda x, v=values: x * v, x, 0.1) < 1.0).double().mean()
        assert least < wrong < 0.12  # four standard deviations
    monkeypatch.undo()
    matrix = torch.randn(7, 5, dtype=torch.float64)
    found = probed_sigma_bound(lambda x: (x @ matrix.T).sin(), torch.zeros(1, 5).double(), 1e-9)
    exact = torch.linalg.matrix_norm(matrix, 2)
    torch.testing.assert_close(
        jacobian_sigma_bound(lambda x: (x @ matrix.T).sin(), 0 * x[:1, :1].expand(1, 5)),
        exact[None],
        rtol=0.04,
        atol=0.0,
    )
    assert exact < found < 1.3 * exact


def test_the_squares_of_tiny_entries_do_not_vanish():
    assert (
        2e-200
        <= gram_sigma_bound(torch.full((1, 2, 2), 1e-200, dtype=torch.float64)).item()
        < 2.1e-200
    )


@pytest.mark.parametrize("scale", [1e-25, 1e-22, 1e22])
def test_probes_of_tiny_and_huge_jacobians(scale):
    torch.manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(128, 128))
    values = torch.full((128,), 0.1)
    values[0] = 1.0
    matrix = (basis * values) @ basis.T * scale
    bound = probed_sigma_bound(lambda x: x @ matrix, torch.randn(3, 128), 1e-12)
    assert (bound >= scale).all()
    assert (bound <= 1.3 * scale).all()
