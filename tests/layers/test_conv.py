import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipsformer.kernels import depthwise
from lipsformer.layers import DepthwiseConv2d
from tests.oracles import depthwise_conv

B, HEIGHT, WIDTH, C = 2, 5, 11, 3


def layer_and_reference(channels, kernel_size):
    torch.manual_seed(0)
    layer = DepthwiseConv2d(channels, kernel_size).train()
    reference = DepthwiseConv2d(channels, kernel_size).double().eval()
    reference.load_state_dict(layer.state_dict())
    return layer, reference


@pytest.mark.parametrize("kernel_size", [3, 5, 7])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("path")
def test_depthwise_conv_equals_the_loop(kernel_size, training):
    torch.manual_seed(0)
    layer = DepthwiseConv2d(C, kernel_size).train(training)
    x = torch.randn(B, HEIGHT, WIDTH, C)
    expected = torch.stack([depthwise_conv(image, layer.weight, layer.bias) for image in x])
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)


SHAPES = [  # one, two and more runs of columns, either side the longer, channels within and over 16
    *[(1, 1, 1, 5), (3, 2, 13, 37), (3, 13, 1, 5), (11, 5, 2, 37), (1, 11, 19, 16)],
    *[(1, 23, 11, 48), (2, 3, 43, 17), (3, 37, 2, 5)],
]


@pytest.mark.parametrize("kernel_size", [3, 7])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("path")
def test_values_and_gradients_equal_float64(kernel_size, shape):
    layer, reference = layer_and_reference(shape[-1], kernel_size)
    # neither the input nor the gradient of the output is contiguous
    x = torch.randn(shape[::-1]).permute(3, 2, 1, 0).requires_grad_()
    upstream = torch.randn(shape[::-1]).permute(3, 2, 1, 0)
    y = layer(x)
    y.backward(upstream)
    x64 = x.detach().double().requires_grad_()
    expected = reference(x64)
    expected.backward(upstream.double())
    with torch.no_grad():
        inferred = layer.eval()(x)
    for actual, wanted in [
        (y, expected),
        (inferred, expected),
        (x.grad, x64.grad),
        (layer.weight.grad, reference.weight.grad),
        (layer.bias.grad, reference.bias.grad),
    ]:
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel_size", [3, 7])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("compiled_kernels")
def test_gelu_and_residual_in_the_pass_of_the_convolution_equal_float64(shape, kernel_size, dtype):
    layer, reference = layer_and_reference(shape[-1], kernel_size)
    x, scale = torch.randn(shape[::-1]).permute(3, 2, 1, 0).to(dtype), torch.randn(shape[-1])
    activated = F.gelu(reference(x.double()))
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    for own, expected in [(None, activated), (scale, x.double() + scale * activated)]:
        y = depthwise.depthwise_gelu(x, layer.weight, layer.bias, own)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.usefixtures("path")
def test_second_derivatives_and_batches_of_gradients_equal_float64():
    layer, reference = layer_and_reference(C, 7)
    x = torch.randn(B, HEIGHT, WIDTH, C)
    upstream = torch.randn(2, B, HEIGHT, WIDTH, C)
    results = []
    for module, input, grads in [
        (layer, x, upstream),
        (reference, x.double(), upstream.double()),
    ]:
        input.requires_grad_()
        inputs = (input, module.weight, module.bias)
        batched = torch.autograd.grad(module(input), inputs, grads, is_grads_batched=True)
        first = torch.autograd.grad(module(input), inputs, grads[0], create_graph=True)
        second = torch.autograd.grad((first[0].sin() + first[1].sum()).sum(), inputs[:2])
        results.append([*batched, *second])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernel_size", [3, 7])
