"""Modules that compute something else than what their bound rule reads: refused, or still true."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from timm.layers import LayerScale, SelectAdaptivePool2d
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from lipsformer.analysis.bounds import Domain, UnknownModuleError, image_domain, lipschitz_bound
from lipsformer.analysis.bounds.attention import max_abs_score
from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    ScaledCosineAttention,
    WeightedResidual,
)
from lipsformer.models import convert
from lipsformer.models.lipsformer_cswin import StripeAttention
from lipsformer.models.lipsformer_swin import WindowAttention
from tests.analysis.tampering import replaced
from tests.hunt.attack import top_singular

TOKENS = Domain(size=(4,))


class Alternates(nn.Module):
    """Return the tensor at the first call, and three times the tensor at the next."""

    calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight if self.calls % 2 else 3.0 * weight


def alternating() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(3, 3), "weight", Alternates()).eval()


class LargerInEvaluation(nn.Linear):
    """Its weight is a property, which depends on the mode."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.small = self._parameters.pop("weight")

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.small if self.training else 3.0 * self.small


def in_training_alone() -> nn.Module:
    layer = spectral_norm(nn.Linear(3, 3)).eval()
    layer.parametrizations.weight.train()  # the power iteration goes on at every call
    return layer


def hooked_parametrization() -> nn.Module:
    layer = spectral_norm(nn.Linear(3, 3)).eval()
    layer.parametrizations.weight[0].register_forward_hook(lambda *_: 3.0 * torch.eye(3))
    return layer


def distributed():
    """`torch.distributed.tensor.distribute_module` wraps a function of the user like this."""
    hook = lambda *inputs: 5.0 * inputs[-1]  # noqa: E731
    hook.__module__ = "torch.distributed.tensor._api"
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(hook)
    return layer


class OfTheMode:
    """A descriptor that cannot be set, which hides a weight as a property does."""

    def __get__(self, layer, kind=None):
        weight = None if layer is None else layer._parameters.get("weight")
        if weight is None:
            raise AttributeError
        return weight if layer.training else 3.0 * weight


class LargerByDescriptor(nn.Linear):
    weight = OfTheMode()  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        super().__init__(3, 3)


