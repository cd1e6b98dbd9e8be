"""Parameter groups hold every parameter once; every optimizer of a run resumes bit for bit."""

import dataclasses
import json
import re

import pytest
import torch
from timm import create_model
from torch import nn

import lipsformer  # noqa: F401  (registers the models)
from lipsformer._errors import ConfigError
from lipsformer.config import OptimConfig
from lipsformer.engine.optim import (
    check_sharded,
    load_state,
    make_optimizer,
    optimizer_names,
    parameter_groups,
    set_lr,
    state_numbers,
    state_tensors,
)
from tests.one_rank import sharded


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5)
        self.table = nn.Parameter(torch.zeros(7, 2))
        self.scale = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.head = nn.Linear(5, 2, bias=False)

    def no_weight_decay(self) -> set[str]:
        return {"table"}


def decays(model: nn.Module, groups: list[dict]) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pairs = [(names[id(p)], group["weight_decay"]) for group in groups for p in group["params"]]
    assert len(pairs) == len(dict(pairs)), "a parameter is in two groups"
    return dict(pairs)


def test_matrices_decay_and_vectors_and_named_exceptions_do_not() -> None:
    model = Toy()
    groups = parameter_groups(model, OptimConfig(lr=1.0, weight_decay=0.3))
    assert decays(model, groups) == {
        "stem.weight": 0.3,
        "stem.bias": 0.0,
        "table": 0.0,
        "scale": 0.0,
        "head.weight": 0.3,
    }


def test_layer_decay_scales_lr_by_distance_from_the_head() -> None:
    model = create_model("vit_tiny_patch16_224", depth=3, embed_dim=12, num_heads=2, num_classes=5)
    optim = OptimConfig(lr=1.0, weight_decay=0.3, layer_decay=0.5)
    optimizer = make_optimizer(model, optim)
    assert decays(model, optimizer.param_groups).keys() == dict(model.named_parameters()).keys()
    set_lr(optimizer, 8.0)
    lr = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert lr[id(model.head.weight)] == 8.0
    assert lr[id(model.blocks[2].mlp.fc1.weight)] == 4.0
    assert lr[id(model.blocks[0].mlp.fc1.weight)] == 1.0
    assert lr[id(model.patch_embed.proj.weight)] == 0.5


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("lipsformer_nano", (1, 2, 4, 1)), ("lipsformer_swin_tiny", (2, 2, 6, 2))],
)
def test_layer_decay_counts_blocks_of_all_stages(name: str, blocks: tuple[int, ...]) -> None:
    model = create_model(name, device="meta")
    groups = parameter_groups(model, OptimConfig(lr=1.0, layer_decay=0.8))
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    total = sum(blocks)
    for parameter_name, parameter in model.named_parameters():
        part, *rest = parameter_name.split(".")
        if part == "stages":  # merging goes with the block that follows, the norm with the last
            inner = int(rest[2]) if rest[1] == "blocks" else 0
            depth = 1 + sum(blocks[: int(rest[0])]) + inner
        else:
            depth = {"patch_embed": 0, "norm": total, "head": total + 1}[part]
        assert scale.pop(id(parameter)) == pytest.approx(0.8 ** (total + 1 - depth), rel=1e-12)
    assert not scale


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_the_weights_of_residual_branches_have_a_learning_rate_of_their_own(layer_decay) -> None:
    model = create_model("lipsformer_swin_nano", device="meta")
    optim = OptimConfig(lr=1.0, name="muon", weight_decay=0.3, layer_decay=layer_decay)
    scaled = dataclasses.replace(optim, residual_lr_scale=7.0)

    def settings(optim: OptimConfig) -> dict[int, tuple]:
        keys = ("weight_decay", "use_fallback", "lr_scale")
        defaults = {"use_fallback": False, "lr_scale": 1.0}
        return {
            id(p): tuple((defaults | group)[key] for key in keys)
            for group in parameter_groups(model, optim)
            for p in group["params"]
        }

    before, after = settings(optim), settings(scaled)
    assert before.keys() == after.keys() == {id(p) for p in model.parameters()}
    for name, parameter in model.named_parameters():
        decay, fallback, scale = before[id(parameter)]
        factor = 7.0 if name.endswith("residual_scale") else 1.0
        assert after[id(parameter)] == (decay, fallback, pytest.approx(factor * scale)), name
    with pytest.raises(ConfigError, match="the model has no weighted residuals: remove it"):
        parameter_groups(small_network(), scaled)


