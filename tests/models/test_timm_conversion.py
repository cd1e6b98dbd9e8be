import copy

import pytest
import timm
import torch
from timm.layers import LayerNorm2d, LayerScale, SwiGLU
from timm.utils import AttentionExtract
from torch.nn.utils import prune

import lipsformer
from lipsformer.layers import CenterNorm
from tests.oracles import cosine_attention


def heads(x: torch.Tensor, attn: torch.nn.Module) -> torch.Tensor:
    """[3, heads, N, d] of one sequence."""
    qkv = x.double() @ attn.qkv.weight.double().T + attn.qkv.bias.double()
    return qkv.view(x.shape[0], 3, attn.num_heads, -1).permute(1, 2, 0, 3)


def joined(outputs: list[torch.Tensor], attn: torch.nn.Module) -> torch.Tensor:
    return torch.cat(outputs, -1) @ attn.proj.weight.double().T + attn.proj.bias.double()


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("mask", ["none", "added", "bool", "causal"])
@torch.no_grad()
def test_vit_attention_equals_the_loop_one_head_at_a_time(mask):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=21, num_heads=3, depth=1)
    attn = randomized(lipsformer.convert(model)).blocks[0].attn
    x = torch.randn(2, 5, 21)
    bias = torch.randn(5, 5)
    allowed = torch.rand(5, 5) > 0.4
    allowed.fill_diagonal_(True)
    blocked = torch.full((5, 5), float("-inf"))
    arguments, expected_bias = {
        "none": ({}, None),
        "added": ({"attn_mask": bias}, bias),
        "bool": ({"attn_mask": allowed}, torch.where(allowed, 0.0, blocked)),
        "causal": ({"is_causal": True}, blocked.triu(1)),
    }[mask]
    out = attn(x, **arguments)
    for image in range(2):
        q, k, v = heads(x[image], attn)
        expected = joined(
            [cosine_attention(q[h], k[h], v[h], expected_bias, 10.0, 1.0, 1e-2) for h in range(3)],
            attn,
        )
        torch.testing.assert_close(out[image].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_query_without_a_key_gets_0_from_vit_attention():
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=21, num_heads=3, depth=1)
    attn = randomized(lipsformer.convert(model)).blocks[0].attn
    x = torch.randn(2, 5, 21, requires_grad=True)
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    allowed[0, :, 3] = False
    out = attn(x, allowed)
    torch.testing.assert_close(out[0, 3], attn.proj.bias)
    keep = torch.ones(2, 5, 1)
    keep[0, 3] = 0.0
    torch.testing.assert_close(out * keep, attn(x) * keep)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert gradient.isfinite().all()


@torch.no_grad()
def test_swin_attention_keeps_bias_and_shift_mask():
    torch.manual_seed(0)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=24,
        window_size=3,
        embed_dim=14,
        depths=(2,),
        num_heads=(2,),
        head_dim=5,  # not embed_dim / num_heads
    )
    block = randomized(lipsformer.convert(model)).layers[0].blocks[1]
    attn, mask = block.attn, block.attn_mask
    assert mask is not None
    x = torch.randn(2 * mask.shape[0], 9, 14)
    out = attn(x, mask)
    position = attn._get_rel_pos_bias()[0]
    for window in (0, 3, mask.shape[0] + 1, 2 * mask.shape[0] - 1):
        q, k, v = heads(x[window], attn)
        bias = position + mask[window % mask.shape[0]]
        expected = joined(
            [cosine_attention(q[h], k[h], v[h], bias[h], 10.0, 1.0, 1e-2) for h in range(2)], attn
        )
        torch.testing.assert_close(out[window].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "width", "num_blocks"),
    [
        ("vit_tiny_patch16_224", 96, 12),
        ("deit_small_distilled_patch16_224", 96, 12),
        ("swin_tiny_patch4_window7_224", 24, 12),
    ],
)
def test_every_component_is_replaced(name, width, num_blocks):
    model = timm.create_model(name, embed_dim=width)
    names = set(model.state_dict())
    shapes = [model.get_parameter(key).shape for key, _ in model.named_parameters()]
    converted = lipsformer.convert(model)
    assert converted is model
    assert names <= set(model.state_dict())
    kept = [p.shape for key, p in model.named_parameters() if key in names]
    assert kept == shapes
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in model.modules())
    scales = [m.gamma for m in model.modules() if isinstance(m, LayerScale)]
    assert len(scales) == 2 * num_blocks
    torch.testing.assert_close(torch.cat(scales), torch.full_like(torch.cat(scales), 1 / 12))
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            sigma = torch.linalg.svdvals(module.weight.detach().flatten(1))[0].item()
            assert sigma == pytest.approx(1.0, abs=1e-3)


def test_pretrained_weights_can_be_kept():
    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lipsformer.convert(model, spectral_init=False, residual_scale=0.5)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            torch.testing.assert_close(module.weight, before[f"{name}.weight"], rtol=0, atol=0)
        if isinstance(module, LayerScale):
            assert module.gamma.unique().tolist() == [0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18", "ResNet has no Lipschitz form"),
        ("vit_base_patch16_siglip_224", "attention pooling is not converted"),
        ("vit_medium_patch16_rope_reg1_gap_256", "has no Lipschitz form|is not converted"),
        ("vit_pwee_patch16_reg1_gap_256", "ParallelScalingBlock is not converted"),
    ],
)
def test_other_models_are_refused_unchanged(name, message):
    with torch.device("meta"):
        model = timm.create_model(name)
    before = [type(module) for module in model.modules()]
    with pytest.raises(TypeError, match=message):
        lipsformer.convert(model)
    assert [type(module) for module in model.modules()] == before


