"""Maps in bfloat16, computed in float32: equal to float64 but for the rounding of the result."""

import pytest
import torch
from torch import nn

from lipsformer.kernels import linear, pointwise
from lipsformer.layers import CenterNorm, DepthwiseConv2d, Linear, WeightedResidual
from lipsformer.models.folded_layers import FrozenLinear

SHAPE = (5, 67, 3, 37)  # enough for two threads and several parts, with a rest of 5 channels
KEPT = torch.tensor([0, 2, 3])
ROUNDING = 2.0**-8


def gelu(z):
    return 0.5 * z * (1 + torch.erf(z / 2**0.5))


def maps(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape).bfloat16() for shape in shapes]


@torch.no_grad()
def gradients(function, inputs, upstream):
    """Result and gradients in double precision."""
    inputs = [tensor.double().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        result = function(*inputs)
        return [result.detach(), *torch.autograd.grad(result, inputs, upstream.double())]


def check(actual, expected, atol=1e-5):
    """Maps may differ by their rounding, sums in float32 by very little."""
    for tensor, reference in zip(actual, expected, strict=True):
        rtol = ROUNDING if tensor.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(tensor.double(), reference, rtol=rtol, atol=atol)


def check_scale(actual, expected, roundings=2):
    """The rounding of what was summed counts relative to the largest result."""
    for tensor, reference in zip(actual, expected, strict=True):
        atol = roundings * ROUNDING * reference.abs().max().item()
        torch.testing.assert_close(tensor.double(), reference, rtol=0.0, atol=atol)


@torch.no_grad()
def test_gelu_and_its_derivative(path):
    z, grad = maps(SHAPE, SHAPE)
    z *= 3.0
    z.flatten()[:4] = torch.tensor([1e4, -1e4, 0.0, 12.0])
    expected = gradients(gelu, [z], grad)
    check([linear.gelu_backward_(grad, z), grad], expected)


@torch.no_grad()
@pytest.mark.parametrize("index", [None, KEPT])
@pytest.mark.parametrize("per_sample", [False, True])
def test_adding_gelu(path, index, per_sample):
    kept = 5 if index is None else 3
    x, z, grad = maps(SHAPE, (kept, *SHAPE[1:]), SHAPE)
    scale = torch.randn((kept, 1, 1, 37) if per_sample else (37,))
    samples = torch.arange(5) if index is None else index
    expected = gradients(
        lambda x, z, scale: x.index_add(0, samples, gelu(z) * scale), [x, z, scale], grad
    )
    y = pointwise.gelu_residual_forward(x, z, scale, index)
    check([y, grad, *pointwise.gelu_residual_backward(grad, z, scale, index)], expected, atol=2e-4)


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("index", [None, KEPT])
def test_adding_a_masked_branch(index):
    kept = 5 if index is None else 3
    x, z, grad = maps(SHAPE, (kept, *SHAPE[1:]), SHAPE)
    mask = torch.rand(kept, 1, 1, 1)
    samples = torch.arange(5) if index is None else index
    expected = gradients(lambda x, z: x.index_add(0, samples, z * mask.double()), [x, z], grad)
    x.requires_grad_()
    z.requires_grad_()
    y = pointwise.residual(x, z, mask, index)
    y.backward(grad)
    check([y.detach(), x.grad, z.grad], expected)


@torch.no_grad()
def test_centring(path):
    x, grad = maps(SHAPE, SHAPE)
    x += 7.0
    gain, shift = torch.randn(2, 37).unbind()
    expected = gradients(
        lambda x, gain, shift: gain * (x - x.mean(-1, keepdim=True)) + shift, [x, gain, shift], grad
    )
    y = pointwise.center(x, gain, shift)
    check([y, pointwise.center(x, gain, grad)], [expected[0], expected[0] - shift + grad])
    grad_x, offset, grad_shift = pointwise.center_backward(grad, y, gain, shift)
    check([grad_x, grad_shift], [expected[1], expected[3]], atol=2e-4)
    # the sum is over the rounded result
    exact = (grad.double() * (y.double() - shift)).sum((0, 1, 2))
    check([offset], [exact], atol=2e-3)


@torch.no_grad()
def test_sum_of_rows(path):
    (x,) = maps(SHAPE)
    check([linear.sum_rows(x)], [x.double().sum((0, 1, 2))], atol=1e-4)


@torch.no_grad()
def test_kernels_give_the_same_bits_on_one_and_two_threads():
    x, grad, z = maps(SHAPE, SHAPE, (3, *SHAPE[1:]))
    scale, weight = torch.randn(3, 1, 1, 37), torch.randn(331, 101)
    gain, shift, row_scale = scale[0, 0, 0], scale[1, 0, 0], weight[:, 0].contiguous()
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        scaled = linear._scale_rows(weight, None, row_scale, torch.bfloat16)[0]
        results.append(
            [
                linear.gelu_backward_(grad.clone(), x),
                pointwise.gelu_residual_forward(x, z, scale, KEPT),
                *pointwise.gelu_residual_backward(grad, z, scale, KEPT),
                pointwise.center(x, gain, shift),
                *pointwise.center_backward(grad, x, gain, shift),
                linear.sum_rows(x),
                scaled,
                *linear._scale_rows_backward(scaled, weight, row_scale),
            ]
        )
    torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@torch.no_grad()
def test_scaled_weights_and_their_gradients(path):
    (grad,) = maps((331, 101))
    weight, scale = torch.randn(331, 101), torch.randn(331)
    expected = gradients(lambda w, s: w * s[:, None], [weight, scale], grad)
    scaled, _ = linear._scale_rows(weight, None, scale, torch.bfloat16)
    check([scaled, *linear._scale_rows_backward(grad, weight, scale)], expected, atol=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("act", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
def test_linear_layer_under_autocast(path, mode, act, scaled):
    torch.manual_seed(0)
    layer = Linear(37, 101).train(mode == "train")
    layer.to(torch.bfloat16).float()  # products round their weights
    scale = torch.tensor([0.5, 2.0]).repeat(51)[:101].requires_grad_() if scaled else None
    x, grad = maps((5, 67, 3, 37), (5, 67, 3, 101))
    inputs = [x, *layer.parameters(), *([scale] if scaled else [])]
    for tensor in inputs:
        tensor.requires_grad_()

    def exact(x, weight, bias, scale=1.0):
        return ((gelu(x) if act else x) @ weight.T + bias) * scale

    expected = gradients(exact, inputs, grad)
    with torch.inference_mode(mode == "inference"), torch.autocast("cpu", torch.bfloat16):
        y = layer(x, act_before=act, output_scale=scale)
    assert y.dtype == torch.bfloat16
    check_scale([y.detach()], expected[:1])
    if mode != "inference":
        y.backward(grad)
        assert layer.weight.grad.dtype == torch.float32
        check_scale([tensor.grad for tensor in inputs], expected[1:])


@pytest.mark.parametrize("scaled", [False, True])
def test_weight_gradients_of_many_blocks_are_as_exact_as_those_of_one(monkeypatch, scaled):
    errors = []
    for largest_whole, block in ((linear._LARGEST_REUSED, linear._BLOCK), (0, 5 * 37 * 2)):
        monkeypatch.setattr(linear, "_LARGEST_REUSED", largest_whole)
        monkeypatch.setattr(linear, "_BLOCK", block)
        torch.manual_seed(0)
        layer = Linear(37, 101).train()
        layer.to(torch.bfloat16).float()  # products round their weights
        scale = torch.tensor([0.5, 2.0]).repeat(51)[:101] if scaled else None
        x, grad = maps((5, 67, 3, 37), (5, 67, 3, 101))
        with torch.autocast("cpu", torch.bfloat16):
            layer(x.requires_grad_(), act_before=True, output_scale=scale).backward(grad)
        upstream = grad.double() * (scale.double() if scaled else 1.0)
        exact = torch.einsum("bhwo,bhwi->oi", upstream, gelu(x.double()))
        errors.append((layer.weight.grad - exact).norm() / exact.norm())
    assert errors[1] < 1.5 * errors[0] < 0.01


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.parametrize("layer", [Linear(7, 17), DepthwiseConv2d(7, 3)])
def test_autocast_leaves_float64_alone(layer, mode):
    layer.double().train(mode == "train")
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    with torch.inference_mode(mode == "inference"):
        expected = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("spread", [1.0, 0.01])
@pytest.mark.parametrize("offset", [1.0, 100.0])
@pytest.mark.usefixtures("compiled_kernels")
def test_center_norm_keeps_the_type_and_gives_the_gradient_of_its_gain(offset, spread):
    """Also where tokens vary less than the result is rounded, because the bias is large."""
    torch.manual_seed(0)
    norm = CenterNorm(37).train()
    nn.init.normal_(norm.weight)
    nn.init.constant_(norm.bias, offset)
    x, grad = maps(SHAPE, SHAPE)
    x *= spread
    inputs = [x.requires_grad_(), norm.weight, norm.bias]
    expected = gradients(
        lambda x, gain, shift: gain * (37 / 36) * (x - x.mean(-1, keepdim=True)) + shift,
        inputs,
        grad,
    )
    y = norm(x)
    assert y.dtype == torch.bfloat16
    y.backward(grad)
    check([y.detach(), x.grad, norm.bias.grad], [*expected[:2], expected[3]], atol=2e-4)
    check_scale([norm.weight.grad], [expected[2]])


@pytest.mark.parametrize("ends_in", ["gelu", "linear", "nothing"])
@pytest.mark.parametrize("kept", [[0, 2, 3], [0, 1, 2, 3, 4]])
def test_residual_keeps_the_type_of_the_stream(path, monkeypatch, ends_in, kept):
    class Branch(nn.Module):
        def forward(self, x, last_gelu=True, output_scale=1.0):
            return (gelu(x) if ends_in == "gelu" and last_gelu else x) * output_scale

    if ends_in != "nothing":
        Branch.ends_in = ends_in
    layer = WeightedResidual(Branch(), 37, 0.25, drop_path=0.5).train()
    mask = torch.zeros(5, 1, 1, 1).index_fill(0, torch.tensor(kept), 2.0)
    monkeypatch.setattr(layer, "draw_mask", lambda x: mask)
    x, grad = maps(SHAPE, SHAPE)
    expected = gradients(
        lambda x, scale: x + scale * mask * (gelu(x) if ends_in == "gelu" else x),
        [x, layer.residual_scale],
        grad,
    )
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(grad)
    check_scale([y.detach(), x.grad, layer.residual_scale.grad], expected)


@torch.no_grad()
def test_frozen_layer_follows_the_type_of_autocast_and_changed_parameters():
    torch.manual_seed(0)
    layer = FrozenLinear(nn.Linear(37, 101), act_after=True).requires_grad_(False)
    layer.to(torch.bfloat16).float()
    x = torch.randn(5, 11, 37).bfloat16().float()
    for _ in range(2):
        exact = gelu(x.double() @ layer.weight.double().T + layer.bias.double())
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            check_scale([layer(x)], [exact])
        layer.bias += 1.0
