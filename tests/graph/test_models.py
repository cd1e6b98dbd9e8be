import math

import pytest
import torch
from torch.nn.utils import parametrize
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from lipsformer.graph import (
    LipschitzGATConv,
    NeighborNorm,
    ResidualGCN,
    SparseGCNConv,
    create_model,
)
from lipsformer.graph.diagnostics import layer_profile
from lipsformer.graph.dropout import Dropout
from lipsformer.graph.edge_attention.csr import silence_beta_notice
from lipsformer.graph.models import GraphNet, default_bound
from lipsformer.graph.models.residual import ResidualLayer
from lipsformer.graph.operator_bounds import adjacency_sigma_bound, gat_attention_bound

NAMES = [
    "gcn",
    "gcn2",
    "classic",
    "ggnn",
    "deep_gat",
    "deep_graph_transformer",
    "residual_gcn",
    "residual_gat",
    "lips_gat",
    "lips_graph_transformer",
]
NODES, FEATURES, CLASSES, LAYERS = 11, 7, 3, 5


def make(name, num_layers=LAYERS, **kwargs):
    torch.manual_seed(0)
    return create_model(name, FEATURES, 8, CLASSES, num_layers, **kwargs).double()


@pytest.fixture
def graph():
    torch.manual_seed(1)
    return torch.randn(NODES, FEATURES, dtype=torch.double), torch.randint(NODES, (2, 31))


def gradients(model, x, edge_index):
    torch.manual_seed(2)
    model(x, edge_index).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(graph, name):
    missing = [key for key, grad in gradients(make(name).eval(), *graph).items() if grad is None]
    assert not missing


@pytest.mark.parametrize("name", ["deep_gat", "deep_graph_transformer", "residual_gat"])
def test_a_model_with_lipschitznorm_trains_in_half_precision(graph, name):
    x, edge_index = graph
    model, half = (make(name, num_layers=2, norm="lipschitznorm").eval() for _ in range(2))
    expected = gradients(model, x, edge_index)
    half.bfloat16()
    for key, grad in gradients(half, x.bfloat16(), edge_index).items():
        assert grad.dtype is torch.bfloat16
        error = (grad.double() - expected[key]).norm().item()
        assert error <= 0.1 * expected[key].norm().item() + 0.01, key


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ggnn"])
def test_gradient_checkpointing_changes_nothing(graph, name):
    plain = gradients(make(name).train(), *graph)
    saved = gradients(make(name, grad_checkpointing=True).train(), *graph)
    torch.testing.assert_close(saved, plain)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_loads_its_own_state(graph, name):
    model, other = make(name).eval(), make(name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(*graph), model(*graph))


@pytest.mark.parametrize("name", NAMES)
def test_the_intermediate_states_are_the_outputs_of_the_layers(graph, name):
    x, edge_index = graph
    model, seen = make(name).eval(), []
    for module in (model.encoder, *model.layers):
        module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    logits = model(x, edge_index)
    expected = list(seen)
    again, states = model.forward_intermediates(x, edge_index)
    torch.testing.assert_close((again, states), (logits, expected), rtol=0, atol=0)
    torch.testing.assert_close(model.head(states[-1]), logits)


@pytest.mark.parametrize("name", ["deep_gat", "deep_graph_transformer"])
def test_narrow_heads_are_no_bottleneck_of_the_features(graph, name):
    x, edge_index = graph
    settings = {"heads": 4, "norm": "lipschitznorm"}
    for extra, rank in (({}, FEATURES), ({"encoder_channels": 2}, 2)):
        torch.manual_seed(0)
        model = create_model(name, FEATURES, 2, CLASSES, LAYERS, **settings, **extra).double()
        _, states = model.forward_intermediates(x, edge_index)
        centered = states[0] - states[0].mean(0)
        assert torch.linalg.matrix_rank(centered) == rank


def test_input_dropout_comes_before_the_first_linear_map(graph):
    x, edge_index = graph
    model = make("deep_gat", input_dropout=0.4, dropout=0.0, attn_dropout=0.0).train()
    torch.manual_seed(3)
    _, states = model.forward_intermediates(x, edge_index)
    torch.manual_seed(3)
    kept = Dropout(0.4)(x)
    torch.testing.assert_close(states[0], model.encoder[1](kept))
    assert torch.equal(make("deep_gat").encoder.weight, model.encoder[1].weight)


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("residual", [False, True])
def test_a_large_att_norm_makes_every_attention_the_mean_of_the_neighborhood(
    graph, residual, loops
):
    x, edge_index = graph
    edge_index = edge_index[:, edge_index[1] != 2].unique(dim=1)  # node 2 has no neighbor
    settings = {"norm": "lipschitznorm", "att_norm": 1e9, "add_self_loops": loops}
    model = make("deep_gat", residual=residual, **settings).eval()
    adjacency = torch.eye(NODES, dtype=torch.double) * loops
    adjacency[edge_index[1], edge_index[0]] = 1
    mean = adjacency / adjacency.sum(1, keepdim=True).clamp_min(1)
    _, states = model.forward_intermediates(x, edge_index)
    for before, after, layer in zip(states, states[1:], model.layers, strict=False):
        expected = mean @ layer.conv.lin(before) + layer.conv.bias
        if residual:
            expected = expected + before @ layer.conv.res.weight.T
        torch.testing.assert_close(after, layer.activation(expected))


