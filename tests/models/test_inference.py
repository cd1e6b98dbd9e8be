"""Folding changes no value: float64 to 1e-12, float32 to rounding, features and logits."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models._features_fx import create_feature_extractor
from torch import nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal

import lipsformer
from lipsformer.kernels import product
from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    ScaledCosineAttention,
    WeightedResidual,
)
from lipsformer.models.folded_layers import FoldedConv, FrozenLinear
from lipsformer.models.lipsformer_swin import WindowAttention
from tests.oracles import depthwise_conv

SWIN = {"embed_dim": 24, "depths": (1, 2), "num_heads": (3, 6), "window_size": 7}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
HEADS = {"num_classes": 5}


def make(form: str, img_size: int = 56) -> nn.Module:
    """A small model of each form, converted where the form is timm's."""
    if form == "vit":
        return timm.create_model("lipsformer_vit_tiny", **VIT, **HEADS)
    if form in ("timm_vit", "timm_swin"):
        name = "vit_tiny_patch16_224" if form == "timm_vit" else "swin_tiny_patch4_window7_224"
        kwargs = VIT if form == "timm_vit" else {**SWIN, "img_size": img_size}
        return lipsformer.convert(timm.create_model(name, **kwargs, **HEADS), value_scale=1.7)
    body, _, option = form.partition("-")
    options = {
        "": {"value_scale": 1.7},
        "official": {"official_compat": True},
        "learned": {"learn_logit_scale": True, "value_scale": 0.3},
        "lipschitznorm": {"attn": "lipschitznorm"},
    }[option]
    return timm.create_model(f"lipsformer_{body}", **options, **HEADS)


