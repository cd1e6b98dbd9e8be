import math

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.explain import AttentionExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GATConv, GCNConv, TransformerConv, to_hetero
from torch_geometric.utils import k_hop_subgraph, to_torch_csr_tensor

from lipsformer.graph import (
    LipschitzGATConv,
    LipschitzTransformerConv,
    LipsGAT,
    ScaledCosineConv,
    SparseGCNConv,
)

NODES, TARGETS, EDGES, FEATURES, EDGE_DIM, CHANNELS, HEADS = 11, 7, 37, 5, 2, 4, 3


@pytest.fixture
def graph():
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NODES, (2, EDGES), generator=generator)
    x = torch.randn(NODES, FEATURES, generator=generator, dtype=torch.double)
    edge_attr = torch.randn(EDGES, EDGE_DIM, generator=generator, dtype=torch.double)
    return x, edge_index, edge_attr


def make(layer, in_channels=FEATURES, **kwargs):
    torch.manual_seed(1)
    return layer(in_channels, CHANNELS, HEADS, **kwargs).double()


def loop_gat(conv, x, edge_index):
    """Paper's formula, one head and one target at a time, in plain numbers."""
    loops = [(i, i) for i in range(len(x))]
    edges = [(j, i) for j, i in edge_index.T.tolist() if i != j] + loops
    return loop_gat_with_edges(conv, x, edges, torch.zeros(len(edges), HEADS, CHANNELS))


def loop_gat_with_edges(conv, x, edges, extra):
    """The same with the projected features of the edges, [E, HEADS, CHANNELS]."""
    out = torch.zeros(len(x), HEADS, CHANNELS, dtype=x.dtype)
    h = (x @ conv.lin.weight.T).view(len(x), HEADS, CHANNELS)
    for head in range(HEADS):
        left, right = conv.att_src[0, head], conv.att_dst[0, head]
        of_edge = torch.zeros_like(left) if conv.att_edge is None else conv.att_edge[0, head]
        a_norm = torch.cat([left, right, of_edge]).norm()
        for i in range(len(x)):
            own = [(j, extra[e, head]) for e, (j, target) in enumerate(edges) if target == i]
            if not own:
                continue
            largest = max(h[j, head].norm() ** 2 + edge.norm() ** 2 for j, edge in own)
            root = (largest + h[i, head].norm() ** 2).sqrt()
            scores = []
            for j, edge in own:
                score = left @ h[j, head] + right @ h[i, head] + of_edge @ edge.to(left)
                e = score / (4 * a_norm * root)
                scores.append(e if e > 0 else 0.2 * e)
            attn = torch.stack(scores).softmax(0)
            out[i, head] = sum(p * h[j, head] for p, (j, _) in zip(attn, own, strict=True))
    return out.flatten(1) + conv.bias


def loop_transformer(conv, x, edge_index, edge_attr):
    q, k, v = (
        lin(x).view(len(x), HEADS, CHANNELS)
        for lin in (conv.lin_query, conv.lin_key, conv.lin_value)
    )
    extra = (edge_attr @ conv.lin_edge.weight.T).view(-1, HEADS, CHANNELS)
    incoming = [(edge_index[1] == i).nonzero().flatten().tolist() for i in range(len(x))]
    out = torch.zeros(len(x), HEADS, CHANNELS, dtype=x.dtype)
    for head in range(HEADS):
        counted = [edges if conv.released_code else edges[:1] for edges in incoming]
        u = torch.stack([q[i, head] for i, edges in enumerate(counted) for _ in edges]).norm()
        for i, edges in enumerate(incoming):
            if not edges:
                continue
            keys = torch.stack([k[edge_index[0, e], head] + extra[e, head] for e in edges])
            values = torch.stack([v[edge_index[0, e], head] + extra[e, head] for e in edges])
            a, b = keys.norm(dim=1).max(), values.norm(dim=1).max()
            scores = keys @ q[i, head] / math.sqrt(CHANNELS) / max(u * a, u * b, a * b)
            out[i, head] = scores.softmax(0) @ values
    return out.flatten(1) + conv.lin_skip(x)


def test_gat_paper_mode_equals_a_loop_over_heads(graph):
    x, edge_index, _ = graph
    conv = make(LipschitzGATConv)
    torch.testing.assert_close(conv(x, edge_index), loop_gat(conv, x, edge_index))


