"""The whole block in one call on the CPU, compared with its modules and with float64."""

import copy

import pytest
import torch
from torch import nn

from lipsformer.kernels import dispatch
from lipsformer.layers import CenterNorm, ScaledCosineAttention
from lipsformer.models import _fused
from lipsformer.models.lipsformer import LipsFormerBlock
from lipsformer.models.lipsformer_cswin import StripeAttention
from lipsformer.models.lipsformer_swin import WindowAttention

MAPS = {"few tokens": (1, 3, 5), "many tokens": (3, 11, 7)}  # images, height, width
DIM = 18


@pytest.fixture(autouse=True)
def kernels():
    if dispatch.compiled_library() is None:
        pytest.skip("no compiled kernels")


BF16_SUPPORTED = torch.ops.mkldnn._is_mkldnn_bf16_supported()
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(not BF16_SUPPORTED, reason="oneDNN computes no bfloat16 here"),
    ),
]


def make(kind: str, lost: bool = False) -> LipsFormerBlock:
    """Return a block with random parameters; `lost` makes a channel's gain of each norm zero."""
    torch.manual_seed(0)
    if kind == "windows":
        attn = WindowAttention(DIM, 3, 3, ScaledCosineAttention(3, learn_logit_scale=True))
    else:
        cores = nn.ModuleList(ScaledCosineAttention(3, value_scale=1.5) for _ in range(2))
        attn = StripeAttention(DIM, 6, 2, cores)
    block = LipsFormerBlock(DIM, attn, kind == "windows", 0.3, mlp_ratio=3.0).train()
    for parameter in block.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    for norm in (block.norm1, block.norm2):
        if lost and isinstance(norm, CenterNorm):
            norm.weight.data[3] = 0.0
    return block


def results(block, x, upstream, forward=LipsFormerBlock.forward) -> list[torch.Tensor]:
    """Return the output and all gradients."""
    x = x.clone().requires_grad_()
    block.zero_grad()
    torch.manual_seed(5)  # of drop path
    out = forward(block, x)
    out.backward(upstream.to(out.dtype))
    return [out.detach(), x.grad, *(p.grad for p in block.parameters())]


def maps(size: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, *MAPS[size], DIM, generator=generator).unbind(0)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("size", MAPS)
@pytest.mark.parametrize("kind", ["windows", "stripes"])
def test_equals_float64(monkeypatch, kind, size, lost):
    block = make(kind, lost)
    x, upstream = maps(size)
    assert _fused.cpu_arrangement(block, x) is not None
    actual = results(block, x, upstream)
    monkeypatch.setattr(dispatch, "ENABLED", False)
    expected = results(copy.deepcopy(block).double(), x.double(), upstream.double())
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5 * other.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", MAPS)
@pytest.mark.parametrize("kind", ["windows", "stripes"])
@pytest.mark.parametrize("rate", [0.0, 0.6, 1 - 1e-9])  # the last one drops every sample
def test_has_the_bits_of_the_modules(kind, size, dtype, rate):
    """So that a hook, which needs the modules, does not change a run."""
    block = make(kind)
    for residual in _fused.residuals(block):
        residual.drop_path = rate
    x, upstream = (tensor.to(dtype) for tensor in maps(size))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert _fused.cpu_arrangement(block, x) is not None
        one_call = results(block, x, upstream)
        modules = results(block, x, upstream, LipsFormerBlock.forward.__wrapped__)
    for one, other in zip(one_call, modules, strict=True):
        assert torch.equal(one, other)


