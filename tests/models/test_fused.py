"""Which blocks the kernels for a GPU take, and what they compute, without a GPU."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from lipsformer.kernels import dispatch
from lipsformer.layers import ScaledCosineAttention
from lipsformer.models import _fused
from lipsformer.models.lipsformer import LipsFormerBlock
from lipsformer.models.lipsformer_swin import WindowAttention
from tests.conftest import ROOT
from tests.kernels.test_block import Adapter


def block(window: int = 3, **kwargs) -> LipsFormerBlock:
    attn = WindowAttention(12, 3, window, ScaledCosineAttention(3, **kwargs))
    return LipsFormerBlock(12, attn, attn_norm=True, residual_scale=0.3).train()


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "device_type", lambda x: "cuda")
    monkeypatch.setattr(dispatch, "GPU_BLOCKS", True)


def test_bfloat16_training_takes_the_kernels_and_nothing_else_does():
    pytest.importorskip("triton", reason="the kernels are Triton's")
    x = torch.randn(2, 5, 7, 12)
    changed = {
        "hook": block(),
        "dropout": block(),
        "attention's dropout": block(attn_drop=0.1),
        "large windows": block(window=9),
        "subclass": block(),
        "small depthwise kernel": block(),
        "subclass of the attention": block(),
        "branches in other places": block(),
        "adapter": block(),
        "no windows": LipsFormerBlock(12, nn.Identity(), True, 0.3).train(),
    }
    changed["adapter"].mlp.branch.fc1 = Adapter(changed["adapter"].mlp.branch.fc1)
    changed["hook"].mlp.branch.fc1.register_forward_hook(lambda *_: None)
    depthwise = changed["small depthwise kernel"].conv1.branch.depthwise
    depthwise.weight = nn.Parameter(torch.randn(12, 1, 3, 3))
    changed["dropout"].mlp.branch.drop.p = 0.1
    attn = changed["subclass of the attention"].attn.branch
    attn.__class__ = type("Mine", (type(attn),), {})
    moved = changed["branches in other places"]
    moved.conv1.branch, moved.conv2.branch = moved.conv2.branch, moved.conv1.branch
    changed["subclass"].norm1.__class__ = type("Mine", (type(changed["subclass"].norm1),), {})
    with torch.autocast("cpu", torch.bfloat16):
        assert _fused.usable_on_gpu(block(), x)
        assert not _fused.usable_on_gpu(block().eval(), x)  # may be differentiated twice
        assert not _fused.usable_on_gpu(block(), x[:0])
        assert not _fused.usable_on_gpu(changed["large windows"], torch.randn(2, 9, 9, 12))
        for reason in set(changed) - {"large windows"}:
            assert not _fused.usable_on_gpu(changed[reason], x), reason
    with torch.autocast("cpu", torch.float16):
        assert not _fused.usable_on_gpu(block(), x)  # the stream could overflow
    assert not _fused.usable_on_gpu(block(), x)  # float32


BIASES = [f"{place}.bias" for place in ("conv1.branch.pointwise", "attn.branch.qkv")]
BIASES += [f"{place}.bias" for place in ("attn.branch.proj", "mlp.branch.fc1", "mlp.branch.fc2")]
PARAMETERS = [*BIASES, "conv1.residual_scale", "conv2.branch.depthwise.bias", "norm2.weight"]
CHANGES = {
    "one number": lambda old: old.detach()[:1].clone(),
    "every second number": lambda old: old.detach().repeat_interleave(2)[::2],
}


@pytest.mark.parametrize(
    ("name", "change"),
    [*itertools.product(PARAMETERS, CHANGES), *((name, "none") for name in BIASES)],
)
def test_parameters_that_the_kernels_would_read_wrongly_are_left_to_plain_operators(name, change):
    """The kernels read as many numbers as there are channels, one after the other."""
    pytest.importorskip("triton", reason="the kernels are Triton's")
    changed, (place, _, leaf) = block(), name.rpartition(".")
    module = changed.get_submodule(place)
    new = None if change == "none" else nn.Parameter(CHANGES[change](getattr(module, leaf)))
    module.register_parameter(leaf, new)
    x = torch.randn(2, 5, 7, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert _fused.usable_on_gpu(block(), x)
        assert not _fused.usable_on_gpu(changed, x)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kernels_equal_float64_in_tritons_interpreter():
    pytest.importorskip("triton", reason="the kernels are Triton's")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/kernels/test_gpu_block.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
