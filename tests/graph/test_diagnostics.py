import math

import pytest
import torch
from torch_geometric.utils import softmax, to_undirected

from lipsformer.analysis.bounds import lipschitz_bound
from lipsformer.analysis.bounds.graph import graph_domain
from lipsformer.graph import LipschitzGATConv, SortedEdges, create_model
from lipsformer.graph.diagnostics import (
    attention_statistics,
    dirichlet_energy,
    distance_from_mean,
    gradient_norms,
    layer_profile,
    mean_cosine,
)
from lipsformer.graph.edge_attention.csr import silence_beta_notice
from lipsformer.graph.operator_bounds import attention_column_sum, gat_attention_bound

NODES = 7


@pytest.fixture
def graph():
    torch.manual_seed(0)
    x = torch.randn(NODES, 5, dtype=torch.double)
    return x, to_undirected(torch.randint(NODES, (2, 9)))


def test_distance_from_mean_is_orthogonal_to_the_mean(graph):
    x, _ = graph
    mean = torch.full((NODES, NODES), 1 / NODES, dtype=torch.double) @ x
    torch.testing.assert_close(x.norm() ** 2, mean.norm() ** 2 + distance_from_mean(x) ** 2)
    assert distance_from_mean(torch.ones(NODES, 3)) == 0
    for scale in (1e-30, 1e30):  # whose squares are 0 and infinite in single precision
        assert distance_from_mean(x.float() * scale).item() == pytest.approx(
            distance_from_mean(x).item() * scale, rel=1e-5
        )


def test_mean_cosine_equals_the_mean_over_pairs(graph):
    x, _ = graph
    pairs = [torch.cosine_similarity(a, b, dim=0) for a in x for b in x]
    torch.testing.assert_close(mean_cosine(x), torch.stack(pairs).mean())


def test_dirichlet_energy_equals_a_loop_over_edges(graph):
    x, edge_index = graph
    edge_index = edge_index[:, edge_index[0] < edge_index[1]]  # so that in- and out-degrees differ
    counts = [1 + (edge_index[1] == i).sum().item() for i in range(NODES)]
    total = 0.0
    for j, i in edge_index.T.tolist():
        total += (x[i] / math.sqrt(counts[i]) - x[j] / math.sqrt(counts[j])).norm().item() ** 2
    assert dirichlet_energy(x, edge_index).item() == pytest.approx(total / 2)


def test_attention_statistics_in_closed_form():
    target = torch.tensor([0, 0, 0, 1])  # node 1 has one neighbor, which says nothing
    attn = torch.tensor([[0.5, 1 / 3], [0.25, 1 / 3], [0.25, 1 / 3], [1.0, 1.0]])
    entropy, spread = attention_statistics(attn, target, 3)
    assert entropy == pytest.approx((1.5 * math.log(2) / math.log(3) + 1) / 2)
    assert spread == pytest.approx(math.log(2))
    entropy, spread = attention_statistics(torch.eye(2)[:, :1], torch.zeros(2).long(), 1)
    assert entropy == 0.0 and math.isfinite(spread)  # a weight has underflowed


@pytest.mark.parametrize("att_norm", [1.0, pytest.param(4.0, marks=pytest.mark.slow)])
def test_gat_attention_never_exceeds_its_proved_bound(graph, att_norm):
    _, edge_index = graph
    conv = LipschitzGATConv(5, 5, bias=False, att_norm=att_norm).double()
    conv.lin.weight.data = torch.eye(5, dtype=torch.double)  # the attention's own map, h -> P(h) h
    bound = gat_attention_bound(conv, edge_index, NODES)
    for seed in range(0, 5, 2):
        torch.manual_seed(seed)
        x = torch.randn(NODES, 5, dtype=torch.double) * 10 ** (seed - 2)
        for _ in range(8):  # climb the exact constant
            x.requires_grad_()
            jacobian = torch.autograd.functional.jacobian(
                lambda v: conv(v, edge_index), x, create_graph=True
            )
            sigma = torch.linalg.matrix_norm(jacobian.reshape(NODES * 5, -1), 2)
            assert sigma.item() <= bound
            (grad,) = torch.autograd.grad(sigma, x)
            x = (x + 0.1 * x.norm() * grad / grad.norm()).detach()
    conv.score_norm = None
    assert gat_attention_bound(conv, edge_index, NODES) == math.inf


