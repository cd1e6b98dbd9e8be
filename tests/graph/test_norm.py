import re

import pytest
import torch

from lipsformer.graph.norm import NeighborNorm, NodeNorm, parse_norm


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.double, 1e-7), (torch.float, 1e-4), (torch.bfloat16, 2**-9)]
)
def test_neighbor_norm_equals_a_loop_over_nodes(dtype, rtol):
    """Two groups of nodes far apart, and one node with more neighbors than bfloat16 can count."""
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.double)
    offset = 10 if dtype is torch.bfloat16 else 1000  # bfloat16 cannot tell 1000 from 1001
    x[:3] += offset
    x[3:] -= offset
    edge_index = torch.cat([torch.randint(3, (2, 11)), torch.randint(3, 7, (2, 613))], dim=1)
    edge_index[1, 23:] = 5
    x = x.to(dtype)
    out = NodeNorm("neighbornorm", 5)(x, edge_index)
    assert out.dtype is dtype
    x = x.double()
    for i in range(7):
        neighbors = [j for j, target in edge_index.T.tolist() if target == i != j]
        rows = torch.stack([x[i], *(x[j] for j in neighbors)])
        spread = (rows - rows.mean(0)).square().sum(1).mean()
        expected = (x[i] - rows.mean(0)) / (spread + 1e-5).sqrt()
        torch.testing.assert_close(out[i].double(), expected, rtol=rtol, atol=rtol)


def test_self_loops_do_not_change_neighbor_norm():
    torch.manual_seed(3)
    x = torch.randn(7, 5, dtype=torch.double)
    edge_index = torch.randint(7, (2, 13))
    without = edge_index[:, edge_index[0] != edge_index[1]]
    loops = torch.tensor([[2, 2, 4], [2, 2, 4]])
    expected = NeighborNorm()(x, without)
    torch.testing.assert_close(NeighborNorm()(x, torch.cat([without, loops], dim=1)), expected)


def test_pair_norm_centers_the_graph_and_sets_its_mean_square_length():
    torch.manual_seed(1)
    out = NodeNorm("pairnorm", 5)(torch.randn(11, 5, dtype=torch.double) + 3, None)
    torch.testing.assert_close(out.mean(0), torch.zeros(5, dtype=torch.double))
    one = torch.ones((), dtype=torch.double)
    torch.testing.assert_close(out.square().sum(1).mean(), one, rtol=1e-4, atol=0)


def test_layer_norm_is_per_node():
    torch.manual_seed(2)
    norm, x = NodeNorm("layernorm", 5), torch.randn(7, 5)
    changed = torch.cat([x[:1], 10 * x[1:]])
    torch.testing.assert_close(norm(x, None)[0], norm(changed, None)[0])


def test_center_norm_is_per_node_and_keeps_the_scale():
    torch.manual_seed(2)
    x = torch.randn(7, 5, dtype=torch.double)
    expected = (x - x.mean(1, keepdim=True)) * 5 / 4
    torch.testing.assert_close(NodeNorm("centernorm", 5).double()(x, None), expected)


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("none", (None, "none")),
        ("lipschitznorm", ("lipschitznorm", "none")),
        ("neighbornorm", (None, "neighbornorm")),
        ("lipschitznorm+pairnorm", ("lipschitznorm", "pairnorm")),
    ],
)
def test_the_name_of_a_norm_says_what_scores_and_nodes_get(norm, expected):
    assert parse_norm(norm) == expected


@pytest.mark.parametrize("norm", ["maxnorm", "pairnorm+lipschitznorm", "lipschitznorm+", "", None])
def test_unknown_norms_raise(norm):
    with pytest.raises(ValueError, match="is not known; choose none, lipschitznorm, pairnorm"):
        parse_norm(norm)
    name = re.escape(repr(norm))
    with pytest.raises(ValueError, match=f"name={name} is not known; choose none or"):
        NodeNorm(norm, 3)