@pytest.mark.usefixtures("compiled_kernels")
def test_nan_stays_within_reach_of_its_kernel(kernel_size):
    layer, _ = layer_and_reference(C, kernel_size)
    x = torch.randn(B, HEIGHT, WIDTH, C, requires_grad=True)
    hole = torch.zeros(B, HEIGHT, WIDTH, C)
    hole[1, 4, 9, 2] = 1.0
    box = torch.ones(C, 1, kernel_size, kernel_size)
    reached = F.conv2d(hole.permute(0, 3, 1, 2), box, padding=kernel_size // 2, groups=C) > 0
    with torch.no_grad():
        y = layer(x.where(hole == 0, float("nan")))
    assert torch.equal(y.isnan().permute(0, 3, 1, 2), reached)
    layer(x).backward(hole.where(hole == 0, float("nan")))
    assert torch.equal(x.grad.isnan().permute(0, 3, 1, 2), reached)
    assert torch.equal(layer.weight.grad.isnan().flatten(1).any(1), torch.arange(C) == 2)
    assert torch.equal(layer.bias.grad.isnan(), torch.arange(C) == 2)


@pytest.mark.usefixtures("compiled_kernels")
def test_results_do_not_depend_on_the_number_of_threads():
    layer, _ = layer_and_reference(37, 7)
    x = torch.randn(3, 11, 17, 37, requires_grad=True)
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            y = layer(x)
            inputs = (x, layer.weight, layer.bias)
            results.append([y, *torch.autograd.grad(y, inputs, torch.sin(x))])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("compiled_kernels")
def test_kernels_run_in_training_and_without_gradients(monkeypatch):
    called = []

    def noting(kernel, *args):
        called.append(kernel)
        run(kernel, *args)

    run = depthwise.run
    monkeypatch.setattr(depthwise, "run", noting)
    layer = DepthwiseConv2d(C, 7).train()
    x = torch.randn(B, HEIGHT, WIDTH, C, requires_grad=True)
    layer(x).sum().backward()
    assert called == [*2 * ["depthwise_float32"], "depthwise_parameters_float32"]
    called.clear()
    with torch.no_grad():
        layer.eval()(x)
    assert called == ["depthwise_float32"]
    called.clear()
    layer(x)
    layer.double()(x.double())
    assert called == []


def test_output_is_channels_last_without_a_copy():
    assert DepthwiseConv2d(C, 7)(torch.randn(B, HEIGHT, WIDTH, C)).is_contiguous()


def test_even_kernels_are_refused():
    with pytest.raises(ValueError, match="kernel_size=4 must be odd"):
        DepthwiseConv2d(C, 4)


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("mode", ["autocast", "pure", "inference"])
def test_bfloat16_rounds_maps_only(mode):
    layer, _ = layer_and_reference(19, 7)
    layer.to(torch.bfloat16).float()  # the same parameters in both types
    x = torch.randn(2, 11, 5, 19).bfloat16()
    upstream = torch.randn(2, 11, 5, 19).bfloat16()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        if mode == "pure":
            layer.to(dtype)
        layer.zero_grad()
        inputs = x.to(dtype).requires_grad_()
        autocast = mode != "pure" and dtype == torch.bfloat16
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            torch.set_grad_enabled(mode != "inference"),
        ):
            y = layer(inputs.float() if autocast else inputs)
        assert y.dtype == dtype
        results.append([y.detach()])
        if mode != "inference":
            y.backward(upstream.to(dtype))
            results[-1] += [inputs.grad, *(p.grad.clone() for p in layer.parameters())]
    for exact, rounded in zip(*results, strict=True):
        torch.testing.assert_close(rounded, exact.to(rounded.dtype), rtol=1e-6, atol=1e-6)


def test_the_gradient_of_kernels_that_are_not_contiguous_is_in_its_place():
    torch.manual_seed(0)
    layer = DepthwiseConv2d(17, 3)
    weight = torch.randn(3, 3, 1, 17).permute(3, 2, 0, 1)
    layer.weight = torch.nn.Parameter(weight)
    x, up = torch.randn(2, 7, 11, 17), torch.randn(2, 7, 11, 17)
    (actual,) = torch.autograd.grad(layer(x), layer.weight, up)
    wide = weight.double().requires_grad_()
    y = torch.nn.functional.conv2d(x.double().permute(0, 3, 1, 2), wide, padding=1, groups=17)
    (expected,) = torch.autograd.grad(y.permute(0, 2, 3, 1), wide, up.double())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [4, 64])
def test_a_convolution_refuses_another_number_of_channels(channels):
    with torch.no_grad(), pytest.raises(RuntimeError, match="channels"):
        DepthwiseConv2d(8, 3)(torch.ones(1, 4, 4, channels))


def replaced(weight: tuple[int, ...], bias: tuple[int, ...]) -> DepthwiseConv2d:
    torch.manual_seed(0)
    conv = DepthwiseConv2d(8, 7)
    conv.weight, conv.bias = nn.Parameter(torch.randn(weight)), nn.Parameter(torch.randn(bias))
    return conv


@pytest.mark.parametrize(("weight", "bias"), [((4, 1, 7, 7), (8,)), ((8, 1, 7, 7), (4,))])
def test_parameters_for_another_number_of_channels_are_refused(weight, bias, compiled_kernels):
    with pytest.raises(RuntimeError):
        replaced(weight, bias)(torch.randn(2, 5, 11, 8))


def test_a_kernel_that_is_no_square_is_applied_as_it_is(compiled_kernels):
    conv, x = replaced((8, 1, 3, 7), (8,)), torch.randn(2, 5, 11, 8)
    maps, *parameters = (t.double() for t in (x.permute(0, 3, 1, 2), conv.weight, conv.bias))
    expected = F.conv2d(maps, *parameters, padding=3, groups=8).permute(0, 2, 3, 1)
    torch.testing.assert_close(conv(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_that_are_views_with_the_opposite_sign_are_read_with_it(
    name: str, gradients: bool
) -> None:
    conv, x = DepthwiseConv2d(11, kernel_size=3), torch.randn(5, 7, 11)
    view = torch._neg_view(getattr(conv, name).detach().clone())
    setattr(conv, name, nn.Parameter(view))
    with torch.set_grad_enabled(gradients):
        y = conv.train(gradients)(x[None])[0].detach()
    weight, bias = (p.detach().resolve_neg().double() for p in (conv.weight, conv.bias))
    expected = depthwise_conv(x, weight, bias)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