class Adapter(nn.Module):
    """A layer around another one that shows its weight, as adapters for fine-tuning do."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x):
        return 3.0 * self.base(x)


def hook(block):
    block.mlp.branch.fc1.register_forward_hook(lambda *_: None)


def adapt(block):
    block.mlp.branch.fc1 = Adapter(block.mlp.branch.fc1)


def subclass(block):
    block.norm2.__class__ = type("Mine", (type(block.norm2),), {})


def dropout(block):
    block.mlp.branch.drop.p = 0.1


def freeze(block):
    block.conv1.branch.depthwise.bias.requires_grad_(False)


def widen(block):
    block.mlp.branch.fc1.double()


def replace_forward(block):
    block.conv2.branch.forward = lambda x, last_gelu=True: x


def second_pointwise(block):
    block.conv2.branch = type(block.conv2.branch)(block.conv1.branch.depthwise.dim, pointwise=True)


def exchange_a_norm(block):
    block.norm1 = copy.deepcopy(block.conv1.branch.pointwise)


def leave_a_norm_out(block):
    block.norm2 = torch.nn.Identity()


def put_a_layer_behind_the_attention(block):
    block.attn.branch.proj_drop = copy.deepcopy(block.conv1.branch.pointwise)


def remove_a_positional_encoding(block):
    """The kernel would read the memory behind the other one."""
    del block.attn.branch.lepe[1]


def enlarge_a_depthwise_kernel(block):
    """There is no kernel of 5 x 5."""
    block.conv1.branch.depthwise.weight = nn.Parameter(torch.randn(DIM, 1, 5, 5))


def shorten_a_depthwise_bias(block):
    """The kernel would read the memory after it."""
    block.conv2.branch.depthwise.bias = nn.Parameter(torch.randn(1))


def widen_the_queries(block):
    """The kernel would read beyond the positional encoding."""
    block.attn.branch.qkv.weight = nn.Parameter(torch.randn(6 * DIM, DIM))


def share_a_bias(block):
    """The kernel would read the memory after it."""
    block.norm2.bias = nn.Parameter(torch.randn(1))


def turn_a_sign(block):
    """The kernel would read what lies in memory, which is the opposite of the parameter."""
    block.mlp.branch.fc1.bias = nn.Parameter(torch._neg_view(torch.randn(3 * DIM)))


CHANGES = [
    *(second_pointwise, exchange_a_norm, leave_a_norm_out, put_a_layer_behind_the_attention),
    *(remove_a_positional_encoding, enlarge_a_depthwise_kernel, shorten_a_depthwise_bias),
    *(widen_the_queries, turn_a_sign, hook, adapt, subclass, dropout, freeze, widen),
    *(replace_forward, share_a_bias),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_block_takes_its_modules(change):
    block = make("stripes")
    x, _ = maps("few tokens")
    assert _fused.cpu_arrangement(block, x) is not None
    change(block)
    assert _fused.cpu_arrangement(block, x) is None


@pytest.mark.parametrize("place", ["mlp", "mlp.branch", "mlp.branch.fc1", "attn.branch", "norm2"])
def test_a_block_with_a_class_whose_forward_function_was_replaced_takes_its_modules(
    place, monkeypatch
):
    block = make("stripes")
    x, _ = maps("few tokens")
    kind = type(block.get_submodule(place))
    with monkeypatch.context() as patched:
        patched.setattr(kind, "forward", lambda self, x, *args, **kwargs: torch.zeros_like(x))
        assert _fused.cpu_arrangement(block, x) is None
    assert _fused.cpu_arrangement(block, x) is not None


@pytest.mark.parametrize("kind", ["windows", "stripes"])
def test_without_bfloat16_in_onednn_the_modules_compute_it(monkeypatch, kind):
    """As on processors without AVX-512, where oneDNN refuses products of bfloat16."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    block = make(kind)
    x, upstream = maps("many tokens")
    exact = results(block, x, upstream, LipsFormerBlock.forward.__wrapped__)
    with torch.autocast("cpu", torch.bfloat16):
        assert _fused.cpu_arrangement(block, x.bfloat16()) is None
        rounded = results(block, x.bfloat16(), upstream)
    assert _fused.cpu_arrangement(block, x) is not None
    for one, other in zip(rounded, exact, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 0.03


def test_evaluation_and_other_types_take_the_modules():
    block = make("windows")
    x, _ = maps("few tokens")
    with torch.no_grad():
        assert _fused.cpu_arrangement(block, x) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert _fused.cpu_arrangement(block, x) is None  # a float32 stream
    assert _fused.cpu_arrangement(block, x.bfloat16().double()) is None
    assert _fused.cpu_arrangement(block.eval(), x) is None


def test_second_derivatives_are_refused():
    block = make("windows")
    x = maps("few tokens")[0].requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)


def test_modules_that_a_checkpoint_computes_again_are_asked_again():
    """In the backward pass of the second block, whose first block has a hook for its modules."""
    first, second = make("windows"), make("windows")
    calls = []
    first.mlp.branch.fc1.register_forward_hook(lambda *_: calls.append(1))
    x, upstream = maps("few tokens")
    expected = results(nn.Sequential(first, second), x, upstream, lambda both, y: both(y))
    assert len(calls) == 1
    actual = results(
        nn.Sequential(first, second),
        x,
        upstream,
        lambda both, y: torch.utils.checkpoint.checkpoint(both, y, use_reentrant=False),
    )
    assert len(calls) == 3
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
