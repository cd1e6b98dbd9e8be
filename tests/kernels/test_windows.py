import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from lipsformer import kernels
from lipsformer.layers import (
    DepthwiseConv2d,
    ScaledCosineAttention,
    attend_in_windows,
    cosine_normalize,
    merge_heads,
    partition_heads,
)

pytestmark = pytest.mark.usefixtures("compiled_kernels")

# (height, width), windows of the partitions, heads and channels per head, with LePE
CASES = [
    ((7, 7), [(7, 7)], 3, 32, False),
    ((11, 13), [(5, 3)], 2, 5, False),
    ((11, 13), [(11, 2), (3, 13)], 2, 17, True),
    ((1, 19), [(1, 19)], 1, 7, True),
    ((19, 23), [(19, 17)], 3, 5, True),  # so wide that heads are taken one after the other
]

WIDE_ROWS = ((5, 7), [(5, 7)], 2, 41, False)  # more than 32 channels per head


@pytest.fixture
def calls(monkeypatch):
    """The kernel's results, in order of its calls."""
    results = []

    def noting(*args):
        results.append(kernel(*args))
        return results[-1]

    kernel = kernels.cosine_windows
    monkeypatch.setattr(kernels, "cosine_windows", noting)
    return results


def parts(windows: list[tuple[int, int]], heads: int, dim: int, lepe: bool, **kwargs):
    torch.manual_seed(1)
    attentions = [ScaledCosineAttention(heads, **kwargs) for _ in windows]
    for attention in attentions:
        if attention.log_logit_scale is not None:
            scales = torch.linspace(3.0, 130.0, heads).log()  # the last beyond the ceiling
            attention.log_logit_scale.data.copy_(scales.view(-1, 1, 1))
    lepes = [DepthwiseConv2d(heads * dim, 3) for _ in windows] if lepe else []
    return nn.ModuleList(attentions), nn.ModuleList(lepes)


def reference(qkv, windows, attentions, bias, lepes):
    """Partition, attend, convolve and merge, in evaluation mode: plain differentiable operators."""
    outputs = []
    for part, window in enumerate(windows):
        heads = attentions[part].num_heads
        q, k, v = partition_heads(qkv[..., part, :], window, heads).unbind(0)
        out = attentions[part](q, k, v, bias)
        if len(lepes) > 0:
            cut = v.transpose(1, 2).reshape(v.shape[0], *window, -1)
            position = lepes[part](cut).reshape(v.shape[0], v.shape[2], heads, -1)
            out = out + position.transpose(1, 2)
        outputs.append(merge_heads(out, window, qkv.shape[1:3]))
    return torch.cat(outputs, -1)


@pytest.mark.parametrize(("size", "windows", "heads", "dim", "lepe"), CASES)
@pytest.mark.parametrize("value_scale", [None, 2.5])
def test_value_and_gradients_equal_float64(calls, size, windows, heads, dim, lepe, value_scale):
    attentions, lepes = parts(
        windows, heads, dim, lepe, value_scale=value_scale, learn_logit_scale=True
    )
    qkv = torch.randn(3, *size, 3, len(windows), heads * dim)
    qkv[0, 0, 0] = 0.0  # a zero token
    tokens = math.prod(windows[0])
    bias = torch.randn(1, heads, tokens, tokens) if len(windows) == 1 else None
    upstream = torch.randn(3, *size, len(windows) * heads * dim)

    results = []
    for dtype in (torch.float64, torch.float32):
        modules = nn.ModuleList([attentions, lepes]).to(dtype)
        modules.zero_grad()
        inputs = [x if x is None else x.to(dtype).requires_grad_() for x in (qkv, bias)]
        if dtype == torch.float64:
            modules.eval()
            out = reference(inputs[0], windows, attentions, inputs[1], lepes)
        else:
            modules.train()
            out = attend_in_windows(inputs[0], windows, list(attentions), inputs[1], list(lepes))
            assert len(calls) == 1
        out.backward(upstream.to(dtype))
        gradients = [x.grad.clone() for x in (*inputs, *modules.parameters()) if x is not None]
        results.append([out.detach(), *gradients])
    rounding = 1e-5 * max(1.0, tokens / 100)  # more terms in the sums
    for exact, fast in zip(*results, strict=True):
        atol = rounding * exact.abs().max().item()
        torch.testing.assert_close(fast.double(), exact.double(), rtol=rounding, atol=atol)


