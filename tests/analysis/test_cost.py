"""Cost counting against fvcore, closed forms and a known allocation."""

import math
import subprocess
import sys
import time

import pytest
import timm
import torch
from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipsformer  # noqa: F401  (registers)
from lipsformer.analysis.cost import count_parameters, median_seconds, part_costs

MODELS = [
    ("lipsformer_nano", {}),
    ("lipsformer_swin_nano", {}),
    ("lipsformer_swin_tiny", {}),
    ("swin_tiny_patch4_window7_224", {}),
    ("vit_tiny_patch16_224", {"img_size": 112}),
    ("resnet18", {}),
]


def shape(value):
    return value.type().sizes()


def attention_macs(inputs, _outputs):
    query, key, value = map(shape, inputs[:3])
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_activations(inputs, _outputs):
    query, key, value = map(shape, inputs[:3])
    return math.prod(query[:-1]) * (key[-2] + value[-1])


@pytest.mark.filterwarnings("ignore")  # fvcore traces, which PyTorch discourages
@pytest.mark.parametrize(("name", "kwargs"), MODELS)
def test_macs_and_activations_agree_with_fvcore(name, kwargs):
    model = timm.create_model(name, **kwargs).eval()
    size = model.pretrained_cfg["input_size"]
    images = torch.randn(1, size[0], *[kwargs.get("img_size", side) for side in size[1:]])
    parts = part_costs(model, images)
    attention = "aten::scaled_dot_product_attention"
    macs = FlopCountAnalysis(model, images).unsupported_ops_warnings(False)
    macs.set_op_handle(attention, attention_macs)
    # fvcore also counts norms and pooling; the rule here is products alone
    products = sum(
        count
        for operator, count in macs.by_operator().items()
        if not operator.endswith(("_norm", "_avg_pool2d"))
    )
    assert sum(part.macs for part in parts) == pytest.approx(products, rel=0.01)
    activations = ActivationCountAnalysis(model, images).unsupported_ops_warnings(False)
    activations.set_op_handle(attention, attention_activations)
    total = sum(part.activations for part in parts)
    assert total == pytest.approx(activations.total(), rel=0.01)


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


def test_shared_parameters_count_once():
    shared = nn.Linear(5, 5)
    assert count_parameters(nn.Sequential(shared, nn.ReLU(), shared)) == 30


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
