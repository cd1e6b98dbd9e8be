"""The bodies of the league: what each changes, and that each can be trained."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.league.attention import DotProductAttention
from benchmarks.league.bodies import BODIES, build, linear_maps, residuals
from benchmarks.league.nvit import NormalizedBlock
from benchmarks.league.signals import attention_entropy, spectral_concentration
from lipsformer.config import OptimConfig
from lipsformer.engine.optim import make_optimizer
from lipsformer.layers import CenterNorm, DepthwiseConv2d, ScaledCosineAttention
from lipsformer.models.lipsformer_swin import WindowAttention


def make(name: str, blocks: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return build(name, blocks, num_classes=10)


def count(model: nn.Module, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


PARTS = {
    "lipsformer": set(),
    "plain": {"norm", "attention", "residual", "init"},
    "lipsformer, LayerNorm": {"norm"},
    "lipsformer, dot product": {"attention"},
    "lipsformer, plain residual": {"residual"},
    "lipsformer, default init": {"init"},
}


@pytest.mark.parametrize("name", PARTS)
def test_each_swap_changes_its_own_part_alone(name):
    base, model, parts = make("lipsformer"), make(name), PARTS[name]
    assert [len(stage.blocks) for stage in base.stages] == [2, 4]
    norms = count(base, CenterNorm)
    assert count(model, nn.LayerNorm) == (norms if "norm" in parts else 0)
    assert count(model, CenterNorm) == (0 if "norm" in parts else norms)
    assert count(model, DotProductAttention) == (6 if "attention" in parts else 0)
    assert count(model, ScaledCosineAttention) == (0 if "attention" in parts else 6)
    for residual in residuals(model):
        assert residual.residual_scale.requires_grad is ("residual" not in parts)
        alpha = residual.residual_scale.unique().item()
        assert alpha == pytest.approx(1.0 if "residual" in parts else 1 / 6)
    sigmas = [torch.linalg.svdvals(layer.weight.flatten(1))[0] for layer in linear_maps(model)]
    assert torch.allclose(torch.stack(sigmas), torch.ones(()), atol=1e-3) is ("init" not in parts)
    assert sum(parameter.numel() for parameter in model.parameters()) == 83150


def test_norms_of_the_bodies_that_move_or_drop_them():
    before, behind = make("pre-norm"), make("plain")
    # two norms behind the sums of a block become four before its branches
    assert count(before, nn.LayerNorm) == count(behind, nn.LayerNorm) + 2 * 6
    assert count(make("DyT"), nn.LayerNorm) == count(make("Derf"), nn.LayerNorm) == 0
    for name in ("ReZero", "sigmaReparam", "nViT"):
        assert count(make(name), nn.LayerNorm) == count(make(name), CenterNorm) == 0
    x = torch.randn(2, 8, 8, 16)
    block = before.stages[0].blocks[0]
    seen = {}
    for name, module in block.named_modules():
        if hasattr(module, "input_norm"):
            first = next(layer for layer in linear_maps(module))
            first.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    block(x)
    assert len(seen) == 4
    for read in seen.values():
        assert read.mean(-1).abs().max() < 1e-5
        assert torch.allclose(read.var(-1, unbiased=False), torch.ones(()), atol=1e-3)


def map_by_hand(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a linear map or depthwise convolution of x, with SimpleNorm behind it where it is."""
    bias = None if layer.bias is None else layer.bias.double()
    weight = layer.weight.double()
    if isinstance(layer, DepthwiseConv2d):
        maps = x.permute(0, 3, 1, 2)
        y = F.conv2d(maps, weight, bias, padding=3, groups=x.shape[-1]).permute(0, 2, 3, 1)
    else:
        y = F.linear(x, weight, bias)
    if not hasattr(layer, "output_norm"):
        return y
    parts = y.unflatten(-1, (layer.output_norm.parts, -1))
    parts = parts / (parts.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return parts.flatten(-2) * layer.output_norm.gain.double()


def norm_by_hand(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(norm, nn.LayerNorm):
        return x
    return F.layer_norm(x, x.shape[-1:], norm.weight.double(), norm.bias.double())


def attend_by_hand(attn: WindowAttention, x: torch.Tensor) -> torch.Tensor:
    """Return dot-product attention in windows of 4 x 4 of a map of 8 x 8."""
    heads, d = attn.num_heads, attn.dim // attn.num_heads
    qkv = map_by_hand(attn.qkv, x).view(len(x), 2, 4, 2, 4, 3, heads, d)
    q, k, v = qkv.permute(5, 0, 1, 3, 6, 2, 4, 7).flatten(5, 6)
    scores = q @ k.mT / d**0.5 + attn.position_bias(4, 4).double()
    out = (scores.softmax(-1) @ v).unflatten(4, (4, 4)).permute(0, 1, 4, 2, 5, 3, 6)
    return map_by_hand(attn.proj, out.reshape(x.shape))


def block_by_hand(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return x + alpha f(norm(x)) for the four branches, with the norms behind the sums."""

    def add(residual: nn.Module, x: torch.Tensor, f: Callable) -> torch.Tensor:
        h = norm_by_hand(getattr(residual.branch, "input_norm", None), x)
        return x + residual.residual_scale.double() * f(residual.branch, h)

    def conv1(b: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return F.gelu(map_by_hand(b.pointwise, F.gelu(map_by_hand(b.depthwise, h))))

    x = add(block.conv1, x, conv1)
    x = add(block.conv2, x, lambda b, h: F.gelu(map_by_hand(b.depthwise, h)))
    x = norm_by_hand(block.norm1, add(block.attn, x, attend_by_hand))
    x = add(block.mlp, x, lambda b, h: map_by_hand(b.fc2, F.gelu(map_by_hand(b.fc1, h))))
    return norm_by_hand(block.norm2, x)


@pytest.mark.parametrize(
    "name", ["plain", "pre-norm", "LayerScale", "ReZero", "sigmaReparam", "SimpleNorm"]
)
@pytest.mark.parametrize("training", [True, False])
def test_blocks_and_their_gradients_are_their_formulas(name, training):
    block = make(name, blocks=2).stages[0].blocks[0].train(training)
    for parameter_name, parameter in block.named_parameters():
        if parameter.requires_grad and parameter.ndim == 1:
            nn.init.normal_(parameter, 0.5 if parameter_name.endswith("bias") else 1.0)
    x = torch.randn(2, 8, 8, 16)
    with torch.no_grad():
        truth = block_by_hand(block, x.double())
        assert torch.allclose(block(x).double(), truth, rtol=1e-4, atol=1e-4)
    grads = []
    for compute, dtype in ((block, torch.float32), (partial(block_by_hand, block), torch.float64)):
        block.zero_grad()
        inputs = x.to(dtype, copy=True).requires_grad_()
        compute(inputs).square().sum().backward()
        found = [p.grad for p in block.parameters() if p.requires_grad]
        grads.append([inputs.grad.double(), *(g.double().clone() for g in found)])
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-4


def test_blocks_of_rezero_start_as_the_identity():
    x = torch.randn(2, 8, 8, 16)
    assert torch.equal(make("ReZero").stages[0](x), x)


@pytest.mark.parametrize("name", BODIES)
def test_an_update_reaches_every_parameter(name):
    model = make(name, blocks=2).train()
    instruments = [make_one(model) for make_one in BODIES[name].instruments]
    optimizer = make_optimizer(model, OptimConfig(lr=1e-2))
    for update in range(2):  # branches of ReZero get a gradient from the second update on
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8))
        loss.backward()
        for instrument in instruments:
            instrument.before_step(update)
        optimizer.step()
        for instrument in instruments:
            instrument.after_step(update)
    assert loss.isfinite()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.any(), parameter_name
            assert parameter.isfinite().all(), parameter_name


def test_vectors_of_the_normalized_transformer_have_length_one_after_an_update():
    model = make("nViT").train()
    (instrument,) = (make_one(model) for make_one in BODIES["nViT"].instruments)
    optimizer = make_optimizer(model, OptimConfig(lr=1e-1))
    F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8)).backward()
    optimizer.step()
    instrument.after_step(0)
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            writes = name.endswith(("attn.proj", "mlp.2"))
            lengths = layer.weight.flatten(1).norm(dim=0 if writes else 1)
            assert torch.allclose(lengths, torch.ones(())), name
            assert layer.bias is None or not layer.bias.any(), name
    features = model.forward_features(torch.randn(2, 3, 32, 32))
    assert torch.allclose(features.norm(dim=-1), torch.ones(()))
    assert count(model, NormalizedBlock) == 6


def test_caps_and_limits_hold():
    model = make("plain + UpdateLimit", blocks=2).train()
    (instrument,) = (make_one(model) for make_one in BODIES["plain + UpdateLimit"].instruments)
    weight = model.stages[0].blocks[0].mlp.branch.fc1.weight
    before = weight.detach().clone()
    instrument.before_step(0)
    with torch.no_grad():
        weight.add_(torch.randn_like(weight))
    instrument.after_step(0)
    moved = torch.linalg.svdvals(weight.detach() - before)[0] / torch.linalg.svdvals(before)[0]
    assert moved.item() == pytest.approx(0.02, rel=0.02)
    model = make("plain + SpectralCap", blocks=2).train()
    (instrument,) = (make_one(model) for make_one in BODIES["plain + SpectralCap"].instruments)
    with torch.no_grad():
        model.stages[0].blocks[0].mlp.branch.fc1.weight.mul_(100.0)
    instrument.before_eval()
    sigma = torch.linalg.svdvals(model.stages[0].blocks[0].mlp.branch.fc1.weight.detach())[0]
    assert sigma.item() == pytest.approx(1.0, abs=1e-4)


def test_entropy_is_one_where_attention_is_uniform_and_else_that_of_the_weights():
    model, images = make("plain"), torch.randn(4, 3, 32, 32)
    attentions = [m for m in model.modules() if isinstance(m, WindowAttention)]
    for attention in attentions:
        nn.init.zeros_(attention.qkv.weight)
        nn.init.zeros_(attention.relative_position_bias_table)
    assert attention_entropy(model, images) == pytest.approx([1.0] * 6, abs=1e-6)
    assert model.training
    model = make("lipsformer")
    cores = [m for m in model.modules() if isinstance(m, ScaledCosineAttention)]
    truths = []

    def smooth_unit(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().sum(-1, keepdim=True) + 1e-2).sqrt()

    def keep(core: nn.Module, args: tuple) -> None:
        q, k, _, bias = (tensor.detach().double() for tensor in args)
        scores = 10.0 * smooth_unit(q) @ smooth_unit(k).mT + bias
        rows = scores.softmax(-1).flatten(0, 2).numpy()
        truths.append(-(rows * torch.from_numpy(rows).log().numpy()).sum(-1).mean())

    for core in cores:
        core.register_forward_pre_hook(keep)
    found = attention_entropy(model, images)
    scaled = [truth / torch.log(torch.tensor(16.0)).item() for truth in truths]
    assert found == pytest.approx(scaled, abs=1e-5) and len(found) == 6


def test_concentration_of_known_spectra():
    model = make("plain")
    for attention in model.modules():
        if isinstance(attention, WindowAttention):
            dim, d = attention.dim, attention.dim // attention.num_heads
            q = torch.zeros(attention.num_heads, d, dim)
            q[:, range(d), range(d)] = torch.arange(1.0, d + 1)
            k = torch.zeros(attention.num_heads, d, dim)
            k[:, range(d), range(d)] = 1.0
            v = torch.zeros_like(k)
            with torch.no_grad():
                attention.qkv.weight.copy_(torch.cat([x.flatten(0, 1) for x in (q, k, v)]))
    # singular values 1 to 8 of every head
    share = (7**2 + 8**2) / sum(i**2 for i in range(1, 9))
    assert spectral_concentration(model) == pytest.approx([share] * 6)