@pytest.mark.parametrize("released_code", [False, True])
def test_transformer_equals_a_loop_over_heads(graph, released_code):
    conv = make(LipschitzTransformerConv, edge_dim=EDGE_DIM, released_code=released_code)
    torch.testing.assert_close(conv(*graph), loop_transformer(conv, *graph))


@pytest.mark.parametrize("constants", [(4.0, 4.0, 4.0), (4.0, 0.5, 1.3)])
def test_all_heads_at_once_equal_one_head_at_a_time(graph, constants):
    x, edge_index, _ = graph
    learned = {} if constants[1] == 4.0 else {"min_att_norm": 0.3}
    conv = make(LipschitzGATConv, bias=False, **learned)
    if learned:
        assert conv.log_att_norm.tolist() == [0.0] * HEADS  # c = att_norm at the start
        conv.log_att_norm.data = torch.tensor([(c - 0.3) / 3.7 for c in constants]).double().log()
    out = conv(x, edge_index).view(NODES, HEADS, CHANNELS)
    released = make(LipschitzGATConv, bias=False, released_code=True)(x, edge_index)
    for head in range(HEADS):
        single = LipschitzGATConv(FEATURES, CHANNELS, bias=False, att_norm=constants[head])
        single = single.double()
        single.lin.weight.data = conv.lin.weight.view(HEADS, CHANNELS, FEATURES)[head].clone()
        single.att_src.data = conv.att_src[:, head : head + 1].clone()
        single.att_dst.data = conv.att_dst[:, head : head + 1].clone()
        torch.testing.assert_close(out[:, head], single(x, edge_index))
    assert not torch.allclose(released, out.flatten(1), rtol=1e-3)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(LipschitzGATConv, GATConv), (LipschitzTransformerConv, TransformerConv)]
)
@pytest.mark.parametrize("kwargs", [{}, {"concat": False}, {"bias": False}, {"edge_dim": EDGE_DIM}])
@pytest.mark.parametrize("bipartite", [False, True])
def test_without_norm_equals_pyg_in_value_and_gradient(graph, ours, theirs, kwargs, bipartite):
    x, edge_index, edge_attr = graph
    args = (edge_attr,) if "edge_dim" in kwargs else ()
    in_channels = FEATURES
    if bipartite:
        edge_index = torch.stack([edge_index[0], edge_index[1] % TARGETS])
        in_channels = (FEATURES, 3)
    results = []
    for layer, extra in ((ours, {"score_norm": None}), (theirs, {})):
        conv = make(layer, in_channels, **kwargs, **extra)
        source = x.clone().requires_grad_()
        nodes = (source, x[:TARGETS, :3]) if bipartite else source
        out, (_, attn) = conv(nodes, edge_index, *args, return_attention_weights=True)
        out.square().sum().backward()
        grads = {name: p.grad for name, p in conv.named_parameters()}
        results.append((out, attn, source.grad, grads))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layer", [LipschitzGATConv, LipschitzTransformerConv, ScaledCosineConv])
def test_sparse_adjacency_gives_the_same(graph, layer):
    x, edge_index, _ = graph
    edge_index = edge_index.unique(dim=1)  # a matrix cannot hold an edge twice
    conv = make(layer)
    adj_t = to_torch_csr_tensor(edge_index, size=(NODES, NODES)).t().to_sparse_csr()
    torch.testing.assert_close(conv(x, adj_t), conv(x, edge_index))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_adjacency_returns_what_pyg_returns(graph):
    x, edge_index, _ = graph
    adj_t = to_torch_csr_tensor(edge_index.unique(dim=1), size=(NODES, NODES)).to_sparse_coo().t()
    adj_t = adj_t.coalesce()
    expected, (adj, attn) = make(GATConv)(x, adj_t, return_attention_weights=True)
    conv = make(LipschitzGATConv, score_norm=None)
    out, (own_adj, own_attn) = conv(x, adj_t, return_attention_weights=True)
    torch.testing.assert_close((out, own_attn), (expected, attn))
    torch.testing.assert_close(own_adj.to_dense(), adj.to_dense())
    torch.testing.assert_close(conv(x, adj_t, return_attention_weights=False), expected)


