"""Proved bounds of the operators of graph networks: adjacency matrices and attention over edges."""

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree, scatter

from lipsformer.graph.edge_attention.csr import EdgeCSR, SortedEdges, listed_edges
from lipsformer.graph.edge_attention.messages import changed_messages
from lipsformer.graph.gat_conv import LipschitzGATConv

__all__ = [
    "adjacency_sigma_bound",
    "attention_column_sum",
    "gat_attention_bound",
    "normalized_adjacency",
    "takes_normalized_adjacency",
]


def takes_normalized_adjacency(conv: GCNConv) -> bool:
    """Return whether a graph convolution multiplies by the matrix of `normalized_adjacency`.

    Other settings or messages of `GCNConv` give another matrix, whose norm may be larger.

    Args:
        conv: The layer.

    Example:
        >>> from lipsformer.graph import SparseGCNConv
        >>> from lipsformer.graph.operator_bounds import takes_normalized_adjacency
        >>> [takes_normalized_adjacency(SparseGCNConv(3, 3, normalize=n)) for n in (True, False)]
        [True, False]
    """
    usual = conv.normalize and conv.add_self_loops and not (conv.improved or conv.cached)
    return usual and changed_messages(conv, GCNConv) is None


def normalized_adjacency(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    r"""Return GCN's normalized adjacency with self loops, :math:`D^{-1/2} (A + I) D^{-1/2}`.

    D holds the in-degrees, self loops included.

    Args:
        edge_index: [2, E].
        num_nodes: Number of nodes.

    Returns:
        Sources and targets of the entries, [2, E'], and their values in float64, [E']. E' counts
        one self loop for every node.

    Example:
        >>> import torch
        >>> from lipsformer.graph.operator_bounds import normalized_adjacency
        >>> pair = torch.tensor([[0, 1], [1, 0]])  # with self loops, both nodes have in-degree 2
        >>> edges, values = normalized_adjacency(pair, num_nodes=2)
        >>> edges.tolist(), [round(value, 6) for value in values.tolist()]
        ([[0, 1, 0, 1], [1, 0, 0, 1]], [0.5, 0.5, 0.5, 0.5])
    """
    edge_index = listed_edges(edge_index)
    ones = torch.ones(edge_index.size(1), dtype=torch.float64, device=edge_index.device)
    normalized: Any = gcn_norm(edge_index, ones, num_nodes, dtype=torch.float64)
    return normalized


@torch.no_grad()
def adjacency_sigma_bound(edge_index: Tensor, num_nodes: int, num_iters: int = 100) -> float:
    r"""Return an upper bound of the 2-norm of GCN's normalized adjacency with self loops.

    The matrix :math:`B = \hat A^T \hat A` has no negative entry. For every positive vector v the
    theorem of Collatz and Wielandt gives

    .. math:: |\hat A|_2^2 = \rho(B) \le \max_i (B v)_i / v_i.

    Power iteration improves v, so the bound approaches the norm from above. It is 1 up to rounding
    for an undirected graph, where the first v is the eigenvector.

    Args:
        edge_index: [2, E].
        num_nodes: Number of nodes.
        num_iters: Number of iterations.

    Example:
        >>> import torch
        >>> from lipsformer.graph.operator_bounds import adjacency_sigma_bound
        >>> ring = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> f"{adjacency_sigma_bound(ring, 3):.4f}"
        '1.0000'
    """
    (source, target), weight = normalized_adjacency(edge_index, num_nodes)
    v = degree(target, num_nodes, torch.float64).sqrt()  # with the self loop, so at least 1
    best = math.inf
    for _ in range(num_iters):
        forward = scatter(weight * v[source], target, dim_size=num_nodes)
        product = scatter(weight * forward[target], source, dim_size=num_nodes)
        best = min(best, (product / v).max().item())
        v = (product / product.max()).clamp_min(1e-12)
    degrees = degree(source, num_nodes).max() + degree(target, num_nodes).max()
    return math.sqrt(best) * (1.0 + (degrees.item() + 32.0) * 2.0**-52)


def attention_column_sum(csr: EdgeCSR, largest_score: Tensor) -> Tensor:
    r"""Bound the column sums of the attention matrix over the edges of a graph, one per head.

    If all scores lie in [-s, s], a weight in N(i) is at most
    :math:`1 / (1 + (|N(i)| - 1) e^{-2 s})`. The bound is the largest sum of these over the edges
    that leave one node.

    Args:
        csr: The edges over which attention runs, self loops included.
        largest_score: s >= 0 of each head, [H]; inf if the scores have no bound.

    Returns:
        An upper bound for each head, [H], in float64.

    Example:
        >>> import torch
        >>> from lipsformer.graph import SortedEdges
        >>> from lipsformer.graph.operator_bounds import attention_column_sum
        >>> csr = SortedEdges(torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]]), num_sources=2).csr
        >>> sums = attention_column_sum(csr, torch.tensor([0.0, torch.inf]))
        >>> [round(bound, 6) for bound in sums.tolist()]  # all weights are 1/2; each may be 1
        [1.0, 2.0]
    """
    others = (csr.ptr.diff().double() - 1.0)[csr.row.long()]
    odds = torch.exp(-2.0 * largest_score.detach().double().cpu())
    largest = 1.0 / (1.0 + others.cpu() * odds[:, None])
    sums = largest.new_zeros(len(odds), csr.num_sources)
    rounding = (int(csr.ptr_t.diff().max()) + 8) * 2.0**-52
    return sums.index_add(1, csr.col.long().cpu(), largest).amax(1) * (1.0 + rounding)


@torch.no_grad()
def gat_attention_bound(
    conv: LipschitzGATConv,
    edge_index: Tensor | SortedEdges,
    num_nodes: int,
    *,
    reachable: bool = False,
) -> Tensor:
    r"""Return proved Lipschitz constants, in Frobenius norm, of a `LipschitzGATConv`'s heads, [H].

    They bound the map h -> P(h) h of one head, without the norm of the projection. Let S be the
    largest sum, over the targets of one node, of the largest weight that the edge can have. Let D
    be the largest number of edges that leave one node. The constant is

    .. math:: \sqrt{S} + \frac{1}{c} (\sqrt{S + 1} + \sqrt{D + 1}), \quad
        S = \max_j \sum_{i: j \in N(i)} \frac{1}{1 + (|N(i)| - 1) e^{-2/c}}

    A slope of LeakyReLU above 1 multiplies 1/c. The proof is in docs/theorems.md. The constants
    are infinite without LipschitzNorm, and for layers that the proof does not cover: with separate
    maps of sources and targets, another direction or aggregation of the messages, overridden
    messages, or a c that is neither one number nor one per head.

    Args:
        conv: The layer; c is its `current_att_norm()`.
        edge_index: [2, E] or a `SortedEdges`; the layer's own self loops are added if it adds them.
        num_nodes: Number of nodes.
        reachable: If c learns, use `min_att_norm` in its place, which bounds the heads of this
            layer after any training.

    Example:
        >>> import torch
        >>> from lipsformer.graph import LipschitzGATConv
        >>> from lipsformer.graph.operator_bounds import gat_attention_bound
        >>> ring = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> constants = gat_attention_bound(LipschitzGATConv(5, 7, heads=2), ring, 3)
        >>> [f"{constant:.3f}" for constant in constants]
        ['1.923', '1.923']
    """
    learns = conv.min_att_norm is not None
    c = conv.min_att_norm if reachable and learns else conv.current_att_norm(torch.float64)
    c = torch.as_tensor(c, dtype=torch.float64, device="cpu")
    other = changed_messages(conv, LipschitzGATConv) is not None or conv.lin is None
    other |= c.shape not in ((), (conv.heads,))  # a c of [V, 1] would differ between nodes
    if conv.score_norm is None or conv.released_code or other:
        return torch.full((conv.heads,), math.inf, dtype=torch.float64)
    edges = SortedEdges.of(edge_index, num_nodes, num_nodes)
    csr = edges.csr_with_self_loops if conv.add_self_loops else edges.csr
    inverse = max(abs(conv.negative_slope), 1.0) / c.view(-1).abs()  # in this order NaN stays NaN
    s = attention_column_sum(csr, inverse)
    d = csr.ptr_t.diff().max().item()
    return (s.sqrt() + inverse * ((s + 1).sqrt() + math.sqrt(d + 1))).expand(conv.heads)
