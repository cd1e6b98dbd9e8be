"""Half precision: types, parity with float32, and images of zeros."""

import pytest
import timm
import torch

import lipsformer  # noqa: F401  (registers)

NAMES = ["lipsformer_nano", "lipsformer_swin_nano"]
# largest deviation of the logits from float32, relative to their largest magnitude
TOLERANCES = {torch.float16: 0.01, torch.bfloat16: 0.06}


def create(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=7, **kwargs).eval()


def assert_close_to_scale(actual, expected, tolerance):
    bound = tolerance * expected.abs().max().item()
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("dtype", "official"), [(torch.float16, False), (torch.bfloat16, False), (torch.float16, True)]
)
@pytest.mark.parametrize("name", NAMES)
def test_pure_half_precision_follows_float32(name, dtype, official):
    model = create(name, official_compat=official)
    images = torch.randn(3, 3, 32, 48)
    with torch.no_grad():
        expected = model(images)
        actual = model.to(dtype)(images.to(dtype))
    assert actual.dtype == dtype
    assert_close_to_scale(actual, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_follows_float32_in_output_and_gradient(name, dtype):
    model = create(name).train()
    images = torch.randn(3, 3, 32, 48)
    weight = model.stages[0].blocks[0].attn.branch.qkv.weight

    def run():
        output = model(images)
        # scaled, as in training: float16 cannot hold the gradient's small values
        (gradient,) = torch.autograd.grad(output.float().square().mean() * 1024, weight)
        return output.detach(), gradient

    expected = run()
    with torch.autocast("cpu", dtype):
        actual = run()
    assert actual[0].dtype == dtype
    assert actual[1].dtype == torch.float32
    assert_close_to_scale(actual[0], expected[0], TOLERANCES[dtype])
    assert_close_to_scale(actual[1], expected[1], 3 * TOLERANCES[dtype])


@pytest.mark.parametrize("mode", ["pure", "autocast"])
@pytest.mark.parametrize(
    ("dtype", "official"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float16, False),
        (torch.float16, True),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_zero_images_are_finite_in_value_and_gradient(name, dtype, official, mode):
    """With biases of zero every token is zero, where the released code divides zero by zero."""
    model = create(name, official_compat=official).train()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.zero_()
    images = torch.zeros(2, 3, 32, 32)
    if mode == "pure":
        model, images = model.to(dtype), images.to(dtype)
    images.requires_grad_()
    with torch.autocast("cpu", dtype, enabled=mode == "autocast" and dtype != torch.float32):
        output = model(images)
    output.float().square().sum().add(output.float().sum()).backward()
    assert torch.isfinite(output).all()
    assert torch.isfinite(images.grad).all()
    for parameter_name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), parameter_name
