"""Bounds of graph layers and networks in closed form; the hunt attacks the others."""

import math
from decimal import Decimal

import pytest
import torch
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import GCNConv

from lipsformer.analysis.bounds import UnknownModuleError, flatten_bound, lipschitz_bound
from lipsformer.analysis.bounds.graph import graph_domain
from lipsformer.graph import (
    GCN2,
    LipschitzGATConv,
    LipschitzTransformerConv,
    LipsGAT,
    ResidualGCN,
    create_model,
)
from lipsformer.graph.models.create import _MODELS

NODES = 7
DIRECTED = torch.tensor([[0, 0, 0, 0, 1, 5, 5, 3], [1, 2, 3, 4, 5, 6, 6, 3]])
CYCLE = torch.stack([torch.arange(NODES), torch.arange(1, NODES + 1) % NODES])
UNDIRECTED = torch.cat([CYCLE, CYCLE.flip(0)], dim=1)


def sigma(matrix: torch.Tensor) -> float:
    return torch.linalg.svdvals(matrix.detach().double())[0].item()


@pytest.mark.parametrize("edges", [DIRECTED, UNDIRECTED])
def test_the_bound_of_a_graph_convolution_is_exact(edges):
    torch.manual_seed(0)
    conv = GCNConv(3, 5).double()
    jacobian = torch.autograd.functional.jacobian(
        lambda x: conv(x, edges), torch.zeros(NODES, 3, dtype=torch.double)
    )
    bound = lipschitz_bound(conv, graph_domain(edges, NODES))
    assert bound.value == pytest.approx(sigma(jacobian.reshape(NODES * 5, -1)), rel=1e-6)


@pytest.mark.parametrize("layer", [GCNConv, LipschitzGATConv, LipschitzTransformerConv])
def test_an_explainer_that_has_looked_at_a_layer_changes_no_bound(layer):
    """PyG leaves the method `propagate` of the class on the instance. Another one is refused."""
    conv, domain = layer(3, 5).eval(), graph_domain(DIRECTED, NODES)
    expected = lipschitz_bound(conv, domain).value
    mask = torch.nn.Parameter(torch.ones(DIRECTED.size(1)))
    set_masks(conv, mask, DIRECTED, apply_sigmoid=False)
    with pytest.raises(UnknownModuleError):
        lipschitz_bound(conv, domain)
    clear_masks(conv)
    assert "propagate" in vars(conv)
    assert lipschitz_bound(conv, domain).value == expected
    conv.propagate = layer(3, 5).propagate
    with pytest.raises(UnknownModuleError, match="'propagate' was replaced on the instance"):
        lipschitz_bound(conv, domain)


def test_a_residual_network_on_an_undirected_graph_obeys_its_law():
    torch.manual_seed(0)
    model = ResidualGCN(3, 5, 2, num_layers=11, bound=0.2).eval()
    bound = lipschitz_bound(model, graph_domain(UNDIRECTED, NODES))
    ends = sigma(model.encoder[1].weight) * sigma(model.head[1].weight)
    assert bound.value == pytest.approx(ends * 1.2**11, rel=1e-5)
    directed = lipschitz_bound(model, graph_domain(DIRECTED, NODES))
    assert directed.value > 2.0 * bound.value
    parts = dict(flatten_bound(bound))
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)) and "conv" not in name:
            assert name in parts, name


def layers_of(model, edges):
    """Return the map of the layers of a network, without its encoder and its head."""
    model.encoder, model.head = torch.nn.Identity(), torch.nn.Identity()
    return lambda x: model(x, edges)


@pytest.mark.parametrize(
    ("num_layers", "starts"), [(2, 3), (31, 1), pytest.param(1024, 0, marks=pytest.mark.slow)]
)
def test_initial_residuals_keep_the_constant_one_at_every_depth(num_layers, starts):
    torch.manual_seed(0)
    model = GCN2(3, 5, 2, num_layers).double().eval()
    with torch.no_grad():
        for layer in model.layers:  # weights whose norm is far above the cap
            layer.conv.parametrizations.weight1.original.mul_(50)
    bound = lipschitz_bound(model, graph_domain(UNDIRECTED, NODES)).parts["layers"].value
    assert bound <= 1.0 + 1e-9
    assert worst_ratio(layers_of(model, UNDIRECTED), (NODES, 5), starts) <= bound


def test_the_bound_of_initial_residuals_is_reached():
    """The identity as weight: root degrees times a positive vector pass every layer unchanged."""
    model = GCN2(3, 5, 2, num_layers=64).double().eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.conv.parametrizations.weight1.original.copy_(2 * torch.eye(5))
    edges = torch.tensor([[0, 0, 1, 2, 3, 5], [1, 2, 2, 3, 4, 6]])
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    bound = lipschitz_bound(model, graph_domain(edges, NODES)).parts["layers"].value
    layers = layers_of(model, edges)
    x = (1.0 + edges[1].bincount(minlength=NODES)).sqrt().double()[:, None] * torch.arange(1, 6)
    ratio = (layers(x) - layers(0.5 * x)).norm() / (0.5 * x).norm()
    assert ratio.item() == pytest.approx(1.0, rel=1e-12)
    assert ratio <= bound <= 1.0 + 1e-9


