"""The GPU workbench against fake CUDA tensors, closed forms, fvcore and real tensors."""

import json
from argparse import Namespace
from unittest.mock import patch

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import lipsformer  # noqa: F401  (registers the models)
from benchmarks.gpu_predictions import batches
from benchmarks.gpu_predictions.__main__ import RESULTS, compile_step, predict, predict_regions
from benchmarks.gpu_predictions.cubins import generated, occupancy
from benchmarks.gpu_predictions.devices import DEVICES, LAUNCH_SECONDS, seconds
from benchmarks.gpu_predictions.host import HostReads
from benchmarks.gpu_predictions.inductor import Kernel, schedule
from benchmarks.gpu_predictions.table import page
from benchmarks.gpu_predictions.trace import (
    CudaOperators,
    build,
    cuda_attention,
    cuda_step,
    eager,
    graphs,
)
from lipsformer._configfile import read_config
from lipsformer.analysis.cost import part_costs, saved_bytes
from lipsformer.config import Config
from lipsformer.kernels import dispatch
from lipsformer.layers import CenterNorm

B, C, D = 5, 3 * 7 * 7, 11
NANO = "lipsformer_swin_nano"
SMALL = {"depths": (1, 1), "num_heads": (2, 4)}
ONE_BLOCK = {"depths": (1,), "num_heads": (2,)}
# The step of ONE_BLOCK with 8 images, as the workbench counted it.
KNOWN = {"forward_kernels": 29, "backward_kernels": 44, "bytes": 28_957_272}
KNOWN |= {"saved_bytes": 2_560_192, "peak_bytes": 4_219_176}
SMALL_SWIN = {"img_size": 32, "patch_size": 2, "depths": (2, 1)}
SMALL_SWIN |= {"num_heads": (2, 4), "window_size": 4, "embed_dim": 32}


