"""Parameter groups hold every parameter once and decay the right ones; AdamW is AdamW."""

import pytest
import torch
from timm import create_model
from torch import nn

import lipsformer  # noqa: F401  (registers the models)
from lipsformer.config import OptimConfig
from lipsformer.engine.optim import make_optimizer, parameter_groups, set_lr


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