def randomize(model: nn.Module) -> nn.Module:
    """Values for which no gain, scale or bias is neutral."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.4, 1.6)
            else:
                parameter.add_(0.02 * torch.randn_like(parameter))
        for name, parameter in model.named_parameters():
            if name.endswith("log_logit_scale"):
                parameter.uniform_(1.0, 6.0)  # some beyond the ceiling of 100
    return model.eval()


FORMS = [
    *("nano", "nano-official", "nano-learned", "nano-lipschitznorm"),
    *("swin_nano", "swin_nano-official", "swin_nano-learned"),
    *("vit", "timm_vit", "timm_swin"),
]


@pytest.mark.parametrize("form", FORMS)
def test_the_fold_is_exact(form):
    model = randomize(make(form)).double()
    size = {"vit": 32, "timm_vit": 32, "timm_swin": 56}.get(form, 44)
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folded = lipsformer.optimize_for_inference(model)
    with torch.no_grad():
        for call in ("__call__", "forward_features"):
            expected = getattr(model, call)(images)
            actual = getattr(folded, call)(images)
            error = (actual - expected).abs().max() / expected.abs().max()
            assert error.item() < 1e-12
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    single = lipsformer.optimize_for_inference(model.float())
    with torch.no_grad():
        actual, expected = single(images.float()).double(), folded(images)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


SMALL = {
    "lipsformer_swin": {**SWIN, "img_size": 28},
    "lipsformer_cswin": {"embed_dim": 12, "depths": (1, 2), "num_heads": (2, 4), "img_size": 28},
    "lipsformer_contractive": {"dims": (8, 24, 40), "depths": (1, 2, 1), "head_dim": 5},
    "lipsformer_vit": VIT,
    "converted": {**VIT, "original": "deit_tiny_patch16_224"},
}


@pytest.mark.parametrize(
    ("name", "small"),
    [(name, small) for file, small in SMALL.items() for name in timm.list_models(module=file)],
)
def test_every_registered_model_is_folded_exactly(name, small):
    model = randomize(timm.create_model(name, **small, **HEADS)).double()
    side = small.get("img_size", 32)
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    with torch.no_grad():
        expected = model(images)
        actual = lipsformer.optimize_for_inference(model)(images)
    assert expected.std() > 1e-3 * expected.abs().max()
    assert (actual - expected).abs().max() < 1e-12 * expected.abs().max()


def test_the_walk_over_the_registered_models_is_complete():
    files = {
        timm.models.model_entrypoint(name).__module__.removeprefix("lipsformer.models.")
        for name in timm.list_models()
        if timm.models.model_entrypoint(name).__module__.startswith("lipsformer.")
    }
    assert files == set(SMALL)


@pytest.mark.parametrize("name", ["lipsformer_nano", "lipsformer_swin_nano", "lipsformer_vit_tiny"])
def test_every_map_of_a_features_only_model_stays_exact(name):
    options = {**VIT, "out_indices": (0, 1)} if "vit" in name else {}
    model = randomize(timm.create_model(name, features_only=True, **options)).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    folded = lipsformer.optimize_for_inference(model)
    with torch.no_grad():
        for actual, expected in zip(folded(images), model(images), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("made_there", [False, True])
def test_in_inference_mode_the_fold_is_exact_and_notices_new_weights(made_there):
    images = torch.randn(2, 3, 32, 32)
    middle = "stages.1.blocks.0.mlp.branch.1.weight"
    outside = None if made_there else randomize(make("nano"))
    with torch.inference_mode():
        model = outside or randomize(make("nano"))
        folded = lipsformer.optimize_for_inference(model)
        torch.testing.assert_close(folded(images), model(images), rtol=1e-3, atol=1e-4)
        there = copy.deepcopy(folded)  # its weights are tensors of inference mode
        for written in (folded, there):
            before = written(images)
            written.get_parameter(middle).mul_(1.7)
            reference = copy.deepcopy(written).double()
            changed = written(images)
            expected = reference(images.double())
            torch.testing.assert_close(changed.double(), expected, rtol=1e-3, atol=1e-4)
            assert not torch.allclose(changed, before, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of sizes, which are compared
@pytest.mark.parametrize("form", ["nano", "swin_nano"])
def test_one_graph_of_the_compiler_and_a_trace_hold_a_folded_model(form):
    folded = lipsformer.optimize_for_inference(randomize(make(form)))
    images, others = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = folded(others)
        compiled = torch.compile(folded, backend="eager", fullgraph=True, dynamic=False)
        for other_form in (compiled, torch.jit.trace(folded, images)):
            other_form(images)
            torch.testing.assert_close(other_form(others), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@pytest.mark.parametrize("form", ["nano", "swin_nano"])
@torch.no_grad()
def test_a_trace_holds_a_model_that_is_not_folded(form):
    """As TensorBoard's `add_graph` and OpenVINO's converter make it."""
    model = randomize(make(form))
    traced = torch.jit.trace(model, torch.randn(2, 3, 32, 32))
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(traced(images), model(images))


@torch.no_grad()
def test_timm_extracts_features_of_a_folded_model():
    folded = lipsformer.optimize_for_inference(randomize(make("nano")))
    images = torch.randn(2, 3, 32, 32)
    features = create_feature_extractor(folded, ["stages.1.blocks.0.mlp", "stages.3"])(images)
    found = []
    for name in features:
        folded.get_submodule(name).register_forward_hook(lambda *args: found.append(args[2]))
    folded(images)
    torch.testing.assert_close(list(features.values()), found)


@pytest.mark.parametrize("img_size", [56, 60])
def test_windows_padded_behind_the_norm_stay_exact(img_size):
    """60 px are 15 tokens, three windows of 7 with padding: norm1 must stay there."""
    model = randomize(make("timm_swin", img_size)).double()
    folded = lipsformer.optimize_for_inference(model)
    norm1 = folded.layers[0].blocks[0].norm1
    assert isinstance(norm1, CenterNorm if img_size == 60 else nn.Identity)
    images = torch.randn(2, 3, img_size, img_size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(folded(images), model(images), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("form", "norms"), [("vit", 1), ("nano", 0), ("swin_nano", 1)])
def test_no_norm_and_no_gradient_is_left_but_for_the_last(form, norms):
    folded = lipsformer.optimize_for_inference(make(form).eval())
    assert sum(isinstance(module, CenterNorm) for module in folded.modules()) == norms
    assert not any(parameter.requires_grad for parameter in folded.parameters())


def test_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"training mode: call model.eval\(\) first"):
        lipsformer.optimize_for_inference(make("nano").train())


@pytest.mark.parametrize("form", ["nano", "swin_nano", "vit", "timm_swin"])
def test_a_folded_model_is_not_folded_again(form):
    folded = lipsformer.optimize_for_inference(make(form).eval())
    name = type(folded).__name__
    with pytest.raises(TypeError, match=f"^this {name} is folded already: use it as it is, or "):
        lipsformer.optimize_for_inference(folded)


def test_a_model_without_lipschitz_layers_is_refused():
    model = timm.create_model("swin_tiny_patch4_window7_224", **SWIN, img_size=56).eval()
    with pytest.raises(TypeError, match="SwinTransformer has nothing to fold"):
        lipsformer.optimize_for_inference(model)


class LowRank(Linear):
    """A linear layer with an adapter next to its weight, as in LoRA."""

    def forward(self, input, act_before=False, output_scale=None):
        """Add to the layer's output."""
        return 1.3 * super().forward(input, act_before, output_scale)


