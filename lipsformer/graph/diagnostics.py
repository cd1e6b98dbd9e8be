"""Measure what happens inside a deep graph network: sizes, similarity and gradients by layer."""

import functools
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from torch_geometric.utils import degree, scatter

from lipsformer._modes import modes_restored
from lipsformer._renamed import renamed
from lipsformer.graph.edge_attention.csr import SortedEdges, listed_edges
from lipsformer.graph.gat_conv import LipschitzGATConv
from lipsformer.graph.models.residual import ResidualLayer
from lipsformer.graph.models.stack import GraphNet
from lipsformer.graph.operator_bounds import (
    adjacency_sigma_bound,
    gat_attention_bound,
    takes_normalized_adjacency,
)

__all__ = [
    "attention_statistics",
    "dirichlet_energy",
    "distance_from_mean",
    "gradient_norms",
    "layer_profile",
    "mean_cosine",
]


def distance_from_mean(x: Tensor) -> Tensor:
    r"""Return the distance of the rows of X [N, C] from their mean.

    .. math:: \mu(X) = |X - \tfrac{1}{N} 1 1^T X|_F

    For the gradient of the loss with respect to the representations, it tends to 0 with the depth
    under gradient oversmoothing, and to infinity under gradient expansion. It is computed in double
    precision, because in both cases the squares leave the range of single precision.

    Args:
        x: Representations, or the gradient with respect to them, [N, C].

    Returns:
        A scalar in float64.

    Example:
        >>> import torch
        >>> from lipsformer.graph.diagnostics import distance_from_mean
        >>> x = torch.tensor([[0.0], [2.0], [0.0], [2.0]])  # 4 rows at 1 from the mean
        >>> distance_from_mean(x).item()
        2.0

    Reference:
        Park and Kim 2024, who call it mu.
    """
    x = x.double()
    return torch.linalg.matrix_norm(x - x.mean(dim=0))


def mean_cosine(x: Tensor) -> Tensor:
    """Return the mean cosine over all pairs of rows of X [N, C]; 1 means that all rows agree.

    Pairs of a row with itself count too. A row of zeros has the cosine 0 with all rows. It is
    computed in double precision, like `distance_from_mean`.

    Args:
        x: Representations, [N, C].

    Returns:
        A scalar in float64, in [0, 1].

    Example:
        >>> import torch
        >>> from lipsformer.graph.diagnostics import mean_cosine
        >>> mean_cosine(torch.ones(5, 4)).item(), mean_cosine(torch.tensor([[3.0], [-1.0]])).item()
        (1.0, 0.0)
        >>> mean_cosine(torch.eye(2)).item()  # 2 of the 4 pairs: each row with itself
        0.5
    """
    x = x.double()
    norm = x.norm(dim=1, keepdim=True)
    return (x / torch.where(norm > 0.0, norm, 1.0)).mean(dim=0).square().sum()


def dirichlet_energy(x: Tensor, edge_index: Tensor) -> Tensor:
    r"""Return how much X [V, C] differs across edges.

    .. math:: \frac12 \sum_{(j, i) \in E}
        \left|\frac{x_i}{\sqrt{1 + d_i}} - \frac{x_j}{\sqrt{1 + d_j}}\right|_2^2,
        \quad d = \text{in-degree}

    It is 0 if the scaled representations of neighbors agree, as those of constant features do on a
    graph whose nodes all have the same in-degree. It is computed in double precision, like
    `distance_from_mean`.

    Args:
        x: Representations, [V, C].
        edge_index: Sources and targets, [2, E]. An undirected edge is listed in both directions.

    Returns:
        A scalar in float64.

    Example:
        >>> import torch
        >>> from lipsformer.graph.diagnostics import dirichlet_energy
        >>> pair = torch.tensor([[0, 1], [1, 0]])  # two nodes with an edge in both directions
        >>> dirichlet_energy(torch.ones(2, 3), pair).item()
        0.0
        >>> round(dirichlet_energy(torch.tensor([[0.0], [2.0]]), pair).item(), 6)  # (2 / sqrt(2))^2
        2.0
    """
    x = x.double()
    source, target = listed_edges(edge_index)
    scaled = x * (1 + degree(target, x.size(0), x.dtype)).rsqrt().unsqueeze(-1)
    return 0.5 * (scaled[target] - scaled[source]).square().sum()


def attention_statistics(attn: Tensor, target: Tensor, num_nodes: int) -> tuple[float, float]:
    """Return the mean entropy and the largest score difference of attention weights.

    Args:
        attn: Weights after the softmax, [E, H].
        target: Target of each edge, [E].
        num_nodes: Number of nodes.

    Returns:
        A pair. The first number is the entropy divided by that of uniform attention, averaged over
        heads and over the nodes that have at least two neighbors: 1 for uniform attention, and NaN
        if there are no such nodes. The second is the largest difference of two scores in one
        neighborhood, computed from the weights: 0 for uniform attention.

    Example:
        >>> import torch
        >>> from lipsformer.graph.diagnostics import attention_statistics
        >>> uniform, target = torch.full((4, 1), 0.5), torch.tensor([0, 0, 1, 1])
        >>> attention_statistics(uniform, target, num_nodes=2)
        (1.0, 0.0)
    """
    index = target.unsqueeze(-1).expand_as(attn)
    log_attn = attn.clamp_min(torch.finfo(attn.dtype).tiny).log()
    entropy = scatter(-attn * log_attn, target, dim_size=num_nodes)
    count = degree(target, num_nodes, attn.dtype)
    several = count > 1
    relative = entropy[several] / count[several].log().unsqueeze(-1)
    shape = (num_nodes, attn.size(1))
    low = log_attn.new_full(shape, math.inf).scatter_reduce(0, index, log_attn, "amin")
    high = log_attn.new_full(shape, -math.inf).scatter_reduce(0, index, log_attn, "amax")
    spread = (high - low)[several]
    return relative.mean().item(), spread.max().item() if spread.numel() else 0.0


