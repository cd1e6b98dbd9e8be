# ruff: noqa: T201  (the slack of every bound is printed; see it with -s)
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer.analysis.conv_norms import conv_sigma_bound, depthwise_operator
from lipsformer.analysis.sigma import krylov_sigma_estimate
from lipsformer.layers import largest_singular_value, orthogonalize
from lipsformer.layers.spectral import clip_singular_values


def dense_operator(weight: Tensor, size, stride=1, padding=0, groups=1) -> Tensor:
    """The matrix of a convolution on maps of one size."""
    channels = weight.shape[1] * groups
    basis = torch.eye(channels * size[0] * size[1], dtype=weight.dtype)
    basis = basis.reshape(-1, channels, *size)
    return F.conv2d(basis, weight, stride=stride, padding=padding, groups=groups).flatten(1).T


@pytest.mark.parametrize(
    ("out", "channels", "kernel", "stride", "padding", "groups", "size"),
    [
        (5, 3, (3, 3), (1, 1), 1, 1, (7, 11)),
        (2, 7, (5, 3), (1, 1), 2, 1, (11, 5)),
        (3, 2, (7, 7), (4, 4), 2, 1, (13, 17)),
        (4, 3, (3, 2), (2, 3), 1, 1, (11, 7)),
        (6, 4, (3, 3), (2, 2), 1, 2, (7, 13)),
        (5, 5, (7, 7), (1, 1), 3, 5, (13, 11)),
    ],
)
def test_bound_holds_for_the_dense_operator_on_every_map(
    out, channels, kernel, stride, padding, groups, size
):
    weight = torch.randn(out, channels // groups, *kernel, dtype=torch.float64)
    bound = conv_sigma_bound(weight, stride, groups)
    per_group = weight.chunk(groups)
    for group, own in zip(bound, per_group, strict=True):
        exact = torch.linalg.svdvals(dense_operator(own, size, stride, padding))[0]
        print(f"kernel {kernel} stride {stride}: bound / exact = {group / exact:.3f}")
        assert exact <= group
        assert group <= 2.0 * exact


@pytest.mark.parametrize("patch", [1, 2, 5])
def test_stride_equal_to_the_kernel_is_exact(patch):
    weight = torch.randn(7, 3, patch, patch, dtype=torch.float64)
    exact = torch.linalg.svdvals(dense_operator(weight, (2 * patch, 3 * patch), patch))[0]
    torch.testing.assert_close(conv_sigma_bound(weight, (patch, patch))[0], exact)


def test_bound_is_close_to_the_supremum_over_all_frequencies():
    weight = torch.randn(5, 1, 7, 7, dtype=torch.float64)
    fine = torch.fft.fft2(weight, s=(1024, 1024)).abs().flatten(1).amax(1)
    for oversampling, slack in ((8, 1.04), (16, 1.01)):
        bound = conv_sigma_bound(weight, groups=5, oversampling=oversampling)
        assert (fine <= bound).all()
        assert (bound <= slack * fine).all()


def test_grid_correction_covers_a_peak_between_the_grid_points():
    # |1 - z^2| has its peak at frequency 1/4 of a turn, which a grid of 10 points misses
    weight = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64).reshape(1, 1, 1, 3)
    grid = torch.fft.fft(weight, n=30).abs().amax()
    assert grid < 2.0 - 1e-3
    assert conv_sigma_bound(weight, oversampling=10) >= 2.0


@pytest.mark.parametrize("size", [(1, 1), (2, 7), (5, 3)])
def test_depthwise_operator_has_the_singular_values_of_the_dense_operator(size):
    weight = torch.randn(3, 1, 7, 7, dtype=torch.float64)
    for channel, operator in zip(weight, depthwise_operator(weight, size), strict=True):
        exact = torch.linalg.svdvals(dense_operator(channel[None], size, padding=3))
        torch.testing.assert_close(torch.linalg.svdvals(operator), exact)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (largest_singular_value, (17, 31)),
        (lambda weight: clip_singular_values(weight, 2.0), (17, 31)),
        (lambda weight: orthogonalize(weight / 10.0), (17, 31)),
        (lambda weight: krylov_sigma_estimate(weight[None], weight[:1], 16)[0], (17, 31)),
        (conv_sigma_bound, (5, 7, 1, 1)),
        (lambda weight: depthwise_operator(weight, (3, 5)), (5, 1, 3, 3)),
    ],
)
def test_autocast_takes_no_precision_away(function, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16):
        found = function(weight)
    torch.testing.assert_close(found.double(), function(weight.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_squares_of_tiny_and_huge_weights_neither_vanish_nor_overflow(scale):
    torch.manual_seed(0)
    weight, start = scale * torch.randn(11, 7), torch.randn(1, 7)
    exact = torch.linalg.svdvals(weight.double())[0]
    cap = 0.5 * exact.item()
    for found, expected in (
        (largest_singular_value(weight), exact),
        (krylov_sigma_estimate(weight[None], start, 7)[0][0], exact),
        (torch.linalg.svdvals(clip_singular_values(weight, cap).double())[0], 0.5 * exact),
        (conv_sigma_bound(weight[..., None, None])[0], exact),
    ):
        assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=0)