def test_the_column_sums_of_attention_are_reached():
    """A source has the largest score in all its neighborhoods, and the others the smallest."""
    edges = torch.tensor([[0, 0, 1, 2, 2, 3, 4, 4], [0, 1, 1, 1, 3, 3, 4, 0]])
    limits = torch.tensor([0.0, 0.3, 2.0], dtype=torch.double)
    sums = []
    for source in range(5):
        scores = torch.where(edges[0] == source, 1.0, -1.0)[:, None] * limits
        attn = softmax(scores, edges[1], num_nodes=5)
        sums.append(attn[edges[0] == source].sum(0))
    found = attention_column_sum(SortedEdges(edges, 5).csr, limits)
    torch.testing.assert_close(found, torch.stack(sums).amax(0), rtol=1e-12, atol=0)
    assert (found >= torch.stack(sums).amax(0)).all()


@pytest.mark.parametrize(("loops", "degrees", "most"), [(True, (3, 2, 1), 3), (False, (2, 1), 2)])
@pytest.mark.parametrize("slope", [0.2, -3.0])
def test_the_bound_of_gat_attention_in_closed_form(loops, degrees, most, slope):
    """Node 0 sends to nodes 1 and 2, and node 3 to node 1."""
    edges = torch.tensor([[0, 0, 3], [1, 2, 1]])
    conv = LipschitzGATConv(5, 3, att_norm=2.0, add_self_loops=loops, negative_slope=slope)
    c = 2.0 / max(abs(slope), 1.0)
    s = sum(1.0 / (1.0 + (degree - 1) * math.exp(-2.0 / c)) for degree in degrees)
    expected = s**0.5 + ((s + 1) ** 0.5 + (most + 1) ** 0.5) / c
    assert gat_attention_bound(conv, edges, 4).tolist() == [pytest.approx(expected, rel=1e-12)]
    conv.released_code = True  # which divides by the norm of another node
    assert gat_attention_bound(conv, edges, 4) == math.inf


@pytest.mark.parametrize("settings", [{"flow": "target_to_source"}, {"aggr": "max"}])
def test_attention_that_the_proof_does_not_cover_has_no_finite_bound(settings):
    conv = LipschitzGATConv(1, 1, **settings)
    star = torch.stack([torch.arange(1, 41), torch.zeros(40, dtype=torch.long)])
    assert gat_attention_bound(conv, star, 41) == math.inf  # reversed messages exceeded it here
    apart = LipschitzGATConv((1, 1), 1, add_self_loops=False)
    assert gat_attention_bound(apart, star, 41) == math.inf


def test_a_constant_that_learns_never_exceeds_its_proved_bound(graph):
    """The attack moves the features, the score weights and theta, as training could."""
    _, edge_index = graph
    torch.manual_seed(4)
    conv = LipschitzGATConv(5, 3, heads=2, min_att_norm=0.05, bias=False).double()
    domain = graph_domain(edge_index, NODES)
    at_the_start = lipschitz_bound(conv, domain).value
    after_any_training = gat_attention_bound(conv, edge_index, NODES, reachable=True)
    x, theta = torch.randn(NODES, 5, dtype=torch.double), conv.log_att_norm
    theta.data = torch.tensor([-5.0, 0.3], dtype=torch.double)
    worst = 0.0
    for _ in range(5):  # climb the exact constant
        x = x.detach().requires_grad_()
        jacobian = torch.autograd.functional.jacobian(
            lambda v: conv(v, edge_index), x, create_graph=True
        )
        sigma = torch.linalg.matrix_norm(jacobian.reshape(NODES * 6, -1), 2)
        assert sigma.item() <= lipschitz_bound(conv, domain).value
        assert gat_attention_bound(conv, edge_index, NODES).le(after_any_training).all()
        worst = max(worst, sigma.item())
        moved = [x, theta, conv.att_src, conv.att_dst]
        for value, grad in zip(moved, torch.autograd.grad(sigma, moved), strict=True):
            value.data += 0.1 * value.data.norm() * grad / grad.norm()
    assert worst > at_the_start  # so a bound that forgets theta would have failed


