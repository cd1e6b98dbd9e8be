"""Modules that compute something else than what their bound rule reads: refused, or still true."""

import copy
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import LayerScale, SelectAdaptivePool2d
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch_geometric.nn import GCNConv

from lipsformer.analysis.bounds import Domain, UnknownModuleError, image_domain, lipschitz_bound
from lipsformer.analysis.bounds.attention import max_abs_score
from lipsformer.analysis.bounds.graph import graph_domain
from lipsformer.analysis.certificates import certified_radius
from lipsformer.graph import (
    GCN,
    DeepGAT,
    LipschitzGATConv,
    LipschitzTransformerConv,
    ScaledCosineConv,
)
from lipsformer.graph.models import GraphNet
from lipsformer.graph.models.residual import ResidualLayer
from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    ScaledCosineAttention,
    WeightedResidual,
)
from lipsformer.models import convert
from lipsformer.models.lipsformer_contractive import ContractiveResidual
from lipsformer.models.lipsformer_cswin import StripeAttention
from lipsformer.models.lipsformer_swin import WindowAttention
from tests.hunt.attack import top_singular

TOKENS = Domain(size=(4,))
EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 0, 0, 3]])


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


def test_a_norm_whose_gain_is_not_a_number_has_no_finite_bound():
    norm = CenterNorm(3)
    with torch.no_grad():
        norm.weight[1] = math.nan
    assert lipschitz_bound(norm, TOKENS).value == math.inf


def test_a_bias_that_is_one_number_for_all_channels_is_refused():
    """It would make the tokens longer than the rule expects."""
    linear = nn.Linear(3, 5)
    linear.bias = nn.Parameter(torch.tensor([2.0]))
    with pytest.raises(UnknownModuleError, match="not one number per channel"):
        lipschitz_bound(linear, TOKENS)


def test_a_bias_before_the_messages_is_refused():
    """It moves the values away from the ball around 0 in which raw scores are bounded."""
    conv = LipschitzGATConv(3, 2, score_norm=None)
    conv.lin = nn.Linear(3, 2)
    model = GCN(3, 4, 2, num_layers=1)
    model.layers[0].conv.lin = nn.Linear(3, 2)
    for module in (conv, model):
        with pytest.raises(UnknownModuleError, match="no bias before the messages"):
            lipschitz_bound(module.eval(), graph_domain(EDGES, 4, radius=1.0))


def test_a_linear_layer_takes_no_edges_for_a_switch():
    """Graph networks call `layer(x, edges)`, and edges would switch on the GELU before it."""
    model = GraphNet(nn.Identity(), [Linear(3, 3)], nn.Identity()).eval()
    with pytest.raises(TypeError):
        model(torch.randn(4, 3), EDGES)


def replaced(conv, **attributes):
    for name, value in attributes.items():
        setattr(conv, name, value)
    return conv


class Doubled(ScaledCosineConv):
    def message(self, *args, **kwargs):
        return 2.0 * super().message(*args, **kwargs)


def watched():
    conv = ScaledCosineConv(3, 2)
    conv.register_message_forward_hook(lambda _, __, out: 3.0 * out)
    return conv


@pytest.mark.parametrize(
    "make",
    [
        watched,
        lambda: Doubled(3, 2),
        lambda: LipschitzGATConv(3, 2, aggr="max"),
        lambda: LipschitzGATConv(3, 2, flow="target_to_source"),
        lambda: LipschitzGATConv(3, 2, released_code=True),
        lambda: LipschitzGATConv((3, 3), 2),
        # one channel of the shortcut, or of the layer, would be repeated for all
        lambda: replaced(LipschitzGATConv(3, 1, 2, concat=False, residual=True), concat=True),
        lambda: replaced(LipschitzTransformerConv(3, 1, 2, concat=False), concat=True),
        lambda: ResidualLayer(GCNConv(3, 1), None, True, 0.0),
        lambda: replaced(ScaledCosineConv(3, 2), explain=True),
        lambda: replaced(ScaledCosineConv(3, 2), message=F.relu),
        lambda: replaced(ScaledCosineConv(3, 2, 2), attention=ScaledCosineAttention(1)),
    ],
)
def test_layers_that_send_other_messages_are_refused(make):
    layer = make().eval()
    if isinstance(layer, (LipschitzTransformerConv, ResidualLayer)):
        layer(torch.randn(4, 3), EDGES)
    with pytest.raises(UnknownModuleError):
        lipschitz_bound(layer, graph_domain(EDGES, 4))


