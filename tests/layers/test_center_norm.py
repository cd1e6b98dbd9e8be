import pytest
import torch

from lipsformer.layers import CenterNorm
from tests.oracles import center_norm_matrix


def test_center_norm_equals_its_matrix():
    torch.manual_seed(0)
    norm = CenterNorm(11).double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    expected = torch.einsum("bhwj,ij->bhwi", x, center_norm_matrix(norm.weight)) + norm.bias
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("dim", [2, 3, 7, 96])
def test_center_norm_constant_is_d_over_d_minus_1_at_initialization(dim):
    norm = CenterNorm(dim).double()
    sigma = torch.linalg.matrix_norm(norm(torch.eye(dim, dtype=torch.float64)), 2)
    assert sigma.item() == pytest.approx(dim / (dim - 1), rel=1e-12)


def test_training_gradients_equal_the_matrix_for_any_gain_and_bias():
    """Some gains are 0, or too small for the bias to recover the input from the output."""
    torch.manual_seed(0)
    norm = CenterNorm(11).train()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1, -2, 0, 1e-3, 1e-30, 0, 3, 1e-5, 0.5, 1, -0.1]))
        norm.bias.copy_(torch.tensor([0, 3, 0, 5, 1, -7, 90, 0, -2, 63, 0.4]))
    x = torch.randn(2, 3, 5, 11, requires_grad=True)
    inputs = [x, norm.weight, norm.bias]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    centered = exact[0] - exact[0].mean(-1, keepdim=True)
    expected = centered * (11 / 10) * exact[1] + exact[2]
    actual = norm(x)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(actual)
    actual.backward(upstream)
    expected.backward(upstream.double())
    for tensor, reference in zip(inputs, exact, strict=True):
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=1e-4, atol=1e-4)


def test_center_norm_refuses_one_channel():
    with pytest.raises(ValueError, match=r"dim >= 2.*dim=1"):
        CenterNorm(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_another_type_than_the_input(dtype, compiled_kernels):
    torch.manual_seed(0)
    norm = CenterNorm(13).to(dtype).train()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-1, 1)
    x, grad = torch.randn(3, 5, 13, requires_grad=True), torch.randn(3, 5, 13)
    y = norm(x)
    parameters = (x, norm.weight, norm.bias)
    own = torch.autograd.grad(y, parameters, grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in parameters]
    centered = exact[0] - exact[0].mean(-1, keepdim=True)
    expected = 13 / 12 * exact[1] * centered + exact[2]
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(own, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        rtol = 1e-5 if ours.dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=1e-4)


def test_another_number_of_channels_is_refused(path):
    with pytest.raises(ValueError, match=r"x has 1 channels, but CenterNorm\(4\) takes 4, in the"):
        CenterNorm(4)(torch.randn(3, 1))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_one_number_for_all_channels(name, path):
    torch.manual_seed(0)
    norm, x = CenterNorm(11).train(), torch.randn(2, 3, 11, requires_grad=True)
    setattr(norm, name, torch.nn.Parameter(torch.rand(1)))
    inputs = [x, norm.weight, norm.bias]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    centered = exact[0] - exact[0].mean(-1, keepdim=True)
    expected = 11 / 10 * exact[1] * centered + exact[2]
    y, upstream = norm(x), torch.randn(2, 3, 11)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    own = torch.autograd.grad(y, inputs, upstream)
    truth = torch.autograd.grad(expected, exact, upstream.double())
    for ours, theirs in zip(own, truth, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [1e2, 1e4, 1e6])
def test_the_gradient_of_the_gain_survives_a_large_bias(offset, path):
    torch.manual_seed(0)
    norm = CenterNorm(11).train()
    torch.nn.init.constant_(norm.bias, offset)
    x, upstream = torch.randn(2, 131, 11).unbind(0)
    norm(x).backward(upstream)
    centered = (x - x.mean(-1, keepdim=True)).double() * 11 / 10
    expected = (centered * upstream.double()).sum(0)
    torch.testing.assert_close(norm.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_in_float32_keeps_the_type_of_a_half_precision_model(dtype, training):
    """As in a model in half precision whose norms stay in float32; no autocast casts there."""
    torch.manual_seed(0)
    norm = CenterNorm(11).train(training)
    x = torch.randn(2, 3, 11, dtype=dtype)
    y = norm(x)
    assert y.dtype == dtype
    expected = x.double() @ center_norm_matrix(norm.weight.double()).T
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=2e-2)
    assert norm.to("meta")(x.to("meta")).dtype == dtype
