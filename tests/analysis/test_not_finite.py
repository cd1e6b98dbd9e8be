"""Weights, tensors and settings that are NaN or infinite have no finite bound."""

import math

import pytest
import timm
import torch
from torch import nn

from lipsformer.analysis.bounds import Domain, UnknownModuleError, lipschitz_bound
from lipsformer.analysis.bounds.graph import graph_domain
from lipsformer.analysis.certificates import certified_radius
from lipsformer.graph import DeepGAT, LipschitzGATConv
from lipsformer.layers import CenterNorm, DepthwiseConv2d, ScaledCosineAttention
from lipsformer.models import convert
from lipsformer.models.lipsformer_contractive import ContractiveResidual
from lipsformer.models.lipsformer_swin import WindowAttention

TOKENS = Domain(size=(4,))
EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 0, 0, 3]])


def test_a_norm_whose_gain_is_not_a_number_has_no_finite_bound():
    norm = CenterNorm(3)
    with torch.no_grad():
        norm.weight[1] = math.nan
    assert lipschitz_bound(norm, TOKENS).value == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_have_no_finite_bound(value):
    for make in (lambda: nn.Linear(3, 3), lambda: DepthwiseConv2d(3, 3), lambda: CenterNorm(3)):
        module = make()
        module.weight.data.flatten()[0] = value
        assert lipschitz_bound(module, Domain(size=(3, 3))).value == math.inf


def test_every_parameter_that_is_not_finite_makes_the_bound_infinite():
    """Biases, tokens and score vectors too: the outputs are not numbers."""
    small = {"img_size": 4, "patch_size": 2, "embed_dim": 6, "depth": 1, "num_classes": 3}
    vit = convert(timm.create_model("vit_tiny_patch16_224", **small)).eval()
    gat = DeepGAT(3, 2, 5, 1, heads=2, norm="lipschitznorm").eval()
    for model, domain, value in (
        (vit, Domain(size=(4, 4)), math.nan),
        (gat, graph_domain(EDGES, 4), math.inf),
    ):
        for name, parameter in model.named_parameters():
            before = parameter.detach().clone()
            parameter.data.flatten()[0] = value
            assert lipschitz_bound(model, domain).value == math.inf, name
            parameter.data.copy_(before)
        assert lipschitz_bound(model, domain).value < math.inf


def test_a_bias_that_is_not_a_number_is_not_hidden_by_a_weight_of_zero():
    linear = nn.Linear(3, 2)
    linear.weight.data.zero_()
    linear.bias.data[1] = math.nan
    bound = lipschitz_bound(nn.Sequential(linear, nn.Linear(2, 2)), TOKENS)
    assert bound.value == bound.parts["0"].value == math.inf
    logits = torch.tensor([[3.0, 1.0]])  # of another computation
    assert certified_radius(logits, bound).item() == 0.0


def test_a_tensor_that_is_no_parameter_and_not_finite_makes_the_bound_infinite():
    layer = nn.Linear(3, 2)
    del layer.bias
    layer.bias = torch.tensor([math.nan, 0.0])  # pyright: ignore[reportAttributeAccessIssue]
    assert layer(torch.zeros(1, 3)).isnan().any()
    assert lipschitz_bound(nn.Sequential(layer), TOKENS).value == math.inf


def test_settings_that_are_not_numbers_have_no_finite_bound():
    graph, mixing = graph_domain(EDGES, 4), contractive()
    mixing.mix.data.fill_(math.nan)
    for module, domain in (
        (nn.ELU(math.nan), graph),
        (LipschitzGATConv(3, 2, negative_slope=math.nan), graph),
        (LipschitzGATConv(3, 2, negative_slope=math.nan, score_norm=None), graph),
        (mixing, Domain(size=(4, 6))),
    ):
        assert lipschitz_bound(module, domain).value == math.inf


def test_what_a_parametrization_or_a_buffer_makes_nan_has_no_finite_bound():
    by_weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2), "bias", dim=None)
    by_weight_norm.parametrizations.bias.original1.data.zero_()
    by_buffer = nn.Linear(3, 2)
    del by_buffer.bias
    by_buffer.register_buffer("bias", torch.full((2,), math.nan))
    for module in (by_weight_norm.eval(), by_buffer):
        assert all(parameter.isfinite().all() for parameter in module.parameters())
        assert module(torch.ones(4, 3)).isnan().all()
        assert lipschitz_bound(module, TOKENS).value == math.inf


def contractive() -> ContractiveResidual:
    core = ScaledCosineAttention(2, logit_scale=0.5, value_scale=0.7)
    return ContractiveResidual(WindowAttention(6, 2, (2, 3), core), 6)


@pytest.mark.parametrize("value", [math.inf, -2.0])
def test_scales_of_a_contractive_residual_that_are_not_positive_and_finite_are_refused(value):
    """An infinite scale makes the divisor infinite, and the output is not a number."""
    scaled, steep = contractive(), contractive()
    scaled.branch.attention.value_scale.fill_(value)
    steep.branch.attention.init_logit_scale = value
    for module in (scaled, steep):
        with pytest.raises(UnknownModuleError, match="not positive and finite"):
            lipschitz_bound(module, Domain(size=(4, 6)))