def test_a_graph_layer_asks_for_its_edges():
    conv = ScaledCosineConv(3, 2)
    with pytest.raises(ValueError, match=r"depends on the edges: pass .*graph_domain"):
        lipschitz_bound(conv, TOKENS)
    with pytest.raises(IndexError, match=r"edge_index holds sources 0\.\.3"):
        graph_domain(EDGES, 3)
    with pytest.raises(ValueError, match="num_nodes=0 must be at least 1"):
        graph_domain(EDGES, 0)


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


@pytest.mark.parametrize("kind", [LipschitzGATConv, LipschitzTransformerConv])
def test_graph_layers_of_other_heads_than_their_weights_are_refused(kind):
    conv = replaced(kind(3, 4, score_norm=None), out_channels=1)
    with pytest.raises(UnknownModuleError, match="heads x channels"):
        lipschitz_bound(conv, graph_domain(EDGES, 4, radius=1.0))


def a_learned_constant_of_two_nodes():
    conv = LipschitzGATConv(2, 2, heads=2, min_att_norm=0.01)
    return replaced(conv, log_att_norm=nn.Parameter(torch.tensor([[20.0], [-30.0]])))


def a_fixed_constant_of_two_nodes():
    return replaced(LipschitzGATConv(2, 2, heads=2), att_norm=torch.tensor([[1e6], [0.01]]))


@pytest.mark.parametrize("make", [a_learned_constant_of_two_nodes, a_fixed_constant_of_two_nodes])
def test_a_constant_of_each_node_is_not_taken_for_one_of_each_head(make):
    """The head with the large constant has the small one at the second node."""
    torch.manual_seed(0)
    conv, pair = make().double().eval(), torch.tensor([[0, 1], [1, 0]])
    conv.lin.weight.data = torch.eye(4, 2, dtype=torch.float64)  # the second head is zero
    attend = lambda x: torch.stack([conv(nodes, pair) for nodes in x])  # noqa: E731
    constants = top_singular(attend, torch.randn(30, 2, 2).double())[0]
    assert constants.max() > 1.1  # 1 for the large constant, with which all weights are 1/2
    assert lipschitz_bound(conv, graph_domain(pair, 2)).value == math.inf


@pytest.mark.parametrize("name", ["lin_query", "lin_key", "lin_value"])
def test_projections_of_other_widths_are_refused(name):
    """In evaluation, their rows would be taken for those of other nodes."""
    conv = replaced(LipschitzTransformerConv(3, 2, score_norm=None), **{name: nn.Linear(3, 4)})
    with pytest.raises(UnknownModuleError, match="heads x channels"):
        lipschitz_bound(conv.eval(), graph_domain(EDGES, 4, radius=1.0))


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


def test_a_layer_in_place_before_a_graph_residual_is_refused():
    layer = ResidualLayer(GCNConv(3, 3), None, residual=True, dropout=0.0)
    layer.dropout = nn.ELU(50.0, inplace=True)  # the shortcut adds what it returns
    with pytest.raises(UnknownModuleError, match="inplace=True"):
        lipschitz_bound(layer, graph_domain(EDGES, 4))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_have_no_finite_bound(value):
    for make in (lambda: nn.Linear(3, 3), lambda: DepthwiseConv2d(3, 3), lambda: CenterNorm(3)):
        module = make()
        module.weight.data.flatten()[0] = value
        assert lipschitz_bound(module, Domain(size=(3, 3))).value == math.inf