def dense_adjacency(edge_index, dtype):
    """D^-1/2 (A + I) D^-1/2 by node pairs, duplicate edges added up."""
    adjacency = torch.zeros(NODES, NODES, dtype=dtype)
    for source, target in edge_index.T.tolist():
        adjacency[target, source] += 1
    loops = adjacency.diagonal()
    adjacency += torch.diag((loops == 0).to(dtype))
    scale = adjacency.sum(1).rsqrt()
    return scale[:, None] * adjacency * scale[None]


def test_residual_gcn_equals_its_formula(graph):
    x, edge_index = graph
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    model = make("residual_gcn", bound=0.3).eval()
    adjacency = dense_adjacency(edge_index, x.dtype)
    state = model.encoder(x)
    for layer in model.layers:
        raw = layer.conv.lin.parametrizations.weight.original
        weight = 0.3 * raw / torch.linalg.matrix_norm(raw, 2)
        state = state + (adjacency @ state @ weight.T + layer.conv.bias).relu()
    torch.testing.assert_close(model(x, edge_index), model.head(state))


@pytest.mark.parametrize("skip", ["none", "linear", "identity"])
@pytest.mark.parametrize("jumping_knowledge", [False, True])
def test_classic_gcn_equals_its_formula(graph, skip, jumping_knowledge):
    x, edge_index = graph
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    settings = {"norm": "layernorm", "skip": skip, "jumping_knowledge": jumping_knowledge}
    model = make("classic", **settings).eval()
    adjacency = dense_adjacency(edge_index, x.dtype)

    def normalized(state):
        centered = state - state.mean(1, keepdim=True)
        return centered / (centered.square().mean(1, keepdim=True) + 1e-5).sqrt()

    state, states = model.encoder(x), []
    for layer in model.layers:
        update = adjacency @ state @ layer.conv.lin.weight.T + layer.conv.bias
        if skip == "identity":
            state = normalized(state + update.relu())
        else:
            if skip == "linear":
                update = update + state @ layer.skip.weight.T + layer.skip.bias
            state = normalized(update).relu()
        states.append(state)
    read = torch.stack(states).amax(0) if jumping_knowledge else state
    torch.testing.assert_close(model(x, edge_index), model.head(read))


@pytest.mark.parametrize("conv", ["gcn", "gat"])
def test_drop_edge_leaves_out_edges_in_training_only(graph, conv):
    x, edge_index = graph
    kept, alone = edge_index[:, edge_index[0] != edge_index[1]], edge_index[:, :0]
    settings = {"conv": conv, "dropout": 0.0}
    model = make("classic", edge_dropout=1.0, **settings)
    assert torch.equal(model.eval()(x, kept), make("classic", **settings).eval()(x, kept))
    torch.testing.assert_close(model.train()(x, kept), model.eval()(x, alone))
    model.train().edge_dropout = 0.5
    assert not torch.equal(model(x, kept), model(x, kept))


def test_classic_gat_draws_no_random_numbers_but_those_of_its_layers():
    torch.manual_seed(0)
    expected = LipschitzGATConv(FEATURES, 8, heads=3, score_norm=None)
    conv = make("classic", num_layers=1, conv="gat", heads=3).layers[0].conv
    torch.testing.assert_close(conv.state_dict(), expected.double().state_dict())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in NAMES),
        ("gcn", {"grad_checkpointing": True}),
        ("classic", {"conv": "gat", "skip": "linear"}),
        ("classic", {"skip": "identity"}),
        ("deep_gat", {"input_dropout": 0.4}),
        ("deep_gat", {"linear_ends": False, "residual": True, "input_dropout": 0.4}),
    ],
)
def test_every_model_reads_sparse_features(graph, name, settings):
    x, edge_index = graph
    model = make(name, **settings)
    assert model.takes_sparse_features
    silence_beta_notice()
    gradients(model.train(), x.to_sparse_csr(), edge_index)
    model.eval()
    torch.testing.assert_close(model(x.to_sparse_csr(), edge_index), model(x, edge_index))