def test_initial_residuals_on_a_directed_graph_may_exceed_one_but_not_their_bound():
    torch.manual_seed(1)
    model = GCN2(3, 5, 2, num_layers=3, theta=0.1).double().eval()
    bound = lipschitz_bound(model, graph_domain(DIRECTED, NODES)).parts["layers"].value
    ratio = worst_ratio(layers_of(model, DIRECTED), (NODES, 5))
    assert 1.0 < ratio <= bound


def worst_ratio(function, shape, num_starts=3, num_steps=30) -> float:
    """Search for the two inputs whose outputs differ most, relative to the inputs."""
    best = 0.0
    for _ in range(num_starts):
        x = torch.rand(shape, dtype=torch.double, requires_grad=True)
        difference = torch.randn(shape, dtype=torch.double, requires_grad=True)
        optimizer = torch.optim.Adam([x, difference], lr=0.1)
        for _ in range(num_steps):
            optimizer.zero_grad()
            ratio = (function(x + difference) - function(x)).norm() / difference.norm()
            best = max(best, ratio.item())
            (-ratio.clamp_min(1e-30).log()).backward()
            optimizer.step()
    return best


def test_raw_values_need_a_radius_and_normalized_ones_do_not():
    torch.manual_seed(0)
    models = {scale: LipsGAT(3, 2, 2, 2, value_scale=scale).eval() for scale in (1.0, None)}
    for radius, finite in ((math.inf, {1.0}), (2.0, {1.0, None})):
        domain = graph_domain(DIRECTED, NODES, radius)
        found = {scale: lipschitz_bound(model, domain).value for scale, model in models.items()}
        assert {scale for scale, value in found.items() if value < math.inf} == finite


def test_the_radius_of_a_convolution_covers_the_rounding_of_its_row_sums():
    """A node with so many neighbors that the sum of their weights errs by 4e-13."""
    count = 24990
    edges = torch.stack([torch.arange(1, count + 1), torch.zeros(count, dtype=torch.long)])
    conv = GCNConv(1, 1, bias=False)
    torch.nn.init.ones_(conv.lin.weight)
    exact = Decimal(count) / Decimal(count + 1).sqrt() + Decimal(1) / (count + 1)
    assert exact <= lipschitz_bound(conv, graph_domain(edges, count + 1, radius=1.0)).output.radius


@pytest.mark.parametrize("radius", [0.7, 0.9])  # less in float32
@pytest.mark.parametrize("kind", [LipschitzGATConv, LipschitzTransformerConv])
def test_the_radius_is_not_rounded_to_float32(kind, radius):
    """The identity as projection, so a node with one neighbor gets the features of that."""
    layer = kind(3, 3, score_norm=None).double()
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    values = layer.lin if kind is LipschitzGATConv else layer.lin_value
    torch.nn.init.eye_(values.weight)
    edges = torch.tensor([[0], [1]])
    assert radius <= lipschitz_bound(layer, graph_domain(edges, 2, radius)).output.radius


def test_every_network_but_the_two_that_have_no_rule_has_a_bound():
    missing = set()
    for name in _MODELS:
        model = create_model(name, 3, 4, 2, num_layers=2).eval()
        try:
            bound = lipschitz_bound(model, graph_domain(DIRECTED, NODES, radius=1.0))
            assert bound.value < math.inf
        except UnknownModuleError:
            missing.add(name)
    assert missing == {"classic", "ggnn"}


def test_a_gat_with_edge_features_has_no_bound():
    """They enter the scores without a limit, so the edges decide which neighbor is copied."""
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    layer = LipschitzGATConv(5, 3, edge_dim=2, score_norm=None)
    with pytest.raises(UnknownModuleError, match="no edge features"):
        lipschitz_bound(layer, graph_domain(edges, 3, radius=0.01))


@pytest.mark.parametrize("kind", [GCNConv, LipschitzGATConv, LipschitzTransformerConv])
def test_a_layer_that_has_not_seen_its_input_has_no_bound(kind):
    with pytest.raises(UnknownModuleError, match="no weight yet: run one batch through the model"):
        lipschitz_bound(kind(-1, 3), graph_domain(DIRECTED, NODES))


def test_a_domain_keeps_the_edges_with_which_it_was_made():
    """The norm of the adjacency is that of the star, and not of what its tensor holds later."""
    star = torch.stack([torch.zeros(NODES - 1).long(), torch.arange(1, NODES)])
    conv = GCNConv(3, 2).double()
    expected = lipschitz_bound(conv, graph_domain(star.clone(), NODES)).log10
    domain = graph_domain(star, NODES)
    star.zero_()
    assert lipschitz_bound(conv, domain).log10 == expected
    assert lipschitz_bound(conv, graph_domain(star, NODES)).log10 < expected - 0.1


@pytest.mark.parametrize(
    "edges",
    [torch.tensor([0, 1]), torch.ones(2, 3), torch.ones(3, 2).long(), torch.eye(2).to_sparse()],
)
def test_edges_of_another_form_are_refused_in_one_sentence(edges):
    with pytest.raises(ValueError, match=r"use sources and targets, \[2, E\], as a dense tensor"):
        graph_domain(edges, NODES)
