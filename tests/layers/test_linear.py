import pytest
import torch

from lipsformer.kernels import linear
from lipsformer.layers import Linear


@pytest.fixture(params=["our own", "MKL", "oneDNN"], autouse=True)
def products(request, monkeypatch):
    """The library of the products in float32, which otherwise depends on the processor."""
    if request.param == "our own":
        request.getfixturevalue("compiled_kernels")
    if request.param == "MKL" and not torch.backends.mkl.is_available():
        pytest.skip("this PyTorch was built without MKL")
    monkeypatch.setattr(linear, "_MKL", request.param == "MKL")
    monkeypatch.setattr(linear, "USE_OWN", request.param == "our own")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 11, 7), (1, 1, 1, 7), (13, 7)])
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.usefixtures("path")
def test_values_and_gradients_equal_float64(shape, bias, mode):
    torch.manual_seed(0)
    layer = Linear(7, 17, bias=bias).train(mode == "train")
    x = torch.randn(shape, requires_grad=True)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, layer.weight))
    bias64 = layer.bias.detach().double().requires_grad_() if bias else None
    expected = x64 @ weight64.T + (bias64 if bias else 0.0)
    with torch.inference_mode(mode == "inference"):
        actual = layer(x)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    if mode == "inference":
        return
    upstream = torch.randn_like(actual)
    actual.backward(upstream)
    expected.backward(upstream.double())
    pairs = [(x.grad, x64.grad), (layer.weight.grad, weight64.grad)]
    if bias64 is not None:
        pairs.append((layer.bias.grad, bias64.grad))
    for gradient, reference in pairs:
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-5)


@pytest.fixture(params=["whole", "in blocks"])
def blocks(request, monkeypatch):
    """Maps of 29 tokens are computed whole, or in blocks of 5 tokens and a last one of 4."""
    if request.param == "in blocks":
        monkeypatch.setattr(linear, "_LARGEST_REUSED", 29 * 7 * 4 - 1)
        monkeypatch.setattr(linear, "_BLOCK", 5 * 7 * 4)


@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "scale", "weight and scale"])
@pytest.mark.usefixtures("blocks")
def test_frozen_parts_get_no_gradient_and_leave_the_others_alone(frozen, gelu):
    torch.manual_seed(0)
    layer = Linear(7, 17).train()
    x, scale = torch.randn(1, 29, 7), torch.randn(17)
    upstream = torch.randn(1, 29, 17)
    tensors = {"weight": layer.weight, "bias": layer.bias, "input": x, "scale": scale}
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name not in frozen.split(" and "))
    layer(x, act_before=gelu, output_scale=scale).backward(upstream)
    hidden = torch.nn.functional.gelu(exact["input"]) if gelu else exact["input"]
    output = (hidden @ exact["weight"].T + exact["bias"]) * exact["scale"]
    output.backward(upstream.double())
    for name in frozen.split(" and "):
        assert tensors.pop(name).grad is None
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad.double(), exact[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.usefixtures("path", "blocks")
def test_gradients_are_exact_even_if_the_output_is_changed_in_place(gelu):
    torch.manual_seed(0)
    layer = Linear(7, 17).train()
    x, upstream = torch.randn(1, 29, 7, requires_grad=True), torch.randn(1, 29, 17)
    layer(x, act_before=gelu).square_().backward(upstream)
    inputs = (x, layer.weight, layer.bias)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    hidden = 0.5 * exact[0] * (1 + torch.erf(exact[0] / 2**0.5)) if gelu else exact[0]
    (hidden @ exact[1].T + exact[2]).square().backward(upstream.double())
    for tensor, reference in zip(inputs, exact, strict=True):
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=1e-4, atol=1e-4)


def test_an_input_that_is_not_contiguous_is_read_in_its_order():
    torch.manual_seed(0)
    layer = Linear(7, 17).train()
    x = torch.randn(2, 7, 5, 3).permute(0, 2, 3, 1)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_keep_their_type(dtype):
    layer = Linear(7, 17, dtype=dtype).train()
    x = torch.ones(2, 3, 7, dtype=dtype)
    out = layer(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.parametrize("tokens", [3, 29])
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.usefixtures("path", "blocks")
def test_scale_equals_float64_in_value_and_gradient(bias, gelu, tokens, mode):
    """With fewer tokens than channels and with more."""
    torch.manual_seed(0)
    layer = Linear(7, 17, bias=bias).train(mode == "train")
    x = torch.randn(1, tokens, 7, requires_grad=True)
    scale = torch.randn(17, requires_grad=True)
    inputs = [x, scale, *layer.parameters()]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    hidden = 0.5 * exact[0] * (1 + torch.erf(exact[0] / 2**0.5)) if gelu else exact[0]
    expected = (hidden @ exact[2].T + (exact[3] if bias else 0.0)) * exact[1]
    with torch.inference_mode(mode == "inference"):
        actual = layer(x, act_before=gelu, output_scale=scale)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    if mode == "inference":
        return
    upstream = torch.randn_like(actual)
    actual.backward(upstream)
    expected.backward(upstream.double())
    for tensor, reference in zip(inputs, exact, strict=True):
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 29])
def test_gradient_of_the_gradient_equals_float64_in_training(tokens):
    """With fewer tokens than channels and with more."""
    torch.manual_seed(0)
    layer = Linear(7, 17).train()
    inputs = [torch.randn(1, tokens, 7), torch.randn(17), layer.weight]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    upstream = torch.randn(1, tokens, 17)
    results = []
    for x, scale, weight in (inputs, exact):
        x.requires_grad_(), scale.requires_grad_()
        bias = layer.bias.to(x.dtype)
        output = (
            layer(x, output_scale=scale)
            if weight is layer.weight
            else (x @ weight.T + bias) * scale
        )
        first = torch.autograd.grad(
            output, (x, scale, weight), upstream.to(x.dtype), create_graph=True
        )
        penalty = sum(gradient.square().sum() for gradient in first)
        results.append(torch.autograd.grad(penalty, (x, scale, weight)))
    for gradient, reference in zip(*results, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-3)


def test_the_gradient_of_a_large_input_that_is_not_contiguous_is_written():
    """Above 32 MB the product runs block by block."""
    torch.manual_seed(0)
    layer = Linear(64, 5)
    x = torch.randn(2, 64, 70_001).transpose(1, 2).requires_grad_()
    up = torch.randn(2, 70_001, 5)
    (actual,) = torch.autograd.grad(layer(x, act_before=True), x, up)
    copy = x.detach().contiguous().requires_grad_()
    product = torch.nn.functional.linear(torch.nn.functional.gelu(copy), layer.weight, layer.bias)
    (expected,) = torch.autograd.grad(product, copy, up)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
