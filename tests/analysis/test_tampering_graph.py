"""Graph layers that compute something else than what their bound rule reads are refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv

from lipsformer.analysis.bounds import Domain, UnknownModuleError, lipschitz_bound
from lipsformer.analysis.bounds.graph import graph_domain
from lipsformer.graph import (
    GCN,
    LipschitzGATConv,
    LipschitzTransformerConv,
    ScaledCosineConv,
)
from lipsformer.graph.models import GraphNet
from lipsformer.graph.models.residual import ResidualLayer
from lipsformer.layers import Linear, ScaledCosineAttention
from tests.analysis.tampering import replaced
from tests.hunt.attack import top_singular

TOKENS = Domain(size=(4,))
EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 0, 0, 3]])


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


def test_a_layer_in_place_before_a_graph_residual_is_refused():
    layer = ResidualLayer(GCNConv(3, 3), None, residual=True, dropout=0.0)
    layer.dropout = nn.ELU(50.0, inplace=True)  # the shortcut adds what it returns
    with pytest.raises(UnknownModuleError, match="inplace=True"):
        lipschitz_bound(layer, graph_domain(EDGES, 4))
