"""What the layers of each network compute, what each dropout drops, and where settings arrive."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from lipsformer.graph import create_model
from lipsformer.graph.models.create import _MODELS

NODES, FEATURES, HIDDEN, CLASSES, LAYERS, HEADS = 11, 7, 2, 5, 3, 3
GAT = {"heads": HEADS}


def graph():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NODES, FEATURES, dtype=torch.double, generator=generator)
    return x, torch.randint(NODES, (2, 31), generator=generator)


def make(name, **settings):
    """Return a network with random biases, in which all dropouts are 0 that are not given."""
    keywords = inspect.signature(_MODELS[name]).parameters
    none = {key: 0.0 for key in keywords if key.endswith("dropout")}
    torch.manual_seed(0)
    model = create_model(name, FEATURES, HIDDEN, CLASSES, LAYERS, **{**none, **settings}).double()
    for key, parameter in model.named_parameters():
        if "bias" in key and "norm" not in key:
            parameter.data.normal_()
    return model


def layer_norm(x):
    centered = x - x.mean(1, keepdim=True)
    return centered / (centered.square().mean(1, keepdim=True) + 1e-5).sqrt()


def pair_norm(x):
    centered = x - x.mean(0)
    return centered / (centered.square().sum(1).mean() + 1e-5).sqrt()


NORMS = {"none": lambda x: x, "pairnorm": pair_norm, "layernorm": layer_norm}
ORDERS = {
    "gcn": lambda update, norm: norm(update.relu()),
    "deep_gat": lambda update, norm: norm(F.elu(update)),
    "deep_graph_transformer": lambda update, norm: F.elu(norm(update)),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gcn", {}),
        ("deep_gat", GAT),
        ("deep_gat", {**GAT, "linear_ends": False}),
        ("deep_graph_transformer", GAT),
    ],
)
def test_activation_and_norm_come_in_the_order_of_the_formula(name, settings, norm):
    """The last layer of a GCN and of a GAT has neither. The one that returns logits has a head."""
    x, edges = graph()
    model = make(name, norm=norm, **settings).eval()
    _, states = model.forward_intermediates(x, edges)
    for index, layer in enumerate(model.layers):
        expected = layer.conv(states[index], edges)
        if name == "deep_graph_transformer" or index < LAYERS - 1:
            expected = ORDERS[name](expected, NORMS[norm])
        torch.testing.assert_close(states[index + 1], expected)
    if not settings.get("linear_ends", True):
        assert model.layers[-1].conv.heads == 1 and states[-1].shape == (NODES, CLASSES)


def ends_only(layer, inputs, edges):
    return layer(*inputs, edges)


def before_conv(layer, inputs, edges):
    return layer.activation(layer.conv(0 * inputs[0], edges))


@pytest.mark.parametrize(
    ("name", "dropout", "settings", "ends", "expected"),
    [
        ("gcn", "dropout", {}, "", before_conv),
        ("deep_gat", "dropout", GAT, "", before_conv),
        ("deep_gat", "attn_dropout", GAT, "", lambda layer, *_: layer.activation(layer.conv.bias)),
        ("deep_gat", "input_dropout", GAT, "encoder", ends_only),
        ("deep_graph_transformer", "dropout", GAT, "", before_conv),
        (
            *("deep_graph_transformer", "attn_dropout", GAT, ""),
            lambda layer, inputs, _: F.elu(layer.conv.lin_skip(inputs[0])),
        ),
        (
            *("residual_gcn", "dropout", {}, ""),
            lambda layer, inputs, edges: inputs[0] + layer.conv(0 * inputs[0], edges).relu(),
        ),
        ("residual_gcn", "input_dropout", {}, "encoder head", ends_only),
        (
            *("residual_gat", "attn_dropout", GAT, ""),
            lambda layer, inputs, _: inputs[0] + layer.conv.bias.relu(),
        ),
        (
            *("gcn2", "dropout", {}, "encoder head"),
            lambda layer, inputs, edges: layer.conv(0 * inputs[0], inputs[1], edges).relu(),
        ),
        ("ggnn", "dropout", {}, "encoder head", ends_only),
        ("lips_graph_transformer", "dropout", GAT, "", lambda layer, inputs, _: inputs[0]),
        (
            *("lips_graph_transformer", "attn_dropout", GAT, ""),
            lambda layer, inputs, _: layer.mlp(
                inputs[0] + layer.attn.residual_scale * layer.attn.branch.proj.bias
            ),
        ),
        ("lips_graph_transformer", "input_dropout", GAT, "encoder head", ends_only),
        ("classic", "dropout", {}, "", lambda layer, inputs, _: 0 * layer.conv.bias),
        ("classic", "dropout", {"skip": "identity"}, "", lambda layer, inputs, _: inputs[0]),
        ("classic", "input_dropout", {}, "encoder", ends_only),
        (
            *("classic", "attn_dropout", {"conv": "gat", **GAT}, ""),
            lambda layer, *_: layer.conv.bias.relu(),
        ),
    ],
)
def test_a_dropout_of_one_sets_to_zero_what_it_drops(name, dropout, settings, ends, expected):
    x, edges = graph()
    model = make(name, **{dropout: 1.0}, **settings).train()
    logits, states = model.forward_intermediates(x, edges)
    encoder, head = (part.eval() for part in (model.encoder, model.head))
    torch.testing.assert_close(states[0], encoder(0 * x if "encoder" in ends else x))
    torch.testing.assert_close(logits, head(0 * states[-1] if "head" in ends else states[-1]))
    for layer, before, after in zip(model.layers, states, states[1:], strict=False):
        inputs = (before, states[0]) if model.takes_first else (before,)
        torch.testing.assert_close(after, expected(layer, inputs, edges).expand_as(after))
    torch.testing.assert_close(model.eval()(x, edges), make(name, **settings)(x, edges))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "deep_gat",
            {"att_norm": 2.0, "min_att_norm": 0.3, "scale_individually": False, "heads": HEADS},
        ),
        ("deep_gat", {"released_code": True, "add_self_loops": False}),
        ("deep_graph_transformer", {"released_code": True, "beta": True, "heads": HEADS}),
        ("residual_gat", {"att_norm": 2.0, "min_att_norm": 0.3, "heads": HEADS}),
    ],
)
def test_settings_of_a_network_are_those_of_its_convolutions(name, settings):
    model = make(name, norm="lipschitznorm", **settings)
    for layer in model.layers:
        assert {key: getattr(layer.conv, key) for key in settings} == settings


def test_ggnn_equals_its_formula():
    x, edges = graph()
    model = make("ggnn").eval()
    (conv,) = model.layers
    adjacency = torch.zeros(NODES, NODES, dtype=torch.double)
    adjacency.index_put_((edges[1], edges[0]), torch.ones((), dtype=torch.double), accumulate=True)
    state = model.encoder[1](x)
    for weight in conv.weight:
        state = conv.rnn(adjacency @ state @ weight, state)
    assert len(conv.weight) == LAYERS
    torch.testing.assert_close(model(x, edges), model.head[2](state.relu()))


@pytest.mark.parametrize(("name", "scale"), [("lips_graph_transformer", 6), ("lips_gat", 3)])
def test_lips_layers_equal_their_formula(name, scale):
    x, edges = graph()
    model = make(name, heads=HEADS, logit_scale=3.0).eval()
    _, states = model.forward_intermediates(x, edges)

    def center_norm(x):
        return (x - x.mean(1, keepdim=True)) * x.size(1) / (x.size(1) - 1)

    for layer, before, after in zip(model.layers, states, states[1:], strict=False):
        branch = layer.attn.branch
        assert branch.conv.attention.tau() == 3.0
        expected = before + branch.proj(branch.conv(center_norm(before), edges)) / scale
        if name == "lips_graph_transformer":
            norm, first, _, second, _ = layer.mlp.branch
            hidden = F.gelu(first(center_norm(expected) + norm.bias))
            expected = expected + second(hidden) / scale
        torch.testing.assert_close(after, expected)