@pytest.mark.parametrize("layer", [LipschitzGATConv, LipschitzTransformerConv, ScaledCosineConv])
def test_permuting_nodes_permutes_the_output(graph, layer):
    x, edge_index, _ = graph
    conv = make(layer)
    order = torch.randperm(NODES)
    moved = conv(x[order], order.argsort()[edge_index])
    torch.testing.assert_close(moved, conv(x, edge_index)[order])


def test_bipartite_with_norm_equals_the_square_graph_restricted(graph):
    x, edge_index, _ = graph
    edge_index = torch.stack([edge_index[0], edge_index[1] % TARGETS])
    for layer in (LipschitzGATConv, LipschitzTransformerConv):
        kwargs = {"add_self_loops": False} if layer is LipschitzGATConv else {}
        conv = make(layer, **kwargs)
        expected = conv(x, edge_index)[:TARGETS]
        torch.testing.assert_close(conv((x, x[:TARGETS]), edge_index), expected)


def test_reversed_flow_equals_reversed_edges(graph):
    x, edge_index, _ = graph
    for layer in (LipschitzGATConv, LipschitzTransformerConv):
        conv, reverse = make(layer), make(layer, flow="target_to_source")
        if layer is LipschitzGATConv:  # which end PyG gives which weight is not our business
            reverse.att_src = reverse.att_dst = conv.att_dst = conv.att_src
        expected = conv(x, edge_index)
        torch.testing.assert_close(reverse(x, edge_index.flip(0)), expected)


def test_targets_without_features_count_as_zeros(graph):
    x, edge_index, _ = graph
    edge_index = torch.stack([edge_index[0], edge_index[1] % TARGETS])
    conv = make(LipschitzGATConv, add_self_loops=False)
    expected = conv((x, 0 * x[:TARGETS]), edge_index)
    torch.testing.assert_close(conv((x, None), edge_index, size=(NODES, TARGETS)), expected)


def test_reset_sets_a_constant_that_learns_to_its_start():
    conv = make(LipschitzGATConv, min_att_norm=0.3)
    conv.log_att_norm.data.fill_(0.7)
    conv.reset_parameters()
    assert conv.current_att_norm().tolist() == [4.0] * HEADS


def test_reversed_flow_of_two_kinds_of_nodes_equals_reversed_edges(graph):
    """PyG sends from the first to the second kind in both flows, and needs as many of each."""
    x, edge_index, _ = graph
    conv = make(LipschitzGATConv, add_self_loops=False)
    reverse = make(LipschitzGATConv, add_self_loops=False, flow="target_to_source")
    expected = conv((x, 3 * x.sin()), edge_index)
    torch.testing.assert_close(reverse((x, 3 * x.sin()), edge_index.flip(0)), expected)


def test_neighborhood_subgraphs_give_the_full_result(graph):
    x, edge_index, _ = graph
    conv = make(LipschitzGATConv)
    expected = conv(x, edge_index)
    for node in range(NODES):
        nodes, edges, position, _ = k_hop_subgraph(node, 1, edge_index, relabel_nodes=True)
        torch.testing.assert_close(conv(x[nodes], edges)[position], expected[[node]])


def test_neighbor_loader_batches_give_the_full_result(graph):
    pytest.importorskip("pyg_lib", reason="NeighborLoader samples with pyg-lib")
    x, edge_index, _ = graph
    edge_index = edge_index.unique(dim=1)
    conv = make(LipschitzGATConv)
    expected = conv(x, edge_index)
    for batch in NeighborLoader(Data(x=x, edge_index=edge_index), [-1], batch_size=3):
        out = conv(batch.x, batch.edge_index)[: batch.batch_size]
        torch.testing.assert_close(out, expected[batch.n_id[: batch.batch_size]])


def test_gat_with_edge_features_equals_a_loop_over_heads(graph):
    x, edge_index, edge_attr = graph
    conv = make(LipschitzGATConv, edge_dim=EDGE_DIM, add_self_loops=False)
    extra = (edge_attr @ conv.lin_edge.weight.T).view(-1, HEADS, CHANNELS)
    expected = loop_gat_with_edges(conv, x, edge_index.T.tolist(), extra)
    torch.testing.assert_close(conv(*graph), expected)


