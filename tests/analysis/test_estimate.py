import pytest
import timm
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipsformer  # noqa: F401  (registers the models)
from lipsformer.analysis.bounds import flatten_bound, image_domain, lipschitz_bound
from lipsformer.analysis.estimate import (
    adversarial_lipschitz,
    estimate_submodules,
    local_lipschitz,
)

BODIES = [pytest.param("lipsformer_nano", marks=pytest.mark.slow), "lipsformer_swin_nano"]


def exact_constants(function, x):
    with sdpa_kernel(SDPBackend.MATH):
        jacobians = torch.stack([jacrev(function)(sample[None]) for sample in x])
    return torch.linalg.svdvals(jacobians.reshape(len(x), -1, x[0].numel()))[:, 0]


@pytest.mark.parametrize("name", BODIES)
def test_estimates_of_a_model_and_its_parts_equal_the_exact_jacobians(name):
    torch.manual_seed(0)
    model = timm.create_model(
        name, img_size=8, embed_dim=4, depths=(1, 1), num_heads=(2, 2), num_classes=5
    ).eval()
    x = torch.randn(3, 3, 8, 8)
    for function in (model, model.patch_embed):
        sigma, _ = local_lipschitz(function, x, num_iters=500, rtol=1e-8)
        torch.testing.assert_close(sigma, exact_constants(function, x), rtol=1e-4, atol=0)
    tokens = torch.randn(3, 2, 4, 4)
    block = model.stages[0].blocks[0]
    parts = (block.attn.branch, block.mlp.branch, block.conv1.branch)
    for function in (block, *parts):
        sigma, _ = local_lipschitz(function, tokens, num_iters=2000, rtol=1e-8)
        torch.testing.assert_close(sigma, exact_constants(function, tokens), rtol=1e-4, atol=0)


def test_samples_of_a_batch_do_not_mix():
    scales = torch.tensor([0.5, 3.0, 1e-6, 7e4])

    def function(x):
        return torch.tanh(scales[:, None] * x)

    sigma, _ = local_lipschitz(function, torch.zeros(4, 5))
    torch.testing.assert_close(sigma, scales)


def test_ascent_finds_the_supremum_of_a_curved_function():
    # |gelu'| peaks at sqrt(2); the layer's constant is 1.12890 there and 0.5 at the start
    best, where = adversarial_lipschitz(nn.GELU(), torch.full((1, 1), 0.01), steps=100)
    assert best.item() == pytest.approx(1.128904, abs=1e-4)
    assert where.item() == pytest.approx(2**0.5, abs=0.05)


def test_ascent_never_ends_below_its_start():
    torch.manual_seed(0)
    function = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    x = torch.randn(11, 5)
    start, _ = local_lipschitz(function, x, num_iters=500, rtol=1e-8)
    best, where = adversarial_lipschitz(function, x, steps=10)
    assert (best >= start * (1 - 1e-3)).all()
    torch.testing.assert_close(best, exact_constants(function, where), rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", BODIES)
def test_bounds_exceed_estimates_for_every_part_and_the_mode_is_kept(name):
    torch.manual_seed(0)
    kwargs = {"embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4), "num_classes": 5}
    model = timm.create_model(name, drop_path_rate=0.5, **kwargs).train()
    mean, std = model.default_cfg["mean"], model.default_cfg["std"]
    parts = dict(flatten_bound(lipschitz_bound(model, image_domain((32, 32), mean, std))))
    estimates = estimate_submodules(model, parts, torch.randn(2, 3, 32, 32), num_iters=3)
    assert model.training
    assert estimates.keys() == parts.keys()
    for part, estimate in estimates.items():
        assert 0.0 < estimate <= parts[part].value * (1 + 1e-5), part


def test_a_name_of_no_submodule_leaves_no_hook_behind():
    model = nn.Sequential(nn.Linear(5, 7))
    with pytest.raises(AttributeError, match="has no attribute `1`"):
        estimate_submodules(model, ["0", "1"], torch.randn(3, 5))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", BODIES)
def test_torch_func_differentiates_models_in_training(name):
    torch.manual_seed(0)
    kwargs = {"img_size": 8, "embed_dim": 4, "depths": (1, 1), "num_heads": (2, 2)}
    model = timm.create_model(name, num_classes=5, **kwargs).train()
    x = torch.randn(3, 3, 8, 8)
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(model)(x[:1])
        direction = torch.randn(1, 3, 8, 8)
        pushed = jvp(model, (x[:1],), (direction,))[1]
        expected = jacrev(model.eval())(x[:1])
    torch.testing.assert_close(jacobian, expected)
    torch.testing.assert_close(pushed, expected.flatten(2) @ direction.flatten())
    model.train()

    def loss(parameters, image):
        return functional_call(model, parameters, (image[None],)).logsumexp(1).sum()

    parameters = dict(model.named_parameters())
    values = {key: value.detach() for key, value in parameters.items()}
    with sdpa_kernel(SDPBackend.MATH):
        per_sample = vmap(grad(loss), in_dims=(None, 0))(values, x)
    for i, image in enumerate(x):  # the gradients written for the CPU
        grads = torch.autograd.grad(loss(parameters, image), list(parameters.values()))
        for key, value in zip(parameters, grads, strict=True):
            torch.testing.assert_close(per_sample[key][i], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_the_scale_of_a_function_does_not_make_its_estimate_too_large(scale):
    torch.manual_seed(0)
    weight = torch.randn(7, 5)
    exact = scale * torch.linalg.svdvals(weight.double())[0].item()
    x = torch.randn(3, 5)
    sigma, direction = local_lipschitz(lambda x: (x @ weight.T) * scale, x)
    assert (sigma.double() <= exact * (1 + 1e-5)).all()
    torch.testing.assert_close(sigma.double(), torch.full((3,), exact).double(), rtol=1e-4, atol=0)
    torch.testing.assert_close(direction.norm(dim=1), torch.ones(3))
    raised, _ = adversarial_lipschitz(lambda x: scale * torch.sin(x), x, steps=30)
    assert (raised.double() <= scale * (1 + 1e-5)).all()
    assert (raised.double() >= 0.99 * scale).all()