@pytest.mark.parametrize("weight_norm", ["spectral", "none"])
def test_gcn2_equals_a_loop_over_nodes_and_neighbors(graph, weight_norm):
    x, edge_index = graph
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    alpha, theta = 0.2, 1.3
    model = make("gcn2", alpha=alpha, theta=theta, weight_norm=weight_norm).eval()
    degree = [1 + (edge_index[1] == node).sum().item() for node in range(NODES)]
    first = state = model.encoder[1](x).clamp_min(0)
    for number, layer in enumerate(model.layers, start=1):
        beta = math.log(1 + theta / number)
        raw = dict(layer.conv.named_parameters())
        if weight_norm == "spectral":
            raw = raw["parametrizations.weight1.original"]
            sigma = torch.linalg.svdvals(raw)[0].item()
            assert sigma > 1  # the weight is scaled
            weight = raw / sigma
        else:
            weight = raw["weight1"]
        rows = []
        for node in range(NODES):
            total = state[node] / degree[node]
            for source, target in edge_index.T.tolist():
                if target == node:
                    total = total + state[source] / math.sqrt(degree[source] * degree[node])
            mixed = (1 - alpha) * total + alpha * first[node]
            rows.append(((1 - beta) * mixed + beta * (mixed @ weight)).clamp_min(0))
        state = torch.stack(rows)
    torch.testing.assert_close(model(x, edge_index), model.head[1](state))


@pytest.mark.parametrize("name", ["residual_gcn", "residual_gat"])
def test_weight_norm_holds_the_bound_through_training(graph, name):
    model = make(name, bound=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(*graph).square().sum().backward()
        optimizer.step()
    for layer in model.layers:
        sigma = torch.linalg.matrix_norm(layer.conv.lin.weight, 2).item()
        assert sigma == pytest.approx(0.2, rel=1e-9)


@pytest.mark.parametrize("only_shrink", [False, True])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16, torch.half])
def test_spectral_scale_holds_its_bound_in_every_precision(dtype, only_shrink):
    torch.manual_seed(3)
    conv = ResidualGCN(7, 29, 3, 1, bound=0.3).layers[0].conv.to(dtype)
    conv.lin.parametrizations.weight[0].only_shrink = only_shrink
    reached = []
    for seed in range(11):
        weight = conv.lin.parametrizations.weight.original
        weight.data.normal_(generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float):
            effective = conv.lin.weight
        assert effective.dtype is dtype
        reached.append(torch.linalg.matrix_norm(effective.double(), 2).item())
    assert 0.98 * 0.3 < min(reached) and max(reached) <= 0.3 * (1 + 1e-6)


def test_residual_gcn_layer_on_a_directed_star_has_the_reported_bound():
    edge_index = torch.stack([torch.zeros(NODES - 1, dtype=torch.long), torch.arange(1, NODES)])
    model = make("residual_gcn", bound=0.5).eval()
    x = torch.rand(NODES, 8, dtype=torch.double)
    jacobian = torch.autograd.functional.jacobian(lambda v: model.layers[0](v, edge_index), x)
    exact = torch.linalg.matrix_norm(jacobian.reshape(NODES * 8, -1), 2).item()
    weighted = x.new_zeros(NODES, NODES)
    (source, target), weight = gcn_norm(edge_index, None, NODES, dtype=torch.double)
    weighted[target, source] = weight
    norm = adjacency_sigma_bound(edge_index, NODES)
    assert norm == pytest.approx(torch.linalg.matrix_norm(weighted, 2).item(), rel=1e-6)
    features = torch.randn(NODES, FEATURES, dtype=torch.double)
    labels, mask = torch.zeros(NODES, dtype=torch.long), torch.ones(NODES, dtype=torch.bool)
    reported = layer_profile(model, features, edge_index, labels, mask)["layer_bound"]
    assert reported == pytest.approx([1.0 + 0.5 * norm] * LAYERS)
    plain = make("residual_gcn", bound=0.5, residual=False)
    without = layer_profile(plain, features, edge_index, labels, mask)["layer_bound"]
    assert without == pytest.approx([0.5 * norm] * LAYERS)
    assert exact <= reported[0]
    assert norm > 1.5