@pytest.mark.parametrize("released_code", [False, True])
def test_edge_features_enter_scores_and_norms(graph, released_code):
    conv = make(LipschitzGATConv, edge_dim=EDGE_DIM, released_code=released_code)
    x, edge_index, edge_attr = graph
    _, (_, attn) = conv(x, edge_index, edge_attr, return_attention_weights=True)
    _, (_, scaled) = conv(10 * x, edge_index, 10 * edge_attr, return_attention_weights=True)
    torch.testing.assert_close(attn, scaled)  # scores are homogeneous of degree 0
    _, (_, other) = conv(x, edge_index, 10 * edge_attr, return_attention_weights=True)
    assert not torch.allclose(attn, other)


def test_no_edges_with_edge_features_leave_the_bias(graph):
    x, edge_index, edge_attr = graph
    conv = make(LipschitzGATConv, edge_dim=EDGE_DIM, add_self_loops=False)
    out = conv(x, edge_index[:, :0], edge_attr[:0])
    torch.testing.assert_close(out, conv.bias.expand(NODES, -1))
    single = make(LipschitzGATConv, edge_dim=1)
    flat, column = edge_attr[:, 0], edge_attr[:, :1]
    torch.testing.assert_close(single(x, edge_index, flat), single(x, edge_index, column))


@pytest.mark.parametrize("layer", [LipschitzGATConv, LipschitzTransformerConv, ScaledCosineConv])
class TestOddGraphs:
    def test_isolated_node_changes_nothing_else(self, graph, layer):
        x, edge_index, _ = graph
        conv = make(layer)
        out = conv(torch.cat([x, torch.ones(1, FEATURES)]), edge_index)
        torch.testing.assert_close(out[:NODES], conv(x, edge_index))
        assert out[NODES].isfinite().all()

    def test_no_edges_equals_every_node_alone(self, graph, layer):
        x, edge_index, _ = graph
        conv = make(layer)
        together = conv(x, edge_index[:, :0])
        alone = torch.cat([conv(row[None], edge_index[:, :0]) for row in x])
        torch.testing.assert_close(together, alone)

    def test_zero_features_have_finite_gradients(self, graph, layer):
        x, edge_index, _ = graph
        conv = make(layer)
        x = torch.zeros_like(x).requires_grad_()
        conv(x, edge_index).sum().backward()
        assert x.grad.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in conv.parameters())

    def test_nan_stays_where_messages_carry_it(self, graph, layer):
        if layer is LipschitzTransformerConv:
            pytest.skip("the norm of all queries spreads a NaN to every node")
        x, edge_index, _ = graph
        conv = make(layer)
        expected = conv(x, edge_index)
        reached = set(edge_index[1, edge_index[0] == 0].tolist()) | {0}
        x = x.clone()
        x[0, 0] = math.nan
        out = conv(x, edge_index)
        clean = [i for i in range(NODES) if i not in reached]
        assert out[sorted(reached)].isnan().any(dim=1).all()
        torch.testing.assert_close(out[clean], expected[clean])


def test_duplicate_edges_count_twice_and_given_self_loops_once(graph):
    x, edge_index, _ = graph
    conv = make(LipschitzGATConv)
    doubled = torch.cat([edge_index, edge_index[:, :1]], dim=1)
    torch.testing.assert_close(conv(x, doubled), loop_gat(conv, x, doubled))
    loops = torch.arange(NODES).expand(2, -1)
    with_loops = conv(x, torch.cat([edge_index, loops], dim=1))
    torch.testing.assert_close(with_loops, conv(x, edge_index))