def put_low_rank(model: nn.Module) -> None:
    model.get_submodule("stages.0.blocks.0.attn.branch").proj = LowRank(32, 32)


def add_hook(model: nn.Module) -> None:
    model.get_submodule("stages.0.blocks.0.mlp").register_forward_hook(lambda *args: 2 * args[2])


def parametrize_output(model: nn.Module) -> None:
    orthogonal(model.get_submodule("stages.0.blocks.0.mlp.branch.fc2"))


def replace_mlp(model: nn.Module) -> None:
    mlp = timm.layers.Mlp(32, 128, act_layer=nn.ReLU)
    model.get_submodule("stages.0.blocks.0.mlp").branch = mlp


def set_forward(model: nn.Module) -> None:
    model.get_submodule("stages.0.blocks.0.norm2").forward = torch.tanh


def set_forward_of_model(model: nn.Module) -> None:
    forward = model.forward
    model.forward = lambda x: 2 * forward(x)


def replace_norm(model: nn.Module) -> None:
    model.get_submodule("stages.0.blocks.0").norm2 = nn.LayerNorm(32)


def hook(name: str):
    def change(model: nn.Module) -> None:
        model.get_submodule(name).register_forward_hook(lambda *args: args[2] + args[1][0])

    return change


def replace(name: str, module: nn.Module):
    def change(model: nn.Module) -> None:
        model.set_submodule(name, module)

    return change


def subclass_attention(model: nn.Module) -> None:
    attn = model.get_submodule("blocks.0.attn")
    attn.__class__ = type("Mine", (type(attn),), {})


def prune_layer(model: nn.Module) -> None:
    layer = model.get_submodule("stages.1.blocks.0.mlp.branch.fc1")
    prune.l1_unstructured(layer, "weight", 0.3)


def share_a_module(model: nn.Module) -> None:
    blocks = model.get_submodule("stages.2.blocks")
    blocks[1].mlp.branch = blocks[0].mlp.branch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put_low_rank, r"^stages.0.blocks.0 cannot be folded: LowRank is unknown to the fold"),
        (add_hook, r"^stages.0.blocks.0 cannot be folded: WeightedResidual has hooks, which"),
        (parametrize_output, r"0 cannot be folded: ParametrizedLinear is parametrized: call torch"),
        (
            replace_mlp,
            r"^stages.0.blocks.0 cannot be folded: its MLP is a timm.layers.mlp.Mlp, and",
        ),
        (set_forward, r"0 cannot be folded: CenterNorm has a forward function of its own$"),
        (prune_layer, r"^stages.1.blocks.0.mlp.branch.fc1.weight is computed by a hook, as by"),
        (share_a_module, r"^stages.2.blocks.0.mlp.branch and stages.2.blocks.1.mlp.branch are one"),
        (set_forward_of_model, r"^this LipsFormerCSwin has a forward function of its own, which"),
        (replace_norm, r"^stages.0.blocks.0 cannot be folded: it has a LayerNorm where the fold"),
        (hook("stages.0.blocks.0.attn.branch"), r"0 cannot be folded: StripeAttention has hooks"),
        (hook("stages.0.blocks.0.norm1"), r"0 cannot be folded: Identity has hooks, which"),
        (
            replace("stages.0.blocks.0.attn.branch.proj_drop", nn.Tanh()),
            r"^stages.0.blocks.0 cannot be folded: it has a Tanh where the fold knows only Dropout",
        ),
        (
            replace("stages.0.blocks.0.mlp.branch.drop", nn.Tanh()),
            r"^stages.0.blocks.0 cannot be folded: it has a Tanh where the fold knows only Dropout",
        ),
        (
            replace("stages.0.blocks.0.attn.branch.proj", nn.Sequential()),
            r"^stages.0.blocks.0 cannot be folded: it has a Sequential where the fold knows only",
        ),
    ],
)
def test_what_the_fold_would_lose_is_refused(change, message):
    model = make("nano").eval()
    change(model)
    with pytest.raises(TypeError, match=message):
        lipsformer.optimize_for_inference(model)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("vit", subclass_attention, "^blocks.0 cannot be folded: Mine is unknown to the fold"),
        ("vit", replace("blocks.0.attn", nn.Identity()), "has a Identity where .* CosineAttention"),
        ("vit", replace("blocks.0.mlp", nn.Identity()), "it has a Identity where .* only Mlp"),
        ("vit", replace("blocks.0.norm2", nn.Identity()), "Identity where .* only CenterNorm"),
        ("vit", replace("blocks.0.ls1", nn.Identity()), "Identity where .* only LayerScale"),
        ("vit", hook("blocks.0.attn"), "CosineAttention has hooks"),
        ("vit", hook("blocks.0.attn.proj_drop"), "Dropout has hooks"),
        ("timm_vit", hook("blocks.0.mlp"), "Mlp has hooks"),
        ("timm_vit", replace("blocks.0.mlp.drop2", nn.Tanh()), "a Tanh where .* only Dropout"),
        ("timm_swin", hook("layers.0.blocks.0.attn"), "CosineWindowAttention has hooks"),
        ("timm_swin", hook("layers.0.blocks.0.mlp"), "Mlp has hooks"),
        ("timm_swin", hook("layers.0.blocks.0.drop_path1"), "Sequential has hooks"),
        (
            "timm_swin",
            replace("layers.0.blocks.0.drop_path1.1", nn.Tanh()),
            "a Tanh where .* only DropPath or Identity",
        ),
    ],
)
def test_what_the_fold_would_lose_in_a_converted_block_is_refused(form, change, message):
    model = make(form).eval()
    change(model)
    with pytest.raises(TypeError, match=message):
        lipsformer.optimize_for_inference(model)