def layer_profile(
    model: GraphNet, x: Tensor, edge_index: Tensor | SortedEdges, y: Tensor, mask: Tensor
) -> dict[str, list[float]]:
    """Measure every layer of a model in evaluation mode, and clear the gradients of the model.

    Args:
        model: The network.
        x: Features, [V, F_in].
        edge_index: [2, E] or a `SortedEdges`.
        y: Labels, [V].
        mask: Nodes in the loss, [V].

    Returns:
        Lists with one entry per state, beginning with the output of the encoder:
        `distance_from_mean`, `gradient_distance_from_mean` (of dLoss/dX), `mean_cosine`,
        `dirichlet_energy`. Lists with one entry per layer: `gradient_norm` (of all parameters of
        the layer), for GAT layers `attention_entropy`, `score_spread`, `attention_bound`, and for
        residual GCN layers `layer_bound`, the Lipschitz constant 1 + |W|_2 |A|_2. It is inf if the
        convolution does not multiply by the normalized adjacency A.

    Example:
        >>> import torch
        >>> from lipsformer.graph import ResidualGCN
        >>> from lipsformer.graph.diagnostics import layer_profile
        >>> model = ResidualGCN(4, 8, 3, num_layers=2, bound=0.5)
        >>> pair, y = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1])
        >>> mask = torch.tensor([True, True])
        >>> profile = layer_profile(model, torch.randn(2, 4), pair, y, mask)
        >>> [round(bound, 3) for bound in profile["layer_bound"]]  # 1 + 0.5 |A|, and |A| = 1
        [1.5, 1.5]
    """
    with modes_restored(model):
        return _profile(model.eval(), x, edge_index, y, mask)


def _profile(
    model: GraphNet, x: Tensor, edge_index: Tensor | SortedEdges, y: Tensor, mask: Tensor
) -> dict[str, list[float]]:
    model.zero_grad(set_to_none=True)
    sorted_edges = SortedEdges.of(edge_index, x.size(0), x.size(0))
    edge_index = listed_edges(sorted_edges)
    logits, states = model.forward_intermediates(x, sorted_edges)
    states = [state.to_dense() if state.layout is torch.sparse_csr else state for state in states]
    tracked = [value for value in (*states, *model.parameters()) if value.requires_grad]
    loss = F.cross_entropy(logits[mask], y[mask])
    found = torch.autograd.grad(loss, tracked, allow_unused=True)
    gradients = dict(zip(map(id, tracked), found, strict=True))
    profile: dict[str, list[float]] = {
        "distance_from_mean": [distance_from_mean(state).item() for state in states],
        "gradient_distance_from_mean": [
            distance_from_mean(gradients[id(state)]).item() if id(state) in gradients else 0.0
            for state in states
        ],
        "mean_cosine": [mean_cosine(state).item() for state in states],
        "dirichlet_energy": [dirichlet_energy(state, edge_index).item() for state in states],
        "gradient_norm": [_norm(layer, gradients) for layer in model.layers],
    }
    norm_of_graph = functools.cache(adjacency_sigma_bound)
    with torch.no_grad():
        for layer, state in zip(model.layers, states[:-1], strict=True):
            conv, measured = getattr(layer, "conv", None), {}
            if isinstance(layer, ResidualLayer) and isinstance(conv, GCNConv):
                sigma = torch.linalg.matrix_norm(conv.lin.weight.double(), 2).item()
                usual = takes_normalized_adjacency(conv)
                norm = norm_of_graph(edge_index, x.size(0)) if usual else math.inf
                bound = sigma * norm + float(layer.residual)
                measured = {"layer_bound": bound}
            if isinstance(conv, LipschitzGATConv):
                _, (edges, attn) = conv(state, sorted_edges, return_attention_weights=True)
                entropy, spread = attention_statistics(attn, edges[1], x.size(0))
                bound = gat_attention_bound(conv, sorted_edges, x.size(0)).max().item()
                measured = {
                    "attention_entropy": entropy,
                    "score_spread": spread,
                    "attention_bound": bound,
                }
            for key, value in measured.items():
                profile.setdefault(key, []).append(value)
    return profile


def gradient_norms(model: GraphNet) -> list[float]:
    """Return the 2-norm of the gradient of each layer that the last backward pass computed.

    Args:
        model: The network. A layer without gradients gets 0.

    Example:
        >>> import torch
        >>> from lipsformer.graph import SparseGCNConv
        >>> from lipsformer.graph.diagnostics import gradient_norms
        >>> from lipsformer.graph.models import GraphNet
        >>> layer, same = SparseGCNConv(1, 1, bias=False), torch.nn.Identity()
        >>> model = GraphNet(same, [layer], same)  # one weight w: ones become w at both nodes
        >>> model(torch.ones(2, 1), torch.tensor([[0, 1], [1, 0]])).sum().backward()
        >>> [round(norm, 6) for norm in gradient_norms(model)]
        [2.0]
    """
    gradients = {id(p): p.grad for p in model.parameters()}
    return [_norm(layer, gradients) for layer in model.layers]


def _norm(module: nn.Module, gradients: Mapping[int, Tensor | None]) -> float:
    parts = [gradients.get(id(p)) for p in module.parameters()]
    squares = [part.double().square().sum() for part in parts if part is not None]
    return math.sqrt(sum(square.item() for square in squares))


__getattr__ = renamed(__name__)