@pytest.mark.parametrize("changed", ["normalize", "add_self_loops"])
def test_a_residual_gcn_layer_of_another_matrix_has_no_finite_reported_bound(changed):
    """The norm of the other matrix exceeds that of the usual one on this directed graph."""
    edge_index = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [1, 0, 0, 0, 2, 3, 3, 2]])
    layer = ResidualLayer(SparseGCNConv(1, 1, bias=False, **{changed: False}), None, True, 0.0)
    torch.nn.init.ones_(layer.conv.lin.weight)
    model = GraphNet(torch.nn.Identity(), [layer], torch.nn.Linear(1, 2)).double()
    x = torch.ones(4, 1, dtype=torch.double)
    jacobian = torch.autograd.functional.jacobian(lambda v: layer(v, edge_index), x)
    exact = torch.linalg.matrix_norm(jacobian.reshape(4, 4), 2).item()
    assert exact > 1.0 + adjacency_sigma_bound(edge_index, 4)
    labels, mask = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)
    assert layer_profile(model, x, edge_index, labels, mask)["layer_bound"] == [math.inf]


def test_the_bound_of_the_adjacency_is_one_for_undirected_graphs_and_never_too_small(graph):
    _, edge_index = graph
    undirected = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    path = torch.arange(300)
    path = torch.stack([path[:-1], path[1:]])
    for edges, nodes in ((undirected, NODES), (torch.cat([path, path.flip(0)], dim=1), 300)):
        for iterations in (1, 100):  # the first vector is the eigenvector
            norm = adjacency_sigma_bound(edges, nodes, iterations)
            assert 1.0 <= norm == pytest.approx(1.0, abs=1e-12)
    for iterations in (1, 5, 100):
        assert adjacency_sigma_bound(edge_index, NODES, iterations) >= adjacency_sigma_bound(
            edge_index, NODES
        )


@pytest.mark.parametrize("name", ["lips_gat", "lips_graph_transformer"])
def test_lips_models_keep_the_form_of_their_values_in_which_they_were_saved(graph, name):
    assert make(name).layers[0].attn.branch.conv.attention.value_scale == 1.0
    for saved in (make(name, value_scale=None), make(name, value_scale=2.0)):
        for loaded in (make(name), make(name, value_scale=None)):
            loaded.load_state_dict(saved.state_dict())
            assert torch.equal(loaded.eval()(*graph), saved.eval()(*graph))


def test_deep_residual_networks_stay_finite_where_plain_ones_explode(graph):
    x, edge_index = graph
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    bounded = make("residual_gcn", num_layers=256).eval()
    state = bounded.forward_intermediates(x, edge_index)[1]
    assert state[-1].norm() <= math.exp(4) * state[0].norm()
    plain = make("residual_gcn", num_layers=256, weight_norm="none").eval()
    assert plain.forward_intermediates(x, edge_index)[1][-1].norm() > 1e6 * state[-1].norm()


def test_default_bound_keeps_the_product_below_e_to_the_four():
    assert default_bound(2) == 1.0
    for num_layers in (8, 64, 1024):
        assert (1 + default_bound(num_layers)) ** num_layers < math.exp(4)


def test_lips_models_start_with_unit_singular_values_and_small_residuals():
    model = make("lips_graph_transformer")
    for layer in model.layers:
        torch.testing.assert_close(
            layer.attn.residual_scale, torch.full((32,), 0.1, dtype=torch.double)
        )
        for linear in (layer.attn.branch.proj, layer.mlp.branch[1], layer.mlp.branch[3]):
            assert torch.linalg.matrix_norm(linear.weight, 2).item() == pytest.approx(1, rel=1e-5)


