"""Theorem 32: float32 and float64 programs against the exact network in balls of 200 bits."""

import copy

import numpy as np
import pytest
import timm
import torch
from flint import arb, ctx
from torch import Tensor, nn

from data import Normalize
from lipsformer.analysis.bounds import image_domain, lipschitz_bound
from lipsformer.analysis.certificates import executed_error, real_error

MEAN, STD = (0.5, 0.25, 0.75), (0.25, 0.5, 0.375)  # exact in both programs

exact = np.vectorize(arb, otypes=[object])
root, exponential = (np.frompyfunc(lambda x, f=f: getattr(x, f)(), 1, 1) for f in ("sqrt", "exp"))
magnitude = np.frompyfunc(abs, 1, 1)


def numbers(tensor: Tensor) -> np.ndarray:
    return exact(tensor.detach().double().numpy())


def linear(x: np.ndarray, layer: nn.Module) -> np.ndarray:
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


def worst_images(single, double, number: int) -> Tensor:
    """Climb from black and white images towards the largest distance of the two programs."""

    def distance(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            near = single(Normalize(MEAN, STD)(pixels * 255.0)).double()
            wide = pixels.double() * 255.0
            return (near - double(Normalize(MEAN, STD, torch.float64)(wide))).norm(dim=1)

    pixels = torch.rand(32, 3, 8, 8)
    pixels[:16] = pixels[:16].round()
    best = distance(pixels)
    for step in range(40):
        moved = torch.where(torch.rand_like(pixels) < 0.05, torch.rand_like(pixels), pixels)
        moved = moved.round() if step % 3 == 0 else moved
        found = distance(moved)
        pixels[found > best], best = moved[found > best], torch.maximum(found, best)
    return pixels[best.topk(number).indices]


@pytest.fixture(autouse=True)
def _precision():
    ctx.prec = 200
    yield
    ctx.prec = 53


def test_both_programs_stay_within_their_errors():
    torch.manual_seed(0)
    sizes = {"img_size": 8, "dims": (16, 24), "depths": (1, 1), "window_size": (4, 2)}
    shares = {"attn_share": 0.5, "eps": 2.0, "logit_scale": 0.5, "num_classes": 5}
    model = timm.create_model("lipsformer_contractive_nano", **sizes, **shares).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    bound = lipschitz_bound(model, image_domain((8, 8), MEAN, STD))
    double = copy.deepcopy(model).double()
    for image in worst_images(model, double, number=3):
        truth = network(model, image)
        for program, allowed in ((model, bound.output.error), (double, real_error(bound))):
            dtype = program.head.fc.weight.dtype
            pixels = image.to(dtype)[None] * 255.0
            with torch.no_grad():
                computed = program(Normalize(MEAN, STD, dtype)(pixels))[0]
            error = root(((numbers(computed) - truth) ** 2).sum())
            assert error > 0 and error < arb(allowed), (dtype, float(error), allowed)
    assert executed_error(bound, torch.float64) <= 2.0**-26 * executed_error(bound)