def test_optimizer_follows_the_adamw_formula_in_float64() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3, bias=False)
    optim = OptimConfig(lr=0.1, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.2)
    optimizer = make_optimizer(layer, optim)
    weight = layer.weight.detach().double()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 4):
        gradient = torch.randn(3, 5)
        layer.weight.grad = gradient.clone()
        optimizer.step()
        mean = 0.7 * mean + 0.3 * gradient.double()
        square = 0.9 * square + 0.1 * gradient.double() ** 2
        weight = weight * (1 - 0.1 * 0.2)
        corrected = (square / (1 - 0.9**step)).sqrt() + 1e-3
        weight = weight - 0.1 * mean / (1 - 0.7**step) / corrected
    torch.testing.assert_close(layer.weight.detach().double(), weight, rtol=1e-5, atol=1e-6)


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 11), nn.Linear(11, 5))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        set_lr(optimizer, 0.01 / (step + 1))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_resumes_bit_for_bit(name: str) -> None:
    optim = OptimConfig(name=name, lr=0.01, weight_decay=0.1)
    model = small_network()
    optimizer = make_optimizer(model, optim)
    before = [parameter.clone() for parameter in model.parameters()]
    train(model, optimizer, range(3))
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(moved)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    tensors = {key: value.clone() for key, value in state_tensors(model, optimizer).items()}
    numbers = json.dumps(state_numbers(model, optimizer))
    train(model, optimizer, range(3, 6))

    resumed = small_network()
    resumed.load_state_dict(weights)
    other = make_optimizer(resumed, optim)
    load_state(resumed, other, tensors, json.loads(numbers))
    train(resumed, other, range(3, 6))
    for wanted, found in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(wanted, found)


def test_muon_orthogonalizes_hidden_matrices_and_adamw_updates_the_ends() -> None:
    model = create_model("lipsformer_swin_nano", num_classes=7, embed_dim=8, depths=(1, 1))
    optim = OptimConfig(name="muon", lr=1.0, weight_decay=0.0, kwargs={"adjust_lr_fn": "original"})
    optimizer = make_optimizer(model, optim)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        update = (before[name] - parameter).detach()
        if "qkv" in name and update.ndim == 2:
            # Newton-Schulz brings all singular values near 1
            values = torch.linalg.svdvals(update / max(1.0, len(update) / update.shape[1]) ** 0.5)
            assert values.min() > 0.5 and values.max() < 1.3
        if name.startswith(("patch_embed.proj", "head.fc")) or "table" in name:
            # the first step of AdamW moves every entry by the learning rate
            torch.testing.assert_close(update.abs(), torch.ones_like(update), rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "adahessian"}, "optim.name='adahessian'"),  # second derivatives
        ({"name": "bnbadam"}, "optim.name='bnbadam'"),  # another package
        ({"name": "lion", "eps": 1e-8}, "optim.eps=1e-08 has no effect"),
        ({"name": "adamw", "momentum": 0.9}, "optim.momentum=0.9 has no effect"),
        (
            {"name": "muon", "kwargs": {"steps": 5}},
            "optim.name='muon' cannot be built with optim.kwargs=",
        ),
        ({"name": "adan", "betas": (0.9, 0.99)}, "optim.betas=(0.9, 0.99) does not fit"),
        ({"kwargs": {"lr": 1.0}}, "optim.kwargs.lr must not be set"),
        ({"kwargs": {"fused": False}}, "optim.kwargs.fused must not be set"),
        ({"kwargs": {"layer_decay": 0.5}}, "optim.kwargs.layer_decay has no effect"),
        ({"kwargs": {"filter_bias_and_bn": False}}, "optim.kwargs.filter_bias_and_bn has no effe"),
        ({"kwargs": {"differentiable": True}}, "optim.name='adamw' cannot be built"),
    ],
)
def test_settings_that_an_optimizer_does_not_take_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_optimizer(small_network(), OptimConfig(lr=0.1, **settings))


def test_optimizers_that_cannot_update_shards_are_refused():
    """Each of the refused ones fails on a sharded model in another operation."""
    with sharded(nn.Linear(2, 2)):
        before = torch.get_rng_state()
        for name in ("adamw", "lamb", "lion", "muon"):
            check_sharded(OptimConfig(name=name, lr=1e-3, layer_decay=0.7), torch.device("cpu"))
        assert torch.equal(torch.get_rng_state(), before)
        refused = "adafactor", "adafactorbv", "adamp", "cadamw", "cadopt", "nadamuon", "novograd"
        for name in refused:
            with pytest.raises(ConfigError, match=f"optim.name='{name}' cannot update the weights"):
                check_sharded(OptimConfig(name=name, lr=1e-3), torch.device("cpu"))