@pytest.mark.parametrize("complete", [False, True])
def test_scaled_cosine_conv_equals_dense_attention_among_neighbors(graph, complete):
    conv = make(ScaledCosineConv)
    x, edge_index, _ = graph
    neighbors = torch.eye(NODES, dtype=torch.bool)
    neighbors[edge_index[1], edge_index[0]] = True
    neighbors |= complete
    edge_index = neighbors.nonzero().T.flip(0)
    q, k, v = conv.lin(x).view(1, NODES, 3, HEADS, CHANNELS).permute(2, 0, 3, 1, 4)
    bias = torch.zeros(NODES, NODES, dtype=torch.double).masked_fill(~neighbors, -math.inf)
    expected = conv.attention(q, k, v, bias)[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(conv(x, edge_index), expected)
    assert not conv.lin.bias.any()  # at the start
    for weight in conv.lin.weight.split(HEADS * CHANNELS):
        sigma = torch.linalg.matrix_norm(weight, 2)
        torch.testing.assert_close(sigma, torch.ones_like(sigma))


@pytest.mark.parametrize("layer", [LipschitzGATConv, LipschitzTransformerConv])
def test_wrong_settings_raise(layer):
    with pytest.raises(ValueError, match="'maxnorm' is not known; choose 'lipschitznorm' or None"):
        layer(3, 2, score_norm="maxnorm")
    with pytest.raises(ValueError, match="no effect without score_norm"):
        layer(3, 2, score_norm=None, released_code=True)


@pytest.mark.parametrize("layer", [LipschitzGATConv, LipschitzTransformerConv, ScaledCosineConv])
def test_heads_and_dropout_out_of_range_raise(layer):
    for heads in (0, -1):
        with pytest.raises(ValueError, match=f"heads={heads} must be at least 1"):
            layer(3, 2, heads)
    for dropout in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=rf"dropout={dropout} must be in \[0, 1\]"):
            layer(3, 2, dropout=dropout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"att_norm": 0.0}, "att_norm=0.0 must be > 0"),
        ({"att_norm": math.nan}, "att_norm=nan must be > 0"),
        ({"att_norm": 2.0, "score_norm": None}, "att_norm=2.0 has no effect"),
        ({"scale_individually": False, "score_norm": None}, "scale_individually=False has no eff"),
        ({"min_att_norm": 4.0}, r"min_att_norm=4.0 must lie in \(0, att_norm=4.0\)"),
        ({"min_att_norm": 0.0}, r"min_att_norm=0.0 must lie in \(0, att_norm=4.0\)"),
        ({"min_att_norm": 0.1, "score_norm": None}, "min_att_norm=0.1 has no effect"),
    ],
)
def test_wrong_constants_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        LipschitzGATConv(3, 2, **settings)


@pytest.mark.parametrize(("edge_dim", "given"), [(EDGE_DIM, "no"), (None, "an")])
def test_a_graph_transformer_takes_the_edge_features_that_it_was_built_for(graph, edge_dim, given):
    x, edge_index, edge_attr = graph
    message = f"edge_dim={edge_dim} does not fit a call with {given} edge_attr"
    with pytest.raises(ValueError, match=message):
        make(LipschitzTransformerConv, edge_dim=edge_dim)(
            x, edge_index, None if edge_dim else edge_attr
        )


def test_inputs_of_a_wrong_shape_raise(graph):
    x, edge_index, _ = graph
    with pytest.raises(ValueError, match=r"must be \[rows, channels\], got shape \(2, 11, 5\)"):
        make(LipschitzGATConv)(torch.stack([x, x]), edge_index)


@pytest.mark.parametrize(
    ("layer", "settings"),
    [
        (ScaledCosineConv, {}),
        (LipschitzGATConv, {"bias": False}),
        (LipschitzTransformerConv, {"root_weight": False}),
    ],
)
def test_an_activation_in_place_may_follow_a_layer(graph, layer, settings):
    x, edge_index, _ = graph
    conv = make(layer, **settings)
    elu = torch.nn.functional.elu
    elu(conv(x.requires_grad_(), edge_index), inplace=True).square().sum().backward()
    found = x.grad.clone()
    x.grad = None
    elu(conv(x, edge_index)).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("layer", [ScaledCosineConv, LipschitzGATConv, LipschitzTransformerConv])
def test_exported_layers_take_any_number_of_nodes_and_edges(graph, layer):
    x, edge_index, _ = graph

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = make(layer)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    model = Model().eval()
    nodes, edges = torch.export.Dim("nodes"), torch.export.Dim("edges")
    shapes = {"x": {0: nodes}, "edge_index": {1: edges}}
    exported = torch.export.export(model, (x, edge_index), dynamic_shapes=shapes).module()
    with torch.no_grad():
        for inputs in (
            (x, edge_index),
            (torch.cat([x, x]), torch.cat([edge_index, edge_index], 1)),
        ):
            torch.testing.assert_close(exported(*inputs), model(*inputs))


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and it warns of sizes
@pytest.mark.parametrize(
    "layer", [ScaledCosineConv, LipschitzGATConv, LipschitzTransformerConv, SparseGCNConv]
)
def test_traced_layers_take_any_number_of_nodes_and_edges(graph, layer):
    x, edge_index, _ = graph
    torch.manual_seed(1)
    conv = layer(FEATURES, CHANNELS).double().eval()
    traced = torch.jit.trace(conv, (x, edge_index), check_trace=False)
    more = torch.cat([x, 2 * x.sin()]), torch.cat([edge_index, edge_index[:, 3:20] + NODES], dim=1)
    torch.testing.assert_close(traced(*more), conv(*more))


