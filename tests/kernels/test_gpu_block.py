"""The Triton kernels of a block, on a GPU or, with TRITON_INTERPRET=1 set, in the interpreter."""

import copy
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lipsformer.kernels import dispatch, gpu_cosine_windows, verdict
from lipsformer.layers import Arrangement, ScaledCosineAttention
from lipsformer.layers._trial import try_kernel
from lipsformer.layers._window_kernels import gpu_arguments
from lipsformer.models import _fused
from lipsformer.models.lipsformer import LipsFormerBlock
from lipsformer.models.lipsformer_cswin import StripeAttention
from lipsformer.models.lipsformer_swin import WindowAttention
from tests.kernels.test_windows import parts, reference

pytest.importorskip("triton", reason="the kernels are Triton's")
# A GPU multiplies deterministically only if this is set before its first product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytestmark = [pytest.mark.gpu, *([] if INTERPRETED else [needs_cuda])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch):
    """Let the interpreter multiply bfloat16; it holds them as integers and multiplies these."""
    if not INTERPRETED:
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


# (height, width), windows of the partitions, heads and channels per head, with LePE
CASES = [
    ((7, 7), [(7, 7)], 3, 32, False),
    ((11, 13), [(5, 3)], 2, 5, False),
    ((11, 13), [(11, 2), (3, 13)], 2, 17, True),
    ((1, 19), [(1, 19)], 1, 7, True),
    ((14, 14), [(14, 7), (7, 14)], 1, 16, True),
]


