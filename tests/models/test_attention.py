"""Window and stripe attention, and whole models, against loops in float64 at many sizes."""

import re

import pytest
import torch

import lipsformer.models  # noqa: F401  (registers)
from lipsformer.layers import ScaledCosineAttention
from lipsformer.models import LipsFormerCSwin, LipsFormerSwin
from lipsformer.models.lipsformer_cswin import StripeAttention
from lipsformer.models.lipsformer_swin import WindowAttention
from tests.models import reference

MAPS = [(24, 24), (13, 17), (3, 5), (29, 11), (7, 14)]


def randomize(module):
    """Biases and scales away from their special initial values."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def parameters(module):
    return {name: tensor.double() for name, tensor in module.state_dict().items()}


def cosine_attention(num_heads, value_scale):
    eps = 1e-6 if value_scale is None else 1e-2
    return ScaledCosineAttention(num_heads, logit_scale=7.0, value_scale=value_scale, eps=eps)


def window_attention(num_heads, window, dim, value_scale=1.3):
    attention = cosine_attention(num_heads, value_scale)
    return randomize(WindowAttention(dim, num_heads, window, attention).double())


def stripe_attention(num_heads, split, dim, value_scale=1.3):
    partitions = 1 if split is None else 2
    attention = torch.nn.ModuleList(
        cosine_attention(num_heads // partitions, value_scale) for _ in range(partitions)
    )
    module = StripeAttention(dim, num_heads, split, attention, official_compat=value_scale is None)
    return randomize(module.double())


@pytest.mark.parametrize("value_scale", [1.3, None])
@pytest.mark.parametrize("window", [(7, 7), (5, 3)])
@pytest.mark.parametrize("size", MAPS)
def test_window_attention_equals_loops(size, window, value_scale):
    torch.manual_seed(0)
    module = window_attention(3, window, 15, value_scale)
    x = torch.randn(2, *size, 15, dtype=torch.float64)
    expected = reference.window_attention(x, parameters(module), 3, window, 7.0, value_scale)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("window", [0, (0, 7), (7, -1)])
def test_windows_without_tokens_are_refused(window):
    message = re.escape(f"window_size={window} must be at least 1 in each direction")
    with pytest.raises(ValueError, match=message):
        window_attention(3, window, 15)


@pytest.mark.parametrize("value_scale", [1.3, None])
@pytest.mark.parametrize("split", [1, 2, 7, None])
@pytest.mark.parametrize("size", MAPS)
def test_stripe_attention_equals_loops(size, split, value_scale):
    torch.manual_seed(0)
    module = stripe_attention(6, split, 30, value_scale)
    x = torch.randn(2, *size, 30, dtype=torch.float64)
    expected = reference.stripe_attention(x, parameters(module), 6, split, 7.0, value_scale)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("split", [0, -1])
def test_stripes_without_tokens_are_refused(split):
    message = f"split_size={split} must be at least 1, or None for the whole map"
    with pytest.raises(ValueError, match=message):
        stripe_attention(6, split, 30)


def test_lepe_stops_at_the_edge_of_the_stripe():
    """A change of one token reaches its own stripes only, although LePE is three tokens wide."""
    torch.manual_seed(0)
    module = stripe_attention(2, 2, 6)
    x = torch.randn(1, 7, 9, 6, dtype=torch.float64)
    changed = x.clone()
    changed[0, 3, 3] += 1.0  # in columns 2 to 3 and in rows 2 to 3
    with torch.no_grad():
        moved = (module(changed) - module(x)).abs().amax(-1)[0] > 1e-9
    expected = torch.zeros(7, 9, dtype=torch.bool)
    expected[:, 2:4] = True
    expected[2:4] = True
    assert torch.equal(moved, expected)


IMAGES = [(96, 96), (160, 96), (100, 132), (384, 96)]


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize("size", IMAGES)
def test_swin_model_equals_loops(size, official):
    torch.manual_seed(0)
    heads = (1, 3, 2)
    model = LipsFormerSwin(
        embed_dim=6, depths=(1, 2, 1), num_heads=heads, num_classes=5, official_compat=official
    )
    model = randomize(model).double().eval()
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = reference.forward(
        model,
        images,
        swin=True,
        num_heads=heads,
        windows=[(7, 7)] * 3,
        tau=10.0,
        nu=None if official else 1.0,
    )
    torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize("size", IMAGES)
def test_cswin_model_equals_loops(size, official):
    torch.manual_seed(0)
    heads, splits = (2, 4, 2, 3), (1, 2, 7, None)
    model = LipsFormerCSwin(
        embed_dim=12,
        depths=(1, 1, 2, 1),
        num_heads=heads,
        num_classes=5,
        official_compat=official,
    )
    model = randomize(model).double().eval()
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = reference.forward(
        model,
        images,
        swin=False,
        num_heads=heads,
        windows=splits,
        tau=12.0,
        nu=None if official else 1.0,
    )
    torch.testing.assert_close(model(images), expected)