class HalfAttention(WindowAttention):
    """Attention that does not say that it ends in its linear layer, as it does not."""

    def forward(self, x, output_scale=None):
        """Change what the linear layer gives."""
        return torch.tanh(super().forward(x))


def attend_otherwise(attn: nn.Module) -> None:
    attn.__class__ = HalfAttention


def set_forward_of_attention(attn: nn.Module) -> None:
    forward = attn.forward
    attn.forward = lambda x: torch.tanh(forward(x))


@pytest.mark.parametrize("change", [attend_otherwise, set_forward_of_attention])
def test_attention_that_does_not_end_in_its_linear_layer_is_not_folded(change):
    model = randomize(make("swin_nano")).double()
    change(model.get_submodule("stages.1.blocks.0.attn.branch"))
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        expected, actual = model(images), lipsformer.optimize_for_inference(model)(images)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_tied_weights_hooks_of_blocks_and_other_gelus_stay_exact():
    vit = timm.create_model("vit_tiny_patch16_224", **VIT, **HEADS)
    vit.blocks[0].mlp.act = nn.GELU("tanh")
    model = randomize(lipsformer.convert(vit)).double()
    model.blocks[1].attn.proj.weight = model.blocks[0].attn.proj.weight
    model.blocks[1].register_forward_hook(lambda *args: 1.5 * args[2])
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        expected, actual = model(images), lipsformer.optimize_for_inference(model)(images)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


SHARED = [
    (WeightedResidual, "residual_scale"),
    (CenterNorm, "weight"),
    (CenterNorm, "bias"),
    (ScaledCosineAttention, "log_logit_scale"),
]


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize(("kind", "name"), SHARED)
@pytest.mark.parametrize("body", ["nano", "swin_nano"])
def test_one_number_for_all_channels_or_heads_is_not_read_as_many(body, kind, name):
    model = randomize(make(f"{body}-learned"))
    exact = copy.deepcopy(model).double()
    for module, other in zip(model.modules(), exact.modules(), strict=True):
        if isinstance(module, kind):
            full = getattr(other, name)
            setattr(module, name, nn.Parameter(torch.full([1] * full.ndim, 0.7)))
            nn.init.constant_(full, getattr(module, name).item())
    images = torch.randn(2, 3, 32, 32)
    expected = exact(images.double())
    with torch.no_grad():
        folded = lipsformer.optimize_for_inference(model)(images)
    logits = model.train()(images)
    for found in (folded, logits):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    parameters = [
        getattr(next(m for m in of.modules() if isinstance(m, kind)), name) for of in (model, exact)
    ]
    (gradient,) = torch.autograd.grad(logits.square().sum(), parameters[0])
    (every,) = torch.autograd.grad(expected.square().sum(), parameters[1])
    torch.testing.assert_close(gradient.double().sum(), every.sum(), rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.usefixtures("compiled_kernels")
def test_a_folded_convolution_keeps_the_type_of_the_sum_and_calls_hooks():
    conv, alpha, x = DepthwiseConv2d(5, 7), nn.Parameter(torch.randn(5)), torch.randn(2, 11, 13, 5)
    folded = FoldedConv(conv, alpha)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = folded(x)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, x + alpha * F.gelu(conv(x)), rtol=1e-2, atol=1e-2)
    conv.register_forward_hook(lambda *args: 2.0 * args[2])
    torch.testing.assert_close(folded(x), x + alpha * F.gelu(conv(x)))
    assert not torch.allclose(folded(x), mixed, rtol=1e-2, atol=1e-2)


