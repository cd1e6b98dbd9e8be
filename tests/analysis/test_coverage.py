"""Every class of every model has a bound rule, and every attention has a layout."""

from collections.abc import Callable

import pytest
import timm
import torch
from timm.layers import SelectAdaptivePool2d
from torch import nn

import lipsformer
from lipsformer.analysis.attention_maps import attention_maps
from lipsformer.analysis.bounds import (
    Domain,
    bound_rule,
    core,
    flatten_bound,
    lipschitz_bound,
    registration_of,
)
from lipsformer.layers import LipschitzNormAttention, ScaledCosineAttention
from lipsformer.models.lipsformer_swin import WindowAttention

CORES = (ScaledCosineAttention, LipschitzNormAttention)


def computes(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and not isinstance(
        module, (nn.ModuleList, nn.ModuleDict)
    )


def ancestors(path: str) -> list[str]:
    """Paths above a path, the nearest first; the model itself is the last."""
    names = path.split(".")
    return [".".join(names[:end]) for end in range(len(names) - 1, -1, -1)]


def uncovered(model: nn.Module) -> set[str]:
    """Say which classes of a model lack a bound, and which attention lacks a layout.

    The rules of attention and of pooling cover the modules inside them. The layout may belong to a
    module around the attention: in timm's Swin only the block knows how its windows are shifted.
    """
    modules = dict(model.named_modules())
    missing = set()
    closed = {path for path, module in modules.items() if isinstance(module, SelectAdaptivePool2d)}
    for path, module in modules.items():
        if isinstance(module, CORES):
            attention = next(above for above in ancestors(path) if computes(modules[above]))
            closed.add(attention)
            around = [registration_of(type(modules[above])) for above in ancestors(path)]
            if not any(found is not None and found.layout is not None for found in around):
                missing.add(f"{type(modules[attention]).__name__} has no layout")
    for path, module in modules.items():
        inside = path and not closed.isdisjoint(ancestors(path))
        if inside or not computes(module):
            continue
        if registration_of(type(module)) is None:
            missing.add(f"{type(module).__name__} has no bound")
    return missing


REGISTERED = timm.list_models("lipsformer*")
CONVERTED = {
    "vit_tiny_patch16_224": {},
    "vit_base_patch16_clip_224": {"pre_norm": False},
    "deit_tiny_patch16_224": {"reg_tokens": 2},
    "swin_tiny_patch4_window7_224": {},
    "swin_base_patch4_window12_384": {},
}
VARIANTS = [
    ("lipsformer_nano", {"attn": "lipschitznorm"}),
    ("lipsformer_swin_nano", {"attn": "lipschitznorm"}),
]


@pytest.mark.parametrize(("name", "kwargs"), [(name, {}) for name in REGISTERED] + VARIANTS)
def test_every_class_of_a_registered_model_is_covered(name, kwargs):
    assert uncovered(timm.create_model(name, device="meta", **kwargs)) == set()


@pytest.mark.parametrize("name", CONVERTED)
def test_every_class_of_a_converted_model_is_covered(name):
    plain = timm.create_model(name, device="meta", **CONVERTED[name])
    assert "LayerNorm has no bound" in uncovered(plain)
    assert uncovered(lipsformer.convert(plain, spectral_init=False)) == set()


def nano(attn: Callable[..., nn.Module] | None = None) -> nn.Module:
    model = timm.create_model("lipsformer_swin_nano", img_size=8, window_size=2, depths=(1, 1))
    if attn is not None:
        for stage in model.stages:
            stage.blocks[0].attn.branch = attn()
    return model


class Softsign(nn.Softsign):
    pass


class OwnAttention(nn.Module):
    """Attends within the whole map and has one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = ScaledCosineAttention(1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        tokens = x.flatten(1, 2)[:, None]
        return self.attention(tokens, tokens, tokens)[:, 0].reshape(x.shape)


def test_a_class_without_a_bound_is_found():
    model = nano()
    model.stages[1].blocks[0].mlp.branch.drop = Softsign()
    assert uncovered(model) == {"Softsign has no bound"}


def test_a_subclass_that_changes_what_forward_calls_has_no_bound():
    class Doubled(WindowAttention):
        def attend(self, qkv: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().attend(qkv)

    model = nano(lambda: Doubled(32, 2, 2, ScaledCosineAttention(2)))
    assert uncovered(model) == {"Doubled has no bound", "Doubled has no layout"}


def test_an_attention_without_a_layout_is_found(monkeypatch):
    model = nano(OwnAttention)
    assert uncovered(model) == {"OwnAttention has no bound", "OwnAttention has no layout"}
    monkeypatch.setattr(core, "_REGISTERED", dict(core._REGISTERED))
    bound_rule(OwnAttention)(core.children_in_order())
    assert uncovered(model) == {"OwnAttention has no layout"}
    with pytest.raises(TypeError, match="register its class with"):
        attention_maps(model, torch.zeros(1, 3, 8, 8))

    def layout(model, module, index, x):
        size = (x.shape[1], x.shape[2])
        return core.Layout(size, size)

    bound_rule(OwnAttention, layout=layout)(core.children_in_order())
    assert uncovered(model) == set()
    maps = attention_maps(model, torch.zeros(1, 3, 8, 8))
    assert [tuple(m.shape) for m in maps.values()] == [(1, 1, 4, 4), (1, 1, 2, 2)]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("lipsformer_nano", {}),
        ("lipsformer_swin_nano", {}),
        ("lipsformer_vit_tiny", {"img_size": 32, "depth": 2}),
        ("swin_tiny_patch4_window7_224", {"img_size": 32, "window_size": 4, "depths": (1, 1)}),
    ],
)
def test_every_module_is_a_part_of_the_bound(name, kwargs):
    """The rule of a composite module forgets none of its children; that of attention has none."""
    model = timm.create_model(name, **kwargs)
    if not name.startswith("lipsformer"):
        model = lipsformer.convert(model)
    parts = dict(flatten_bound(lipschitz_bound(model, Domain(size=(32, 32)))))
    for path, module in model.named_modules():
        above = [parts[name] for name in ancestors(path) if name in parts] if path else []
        of_attention = bool(above) and not above[0].parts and "Attention" in above[0].kind
        weights_of_a_residual = isinstance(module, timm.layers.LayerScale)
        if list(module.parameters(recurse=False)) and not of_attention:
            assert path in parts or weights_of_a_residual or hasattr(module, "cls_token"), path