def test_threads_that_share_the_biases_of_a_head_add_up_to_the_same():
    """Of 2 images x 3 heads every fourth thread has one or two; two threads share each head."""
    qkv, bias = torch.randn(2, 17, 19, 3, 1, 6), torch.randn(1, 3, 323, 323)
    results, before = [], torch.get_num_threads()
    for threads in (1, 4):
        torch.set_num_threads(threads)
        inputs = [x.clone().requires_grad_() for x in (qkv, bias)]
        attention = ScaledCosineAttention(3).train()
        attend_in_windows(inputs[0], [(17, 19)], [attention], inputs[1]).square().sum().backward()
        results.append([x.grad for x in inputs])
    torch.set_num_threads(before)
    for one, four in zip(*results, strict=True):
        torch.testing.assert_close(one, four, rtol=1e-5, atol=1e-6 * one.abs().max().item())


def test_whole_numbers_are_scales_too(calls):
    qkv = torch.randn(2, 5, 7, 3, 1, 6)
    whole, real = ({"logit_scale": kind(12), "eps": kind(1)} for kind in (int, float))
    with torch.no_grad():
        first, second = (
            attend_in_windows(qkv, [(5, 3)], [ScaledCosineAttention(2, **scales)])
            for scales in (whole, real)
        )
    assert len(calls) == 2
    assert torch.equal(first, second)