def test_hetero_networks_are_made_of_layers_and_not_of_networks(graph):
    x, edge_index, _ = graph
    kinds = (["paper"], [("paper", "cites", "paper")])
    inputs = {"paper": x}, {("paper", "cites", "paper"): edge_index}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = make(LipschitzGATConv)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    expected = make(LipschitzGATConv)(x, edge_index)
    torch.testing.assert_close(to_hetero(Model(), kinds)(*inputs)["paper"], expected)
    with pytest.raises(TypeError, match=r"torch.fx, which PyG's to_hetero uses, cannot trace Lips"):
        to_hetero(LipsGAT(FEATURES, CHANNELS, 3, num_layers=2), kinds)


def test_channels_that_pygs_layers_would_infer_are_refused_in_one_sentence():
    for channels in ((-1, 4), (5, 0)):
        with pytest.raises(ValueError, match=r"(in|out)_channels=(-1|0) must be at least 1"):
            ScaledCosineConv(*channels)


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 5), (torch.zeros(3, 5), torch.zeros(3, 5))])
def test_scaled_cosine_conv_refuses_other_inputs_in_one_sentence(x):
    with pytest.raises(ValueError, match=r"x is .*: ScaledCosineConv takes one matrix \[V, F\]"):
        ScaledCosineConv(5, 4)(x, torch.tensor([[0, 1], [1, 2]]))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (LipschitzGATConv, GATConv),
        (LipschitzTransformerConv, TransformerConv),
        (SparseGCNConv, GCNConv),
        (ScaledCosineConv, None),
    ],
)
def test_masks_of_explainers_multiply_the_messages(graph, ours, theirs):
    """After a layer of PyG's class was built, which generates code that our class could inherit."""
    x, edge_index, _ = graph
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    without_norm = {"score_norm": None} if theirs in (GATConv, TransformerConv) else {}
    results = []
    mask = torch.linspace(0, 1, edge_index.size(1), dtype=torch.double, requires_grad=True)
    for layer, kwargs in ((theirs, {}), (ours, without_norm)):
        if layer is None:
            continue
        torch.manual_seed(1)
        conv = layer(FEATURES, CHANNELS, **kwargs).double().eval()
        unmasked = conv(x, edge_index)
        set_masks(conv, mask, edge_index, apply_sigmoid=False)
        out = conv(x, edge_index)
        assert not torch.allclose(out, unmasked)
        (grad,) = torch.autograd.grad(out.square().sum(), mask)
        clear_masks(conv)
        torch.testing.assert_close(conv(x, edge_index), unmasked)
        results.append((out, grad))
    torch.testing.assert_close(results[0], results[-1])


def test_explainers_of_attention_read_that_of_scaled_cosines(graph):
    x, edge_index, _ = graph
    edge_index = edge_index[:, edge_index[0] != edge_index[1]].unique(dim=1)
    model = LipsGAT(FEATURES, CHANNELS, 3, num_layers=1, heads=HEADS).double().eval()
    weights = AttentionExplainer()._collect_attention_coefficients(model, x, edge_index)
    branch = model.layers[0].attn.branch
    conv, h = branch.conv, branch.norm(model.encoder(x))
    h = conv.lin(h).view(NODES, HEADS, CHANNELS)
    unit = h / (h.square().sum(-1, keepdim=True) + conv.attention.eps).sqrt()
    scores = 10 * torch.einsum("ihc,jhc->ijh", unit, unit)
    neighbors = torch.eye(NODES, dtype=torch.bool)
    neighbors[edge_index[1], edge_index[0]] = True
    dense = scores.masked_fill(~neighbors[..., None], -math.inf).softmax(1)
    expected = dense[edge_index[1], edge_index[0]]
    torch.testing.assert_close(weights[0][: edge_index.size(1)], expected)
    assert conv._alpha is None  # it would keep the graph of the last call alive