def test_lipsformer_vit_is_the_converted_vit():
    torch.manual_seed(0)
    ours = timm.create_model("lipsformer_vit_tiny", num_classes=7, depth=2).eval()
    theirs = lipsformer.convert(
        timm.create_model("vit_tiny_patch16_224", num_classes=7, depth=2)
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in ours.modules())
    assert sum(isinstance(m, CenterNorm) for m in ours.modules()) == 5


@pytest.mark.parametrize("kind", ["vit", "swin"])
@pytest.mark.parametrize("place", ["norm", "block"])
def test_models_with_shared_modules_are_refused_unchanged(kind, place):
    small = {"img_size": 32, "embed_dim": 8, "num_classes": 5}
    if kind == "vit":
        model = timm.create_model("vit_tiny_patch16_224", depth=2, num_heads=2, **small)
        blocks = model.blocks
    else:
        shape = {"patch_size": 2, "depths": (2,), "num_heads": (2,), "window_size": 4}
        model = timm.create_model("swin_tiny_patch4_window7_224", **shape, **small)
        blocks = model.layers[0].blocks
    if place == "norm":
        blocks[0].norm2 = blocks[0].norm1
    else:
        blocks[1] = blocks[0]
    before, text = {k: v.clone() for k, v in model.state_dict().items()}, str(model)
    with pytest.raises(TypeError, match=r"are one module, which is not converted"):
        lipsformer.convert(model)
    assert str(model) == text
    for key, value in model.state_dict().items():
        assert value.equal(before[key])


class Stem(torch.nn.Module):
    """A stem of convolutions whose norm has the channels first."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 4, 4), LayerNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x))


def stem(model):
    model.patch_embed.backbone = Stem()


def identity(model):
    model.blocks[1].norm2 = torch.nn.Identity()


def hooked_norm(model):
    model.norm.register_forward_hook(lambda *_: None)


def hooked_attention(model):
    model.blocks[0].attn.register_forward_pre_hook(lambda *_: None)


def hooked_scale(model):
    model.blocks[1].ls2.register_forward_hook(lambda *_: None)


def hooked_weights(model):
    model.blocks[0].attn.attn_drop.register_forward_hook(lambda *_: None)


def attention_with_its_own_forward(model):
    model.blocks[1].attn.forward = torch.tanh


def pruned(model):
    prune.l1_unstructured(model.blocks[0].mlp.fc1, "weight", 0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (stem, "patch_embed.backbone.norm is a LayerNorm2d: only LayerNorm over the channels of"),
        (identity, "blocks.1.norm2 is a Identity: only LayerNorm over"),
        (hooked_norm, "^norm has hooks, which would be lost: register them after convert"),
        (hooked_attention, "blocks.0.attn has hooks, which would be lost"),
        (hooked_weights, "blocks.0.attn.attn_drop has hooks, which would be lost"),
        (hooked_scale, "blocks.1.ls2 has hooks, which would be lost"),
        (attention_with_its_own_forward, "blocks.1.attn has a forward function of its own, which"),
        (pruned, "the weight of blocks.0.mlp.fc1 is computed by a parametrization"),
    ],
)
def test_models_that_would_compute_something_else_are_refused_unchanged(change, message):
    small = {"img_size": 32, "embed_dim": 8, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", **small)
    change(model)
    text = str(model)
    with pytest.raises(TypeError, match=message):
        lipsformer.convert(model)
    assert str(model) == text


def test_hooks_of_a_layer_scale_that_stays_are_called():
    small = {"img_size": 32, "embed_dim": 8, "depth": 1, "num_heads": 2, "init_values": 0.3}
    model = timm.create_model("vit_tiny_patch16_224", **small)
    called = []
    model.blocks[0].ls1.register_forward_hook(lambda *_: called.append(True))
    lipsformer.convert(model, spectral_init=False)(torch.zeros(1, 3, 32, 32))
    assert called == [True]


def small_swin():
    small = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "num_classes": 5}
    model = timm.create_model("swin_tiny_patch4_window7_224", depths=(2,), num_heads=(2,), **small)
    return lipsformer.convert(model).eval()


def test_what_extracts_attention_finds_no_module_that_is_never_called():
    with pytest.raises(RuntimeError, match="No module names found matching"):
        AttentionExtract(small_swin(), method="hook")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@torch.no_grad()
def test_a_trace_of_shifted_windows_holds_for_other_batches():
    model = small_swin()
    traced = torch.jit.trace(model, torch.randn(2, 3, 32, 32))
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(traced(images), model(images))


def test_gated_mlps_are_refused():
    small = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", mlp_layer=SwiGLU, **small)
    with pytest.raises(
        TypeError, match="SwiGLU is not converted: gated MLPs multiply two linear maps"
    ):
        lipsformer.convert(model)


@torch.no_grad()
def test_a_swin_block_with_an_attribute_of_vits_blocks_is_converted_as_swin():
    torch.manual_seed(0)
    sizes = {"img_size": 24, "window_size": 3, "embed_dim": 14, "depths": (2,), "num_heads": (2,)}
    model = timm.create_model("swin_tiny_patch4_window7_224", **sizes)
    named = copy.deepcopy(model)
    for block in named.layers[0].blocks:
        block.ls1 = block.ls2 = None  # which nothing in Swin reads
    images = torch.randn(2, 3, 24, 24)
    plain, other = (
        lipsformer.convert(m, spectral_init=False).eval()(images) for m in (model, named)
    )
    assert torch.equal(plain, other)