def test_layer_profile_reads_sparse_features(graph):
    x, edge_index = graph
    x = x * (x > 0)
    torch.manual_seed(1)
    model = create_model("classic", 5, 4, 3, 3, skip="linear").double()
    arguments = edge_index, torch.randint(3, (NODES,)), torch.arange(NODES) < 4
    silence_beta_notice()
    sparse = layer_profile(model, x.to_sparse_csr(), *arguments)
    for key, values in layer_profile(model, x, *arguments).items():
        assert sparse[key] == pytest.approx(values), key


def test_layer_profile_of_a_model_with_a_frozen_encoder(graph):
    x, edge_index = graph
    torch.manual_seed(1)
    model = create_model("deep_gat", 5, 4, 3, 3).double()
    arguments = x, edge_index, torch.randint(3, (NODES,)), torch.arange(NODES) < 4
    expected = layer_profile(model, *arguments)
    expected["gradient_distance_from_mean"][0] = 0.0  # no gradient reaches the encoder's output
    model.encoder.requires_grad_(False)
    profile = layer_profile(model, *arguments)
    assert profile == {key: pytest.approx(values) for key, values in expected.items()}


def test_layer_profile_gradients_equal_autograd(graph):
    x, edge_index = graph
    torch.manual_seed(1)
    settings = {"norm": "lipschitznorm", "heads": 2, "min_att_norm": 0.2}
    model = create_model("deep_gat", 5, 4, 3, 3, **settings).double()
    for layer in model.layers:  # the bounds of the heads differ
        layer.conv.log_att_norm.data = torch.tensor([0.0, 0.5], dtype=torch.double)
    y, mask = torch.randint(3, (NODES,)), torch.arange(NODES) < 4
    profile = layer_profile(model, x, edge_index, y, mask)
    assert model.training

    model.eval()
    state = model.encoder(x).detach().requires_grad_()
    out = state
    for layer in model.layers:
        out = layer(out, edge_index)
    torch.nn.functional.cross_entropy(model.head(out)[mask], y[mask]).backward()
    assert profile["gradient_distance_from_mean"][0] == pytest.approx(
        distance_from_mean(state.grad).item()
    )
    for layer, norm in zip(model.layers, profile["gradient_norm"], strict=True):
        expected = torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item()
        assert norm == pytest.approx(expected)
    assert gradient_norms(model) == pytest.approx(profile["gradient_norm"])
    assert profile["distance_from_mean"][0] == pytest.approx(distance_from_mean(state).item())
    assert all(spread <= 2 / 4 for spread in profile["score_spread"])  # |scores| <= 1 / att_norm
    for layer, bound in zip(model.layers, profile["attention_bound"], strict=True):
        assert bound == max(gat_attention_bound(layer.conv, edge_index, NODES).tolist())


def test_states_of_every_scale_are_compared():
    x = torch.eye(3) * 1e-23
    edges = torch.tensor([[0, 1], [1, 2]])
    expected = dirichlet_energy(x.double(), edges)
    assert expected > 0.0
    torch.testing.assert_close(dirichlet_energy(x, edges), expected)
    assert mean_cosine(torch.full((4, 3), 1e-15)).item() == pytest.approx(1.0)
