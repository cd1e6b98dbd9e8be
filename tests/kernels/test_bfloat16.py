"""Maps in bfloat16, computed in float32: equal to float64 but for the rounding of the result."""

import pytest
import torch
from torch import nn

from lipsformer.kernels import linear
from lipsformer.layers import CenterNorm, DepthwiseConv2d, Linear, WeightedResidual
from lipsformer.models.folded_layers import FrozenLinear
from tests.kernels.test_pointwise import ROUNDING, SHAPE, check, gelu, gradients, maps


def check_scale(actual, expected, roundings=2):
    """The rounding of what was summed counts relative to the largest result."""
    for tensor, reference in zip(actual, expected, strict=True):
        atol = roundings * ROUNDING * reference.abs().max().item()
        torch.testing.assert_close(tensor.double(), reference, rtol=0.0, atol=atol)


@torch.no_grad()
def test_scaled_weights_and_their_gradients(path):
    (grad,) = maps(torch.bfloat16, (331, 101))
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
    x, grad = maps(torch.bfloat16, (5, 67, 3, 37), (5, 67, 3, 101))
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
        x, grad = maps(torch.bfloat16, (5, 67, 3, 37), (5, 67, 3, 101))
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
    x, grad = maps(torch.bfloat16, SHAPE, SHAPE)
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
    x, grad = maps(torch.bfloat16, SHAPE, SHAPE)
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