@torch.no_grad()
@pytest.mark.usefixtures("compiled_kernels")
def test_a_hook_of_all_modules_sees_the_convolution_of_a_folded_one():
    conv, x, seen = DepthwiseConv2d(5, 3), torch.randn(1, 4, 6, 5), []
    with nn.modules.module.register_module_forward_hook(lambda *args: seen.append(args[2])):
        FoldedConv(conv)(x)
    expected = depthwise_conv(x[0], conv.weight, conv.bias)
    torch.testing.assert_close(seen[0][0].double(), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_the_packed_weight_follows_every_way_to_change_a_weight():
    layer, x = FrozenLinear(nn.Linear(500, 700, bias=False)), torch.ones(3, 500)
    for value in (1.0, 2.0, 3.0):  # PyTorch frees each and gives its address to the next
        other = {"weight": torch.full((700, 500), value)}
        assert functional_call(layer, other, x)[2, 6].item() == 500 * value
        del other
    square, x = FrozenLinear(nn.Linear(5, 5, bias=False)), torch.randn(3, 5)
    square(x)
    square.weight = nn.Parameter(square.weight.T)  # at the same address
    torch.testing.assert_close(square(x), x @ square.weight.T)
    square.bfloat16().float()
    torch.testing.assert_close(square(x), x @ square.weight.T)


@pytest.mark.parametrize("own", [False, True])
@torch.no_grad()
def test_gelu_behind_a_frozen_layer_is_exact_in_our_product_and_in_onednns(own, monkeypatch):
    monkeypatch.setattr(product, "USE_OWN_PACKED", own)
    layer, x = FrozenLinear(nn.Linear(37, 101), act_after=True), 3.0 * torch.randn(5, 7, 37)
    z = x.double() @ layer.weight.double().T + layer.bias.double()
    expected = z * (1 + torch.erf(z / 2**0.5)) / 2
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_frozen_layer_computes_tensors_of_a_subclass_with_plain_operators():
    class Image(torch.Tensor):
        pass

    layer, x = FrozenLinear(nn.Linear(37, 101)), torch.randn(5, 37)
    y = layer(x.as_subclass(Image))
    assert type(y) is Image
    torch.testing.assert_close(y.as_subclass(torch.Tensor), layer(x))


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("form", ["nano", "vit", "timm_vit", "timm_swin"])
def test_second_derivatives_in_evaluation_mode_equal_differences_of_the_first(form, folded):
    """With frozen weights, where PyTorch's attention would take its kernel without them."""
    model = randomize(make(form)).double().eval().requires_grad_(False)
    if folded:
        model = lipsformer.optimize_for_inference(model)
    size = 56 if form == "timm_swin" else 32
    x, v = torch.randn(2, 1, 3, size, size, dtype=torch.float64)

    def first(y, create_graph=False):
        y = y.requires_grad_()
        total = model(y).pow(2).sum()
        return torch.autograd.grad(total, y, create_graph=create_graph)[0], y

    gradient, point = first(x.clone(), create_graph=True)
    (second,) = torch.autograd.grad((gradient * v).sum(), point)
    step = 1e-6
    differences = (first(x + step * v)[0] - first(x - step * v)[0]) / (2 * step)
    torch.testing.assert_close(second, differences, rtol=1e-4, atol=1e-5 * second.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", ["weight", "bias", "residual_scale"])
def test_a_folded_convolution_reads_views_with_the_opposite_sign_with_it(name: str) -> None:
    folded = FoldedConv(DepthwiseConv2d(11, kernel_size=3), nn.Parameter(torch.randn(11)))
    owner = folded if name == "residual_scale" else folded.depthwise
    view = torch._neg_view(getattr(owner, name).detach().clone())
    setattr(owner, name, nn.Parameter(view, requires_grad=False))
    x = torch.randn(5, 7, 11)
    conv = folded.depthwise
    weight, bias, scale = (
        p.resolve_neg().double() for p in (conv.weight, conv.bias, folded.residual_scale)
    )
    expected = x + scale * F.gelu(depthwise_conv(x, weight, bias))
    torch.testing.assert_close(folded(x[None])[0].double(), expected, rtol=1e-5, atol=1e-5)