class MergesInEvaluation(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def train(self, mode: bool = True):
        with torch.no_grad():
            self.weight.mul_(1.0 if mode else 3.0)
        return super().train(mode)


def complex_attribute():
    layer = LayerScale(3, 1.0)
    del layer.gamma
    layer.gamma = torch.tensor([1.0, 1.0, 1.0 + 5.0j])
    return layer


@pytest.mark.parametrize(
    "make",
    [
        complex_attribute,
        LargerByDescriptor,
        MergesInEvaluation,
        alternating,
        LargerInEvaluation,
        in_training_alone,
        hooked_parametrization,
        distributed,
    ],
)
def test_a_weight_that_a_call_may_replace_is_refused(make):
    with pytest.raises(UnknownModuleError):
        lipschitz_bound(make(), TOKENS)


def test_a_known_parametrization_is_read():
    torch.manual_seed(0)
    layer = spectral_norm(nn.Linear(5, 3), n_power_iterations=50)
    with pytest.raises(UnknownModuleError, match="call eval"):
        lipschitz_bound(layer, TOKENS)
    bound = lipschitz_bound(layer.eval(), TOKENS)
    exact = torch.linalg.svdvals(layer.weight.detach().double())[0].item()
    assert bound.value == pytest.approx(exact, rel=1e-9)


def test_padding_that_was_changed_after_construction_is_refused():
    conv = nn.Conv2d(1, 1, 3, padding=3, padding_mode="circular", bias=False).double()
    nn.init.ones_(conv.weight)
    conv.padding = (0, 0)  # forward still wraps by 3
    on_map = lambda x: conv(x)  # noqa: E731
    plane = 9.0  # the largest value of the symbol
    assert top_singular(on_map, torch.zeros(1, 1, 3, 3).double())[0].item() > plane
    with pytest.raises(UnknownModuleError, match="changed after it was built"):
        lipschitz_bound(conv, Domain(size=(3, 3)))


def test_a_negative_logit_scale_counts_by_its_size():
    torch.manual_seed(0)
    attention = WindowAttention(4, 2, (2, 2), ScaledCosineAttention(2)).eval()
    expected = lipschitz_bound(attention, Domain(size=(2, 2))).value
    attention.attention.init_logit_scale = -attention.attention.init_logit_scale
    assert lipschitz_bound(attention, Domain(size=(2, 2))).value == pytest.approx(expected)


def test_a_bias_that_is_one_number_for_all_channels_is_refused():
    """It would make the tokens longer than the rule expects."""
    linear = nn.Linear(3, 5)
    linear.bias = nn.Parameter(torch.tensor([2.0]))
    with pytest.raises(UnknownModuleError, match="not one number per channel"):
        lipschitz_bound(linear, TOKENS)


def repeats_the_map():
    conv = nn.Conv2d(1, 1, 3, padding=2, padding_mode="circular", bias=False)
    return replaced(conv, padding="same")  # forward still wraps by 2


def kernels(*shape, dim):
    """A depthwise convolution whose weight was replaced."""
    weight = nn.Parameter(torch.ones(shape))
    return replaced(
        DepthwiseConv2d(dim, 3), weight=weight, bias=nn.Parameter(torch.zeros(shape[0]))
    )


def channel_as_tokens():
    """The depthwise convolution takes the seven channels of the first for rows of the map."""
    layers = nn.Sequential(nn.Conv2d(1, 7, 1), DepthwiseConv2d(1, 3))
    for layer in layers:
        nn.init.ones_(layer.weight)
    return layers


def alpha_along_the_width():
    conv = nn.Conv2d(2, 2, 1, bias=False)
    conv.weight.data = torch.tensor([[5.0, 0.0], [0.0, 0.0]]).view(2, 2, 1, 1)
    residual = WeightedResidual(conv, 2, 1.0)
    residual.residual_scale.data = torch.tensor([0.0, 1.0])  # by channel the branch is 0
    return residual


def tau_along_the_channels():
    """Two numbers for two heads broadcast along the two channels of every head."""
    core = ScaledCosineAttention(2, learn_logit_scale=True)
    core.log_logit_scale = nn.Parameter(torch.tensor([-3.0, 4.0]))
    return WindowAttention(4, 2, (2, 2), core)


def compiled_call():
    layer = nn.Linear(3, 3)
    return replaced(layer, _compiled_call_impl=lambda x: 5.0 * F.linear(x, layer.weight))


def one_token_of_four():
    """The model averages only its last token, and the rule once counted five tokens."""
    options = {"class_token": False, "global_pool": "avg", "pos_embed": "none"}
    model = VisionTransformer(
        img_size=4, patch_size=2, num_classes=2, embed_dim=4, depth=1, num_heads=2, **options
    )
    return replaced(convert(model), num_prefix_tokens=-1)


def narrowed_window():
    """`window_size` was changed behind the windows that the attention was built for."""
    model = SwinTransformer(
        img_size=8, patch_size=2, embed_dim=4, depths=(1,), num_heads=(2,), window_size=2
    )
    return replaced(convert(model).layers[0].blocks[0].attn, window_size=(1, 1))


def small_vit(kind=VisionTransformer, **options):
    options = {"img_size": 4, "patch_size": 2, "embed_dim": 4, "num_heads": 2, **options}
    return convert(kind(num_classes=3, depth=1, **options))


def wider_windows():
    """The bias of windows of one token broadcasts over four."""
    model = SwinTransformer(
        img_size=8, patch_size=2, embed_dim=4, depths=(1,), num_heads=(2,), window_size=1
    )
    return replaced(convert(model).layers[0].blocks[0], window_size=(2, 2), window_area=4)


def patches_of_one_channel():
    """The position embedding repeats their channel."""
    model = small_vit(class_token=False, global_pool="avg")
    model.patch_embed.proj = nn.Conv2d(3, 1, 2, 2)
    return model


def positions_of_two_images():
    model = small_vit()
    return replaced(model, pos_embed=nn.Parameter(torch.zeros(2, 5, 4)))


def second_head_of_one_logit():
    return replaced(small_vit(VisionTransformerDistilled), head_dist=nn.Linear(4, 1))


def attention_of_one_channel():
    block = replaced(small_vit().blocks[0], ls1=nn.Identity(), ls2=nn.Identity())
    block.attn.proj = nn.Linear(4, 1)
    return block


def tau_by_channel():
    core = replaced(ScaledCosineAttention(2), init_logit_scale=torch.tensor([0.01, 100.0]))
    return WindowAttention(4, 2, (2, 2), core)


def two_maps(*shape):
    return nn.Parameter(torch.ones(shape))


def residual(*branch, dim):
    return WeightedResidual(nn.Sequential(*branch), dim, 0.1)


# What got a bound before, though its constant is larger: the module, its inputs and their size.
EXCEEDED = {
    "circular padding, 'same'": (repeats_the_map, (1, 3, 3), (3, 3)),
    "two kernels for a channel": (lambda: kernels(4, 1, 3, 3, dim=2), (3, 3, 2), (3, 3)),
    "kernels of another side": (lambda: kernels(2, 1, 5, 5, dim=2), (5, 5, 2), (5, 5)),
    "channels first, then last": (channel_as_tokens, (1, 1, 1), (1, 1)),
    "alpha on channels first": (alpha_along_the_width, (2, 3, 2), (3, 2)),
    "pooling over the channels": (
        lambda: nn.Sequential(nn.Conv2d(1, 1, 1), SelectAdaptivePool2d(1, "fast", False, "NHWC")),
        (1, 2, 9),
        (2, 9),
    ),
    "one channel for all": (
        lambda: nn.Sequential(nn.Linear(3, 1), LayerScale(4, 2.0)),
        (2, 3),
        (2,),
    ),
    "a branch of one channel": (
        lambda: residual(nn.Linear(4, 1), nn.GELU(), dim=4),
        (2, 4),
        (2,),
    ),
    "a branch of one token": (
        lambda: residual(SelectAdaptivePool2d(1, "fast", False, "NHWC"), dim=3),
        (3, 3, 3),
        (3, 3),
    ),
    "LayerScale in place": (lambda: residual(LayerScale(2, 10.0, True), dim=2), (3, 2), (3,)),
    "ELU in place": (lambda: residual(nn.ELU(5.0, inplace=True), dim=2), (3, 2), (3,)),
    "tau along the channels": (tau_along_the_channels, (2, 2, 4), (2, 2)),
    "compiled call": (compiled_call, (2, 3), (2,)),
    "one token of four": (one_token_of_four, (3, 4, 4), (4, 4)),
    "narrowed window": (narrowed_window, (4, 4), (4,)),
    "wider windows of a block": (wider_windows, (4, 4, 4), (4, 4)),
    "patches of one channel": (patches_of_one_channel, (3, 4, 4), (4, 4)),
    "positions of two images": (positions_of_two_images, (3, 4, 4), (4, 4)),
    "a second head of one logit": (second_head_of_one_logit, (3, 4, 4), (4, 4)),
    "attention of one channel": (attention_of_one_channel, (3, 4), (3,)),
    "tau by channel": (tau_by_channel, (2, 2, 4), (2, 2)),
    "biases of two maps": (lambda: replaced(CenterNorm(2), bias=two_maps(2, 2)), (2,), ()),
    "gains of two maps": (lambda: replaced(LayerScale(2), gamma=two_maps(2, 2)), (2,), ()),
    "alphas": (lambda: replaced(residual(dim=2), residual_scale=two_maps(2, 1, 2)), (1, 2), (1,)),
}


@pytest.mark.parametrize("name", EXCEEDED)
def test_a_structure_whose_constant_exceeded_the_bound_is_refused(name):
    torch.manual_seed(0)
    make, shape, size = EXCEEDED[name]
    module = make().double().eval()
    module(torch.randn(2, *shape).double())  # the module itself accepts the inputs
    with pytest.raises(UnknownModuleError):
        lipschitz_bound(module, Domain(size=size))


class Tripled(torch.Tensor):
    """A kind of tensor with a linear map of its own, such as those of quantized weights."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return 3.0 * out if func is F.linear else out


def test_weights_that_are_no_real_tensors_are_refused():
    own = nn.Linear(3, 3)
    own.weight = nn.Parameter(torch.eye(3).as_subclass(Tripled), requires_grad=False)
    sparse = nn.Linear(3, 3)
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    others = (nn.Linear(3, 3, dtype=torch.complex64), nn.Linear(3, 3, device="meta"))
    for layer in (own, sparse, *others):
        with pytest.raises(UnknownModuleError, match="no ordinary tensor of real numbers"):
            lipschitz_bound(layer, TOKENS)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_channels_are_refused_in_one_sentence():
    shapes = {"weight": [nn.Linear(3, 0), nn.Linear(0, 3), Linear(3, 0), nn.Conv2d(3, 0, 2)]}
    shapes["bias"] = [replaced(nn.Linear(3, 2), bias=nn.Parameter(torch.empty(0)))]
    for name, layers in shapes.items():
        for layer in layers:
            with pytest.raises(UnknownModuleError, match=f"its '{name}' of shape .* is empty$"):
                lipschitz_bound(layer, Domain(size=(4, 4)))


def test_a_layer_for_channels_last_on_images_is_refused():
    """It would average channels and rows, not rows and columns."""
    pool = SelectAdaptivePool2d(1, "fast", False, "NHWC")
    with pytest.raises(UnknownModuleError, match="3 channels first"):
        lipschitz_bound(pool, image_domain((8, 8), [0.5] * 3, [0.5] * 3))


def test_a_fixed_logit_scale_is_not_rounded_down():
    """In float32, 0.7 is less."""
    assert max_abs_score(ScaledCosineAttention(1, logit_scale=0.7)).item() >= 0.7


@pytest.mark.parametrize("eps", [0.0, -0.01, math.inf])
def test_an_attention_without_smoothing_has_no_bound(eps):
    attention = WindowAttention(4, 2, 2, replaced(ScaledCosineAttention(2), eps=eps))
    with pytest.raises(UnknownModuleError, match=f"eps={eps}"):
        lipschitz_bound(attention, Domain(size=(2, 2)))


def test_a_mask_of_shifted_windows_that_swallows_the_scores_is_refused():
    """Numbers of 10^8 leave nothing of the scores in float32, and the stated error was 0.02."""
    torch.manual_seed(0)
    small = {"img_size": 8, "patch_size": 1, "embed_dim": 6, "window_size": 4}
    model = convert(SwinTransformer(**small, depths=(2,), num_heads=(1,)))
    block = model.layers[0].blocks[1].eval()
    x = torch.randn(4, 8, 8, 6)
    radius, norm = x.norm(dim=-1).max().item(), x.flatten(1).norm(dim=1).max().item()
    domain = Domain(size=(8, 8), radius=radius, norm=norm, error=0.0)

    def error():
        return (block(x) - copy.deepcopy(block).double()(x.double())).flatten(1).norm(dim=1).max()

    stated = lipschitz_bound(block, domain).output.error
    assert error() <= stated < 0.1
    block.attn_mask -= 1e8  # no real number would change
    assert error() > stated
    with pytest.raises(UnknownModuleError, match="mask of the shifted windows was changed"):
        lipschitz_bound(block, domain)


def test_a_negative_factor_of_the_stripes_counts_by_its_size():
    torch.manual_seed(0)
    cores = nn.ModuleList(ScaledCosineAttention(1) for _ in range(2))
    attention = StripeAttention(4, 2, 1, cores, official_compat=True).eval()
    expected = lipschitz_bound(attention, Domain(size=(3, 3)))
    attention.attn_factor = -attention.attn_factor
    found = lipschitz_bound(attention, Domain(size=(3, 3)))
    assert found.log10 == expected.log10 > 0.0


class Louder(nn.Module):
    """Stands behind a layer among the base classes, and before `nn.Module`."""

    def __call__(self, *args, **kwargs):
        return 100.0 * super().__call__(*args, **kwargs)


class Hidden(nn.Module):
    """Its property wins against the parameter of the same name."""

    @property
    def weight(self):
        return 100.0 * self._parameters["weight"]


@pytest.mark.parametrize("other", [Louder, Hidden])
def test_a_class_behind_the_known_one_that_changes_a_call_is_refused(other):
    known = nn.Linear(3, 3)
    module = copy.deepcopy(known)
    module.__class__ = type("Mixed", (nn.Linear, other), {})
    torch.testing.assert_close(
        module(torch.eye(3)) - module(torch.zeros(3)),
        100.0 * (known(torch.eye(3)) - known(torch.zeros(3))),
    )
    for model in (module, nn.Sequential(module)):
        with pytest.raises(UnknownModuleError, match="it overrides"):
            lipschitz_bound(model, TOKENS)
    attention = WindowAttention(3, 1, 2, ScaledCosineAttention(1))
    attention.proj = module
    with pytest.raises(UnknownModuleError, match="it overrides"):
        lipschitz_bound(attention, Domain(size=(2, 2)))


def test_attributes_that_no_forward_pass_reads_change_no_bound():
    swin = convert(
        SwinTransformer(
            img_size=16, embed_dim=8, depths=(1,), num_heads=(2,), window_size=2, num_classes=3
        )
    ).eval()
    block = swin.layers[0].blocks[0]
    block_domain = Domain(size=(4, 4))
    pool = SelectAdaptivePool2d(pool_type="avg", flatten=False, input_fmt="NCHW")
    pool.pool = nn.AdaptiveAvgPool2d(1)
    pool_domain = Domain(size=(5, 7), channels_first=True)
    before = lipschitz_bound(block, block_domain).value, lipschitz_bound(pool, pool_domain).value
    block.ls1 = block.ls2 = LayerScale(8, 1e-6)
    pool.pool.dim = (1, 2)
    pool.pool.flatten = True
    after = lipschitz_bound(block, block_domain).value, lipschitz_bound(pool, pool_domain).value
    assert after == before


def test_an_eps_whose_neighbors_underflow_in_float32_is_refused():
    attention = WindowAttention(4, 2, 2, ScaledCosineAttention(2, eps=1e-43))
    with pytest.raises(UnknownModuleError, match="eps=1e-43"):
        lipschitz_bound(attention, Domain(size=(2, 2)))


@pytest.mark.parametrize("size", [1e-200, 1e-310])
def test_the_squares_of_tiny_weights_do_not_vanish(size):
    """A Gram matrix of such weights underflows to 0."""
    attention = WindowAttention(4, 2, 2, ScaledCosineAttention(2)).double()
    attention.qkv.weight.data.mul_(size)
    assert lipschitz_bound(attention, Domain(size=(2, 2))).log10 >= math.log10(size)
    for module, exact in (
        (nn.Linear(3, 1), 3.0**0.5),
        (nn.Linear(1, 3), 3.0**0.5),
        (nn.Linear(3, 2), 6.0**0.5),
        (CenterNorm(3), 1.5),
    ):
        module.double().weight.data.fill_(size)
        found = lipschitz_bound(module, TOKENS).log10
        assert found == pytest.approx(math.log10(size) + math.log10(exact), abs=1e-6)