def test_wrong_names_and_settings_raise():
    with pytest.raises(ValueError, match="'gatt' is not known; choose one of gcn, gcn2, classic"):
        make("gatt")
    with pytest.raises(ValueError, match="gcn has no argument 'heads'; it takes norm, dropout"):
        make("gcn", heads=2)
    with pytest.raises(ValueError, match="'maxnorm' is not known"):
        make("deep_gat", norm="maxnorm")
    with pytest.raises(ValueError, match="not for GCN, which has no scores"):
        make("gcn", norm="lipschitznorm")
    with pytest.raises(ValueError, match=r"bound=0.1 has no effect"):
        ResidualGCN(3, 4, 5, 2, weight_norm="none", bound=0.1)
    with pytest.raises(ValueError, match=r"alpha=1.5 must be in \[0, 1\]"):
        make("gcn2", alpha=1.5)
    with pytest.raises(ValueError, match=r"theta=2.0 must be in \(0, e - 1\]"):
        make("gcn2", theta=2.0)
    with pytest.raises(ValueError, match="weight_norm='cap' is not known"):
        make("gcn2", weight_norm="cap")
    with pytest.raises(ValueError, match="conv='sage' is not known"):
        make("classic", conv="sage")
    with pytest.raises(ValueError, match=r"edge_dropout=1.5 must be in \[0, 1\]"):
        make("classic", edge_dropout=1.5)
    with pytest.raises(ValueError, match="skip='dense' is not known"):
        make("classic", skip="dense")
    with pytest.raises(ValueError, match="heads=2, norm='none' are not for gcn"):
        make("classic", heads=2)
    with pytest.raises(ValueError, match=r"attn_dropout=0.3 has no effect on gcn"):
        make("classic", attn_dropout=0.3)
    with pytest.raises(ValueError, match="encoder_channels=5 has no effect with linear_ends=False"):
        make("deep_gat", encoder_channels=5, linear_ends=False)
    with pytest.raises(ValueError, match="encoder_channels=0 must be at least 1"):
        make("deep_graph_transformer", encoder_channels=0)
    with pytest.raises(ValueError, match=r"dropout=-0.1 must be in \[0, 1\]"):
        make("deep_gat", input_dropout=-0.1)
    with pytest.raises(ValueError, match="bound=nan must be > 0"):
        make("residual_gcn", bound=math.nan)
    for ratio in (-0.1, 0.001, math.nan):
        with pytest.raises(ValueError, match=f"mlp_ratio={ratio} must be 0, or give at least one"):
            make("lips_gat", mlp_ratio=ratio)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["lips_gat", "lips_graph_transformer"])
def test_parameters_alone_do_not_change_the_form_of_the_values(graph, name, assign):
    model, saved = make(name), make(name)
    with pytest.raises(RuntimeError, match=r"attention\.value_scale"):
        model.load_state_dict(dict(saved.named_parameters()), assign=assign)
    model.load_state_dict(dict(saved.named_parameters()), strict=False, assign=assign)
    assert torch.equal(model.eval()(*graph), saved.eval()(*graph))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_layers", [0, -1])
def test_a_class_refuses_to_build_no_layers(name, num_layers):
    kind = type(make(name))
    with pytest.raises(ValueError, match=f"num_layers={num_layers} must be at least 1"):
        kind(FEATURES, 8, CLASSES, num_layers)


@pytest.mark.parametrize("name", ["residual_gcn", "residual_gat", "gcn2"])
def test_reset_draws_weights_that_are_scaled(name):
    """Both calls that users know: of one layer, and of everything that has the method."""
    model, fresh = make(name), make(name)
    for layer in model.layers:
        before = [p.clone() for p in layer.conv.parameters() if p.dim() > 1]
        layer.conv.reset_parameters()
        after = [p for p in layer.conv.parameters() if p.dim() > 1]
        assert before and not any(map(torch.equal, before, after))
    largest = [max(p.abs().max() for p in m.layers.parameters()) for m in (model, fresh)]
    assert 0.8 < largest[0] / largest[1] < 1.25  # of the same uniform distributions
    before = [p.clone() for p in model.layers.parameters() if p.dim() > 1]
    model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    after = [p for p in model.layers.parameters() if p.dim() > 1]
    assert not any(map(torch.equal, before, after))


@pytest.mark.parametrize("name", ["residual_gcn", "residual_gat", "gcn2"])
def test_weights_whose_parametrization_was_removed_are_saved(graph, name):
    models = [make(name).eval() for _ in range(2)]
    expected = models[0](*graph)
    for model in models:
        for module in list(model.modules()):
            if parametrize.is_parametrized(module):
                (weight,) = module.parametrizations
                parametrize.remove_parametrizations(module, weight)
    models[1].apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    models[1].load_state_dict(models[0].state_dict())
    torch.testing.assert_close(models[1](*graph), expected)


@pytest.mark.parametrize("edge_index", [torch.eye(2).to_sparse(), torch.eye(NODES).to_sparse()])
def test_what_needs_a_list_of_edges_refuses_an_adjacency_matrix_in_one_sentence(edge_index):
    x, y = torch.randn(len(edge_index), FEATURES), torch.zeros(len(edge_index), dtype=torch.long)
    classic = create_model("classic", FEATURES, 8, CLASSES, 2, edge_dropout=0.5)
    conv = LipschitzGATConv(FEATURES, 8)
    for call in (
        lambda: NeighborNorm()(x, edge_index),
        lambda: classic(x, edge_index),
        lambda: layer_profile(classic, x, edge_index, y, y == 0),
        lambda: adjacency_sigma_bound(edge_index, len(x)),
        lambda: gat_attention_bound(conv, edge_index, len(x)),
    ):
        with pytest.raises(ValueError, match=r"adjacency matrix \(torch.sparse_coo\) where only"):
            call()