def close(actual, expected, dtype, factor=1.0):
    """Compare in the norm: the error of sums over many rows is relative to the whole tensor."""
    error = (actual.double() - expected.double()).norm()
    assert error <= factor * TOLERANCE[dtype] * expected.double().norm(), (
        error / expected.double().norm()
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(("size", "windows", "heads", "dim", "lepe"), CASES)
def test_windows_equal_float64(size, windows, heads, dim, lepe, learned, dtype):
    value_scale = 2.5 if learned else None
    scales = {"learn_logit_scale": learned, "value_scale": value_scale}
    attentions, lepes = (m.to(DEVICE) for m in parts(windows, heads, dim, lepe, **scales))
    qkv = torch.randn(2, *size, 3, len(windows), heads * dim, device=DEVICE).to(dtype)
    qkv[0, 0, 0] = 0.0  # a zero token
    tokens = windows[0][0] * windows[0][1]
    bias = torch.randn(1, heads, tokens, tokens, device=DEVICE) if not lepe else None
    upstream = torch.randn(2, *size, len(windows) * heads * dim, device=DEVICE).to(dtype)
    results = []
    for exact in (True, False):
        wide = torch.float64 if exact else torch.float32
        modules = nn.ModuleList([attentions, lepes]).to(wide).train(not exact)
        modules.zero_grad()
        x = (qkv.double() if exact else qkv.clone()).requires_grad_()
        table = None if bias is None else bias.to(wide).requires_grad_()
        if exact:
            out = reference(x, windows, attentions, table, lepes)
        else:
            arguments = gpu_arguments(Arrangement(windows, list(attentions), table, list(lepes)))
            out = gpu_cosine_windows(x, arguments)
        out.backward(upstream.to(out.dtype))
        leaves = [x, *([] if table is None else [table]), *modules.parameters()]
        results.append([out.detach(), *(leaf.grad.clone() for leaf in leaves)])
    for expected, actual in zip(*results, strict=True):
        # the summands of the gradient of tau, one number per head, cancel
        close(actual, expected, dtype, 4.0 if expected.numel() == heads else 1.0)


def block(kind: str, dim: int) -> LipsFormerBlock:
    if kind == "windows":
        attn = WindowAttention(dim, 3, 3, ScaledCosineAttention(3, learn_logit_scale=True))
        return LipsFormerBlock(dim, attn, True, 0.3, mlp_ratio=3.0)
    cores = nn.ModuleList(ScaledCosineAttention(3, value_scale=1.5) for _ in range(2))
    return LipsFormerBlock(dim, StripeAttention(dim, 6, 2, cores), False, 0.3, mlp_ratio=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("kind", ["windows", "stripes"])
def test_block_equals_float64(monkeypatch, kind, dropped, dtype):
    torch.manual_seed(0)
    fused = block(kind, 18).to(DEVICE).train()
    for parameter in fused.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    plain = copy.deepcopy(fused).double()
    mask = torch.tensor([0.0, 1.7, 1.7], device=DEVICE) if dropped else None
    for residual in _fused.residuals(fused):
        residual.draw_mask = lambda x: mask
    for residual in _fused.residuals(plain):
        residual.draw_mask = lambda x: None if mask is None else mask.double().view(-1, 1, 1, 1)
    x, upstream = torch.randn(2, 3, 3, 5, 18, device=DEVICE)
    exact, rounded = x.double().requires_grad_(), x.clone().requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "ENABLED", False)
        expected = plain(exact)
    expected.backward(upstream.double())
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = _fused.gpu_block(fused, rounded)
    assert out.dtype == dtype
    out.backward(upstream.to(dtype))
    close(out, expected, dtype)
    close(rounded.grad, exact.grad, dtype)
    for (name, one), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None, name
        # The summands of tau's gradient cancel. Plain operators in bfloat16 err by up to 8 % there.
        close(one.grad, other.grad, dtype, 4.0 if name.endswith("log_logit_scale") else 1.0)


def test_a_block_may_be_computed_again_in_its_backward_pass():
    torch.manual_seed(0)
    fused = block("windows", 18).to(DEVICE).train()
    x = torch.randn(1, 3, 5, 18, device=DEVICE, requires_grad=True)
    kept = _fused.gpu_block(fused, x)
    recomputed = checkpoint(_fused.gpu_block, fused, x, use_reentrant=False)
    results = [
        torch.autograd.grad(out.square().sum(), [x, *fused.parameters()])
        for out in (kept, recomputed)
    ]
    torch.testing.assert_close(*results)


def test_second_derivatives_of_a_block_are_refused():
    x = torch.randn(1, 3, 5, 18, device=DEVICE, requires_grad=True)
    fused = block("windows", 18).to(DEVICE).train()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(_fused.gpu_block(fused, x).sum(), x, create_graph=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiler_takes_the_kernels_in_one_graph(monkeypatch, backend):
    monkeypatch.setattr(dispatch, "device_type", lambda x: "cuda")
    monkeypatch.setattr(dispatch, "GPU_BLOCKS", True)
    torch.manual_seed(0)
    fused = block("stripes", 12).to(DEVICE).train()
    x = torch.randn(2, 5, 3, 12, device=DEVICE)
    results = []
    for apply in (fused, torch.compile(fused, fullgraph=True, backend=backend)):
        fused.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            out = apply(x)
        assert out.dtype == torch.bfloat16  # the plain modules would return float32
        out.sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in fused.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_the_trial_takes_the_kernels_of_a_block_and_refuses_wrong_ones(monkeypatch):
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # so that nothing is timed
    try:
        fused, x = block("windows", 18).to(DEVICE).train(), torch.randn(2, 3, 5, 18, device=DEVICE)
        fused.mlp.drop_path = 0.5
        monkeypatch.setattr(_fused, "gpu_kernel_passes", try_kernel)
        plain = LipsFormerBlock.forward.__wrapped__
        with torch.autocast(DEVICE, torch.bfloat16):
            assert _fused._gpu_block_passes(fused, x, plain)
            monkeypatch.setattr(verdict, "_VERDICTS", {})
            with pytest.warns(RuntimeWarning, match="is off by"):
                assert not _fused._gpu_block_passes(fused, x, lambda b, y: 1.2 * plain(b, y))
    finally:
        torch.use_deterministic_algorithms(False)
