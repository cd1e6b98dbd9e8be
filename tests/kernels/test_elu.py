"""ELU against its closed form in float64, with the compiled kernel and with PyTorch's operator."""

import pytest
import torch

from lipsformer import kernels
from lipsformer.graph.elu import ELU

ENDS = [0.0, -0.0, float("inf"), -float("inf"), 3e38, -3e38, 1e-45, -1e-45]


def exact(x, order=0):
    """ELU of float64, or its first or second derivative."""
    negative = torch.expm1(x) if order == 0 else torch.exp(x)
    positive = (x, torch.ones_like(x), torch.zeros_like(x))[order]
    return torch.where(x > 0, positive, negative)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elu_equals_its_closed_form_in_relative_error_for_all_sizes_of_numbers(path, dtype):
    sizes = torch.logspace(-37, 3, 40_009)  # ten blocks of one thread, with a rest
    x = torch.cat([sizes, -sizes, torch.tensor(ENDS)]).to(dtype)
    out = ELU()(x)
    assert out.dtype == dtype
    rtol = {torch.float32: 4e-7, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(out.double(), exact(x.double()), rtol=rtol, atol=1e-44)
    assert ELU()(torch.full((3,), float("nan"), dtype=dtype)).isnan().all()


def test_first_and_second_derivatives_of_elu_equal_their_closed_forms(path):
    torch.manual_seed(0)
    x = torch.randn(101, 67).mul_(4).requires_grad_()
    grad, weight = torch.randn(2, 101, 67)
    layer = ELU().eval()  # whose kernel may be differentiated again
    (first,) = torch.autograd.grad(layer(x), x, grad, create_graph=True)
    torch.testing.assert_close(first.double(), grad * exact(x.double(), 1), rtol=1e-6, atol=1e-6)
    (second,) = torch.autograd.grad(first, x, weight)
    expected = weight * grad * exact(x.double(), 2)
    torch.testing.assert_close(second.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings", [{"alpha": 0.7}, {"inplace": True}])
def test_elu_with_other_settings_is_that_of_pytorch(settings):
    x = torch.randn(13, 17)
    own, expected = x.clone(), x.clone()
    assert torch.equal(ELU(**settings)(own), torch.nn.ELU(**settings)(expected))
    assert torch.equal(own, expected)


def test_forward_mode_and_double_precision_keep_pytorchs_elu():
    x = torch.randn(13, 17)
    assert torch.equal(ELU()(x.double()), torch.nn.functional.elu(x.double()))
    tangent = torch.func.jvp(ELU(), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent.double(), exact(x.double(), 1), rtol=1e-6, atol=1e-6)
    assert not kernels.usable("elu", x.T, training=True)  # not contiguous
    torch.testing.assert_close(ELU()(x.T), torch.nn.functional.elu(x).T)