def test_a_nan_stays_in_its_window():
    qkv = torch.randn(1, 3, 6, 3, 1, 4)
    clean = qkv.clone()
    qkv[0, 1, 1, 2] = torch.nan
    with torch.no_grad():
        out, expected = (
            attend_in_windows(x, [(3, 3)], [ScaledCosineAttention(1)]) for x in (qkv, clean)
        )
    assert out[:, :, :3].isnan().all()
    assert torch.equal(out[:, :, 3:], expected[:, :, 3:])


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_token_that_sees_no_other_has_the_weights_of_softmax(calls, mask):
    """All of them are equal beyond the least number, and not a number beyond infinity."""
    qkv, bias = torch.randn(1, 3, 5, 3, 1, 7), torch.zeros(1, 1, 15, 15)
    bias[:, :, 2] = mask
    with torch.no_grad():
        out = attend_in_windows(qkv, [(3, 5)], [ScaledCosineAttention(1)], bias)
    assert len(calls) == 1
    q, k, v = (cosine_normalize(x) for x in qkv.double().reshape(15, 3, 7).unbind(1))
    expected = (10.0 * q @ k.T + bias[0, 0]).softmax(-1) @ v
    torch.testing.assert_close(
        out.reshape(15, 7).double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("reason", ["hook", "global hook", "dropout", "float64", "second order"])
def test_plain_operators_compute_what_the_kernel_does_not(calls, reason):
    attention = ScaledCosineAttention(1, attn_drop=0.5 if reason == "dropout" else 0.0)
    qkv = torch.randn(1, 2, 3, 3, 1, 4)
    attend_in_windows(qkv, [(2, 3)], [ScaledCosineAttention(1)])
    assert len(calls) == 1
    if reason == "hook":
        attention.register_forward_hook(lambda *_: None)
    if reason == "second order":
        attention.eval()  # evaluation with gradients may be differentiated twice
    if reason == "float64":
        qkv = qkv.double()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    if reason != "global hook":
        everywhere.remove()
    result = attend_in_windows(qkv, [(2, 3)], [attention])
    everywhere.remove()
    (of_the_kernel,) = calls
    if reason != "dropout":
        torch.testing.assert_close(result.float(), of_the_kernel, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of_class", [False, True])
@pytest.mark.parametrize("part", ["attention", "positional encoding"])
def test_a_forward_function_set_on_a_module_is_called(calls, part, of_class, monkeypatch):
    attention, lepe = ScaledCosineAttention(1, value_scale=None), DepthwiseConv2d(4, kernel_size=3)

    def set_forward(module, forward):
        owner = type(module) if of_class else module
        monkeypatch.setattr(owner, "forward", staticmethod(forward))

    if part == "attention":
        set_forward(attention, lambda q, k, v, bias=None: 3.0 * v)
    else:
        set_forward(lepe, lambda x: 3.0 * x)
        attention.forward = lambda q, k, v, bias=None: 0.0 * v
    qkv = torch.randn(2, 5, 6, 3, 1, 4)
    result = attend_in_windows(qkv, [(5, 3)], [attention], lepes=[lepe])
    values = qkv[..., 2, 0, :]
    expected = 3.0 * values
    if part == "attention":  # the convolution ends at the edge of a window
        own = values.unflatten(2, (2, 3)).movedim(2, 1).flatten(0, 1)
        expected = expected + lepe(own).unflatten(0, (2, 2)).movedim(1, 2).flatten(2, 3)
    torch.testing.assert_close(result, expected)
    assert calls == []


def test_partitions_with_different_numbers_of_heads_are_computed_by_plain_operators(calls):
    attentions = [ScaledCosineAttention(2), ScaledCosineAttention(3)]
    qkv, windows = torch.randn(2, 5, 7, 3, 2, 6), [(5, 2), (3, 7)]
    result = attend_in_windows(qkv, windows, attentions)
    torch.testing.assert_close(result, reference(qkv, windows, attentions, None, []))
    assert calls == []


@pytest.mark.parametrize(
    ("name", "shape"), [("log_logit_scale", (1, 1, 1)), ("value_scale", (3, 1, 1))]
)
def test_scales_of_another_shape_are_multiplied_by_plain_operators(calls, name, shape):
    attention = ScaledCosineAttention(3, learn_logit_scale=True)
    setattr(attention, name, nn.Parameter(torch.rand(shape), name == "log_logit_scale"))
    qkv = torch.randn(2, 5, 7, 3, 1, 6)
    result = attend_in_windows(qkv, [(5, 2)], [attention])
    torch.testing.assert_close(result, reference(qkv, [(5, 2)], [attention], None, []))
    assert calls == []


@pytest.mark.parametrize("channels", [4, 16])
def test_a_positional_encoding_of_other_channels_is_refused(calls, channels):
    """The kernel would read beyond its weights, or give channels the weights of others."""
    qkv, attentions = torch.randn(1, 2, 3, 3, 1, 8), [ScaledCosineAttention(2)]
    with pytest.raises(ValueError, match=rf"has {channels} channels.*create it by Depth.*\(8, "):
        attend_in_windows(qkv, [(2, 3)], attentions, lepes=[DepthwiseConv2d(channels, 3)])
    assert calls == []


@pytest.mark.parametrize(
    ("windows", "attentions", "lepes", "bias", "message"),
    [
        (1, 2, 0, False, "2 partitions, but there are 1 windows"),
        (2, 3, 0, False, "3 attentions"),
        (2, 2, 1, False, "1 positional encodings"),
        (2, 2, 0, True, "a bias needs a single one"),
    ],
)
def test_what_does_not_fit_the_partitions_is_refused(windows, attentions, lepes, bias, message):
    with pytest.raises(ValueError, match=message):
        attend_in_windows(
            torch.randn(1, 2, 3, 3, 2, 4),
            [(2, 3)] * windows,
            [ScaledCosineAttention(1)] * attentions,
            torch.zeros(1, 1, 6, 6) if bias else None,
            [DepthwiseConv2d(4, 3)] * lepes,
        )


@pytest.mark.parametrize(
    ("shape", "window", "message"),
    [
        ((1, 2, 3, 2, 1, 8), (2, 3), r"the shape \(1, 2, 3, 2, 1, 8\): it must be"),
        ((1, 2, 3, 4, 1, 8), (2, 3), r"it must be \[B, H, W, 3, P, C\]"),
        ((1, 2, 3, 3, 8), (2, 3), "it must be"),
        ((1, 2, 3, 3, 1, 8), (0, 3), r"windows=\[\(0, 3\)\]: every side must be at least 1"),
        ((1, 2, 3, 3, 1, 8), (-2, -3), "at least 1"),
    ],
)
def test_shapes_that_the_kernel_would_read_past_are_refused(calls, shape, window, message):
    with pytest.raises(ValueError, match=message):
        attend_in_windows(torch.randn(shape), [window], [ScaledCosineAttention(2)])
    assert calls == []


@torch.no_grad()
@pytest.mark.parametrize(("size", "windows", "heads", "dim", "lepe"), [*CASES, WIDE_ROWS])
@pytest.mark.parametrize("value_scale", [None, 2.5])
def test_bfloat16_rounds_the_weights_and_the_output_at_most(
    calls, size, windows, heads, dim, lepe, value_scale
):
    attentions, lepes = parts(
        windows, heads, dim, lepe, value_scale=value_scale, learn_logit_scale=True
    )
    qkv = torch.randn(3, *size, 3, len(windows), heads * dim).bfloat16()
    qkv[0, 0, 0] = 0.0
    tokens = math.prod(windows[0])
    bias = torch.randn(1, heads, tokens, tokens) if len(windows) == 1 else None
    with torch.autocast("cpu", torch.bfloat16):
        out = attend_in_windows(qkv, windows, list(attentions), bias, list(lepes))
    assert len(calls) == 1
    for module in (attentions, lepes):
        module.double()
    exact = qkv.double()
    bias = None if bias is None else bias.double()
    expected = reference(exact, windows, attentions, bias, lepes)
    exact[:, :, :, 2].abs_()
    sizes = reference(exact, windows, attentions, bias, [])  # sum of the weights times |values|
    error = (out.double() - expected).abs()
    assert (error <= 1.01 * 2**-8 * (sizes + expected.abs()) + 1e-5).all()


def test_the_gradients_of_bfloat16_round_inputs_and_results_only():
    attentions, lepes = parts([(3, 5), (7, 2)], 2, 17, lepe=True, learn_logit_scale=True)
    modules = nn.ModuleList([attentions, lepes])
    qkv = torch.randn(3, 7, 11, 3, 2, 34).bfloat16()
    upstream = torch.randn(3, 7, 11, 68).bfloat16()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        modules.zero_grad()
        x = qkv.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = attend_in_windows(x, [(3, 5), (7, 2)], list(attentions), None, list(lepes))
        assert out.dtype == dtype
        out.backward(upstream.to(dtype))
        results.append([x.grad, *(p.grad.clone() for p in modules.parameters())])
    for exact, rounded in zip(*results, strict=True):
        torch.testing.assert_close(rounded, exact.to(rounded.dtype), rtol=1e-6, atol=1e-6)


def test_second_derivatives_in_training_are_refused():
    qkv = torch.randn(1, 2, 3, 3, 1, 4, requires_grad=True)
    out = attend_in_windows(qkv, [(2, 3)], [ScaledCosineAttention(1)])
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.square().sum(), qkv, create_graph=True)


MEASURE = """
import torch
from pathlib import Path
from lipsformer import kernels

def peak() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) << 10

def attend(side, training):
    qkv = torch.randn(1, side, side, 3, 1, 24 * 32, requires_grad=training)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is in use
    before = peak()
    with torch.set_grad_enabled(training):
        partition = kernels.Partition((side, side), nu=1.0, eps=1e-5)
        out = kernels.cosine_windows(qkv, [partition], torch.full((1, 24), 12.0))
    if training:
        out.sum().backward()
    return peak() - before

torch.set_num_threads(2)
attend(5, True)  # loads what a first call loads
print(attend(32, False), attend(32, True))
"""


@pytest.mark.slow
def test_wide_windows_keep_no_scores_of_all_heads():
    """The scores of 24 heads of one image are 101 MB, those of a head in each of two threads 8."""
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    inference, training = map(int, done.stdout.split())
    assert inference < 20e6  # 3 MB of them the output
    assert training < 50e6  # 25 MB of them the output, its gradient and that of the tokens