def test_every_parameter_that_is_not_finite_makes_the_bound_infinite():
    """Biases, tokens and score vectors too: the outputs are not numbers."""
    small = {"img_size": 4, "patch_size": 2, "embed_dim": 6, "depth": 1, "num_classes": 3}
    vit = convert(timm.create_model("vit_tiny_patch16_224", **small)).eval()
    gat = DeepGAT(3, 2, 5, 1, heads=2, norm="lipschitznorm").eval()
    for model, domain, value in (
        (vit, Domain(size=(4, 4)), math.nan),
        (gat, graph_domain(EDGES, 4), math.inf),
    ):
        for name, parameter in model.named_parameters():
            before = parameter.detach().clone()
            parameter.data.flatten()[0] = value
            assert lipschitz_bound(model, domain).value == math.inf, name
            parameter.data.copy_(before)
        assert lipschitz_bound(model, domain).value < math.inf


def test_a_bias_that_is_not_a_number_is_not_hidden_by_a_weight_of_zero():
    linear = nn.Linear(3, 2)
    linear.weight.data.zero_()
    linear.bias.data[1] = math.nan
    bound = lipschitz_bound(nn.Sequential(linear, nn.Linear(2, 2)), TOKENS)
    assert bound.value == bound.parts["0"].value == math.inf
    logits = torch.tensor([[3.0, 1.0]])  # of another computation
    assert certified_radius(logits, bound).item() == 0.0


def test_a_tensor_that_is_no_parameter_and_not_finite_makes_the_bound_infinite():
    layer = nn.Linear(3, 2)
    del layer.bias
    layer.bias = torch.tensor([math.nan, 0.0])  # pyright: ignore[reportAttributeAccessIssue]
    assert layer(torch.zeros(1, 3)).isnan().any()
    assert lipschitz_bound(nn.Sequential(layer), TOKENS).value == math.inf


def test_settings_that_are_not_numbers_have_no_finite_bound():
    graph, mixing = graph_domain(EDGES, 4), contractive()
    mixing.mix.data.fill_(math.nan)
    for module, domain in (
        (nn.ELU(math.nan), graph),
        (LipschitzGATConv(3, 2, negative_slope=math.nan), graph),
        (LipschitzGATConv(3, 2, negative_slope=math.nan, score_norm=None), graph),
        (mixing, Domain(size=(4, 6))),
    ):
        assert lipschitz_bound(module, domain).value == math.inf


def test_what_a_parametrization_or_a_buffer_makes_nan_has_no_finite_bound():
    by_weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2), "bias", dim=None)
    by_weight_norm.parametrizations.bias.original1.data.zero_()
    by_buffer = nn.Linear(3, 2)
    del by_buffer.bias
    by_buffer.register_buffer("bias", torch.full((2,), math.nan))
    for module in (by_weight_norm.eval(), by_buffer):
        assert all(parameter.isfinite().all() for parameter in module.parameters())
        assert module(torch.ones(4, 3)).isnan().all()
        assert lipschitz_bound(module, TOKENS).value == math.inf


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


def contractive() -> ContractiveResidual:
    core = ScaledCosineAttention(2, logit_scale=0.5, value_scale=0.7)
    return ContractiveResidual(WindowAttention(6, 2, (2, 3), core), 6)


@pytest.mark.parametrize("value", [math.inf, -2.0])
def test_scales_of_a_contractive_residual_that_are_not_positive_and_finite_are_refused(value):
    """An infinite scale makes the divisor infinite, and the output is not a number."""
    scaled, steep = contractive(), contractive()
    scaled.branch.attention.value_scale.fill_(value)
    steep.branch.attention.init_logit_scale = value
    for module in (scaled, steep):
        with pytest.raises(UnknownModuleError, match="not positive and finite"):
            lipschitz_bound(module, Domain(size=(4, 6)))


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
