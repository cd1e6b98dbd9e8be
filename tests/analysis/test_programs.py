"""Theorems 32 and 33: programs against the exact network in balls of 200 bits."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from flint import arb, ctx
from torch import Tensor, nn

import lipsformer
from data import Normalize
from lipsformer.analysis.bounds import Domain, image_domain, lipschitz_bound
from lipsformer.analysis.bounds.contractive import divisor
from lipsformer.analysis.certificates import (
    FLOAT64_SHARE,
    LEVELS,
    difference_errors,
    executed_errors,
    local_bounds,
    watch_norms,
)

MEAN, STD = (0.5, 0.25, 0.75), (0.25, 0.5, 0.375)  # exact in both programs

exact = np.vectorize(arb, otypes=[object])
root, exponential = (np.frompyfunc(lambda x, f=f: getattr(x, f)(), 1, 1) for f in ("sqrt", "exp"))
magnitude = np.frompyfunc(abs, 1, 1)


def numbers(tensor: Tensor) -> np.ndarray:
    return exact(tensor.detach().double().numpy())


def linear(x: np.ndarray, layer: Any) -> np.ndarray:
    y = x @ numbers(layer.weight.flatten(1)).T
    return y if layer.bias is None else y + numbers(layer.bias)


def fold_and_shift(x: np.ndarray) -> np.ndarray:
    groups = np.split(x, 8, axis=-1)
    groups[:4] = [magnitude(group) for group in groups[:4]]
    for index, (axis, step) in enumerate(((0, 1), (0, -1), (1, 1), (1, -1)), start=2):
        groups[index] = np.roll(groups[index], step, axis)
    return np.concatenate(groups, axis=-1)


def normalized(x: np.ndarray, eps: float) -> np.ndarray:
    return x / root((x * x).sum(-1, keepdims=True) + arb(eps))


def mixed(x: np.ndarray, module) -> np.ndarray:
    """A contractive residual whose only window is the whole map, with one head."""
    branch, core, (height, width, _) = module.branch, module.branch.attention, x.shape
    kept, tokens = x[..., : -module.dim], x[..., -module.dim :].reshape(height * width, -1)
    query, key, value = np.split(linear(tokens, branch.qkv), 3, axis=-1)
    tau, nu = arb(core.tau()), arb(core.value_scale.item())
    bias = numbers(branch.position_bias(height, width)[0, 0])
    scores = normalized(query, core.eps) @ normalized(key, core.eps).T * tau + bias
    weights = exponential(scores)
    weights = weights / weights.sum(-1, keepdims=True)
    out = linear(weights @ (normalized(value, core.eps) * nu), branch.proj)
    p = exponential(bias)
    p = p / p.sum(-1, keepdims=True)
    mass = max((p / (p + (arb(1) - p) * (-2 * tau).exp())).sum(0), key=float)
    least = min(mass, arb(height * width) / 2, key=float)
    divisor = (tau * (1 + least).sqrt() + mass.sqrt()) * nu / arb(core.eps).sqrt()
    a = arb(module.weight().item())
    return np.concatenate(
        [kept, ((1 - a) * tokens + a / divisor * out).reshape(height, width, -1)], -1
    )


def network(model, image: Tensor) -> np.ndarray:
    x = (numbers(image) - exact(MEAN)[:, None, None]) / exact(STD)[:, None, None]
    side = image.shape[-1] // 2
    x = x.reshape(3, side, 2, side, 2).transpose(1, 3, 0, 2, 4).reshape(side, side, -1)
    x = linear(x, model.patch_embed.proj)
    for stage in model.stages:
        if hasattr(stage.downsample, "reduction"):
            side //= 2
            x = x.reshape(side, 2, side, 2, -1).transpose(0, 2, 3, 1, 4).reshape(side, side, -1)
            x = linear(x, stage.downsample.reduction)
        for block in stage.blocks:
            x = mixed(fold_and_shift(linear(x, block.fc1)), block.attn)
            x = fold_and_shift(linear(x, block.fc2))
    return linear(x.reshape(-1), model.head.fc)


def worst_images(single, double, starts: Tensor, radius: float, number: int) -> Tensor:
    """Climb, within a distance of each start, towards the largest distance of two programs."""

    def distance(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            near = single(Normalize(MEAN, STD)(pixels * 255.0)).double()
            wide = pixels.double() * 255.0
            return (near - double(Normalize(MEAN, STD, torch.float64)(wide))).norm(dim=1)

    pixels, best = starts, distance(starts)
    for step in range(40):
        moved = torch.where(torch.rand_like(pixels) < 0.05, torch.rand_like(pixels), pixels)
        moved = (moved.round() if step % 3 == 0 else moved) - starts
        shrink = radius / moved.flatten(1).norm(dim=1).clamp_min(radius)
        moved = (starts + moved * shrink[:, None, None, None]).clamp(0.0, 1.0)
        found = distance(moved)
        better = (found > best)[:, None, None, None]
        pixels, best = torch.where(better, moved, pixels), torch.maximum(found, best)
    return pixels[best.topk(number).indices]


@pytest.fixture(autouse=True)
def _precision():
    ctx.prec = 200
    yield
    ctx.prec = 53


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"img_size": 8, "dims": (16, 24), "depths": (1, 1), "window_size": (4, 2)}
    shares = {"attn_share": 0.5, "eps": 2.0, "logit_scale": 0.5, "num_classes": 5}
    model = timm.create_model("lipsformer_contractive_nano", **sizes, **shares).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def errors_of(program, image: Tensor) -> np.ndarray:
    """The errors of the logits of a program, in its own precision."""
    dtype = program.head.fc.weight.dtype
    with torch.no_grad():
        computed = program(Normalize(MEAN, STD, dtype)(image.to(dtype)[None] * 255.0))[0]
    return numbers(computed) - network(program, image)


def test_both_programs_stay_within_their_errors(model):
    bound = lipschitz_bound(model, image_domain((8, 8), MEAN, STD))
    double, starts = copy.deepcopy(model).double(), torch.rand(32, 3, 8, 8)
    starts[:16] = starts[:16].round()
    for image in worst_images(model, double, starts, radius=99.0, number=2):
        for program, share in ((model, 1.0), (double, FLOAT64_SHARE)):
            error = root((errors_of(program, image) ** 2).sum())
            assert error > 0 and error < arb(share * bound.output.error), (share, float(error))
    narrow, wide = (executed_errors(bound, 5, dtype) for dtype in (torch.float32, torch.float64))
    assert (wide <= 2.0**-26 * narrow).all()


def test_errors_around_images_are_smaller_and_hold_in_their_balls(model):
    """Theorem 33, for differences of logits, at the worst images of balls of radius 0.5."""
    bound = lipschitz_bound(model, image_domain((8, 8), MEAN, STD))
    double = copy.deepcopy(model).double()
    centers = torch.tensor(MEAN)[:, None, None] + 0.2 * torch.rand(3, 3, 8, 8).round()
    centers *= torch.linspace(0.5, 1.0, 3)[:, None, None, None]
    watched = copy.deepcopy(double)
    norms, radii = watch_norms(watched), torch.full((3,), 0.5 / min(STD), dtype=torch.float64)
    with torch.no_grad():
        watched(Normalize(MEAN, STD, torch.float64)(centers.double() * 255.0))
    largest, levels, bounds = local_bounds(model, bound, norms, radii)
    assert set(largest) == set(norms) and len(bounds) > 1
    everywhere = difference_errors(bound, 5)
    for index, level in enumerate(levels.tolist()):
        allowed = difference_errors(bounds[level], 5)
        assert (allowed < everywhere).all()
        for center_norms, limit in zip(norms.values(), largest.values(), strict=True):
            assert center_norms[0][index] <= limit * level / LEVELS * (1.0 + 1e-12)
        near = centers[index : index + 1].expand(8, -1, -1, -1).contiguous()
        (image,) = worst_images(model, double, near, radius=0.5, number=1)
        error = errors_of(model, image)
        for i, j in itertools.permutations(range(5), 2):
            assert abs(error[i] - error[j]) < arb(allowed[i, j].item())


SMALL = {"img_size": 32, "embed_dim": 16, "num_classes": 5}
CONVERTED = {
    "swin_tiny_patch4_window7_224": {
        **{"patch_size": 2, "window_size": 4, "depths": (2, 2), "num_heads": (2, 4)}
    },
    "vit_tiny_patch16_224": {"patch_size": 8, "depth": 2, "num_heads": 2},
}


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_models_have_errors_around_images_too(name):
    torch.manual_seed(0)
    model = lipsformer.convert(timm.create_model(name, **SMALL, **CONVERTED[name])).eval()
    bound = lipschitz_bound(model, image_domain((32, 32), MEAN, STD))
    exact = copy.deepcopy(model).double()
    norms, radii = watch_norms(exact), torch.full((3,), 0.01, dtype=torch.float64)
    pixels = 255.0 * torch.linspace(0.1, 1.0, 3)[:, None, None, None] * torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        precise = exact(Normalize(MEAN, STD, torch.float64)(pixels.double()))
        computed = model(Normalize(MEAN, STD)(pixels)).double()
    assert all(len(calls[0]) == 3 for calls in norms.values())
    _, levels, bounds = local_bounds(model, bound, norms, radii)
    everywhere = difference_errors(bound, 5)
    for index, level in enumerate(levels.tolist()):
        error = computed[index] - precise[index]
        allowed = difference_errors(bounds[level], 5)
        assert ((error[:, None] - error).abs() <= allowed).all()
        assert (allowed <= everywhere).all() and (
            level == LEVELS or allowed.sum() < everywhere.sum()
        )


def test_errors_of_other_data_types_are_refused(model):
    bound = lipschitz_bound(model, image_domain((8, 8), MEAN, STD))
    with pytest.raises(ValueError, match=r"dtype=torch.bfloat16: errors are proved for"):
        executed_errors(bound, 5, torch.bfloat16)


def test_a_ball_grows_with_the_constants_of_the_layers():
    layers: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        for layer, factor in zip(layers, (7.0, 1.0), strict=True):
            layer.weight.copy_(factor * torch.eye(3))
            layer.bias.zero_()
    known = Domain(size=(), norm=100.0, radius=100.0, error=0.0, ball=0.5)
    local = lipschitz_bound(layers, replace(known, centers={layers[1]: 2.0}))
    assert local.output.ball == pytest.approx(3.5)
    assert local.parts["1"].input.norm == pytest.approx(2.0 + 3.5, rel=1e-6)
    assert local.output.error < lipschitz_bound(layers, known).output.error


def test_the_weight_of_a_residual_is_not_rounded_to_float32(model):
    """Rounded down, it made bounds of contractive residuals too small by up to 3e-8."""
    attn = model.stages[0].blocks[0].attn
    attn.branch.proj.weight.data.mul_(9.0)  # the constant exceeds 1
    known = Domain(size=(4, 4), channels=16)
    plain = lipschitz_bound(attn.branch, replace(known, channels=attn.dim)).value
    for a in torch.linspace(0.1, 0.9, 11):
        attn.mix.data.fill_(a)
        weight = attn.mix.double().item()
        exact = 1.0 - weight + weight * plain / divisor(attn.branch, (4, 4))
        assert lipschitz_bound(attn, known).value >= exact * (1.0 - 2e-9) > 1.0


def test_both_programs_of_an_executed_statement_have_their_allowance():
    """One error is that of the logits of the image, the other that of the logits of the others."""
    net = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    bound = lipschitz_bound(net, Domain(size=(), radius=9.0, norm=9.0, error=0.0))
    one = difference_errors(bound, 3)
    for dtype, share in ((torch.float64, 2.0 * FLOAT64_SHARE), (torch.float32, 1 + FLOAT64_SHARE)):
        allowed = executed_errors(bound, 3, dtype)
        assert (allowed >= one * share).all()
        torch.testing.assert_close(allowed, one * share, rtol=1e-12, atol=0)
