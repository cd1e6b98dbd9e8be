"""`SparseGCNConv` and `SparseGCN2Conv` compute PyG's layers, whichever way they take."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric.nn import GCN2Conv, GCNConv

from lipsformer.graph import SortedEdges, SparseGCNConv
from lipsformer.graph.gcn_conv import SparseGCN2Conv

NODES, CHANNELS, OUT = 13, 5, 3
# directed, with a node of two self loops, one of one, a double edge and a node without edges
EDGES = torch.tensor(
    [[0, 0, 2, 3, 3, 7, 7, 11, 4, 5, 6, 1, 1, 9], [0, 0, 2, 1, 1, 2, 3, 7, 0, 0, 0, 8, 9, 10]]
)


def layers(**kwargs):
    torch.manual_seed(0)
    peer = GCNConv(CHANNELS, OUT, **kwargs).double()
    torch.nn.init.normal_(peer.bias) if peer.bias is not None else None
    layer = SparseGCNConv(CHANNELS, OUT, **kwargs).double()
    layer.load_state_dict(peer.state_dict())
    return layer, peer


def gcnii_layers(**kwargs):
    torch.manual_seed(0)
    settings = {"alpha": 0.3, "theta": 1.1, "layer": 2, **kwargs}
    peer, layer = (kind(CHANNELS, **settings).double() for kind in (GCN2Conv, SparseGCN2Conv))
    layer.load_state_dict(peer.state_dict())
    return layer, peer


def features():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NODES, CHANNELS, dtype=torch.float64, generator=generator)


def derivatives(layer, edges, *args, first=None):
    """Return the output, and the gradients of a fixed function of it."""
    x = features().requires_grad_()
    out = layer(x, edges, *args) if first is None else layer(x, first, edges)
    upstream = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    inputs = [x, *layer.parameters()]
    return [out, *torch.autograd.grad((out.square() * upstream).sum(), inputs)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"bias": False},
        {"improved": True},
        {"cached": True},
        {"add_self_loops": False},
        {"normalize": False},
        {"aggr": "max"},
        {"flow": "target_to_source"},
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_pyg(kwargs, shared):
    layer, peer = layers(**kwargs)
    edges = SortedEdges(EDGES, NODES) if shared else EDGES
    for ours, theirs in zip(derivatives(layer, edges), derivatives(peer, EDGES), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_edge_weights_enter_as_in_pyg():
    layer, peer = layers()
    weight = torch.linspace(0.1, 2, EDGES.shape[1], dtype=torch.float64)
    ours = derivatives(layer, SortedEdges(EDGES, NODES), weight)
    for own, theirs in zip(ours, derivatives(peer, EDGES, weight), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)
    layer, peer = gcnii_layers()
    own, theirs = (conv(features(), features() ** 2, EDGES, weight) for conv in (layer, peer))
    torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


def test_reset_draws_the_weights_of_pyg_again():
    for layer, peer in (layers(), gcnii_layers()):
        for conv in (layer, peer):
            torch.manual_seed(5)
            conv.reset_parameters()
        for own, theirs in zip(layer.parameters(), peer.parameters(), strict=True):
            assert torch.equal(own, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_low_precision_are_left_to_pyg(dtype):
    layer, peer = layers()
    layer, peer, x = layer.to(dtype), peer.to(dtype), features().to(dtype)
    with torch.autocast("cpu", enabled=dtype is torch.float32):
        ours, theirs = layer(x, EDGES), peer(x, EDGES)
    assert ours.dtype is theirs.dtype
    assert torch.equal(ours, theirs)


def test_the_product_has_first_and_second_derivatives():
    layer, _ = layers()
    edges = SortedEdges(EDGES, NODES)
    x = features().requires_grad_()
    assert gradcheck(lambda x: layer(x, edges).sin(), x)
    assert gradgradcheck(lambda x: layer(x, edges).sin(), x)


def test_the_product_sends_no_messages(monkeypatch):
    layer, _ = layers()

    def message(*_):
        raise AssertionError("a message was computed")

    monkeypatch.setattr(GCNConv, "message", message)
    monkeypatch.setattr(GCNConv, "message_and_aggregate", message)
    layer(features(), SortedEdges(EDGES, NODES))


def test_a_hook_on_the_messages_sees_them():
    layer, peer = layers()
    seen = []
    layer.register_message_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.testing.assert_close(layer(features(), EDGES), peer(features(), EDGES))
    assert len(seen) == 1


def test_an_index_out_of_range_and_a_pair_of_inputs_are_refused():
    layer, _ = layers()
    with pytest.raises(IndexError, match=r"indices must lie in 0\.\.12"):
        layer(features(), torch.tensor([[0, 13], [1, 2]]))
    with pytest.raises(ValueError, match="received a tuple"):
        layer((features(), features()), EDGES)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"shared_weights": False},
        {"cached": True},
        {"add_self_loops": False},
        {"normalize": False},
    ],
    ids=str,
)
def test_gcnii_has_the_values_and_gradients_of_pyg(kwargs, shared):
    layer, peer = gcnii_layers(**kwargs)
    first = features().flip(0)

    def results(conv, edges):
        return derivatives(conv, edges, first=first)

    edges = SortedEdges(EDGES, NODES) if shared else EDGES
    for ours, theirs in zip(results(layer, edges), results(peer, EDGES), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gcnii_under_autocast_and_in_bf16_is_left_to_pyg():
    layer, peer = gcnii_layers()
    for dtype, autocast in ((torch.float32, True), (torch.bfloat16, False)):
        x = features().to(dtype)
        with torch.autocast("cpu", enabled=autocast):
            ours, theirs = (conv.to(dtype)(x, x.flip(0), EDGES) for conv in (layer, peer))
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


def test_several_sets_of_features_for_one_graph_are_pygs():
    layer, peer = layers()
    x = torch.stack([features(), features() ** 2])
    torch.testing.assert_close(layer(x, EDGES), peer(x, EDGES))