class Operators(TorchDispatchMode):
    """Records which operators run, without views, and the types of their results."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.seen.append((str(func), tuple(result.shape), result.dtype))
        return result


@pytest.mark.parametrize(
    ("name", "options"), [(NANO, SMALL), ("swin_tiny_patch4_window7_224", SMALL_SWIN)]
)
def test_forward_operators_and_their_types_are_those_of_fake_cuda_tensors(
    name, options, monkeypatch
):
    monkeypatch.setattr(dispatch, "GPU_BLOCKS", False)  # fake CUDA tensors cannot stand the trial
    shape = (2, 3, 32, 32)
    with cuda_step(build(name, **options), shape) as traced, Operators() as ours:
        traced.step(traced.images, traced.labels)
    cudnn = lambda *args, **kwargs: torch._C._ConvBackend.Cudnn  # noqa: E731
    model = build(name, **options).train()
    with (
        patch.object(F, "scaled_dot_product_attention", cuda_attention),
        patch.object(torch._C, "_select_conv_backend", cudnn),
        # without a device autocast would be off
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda: True),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        model = model.to_empty(device="cuda")
        images = torch.empty(shape, device="cuda").contiguous(memory_format=torch.channels_last)
        labels = torch.empty(2, dtype=torch.long, device="cuda")
        with Operators() as theirs:
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(images)
            F.cross_entropy(logits.float(), labels)
    assert ours.seen == theirs.seen


def test_operators_bytes_and_products_of_a_linear_layer():
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(C, D))
    with cuda_step(model, (B, 3, 7, 7)) as traced:
        found = eager(traced)
    flattened = 2 * 4 * B * C  # channels last must be copied
    casts = 6 * (B * C + C * D + D)
    loss = 6 * B * D + 8 * B * D + (4 * B * D + 8 * B + 4 + 4)
    product = 2 * (B * C + C * D + D + B * D)
    assert found["bytes"]["forward"] == flattened + casts + product + loss
    assert found["operators"]["forward"] == 1 + 3 + 1 + 3
    assert found["products"] == {
        "forward": 2 * B * C * D,
        "backward": 2 * B * C * D,
        "optimizer": 0,
    }
    assert found["saved_bytes"] == 2 * B * C + 4 * B * D + 8 * B + 4


def test_bytes_of_center_norm():
    sizes = []
    for norm in (nn.Identity(), CenterNorm(C, device="meta")):
        model = nn.Sequential(nn.Flatten(), norm, nn.Linear(C, D, device="meta"))
        with cuda_step(model, (B, 3, 7, 7)) as traced:
            sizes.append(eager(traced)["bytes"]["forward"])
    mean, centered = 4 * (B * C + B), 4 * (2 * B * C + B)
    gain, affine = 4 * 2 * C, 4 * (2 * B * C + 2 * C)
    assert sizes[1] - sizes[0] == mean + centered + gain + affine


def test_products_are_those_of_fvcore():
    with cuda_step(build(NANO, **SMALL), (B, 3, 32, 32)) as traced:
        found = eager(traced)
    model = timm.create_model(NANO, **SMALL)
    macs = sum(part.macs for part in part_costs(model, torch.randn(1, 3, 32, 32)))
    assert found["products"]["forward"] == 2 * B * macs


def test_saved_activations_are_those_of_real_tensors(monkeypatch):
    monkeypatch.setattr(dispatch, "GPU_BLOCKS", False)  # the kernels need a GPU

    def plain_attention(model):
        for module in model.modules():
            if hasattr(module, "fused_attn"):  # the fused operators need a GPU
                module.fused_attn = False
        return model

    with cuda_step(plain_attention(build(NANO, **SMALL)), (B, 3, 32, 32)) as traced:
        found = eager(traced)
    model = plain_attention(timm.create_model(NANO, **SMALL))
    images = torch.randn(B, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    with patch.object(dispatch, "ENABLED", False), CudaOperators():
        real = saved_bytes(model, images, lambda: torch.autocast("cpu", torch.bfloat16))
    loss = 4 * B * 1000 + 8 * B + 4  # the logarithms of the softmax, the labels, their number
    assert found["saved_bytes"] == real + loss


def test_a_step_of_the_nano_model_has_not_grown():
    known = json.loads((RESULTS / f"{NANO}.json").read_text())
    with cuda_step(build(NANO), (known["batch_size"], 3, 32, 32)) as traced:
        found = eager(traced)
    for part in ("forward", "backward", "optimizer"):
        for figure in ("operators", "bytes"):
            assert found[figure][part] <= 1.02 * known["eager"][figure][part], (figure, part)
    assert found["saved_bytes"] <= 1.02 * known["eager"]["saved_bytes"]


def test_least_time_is_the_longest_of_traffic_products_and_launch():
    h100 = DEVICES["H100"]
    assert seconds(Kernel("mm", 335 * 10**7, 1), h100) == pytest.approx(1e-3)
    assert seconds(Kernel("mm", 1, 989 * 10**9), h100) == pytest.approx(1e-3)
    assert seconds(Kernel("depthwise", 1, 67 * 10**9, grouped=True), h100) == pytest.approx(1e-3)
    assert seconds(Kernel("fused", 1), h100) == LAUNCH_SECONDS


class Tokens(nn.Module):
    """CenterNorm and a linear layer over the channels of a map, averaged over the map."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = CenterNorm(C), nn.Linear(C, D)

    def forward(self, x):
        return self.linear(self.norm(x.permute(0, 2, 3, 1))).mean((1, 2))


@pytest.mark.slow
def test_compiled_center_norm_and_linear_layer_move_the_least():
    rows = 31 * 7 * 5
    with torch.device("meta"):
        model = Tokens()
    with cuda_step(model, (31, C, 7, 5)) as traced:
        found = graphs(traced)
    forward = schedule(found.forward, backward=False).kernels
    norm = 4 * rows * C + 4 * 2 * C + 2 * rows * C
    assert norm <= forward[0].bytes <= norm + 4 * rows  # it may keep the means
    product = 2 * (rows * C + C * D + D + rows * D)
    assert Kernel("aten.addmm.default", product, 2 * rows * C * D) in forward
    backward = schedule(found.backward, backward=True).kernels
    gradient = Kernel("aten.mm.default", product - 2 * D, 2 * rows * C * D)
    assert backward.count(gradient) == 2  # of the input and of the weight


def check_compiled_step(model, shape, known, architectures, every=1):
    """Fail if a step has grown by more than 2 % or if a kernel that Inductor writes spills.

    Compiling a kernel takes a second, so only one in `every` is compiled.
    """
    found, sources = compile_step(model, shape)
    kernels = found["forward_kernels"] + found["backward_kernels"]
    assert kernels <= 1.02 * (known["forward_kernels"] + known["backward_kernels"])
    for figure in ("bytes", "saved_bytes", "peak_bytes"):
        assert found[figure] <= 1.02 * known[figure], figure
    assert len(sources) > every
    for gpu, kernels in generated(sources[::every], architectures).items():
        assert kernels["spilling"] == {}, gpu


