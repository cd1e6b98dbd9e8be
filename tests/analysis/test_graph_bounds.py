"""Bounds of graph layers and networks in closed form; the hunt attacks the others."""

import math

import pytest
import torch
from torch_geometric.nn import GCNConv

from lipsformer.analysis.bounds import UnknownModuleError, flatten_bound, lipschitz_bound
from lipsformer.analysis.bounds.graph import graph_domain
from lipsformer.graph import LipsGAT, ResidualGCN, create_model
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


def test_raw_values_need_a_radius_and_normalized_ones_do_not():
    torch.manual_seed(0)
    models = {scale: LipsGAT(3, 2, 2, 2, value_scale=scale).eval() for scale in (1.0, None)}
    for radius, finite in ((math.inf, {1.0}), (2.0, {1.0, None})):
        domain = graph_domain(DIRECTED, NODES, radius)
        found = {scale: lipschitz_bound(model, domain).value for scale, model in models.items()}
        assert {scale for scale, value in found.items() if value < math.inf} == finite


def test_every_network_but_the_gated_one_has_a_bound():
    missing = set()
    for name in _MODELS:
        model = create_model(name, 3, 4, 2, num_layers=2).eval()
        try:
            bound = lipschitz_bound(model, graph_domain(DIRECTED, NODES, radius=1.0))
            assert bound.value < math.inf
        except UnknownModuleError:
            missing.add(name)
    assert missing == {"ggnn"}
