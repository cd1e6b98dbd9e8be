"""Counts of operators and of memory against torch's own counter and closed forms."""

import functools
import subprocess
import sys
import time

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import lipsformer  # noqa: F401  (registers)
from lipsformer.analysis.attention_maps import attention_maps
from lipsformer.analysis.cost import (
    count_parameters,
    median_seconds,
    part_costs,
    saved_bytes,
    training_bytes,
)
from lipsformer.analysis.estimate import estimate_submodules

MODELS = [
    pytest.param("lipsformer_nano", {}, marks=pytest.mark.slow),
    ("lipsformer_swin_nano", {}),
    ("swin_tiny_patch4_window7_224", {}),
    ("vit_tiny_patch16_224", {"img_size": 112}),
    ("resnet18", {}),
]


@pytest.mark.parametrize(("name", "kwargs"), MODELS)
def test_macs_of_every_part_agree_with_torch(name, kwargs):
    model = timm.create_model(name, **kwargs).eval()
    size = model.pretrained_cfg["input_size"]
    images = torch.randn(1, size[0], *[kwargs.get("img_size", side) for side in size[1:]])
    parts = part_costs(model, images)
    # torch's counter knows the fused attention of a CPU by its two products only
    with FlopCounterMode(display=False, depth=9) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images)
    flops = counter.get_flop_counts()
    assert sum(part.macs for part in parts) == counter.get_total_flops() // 2
    for part in parts:
        if f"{type(model).__name__}.{part.name}" in flops:
            counted = sum(flops[f"{type(model).__name__}.{part.name}"].values())
            assert part.macs == counted // 2, part.name
    called = {part.name for part in parts if part.macs}
    assert len(called & {name.partition(".")[2] for name in flops}) >= 5


def test_activations_and_shapes_in_closed_form():
    model = nn.Sequential(nn.Conv2d(3, 5, 3, 2), nn.Flatten(2), nn.BatchNorm1d(5), nn.Linear(21, 2))
    costs = part_costs(model, torch.randn(1, 3, 15, 7))
    assert [(part.name, part.macs, part.activations) for part in costs] == [
        ("0", 5 * 21 * 27, 5 * 21),
        ("2", 0, 0),
        ("3", 5 * 2 * 21, 5 * 2),
    ]
    assert [part.output for part in costs] == [(5, 7, 3), (5, 21), (5, 2)]


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_counts_the_same_on_every_backend(backend):
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x[:, :, :11], x[:, :, :11])

    with sdpa_kernel(backend):
        (cost,) = part_costs(nn.Sequential(Attention()), torch.randn(2, 3, 17, 5))
    assert cost.macs == 2 * 3 * 17 * 11 * (5 + 5)
    assert cost.activations == 2 * 3 * 17 * (11 + 5)


def test_parts_sum_to_the_model_and_nothing_is_left_behind():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7).train()
    parts = part_costs(model, torch.randn(1, 3, 224, 224))
    assert sum(part.parameters for part in parts) == count_parameters(model)
    # class token and position embedding belong to no part
    assert {part.name: part.parameters for part in parts}["(rest)"] == 192 + 197 * 192
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_every_module_gets_its_mode_back():
    model = timm.create_model("lipsformer_swin_nano").train()
    model.stages[1].eval()
    modes = [module.training for module in model.modules()]
    images = torch.zeros(1, 3, 32, 32)
    for measure in (
        lambda: part_costs(model, images),
        lambda: saved_bytes(model, images),
        lambda: attention_maps(model, images),
        lambda: estimate_submodules(model, ["stages.0"], images, num_iters=1),
    ):
        measure()
        assert [module.training for module in model.modules()] == modes


def test_shared_parameters_count_once():
    shared = nn.Linear(5, 5)
    assert count_parameters(nn.Sequential(shared, nn.ReLU(), shared)) == 30


@pytest.mark.slow
def test_a_weight_of_two_parts_belongs_to_the_first() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(11, 11), nn.Linear(11, 11)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.flatten(1)[:, :11]))

    images = torch.zeros(3, 3, 5, 7)
    counted = {part.name: part.parameters for part in part_costs(Tied(), images[:1])}
    assert counted == {"first": 11 * 11 + 11, "second": 11}
    assert training_bytes(Tied(), images, micro_batch=2)["weights"] == 4 * (11 * 11 + 2 * 11)


def test_peak_memory_sees_what_was_held_and_freed():
    """In a process of its own: what other tests left behind may be freed at any time."""
    lines = [
        "import torch",
        "from lipsformer.analysis.cost import PeakMemory",
        "with PeakMemory(torch.device('cpu')) as memory:",
        "    held = torch.ones(2**26, dtype=torch.uint8)",
        "    del held",
        "    torch.ones(2**24, dtype=torch.uint8)",
        "print(memory.peak)",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if peak == "None":
        pytest.skip("this system does not tell a process's peak memory")
    # in whole pages, and with what else the process does
    assert 0.9 * 2**26 < int(peak) < 1.2 * 2**26


def test_median_seconds_ignores_warmup_and_outliers(monkeypatch):
    durations = iter([7.0, 1.0, 2.0, 9.0, 2.0, 3.0])
    clock = [0.0]

    def step():
        clock[0] += next(durations)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert median_seconds(step, torch.device("cpu"), warmup=1, repeats=5) == 2.0
    assert next(durations, None) is None


def small() -> nn.Module:
    """Flatten 3 x 2 x 5 pixels, 30 -> 7 -> 11."""
    return nn.Sequential(nn.Flatten(), nn.Linear(30, 7), nn.GELU(), nn.Linear(7, 11, bias=False))


def test_kept_are_the_inputs_of_gelu_and_of_the_second_layer() -> None:
    model, images = small().eval(), torch.randn(13, 3, 2, 5)
    # the first layer keeps a view of the images, which do not count
    assert saved_bytes(model, images) == 13 * (7 + 7) * 4
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert saved_bytes(model, images) == 13 * (7 + 7) * 4


def test_under_autocast_what_was_cast_is_kept_too() -> None:
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    cast = 13 * 30 + 7 * 11  # the first weight is not needed: images have no gradient
    kept = saved_bytes(small(), torch.randn(13, 3, 2, 5), autocast)
    assert kept == 2 * (cast + 13 * (7 + 7))


def test_a_storage_that_two_layers_keep_counts_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()  # keeps its result, and so do the two products
            return y * y.flip(0) + y * 3.0

    x = torch.randn(5, 3, 2, 7, requires_grad=True)
    assert saved_bytes(Twice(), x) == 2 * x.numel() * 4


def test_training_needs_weights_gradients_moments_and_a_line_through_two_batches() -> None:
    model = small()
    model.register_buffer("table", torch.zeros(17))
    found = training_bytes(model, torch.randn(3, 3, 2, 5), micro_batch=19, ema=True)
    learned = 4 * (30 * 7 + 7 + 7 * 11)
    assert found == {
        "weights": learned + 4 * 17,
        "gradients": learned,
        "two moments, as of AdamW": 2 * learned,
        "average of the weights": learned + 4 * 17,
        "kept for the backward pass": 19 * (7 + 7) * 4,
    }