@pytest.mark.slow
def test_compiled_step_of_one_block_has_not_grown_and_spills_nothing():
    check_compiled_step(build(NANO, **ONE_BLOCK), (8, 3, 32, 32), KNOWN, [90], every=12)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_step_of_the_nano_model_has_not_grown_and_spills_nothing():
    known = json.loads((RESULTS / f"{NANO}.json").read_text())
    shape = (known["batch_size"], 3, 32, 32)
    check_compiled_step(build(NANO), shape, known["compiled"], [80, 90, 100])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at all inputs
@pytest.mark.parametrize("name", ["lipsformer_nano", NANO, "lipsformer_vit_tiny"])
def test_no_model_breaks_its_graphs(name):
    assert predict_regions(name)["regions"]["breaks"] == {}


def test_what_makes_the_host_wait_is_found():
    x = torch.arange(6.0, requires_grad=True)

    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            return grads[0] * grads[0].max().item()

    with HostReads() as reads:
        y = Reading.apply(x)
        y[x.detach() > 2].sum().backward()
        x.detach().nonzero(), x.detach().cpu(), x.detach().numpy(), x.detach().tolist()
        y.detach().sort(), y.detach().clamp(0, 1), torch.where(x.detach() > 1, 1.0, 0.0)
    # The gradient of a selection by a mask is a selection too.
    expected = {"index": 1, "index_put": 1, "_local_scalar_dense": 1, "nonzero": 1, "cpu": 1}
    assert dict(reads) == {**expected, "numpy": 1, "tolist": 1}


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "architecture", "expected"),
    [
        (32, 0, 4, 90, 1.0),  # 64 warps of 1,024 registers
        (33, 0, 4, 90, 48 / 64),  # 1,280 registers per warp leave room for 51, 12 programs of 4
        (255, 0, 8, 80, 8 / 64),  # one program of 8 warps
        (32, 0, 1, 90, 32 / 64),  # no more than 32 programs
        (32, 100 * 1024, 4, 80, 4 / 64),  # 101 KB of 164
        (32, 100 * 1024, 4, 90, 8 / 64),  # and of 228
    ],
)
def test_occupancy(registers, shared, warps, architecture, expected):
    assert occupancy(registers, shared, warps, architecture) == expected


@pytest.mark.slow
def test_extension_of_a_deep_stage_equals_the_whole_model():
    name = "lipsformer_swin_tiny"  # six blocks, so that the difference of 4 and 2 counts twice
    whole = json.loads((RESULTS / f"{name}.json").read_text())
    found = predict(name, Namespace(extend=2, batch_size=whole["batch_size"]))
    assert found["parameters"] == whole["parameters"]
    for figure in ("operators", "bytes", "products"):
        assert found["eager"][figure] == pytest.approx(whole["eager"][figure], rel=0.02), figure
    assert found["eager"]["saved_bytes"] == pytest.approx(whole["eager"]["saved_bytes"], rel=0.02)


def test_imagenet_configs_state_the_predicted_batches_and_take_no_more():
    for path, name in batches.model_configs().items():
        record = json.loads((RESULTS / f"{name}.json").read_text())
        assert batches.line(record) in path.read_text().splitlines(), path.name
        taken = read_config(Config, path).train.batch_size_per_device
        assert taken is not None and taken <= batches.batch_that_fits(record, 80), path.name


def test_batches_that_fit():
    record = {"parameters": 10**9, "batch_size": 4, "eager": {"saved_bytes": 4 * 10**9}}
    assert batches.eager_gigabytes(record, 8) == 16 + 8
    assert batches.batch_that_fits(record, 40) == 16  # 18 GB remain of 34
    assert batches.batch_that_fits(record, 80) == 32  # 52 GB remain of 68


def test_the_tables_on_the_page_are_those_of_the_predictions():
    records = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    tables = [part for part in page(records).split("\n\n") if part.startswith("|")]
    text = (RESULTS.parents[1] / "docs" / "gpu.md").read_text()
    assert len(tables) >= 6
    for table in tables:
        assert table in text
