"""Modules that compute something else than what their bound rule reads: refused, or still true."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from lipsformer.analysis.bounds import Domain, UnknownModuleError, lipschitz_bound
from lipsformer.analysis.bounds.graph import graph_domain
from lipsformer.graph import GCN, LipschitzGATConv, ScaledCosineConv
from lipsformer.layers import CenterNorm, ScaledCosineAttention
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


@pytest.mark.parametrize(
    "make", [alternating, LargerInEvaluation, in_training_alone, hooked_parametrization]
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
        lambda: replaced(ScaledCosineConv(3, 2), explain=True),
        lambda: replaced(ScaledCosineConv(3, 2), message=F.relu),
        lambda: replaced(ScaledCosineConv(3, 2, 2), attention=ScaledCosineAttention(1)),
    ],
)
def test_layers_that_send_other_messages_are_refused(make):
    with pytest.raises(UnknownModuleError):
        lipschitz_bound(make().eval(), graph_domain(EDGES, 4))


def test_a_graph_layer_asks_for_its_edges():
    conv = ScaledCosineConv(3, 2)
    with pytest.raises(ValueError, match=r"depends on the edges: pass .*graph_domain"):
        lipschitz_bound(conv, TOKENS)
    with pytest.raises(IndexError, match=r"edge_index holds sources 0\.\.3"):
        graph_domain(EDGES, 3)
    with pytest.raises(ValueError, match="num_nodes=0 must be at least 1"):
        graph_domain(EDGES, 0)
