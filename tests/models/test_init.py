"""Initialization: spectral, complete, repeatable, also after the meta device."""

import itertools
import math

import pytest
import timm
import torch
from timm.models._manipulate import reinit_non_persistent_buffers
from torch import nn

import lipsformer  # noqa: F401  (registers)
from lipsformer.layers import CenterNorm, DepthwiseConv2d
from lipsformer.models import LipsFormerContractive

NAMES = ["lipsformer_nano", "lipsformer_swin_nano"]


def create(name, **kwargs):
    return timm.create_model(name, num_classes=7, learn_logit_scale=True, **kwargs)


def seeded(name, **kwargs):
    torch.manual_seed(3)
    return create(name, **kwargs)


def assert_equal_tensors(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_init_weights_leaves_nothing_unset(name):
    model = create(name, weight_init="skip")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(math.nan)
    model.init_weights()
    unset = [n for n, t in model.state_dict().items() if not torch.isfinite(t).all()]
    assert unset == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_every_reshaped_weight_has_norm_one(name, dtype):
    model = create(name, dtype=dtype)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-2
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d, DepthwiseConv2d))
    }
    weights = {n.removesuffix(".weight") for n, _ in model.named_parameters() if "weight" in n}
    assert {n for n in weights if "norm" not in n} == set(layers)
    for layer_name, layer in layers.items():
        assert layer.weight.dtype == dtype
        sigma = torch.linalg.svdvals(layer.weight.double().flatten(1))[0].item()
        assert sigma == pytest.approx(1.0, abs=tolerance), layer_name
        if layer.bias is not None:
            assert not layer.bias.any(), layer_name


@pytest.mark.parametrize("name", NAMES)
def test_unit_norms_have_the_constant_one(name):
    """The largest singular value of the matrix of every CenterNorm, also after a reset."""
    model = create(name, weight_init="unit_norm")
    for _ in range(2):
        for norm in (module for module in model.modules() if isinstance(module, CenterNorm)):
            matrix = norm(torch.eye(norm.dim)) - norm.bias
            assert torch.linalg.svdvals(matrix.double())[0].item() == pytest.approx(1.0, abs=1e-6)
        model.init_weights()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_seed(name):
    first, again, other = seeded(name), seeded(name), create(name)
    assert_equal_tensors(first, again)
    assert not torch.equal(first.get_classifier().weight, other.get_classifier().weight)


@pytest.mark.parametrize("name", NAMES)
def test_meta_then_init_equals_direct_creation(name):
    model = create(name, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(0 if not tensor.is_floating_point() else math.nan)
    torch.manual_seed(3)
    model.init_weights()
    direct = create(name)
    torch.manual_seed(3)
    direct.init_weights()
    assert_equal_tensors(model, direct)
    images = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(model.eval()(images), direct.eval()(images), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_meta_then_load_equals_the_source_once_timm_fills_the_buffers(name):
    """`keep_rate` is read by the compiled model only."""
    source = create(name, drop_path_rate=0.4)
    model = create(name, drop_path_rate=0.4, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(0 if not tensor.is_floating_point() else math.nan)
    model.load_state_dict(source.state_dict())
    reinit_non_persistent_buffers(model)
    assert_equal_tensors(model, source)
    for (name, found), (_, expected) in zip(
        model.named_buffers(), source.named_buffers(), strict=True
    ):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "lipsformer_contractive_nano"])
def test_meta_then_load_equals_the_source(name, assign):
    options = {} if name == "lipsformer_contractive_nano" else {"drop_path_rate": 0.4}
    source = timm.create_model(name, **options).eval()
    with torch.no_grad():
        for parameter_name, parameter in source.named_parameters():
            if parameter_name.endswith("relative_position_bias_table"):
                nn.init.normal_(parameter)
    with torch.device("meta"):
        model = timm.create_model(name, **options).eval()
    if not assign:
        model.to_empty(device="cpu")
        for buffer in model.buffers():
            buffer.fill_(0)
    model.load_state_dict(source.state_dict(), assign=assign)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), source(images))
    expected = dict(source.named_buffers())
    for buffer_name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[buffer_name]), buffer_name


@pytest.mark.parametrize("name", NAMES)
def test_released_form_keeps_pytorch_convolution_biases(name):
    model = create(name, official_compat=True)
    block = model.stages[0].blocks[0]
    for layer, fan_in in [(model.patch_embed.proj, 12), (block.conv1.branch.depthwise, 49)]:
        assert 0 < layer.bias.abs().max() <= fan_in**-0.5
    assert not block.mlp.branch.fc1.bias.any()


@pytest.mark.parametrize(
    ("name", "official", "scale"),
    [
        ("lipsformer_swin_nano", False, 1 / 8),
        ("lipsformer_swin_nano", True, 1 / 8),
        ("lipsformer_nano", False, 1 / 8),
        ("lipsformer_nano", True, 0.2),
    ],
)
def test_residual_scales_start_as_stated(name, official, scale):
    model = create(name, official_compat=official)
    scales = [p for n, p in model.named_parameters() if n.endswith("residual_scale")]
    assert len(scales) == 4 * 8
    torch.testing.assert_close(torch.cat(scales), torch.full((sum(map(len, scales)),), scale))


def test_restarted_attention_is_a_mean_over_near_tokens_with_the_weight_of_its_start():
    """For short tokens the cosines vanish, and the values keep their length."""
    torch.manual_seed(0)
    model = LipsFormerContractive(
        dims=(24,),
        depths=(2,),
        window_size=(7,),
        img_size=(14, 6),
        attn_share=0.5,
        attn_least=0.4,
        head_dim=4,
        num_classes=5,
    ).double()
    for block in model.stages[0].blocks:
        attention = block.attn.branch
        for parameter in (block.attn.mix, *attention.parameters()):
            if parameter is not attention.qkv.weight:  # training keeps it orthogonal
                torch.nn.init.normal_(parameter)
    model.restart_attention()
    x = 1e-6 * torch.randn(2, 7, 3, 24, dtype=torch.float64)
    for block in model.stages[0].blocks:
        expected = x.clone()
        for row, column in itertools.product(range(7), range(3)):
            total, mean = 0.0, torch.zeros(2, 12, dtype=torch.float64)
            for i, j in itertools.product(range(7), range(3)):
                near = math.exp(-2.0 * ((row - i) ** 2 + (column - j) ** 2))
                total, mean = total + near, mean + near * x[:, i, j, 12:]
            mixed = 0.3 * x[:, row, column, 12:]
            mixed += 0.7 / block.attn.divisor(7, 3) * mean / total
            expected[:, row, column, 12:] = mixed
        # the matrices are orthogonal to the precision of float32, in which they were drawn
        torch.testing.assert_close(1e6 * block.attn(x), 1e6 * expected, rtol=0.0, atol=2e-6)
