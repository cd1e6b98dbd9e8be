"""The methods of the league against their formulas, computed in another way in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.league.attention import DotProductAttention, QKNormAttention
from benchmarks.league.nvit import NormalizedAttention, Scale, ScaledGelu
from benchmarks.league.pointwise_norms import Derf, DyT
from benchmarks.league.residual_scales import layer_scale_, rezero_
from benchmarks.league.sigma_reparam import sigma_reparam_
from benchmarks.league.simple_norm import simple_norm_
from lipsformer.layers import DepthwiseConv2d, Linear, WeightedResidual


def randomize(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("kind", [DyT, Derf])
def test_pointwise_norms_are_their_formulas(kind):
    torch.manual_seed(0)
    norm, x = randomize(kind(3)), torch.randn(4, 3)
    for row, tokens in zip(norm(x).tolist(), x.tolist(), strict=True):
        for c, value in enumerate(tokens):
            a, gamma, beta = norm.alpha.item(), norm.weight[c].item(), norm.bias[c].item()
            inner = a * value + (norm.shift.item() if kind is Derf else 0.0)
            bent = math.erf(inner) if kind is Derf else math.tanh(inner)
            assert row[c] == pytest.approx(gamma * bent + beta, abs=1e-6)


def softmax_attention(q, k, v, bias):
    scores = np.exp(q @ k.swapaxes(-1, -2) + bias)
    return scores / scores.sum(-1, keepdims=True) @ v


def test_attention_is_the_softmax_of_its_scores():
    torch.manual_seed(0)
    d = 8
    tensors = [torch.randn(2, 3, 5, d) for _ in range(3)] + [torch.randn(1, 3, 5, 5)]
    q, k, v, bias = (tensor.double().numpy() for tensor in tensors)

    def layer_norm(x):
        centered = x - x.mean(-1, keepdims=True)
        return centered / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    truths = {
        DotProductAttention(3): (q / math.sqrt(d), k),
        QKNormAttention(3, d): (layer_norm(q) / math.sqrt(d), layer_norm(k)),
        NormalizedAttention(3, d, 16): (unit(q) * math.sqrt(d), unit(k)),
    }
    for attention, (left, right) in truths.items():
        truth = softmax_attention(left, right, v, bias)
        assert attention(*tensors).detach().numpy() == pytest.approx(truth, abs=1e-5)
        weights = attention.scores(*tensors).softmax(-1)
        assert (weights @ tensors[2]).detach().numpy() == pytest.approx(truth, abs=1e-5)


@pytest.mark.parametrize("layer", [Linear(7, 5), nn.Conv2d(3, 6, 4, 4), DepthwiseConv2d(9, 7)])
def test_sigma_reparam_keeps_the_spectral_norm_at_gamma(layer):
    torch.manual_seed(0)
    sigma_reparam_(layer)
    parametrization = layer.parametrizations.weight
    with torch.no_grad():
        parametrization[0].gamma.fill_(1.7)
        assert torch.linalg.svdvals(layer.weight.flatten(1))[0].item() == pytest.approx(1.7)
        parametrization.original.normal_()
    for _ in range(300):
        weight = layer.weight  # every use in training is a step of power iteration
    assert torch.linalg.svdvals(weight.detach().flatten(1))[0].item() == pytest.approx(1.7, 1e-3)
    weight.square().sum().mul(weight.sum()).backward()
    original = parametrization.original
    # the weight does not depend on the length of the original, so the gradient is orthogonal to it
    along = (original * original.grad).sum() / (original.norm() * original.grad.norm())
    assert along.abs().item() < 1e-5
    layer.eval()
    assert torch.equal(layer.weight, layer.weight)


def test_simple_norm_gives_every_map_unit_mean_square():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 4, 6)
    for layer, parts in ((Linear(6, 12), 3), (DepthwiseConv2d(6, 3), 1)):
        nn.init.normal_(layer.weight)
        simple_norm_(layer, parts)
        y = layer(x)
        mean_square = y.unflatten(-1, (parts, -1)).square().mean(-1)
        assert mean_square.detach().numpy() == pytest.approx(1.0, abs=1e-4)
        with torch.no_grad():
            layer.weight.mul_(5.0)
        assert torch.allclose(layer(x), y, atol=1e-5)


def test_rezero_has_one_weight_per_branch_that_starts_at_zero():
    residual = WeightedResidual(nn.Identity(), 6, 0.5)
    rezero_(residual)
    (number,) = residual.parameters()
    assert number.shape == (1,) and residual.residual_scale.tolist() == [0.0] * 6
    residual.residual_scale.sum().backward()
    assert number.grad is not None and number.grad.item() == 6.0


@pytest.mark.parametrize(("blocks", "start"), [(6, 0.1), (18, 0.1), (24, 1e-5), (96, 1e-6)])
def test_layer_scale_starts_as_its_paper_says(blocks, start):
    residual = WeightedResidual(nn.Identity(), 6, 0.5)
    layer_scale_(residual, blocks)
    assert residual.residual_scale.tolist() == pytest.approx([start] * 6)


def test_scales_of_the_normalized_transformer():
    scale = Scale(3, 16, init=0.05)
    assert scale().tolist() == pytest.approx([0.05] * 3)
    assert scale.values.tolist() == pytest.approx([0.25] * 3)  # 1 / sqrt(16)
    x = torch.tensor([0.3, -0.2])
    truth = [4 * v * 0.5 * (1 + math.erf(4 * v / math.sqrt(2))) for v in x.tolist()]
    assert ScaledGelu(2, 16)(x).tolist() == pytest.approx(truth, abs=1e-6)
