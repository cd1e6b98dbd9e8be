import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lipsformer.layers import (
    largest_singular_value,
    spectral_init_,
    spectral_init_modules_,
)
from lipsformer.layers.spectral import SpectralScale, clip_singular_values

SHAPES = [(7, 5), (5, 7), (11, 1, 7, 7), (13, 3, 4, 4), (384, 96)]


@pytest.mark.parametrize("shape", SHAPES)
def test_largest_singular_value_equals_the_decomposition(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    expected = torch.linalg.svdvals(weight.double().flatten(1))[0].float()
    torch.testing.assert_close(largest_singular_value(weight), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_spectral_init_gives_norm_one(shape, dtype):
    torch.manual_seed(0)
    weight = spectral_init_(torch.empty(shape, dtype=dtype))
    sigma = torch.linalg.svdvals(weight.double().flatten(1))[0].item()
    assert sigma == pytest.approx(1.0, abs=1e-3)


def test_spectral_init_is_xavier_normal_up_to_scale():
    reference = torch.nn.init.xavier_normal_(
        torch.empty(5, 7), generator=torch.Generator().manual_seed(3)
    )
    weight = spectral_init_(torch.empty(5, 7), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(weight, reference / torch.linalg.svdvals(reference)[0])


def test_spectral_init_on_meta_keeps_the_tensor():
    weight = torch.empty(5, 7, device="meta")
    assert spectral_init_(weight) is weight


@pytest.mark.parametrize(
    "register",
    [
        parametrizations.weight_norm,
        torch.nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    ],
)
def test_weights_that_are_computed_from_others_are_refused_unchanged(register):
    """The values would be overwritten at the next call."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    register(model[1])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TypeError, match=r"the weight of 1 is computed by a parametrization"):
        spectral_init_modules_(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"at least 2 dimensions, got shape \(5,\)"):
        largest_singular_value(torch.ones(5))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_limits_that_are_not_positive_numbers_are_refused(value):
    with pytest.raises(ValueError, match=f"bound={value} must be > 0 and finite"):
        SpectralScale(value)
    with pytest.raises(ValueError, match=f"cap={value} must be > 0 and finite"):
        clip_singular_values(torch.eye(3), value)


@pytest.mark.parametrize("factor", [1e-30, 1e-13, 1.0, 1e20, 1e30])
@pytest.mark.parametrize("only_shrink", [False, True])
def test_scaling_reaches_the_bound_at_every_size_of_the_weight(factor, only_shrink):
    torch.manual_seed(0)
    weight = factor * torch.randn(7, 5)
    scaled = SpectralScale(0.5, only_shrink)(weight)
    sigma = torch.linalg.svdvals(weight.double() / factor)[0].item() * factor
    expected = weight.double() * (0.5 / max(sigma, 0.5) if only_shrink else 0.5 / sigma)
    torch.testing.assert_close(scaled.double(), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(("only_shrink", "factor"), [(False, 3.0), (True, 3.0), (True, 0.5)])
def test_gradients_of_the_scaling_equal_differences(only_shrink, factor):
    torch.manual_seed(3)
    weight = torch.randn(5, 7, dtype=torch.double)
    weight = (factor * weight / torch.linalg.matrix_norm(weight, 2)).requires_grad_()
    assert torch.autograd.gradcheck(SpectralScale(1.0, only_shrink), (weight,))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_weight_that_is_not_finite_stays_so(value):
    weight = torch.randn(7, 5)
    weight[2, 3] = value
    assert not torch.isfinite(SpectralScale(0.5)(weight)[2, 3])


@pytest.mark.parametrize("bound", [1e-2, 1e-4])
def test_weights_below_the_normal_numbers_of_half_precision_keep_the_bound(bound):
    weight = SpectralScale(bound)(torch.ones(1000, 1000, dtype=torch.float16))
    assert torch.linalg.matrix_norm(weight.double(), 2) <= bound
