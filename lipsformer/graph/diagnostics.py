"""What happens inside a deep graph network: sizes, similarity and gradients, layer by layer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.utils import add_remaining_self_loops, degree, scatter

from .conv import LipschitzGATConv
from .models import GraphNet

__all__ = [
    "attention_statistics",
    "dirichlet_energy",
    "gat_attention_bound",
    "gradient_norms",
    "layer_profile",
    "mean_cosine",
    "mu",
]


def mu(x: Tensor) -> Tensor:
    r"""Distance of the rows from their mean: :math:`|X - \frac{1}{N} 1 1^T X|_F`, X [N, C].

    Of dLoss/dX it measures gradient oversmoothing (towards 0) and expansion (towards infinity); in
    double precision, as the squares of either leave the range of single precision.

    Reference:
        Park and Kim 2024.
    """
    x = x.double()
    return torch.linalg.matrix_norm(x - x.mean(dim=0))


def mean_cosine(x: Tensor) -> Tensor:
    """Mean cosine over all pairs of rows of X [N, C], a row with itself included; 1 is collapse."""
    return F.normalize(x, dim=1).mean(dim=0).square().sum()


def dirichlet_energy(x: Tensor, edge_index: Tensor) -> Tensor:
    r"""Roughness of X [V, C] over the edges.

    .. math:: \frac12 \sum_{(j, i) \in E}
        \left|\frac{x_i}{\sqrt{1 + d_i}} - \frac{x_j}{\sqrt{1 + d_j}}\right|_2^2,
        \quad d = \text{in-degree}
    """
    source, target = edge_index
    scaled = x * (1 + degree(target, len(x), x.dtype)).rsqrt().unsqueeze(-1)
    return 0.5 * (scaled[target] - scaled[source]).square().sum()


def attention_statistics(attn: Tensor, target: Tensor, num_nodes: int) -> tuple[float, float]:
    """Mean entropy and largest score difference of attention weights.

    Args:
        attn: weights after the softmax, [E, H].
        target: target of each edge, [E].
        num_nodes: number of nodes.

    Returns:
        The entropy over that of uniform attention, averaged over nodes with at least two
        neighbours and over heads (1 is uniform; NaN without such nodes), and the largest difference
        of two scores of one neighbourhood, which the softmax keeps.
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


@torch.no_grad()
def gat_attention_bound(conv: LipschitzGATConv, edge_index: Tensor, num_nodes: int) -> float:
    r"""Proved Lipschitz constant, Frobenius norm, of the attention of a ``LipschitzGATConv``.

    Of the map h -> P(h) h of one head, before the projection's own norm: with S the largest sum
    over targets of the largest weight that a node's edges can have, and D the largest number of
    edges that leave a node,

    .. math:: \sqrt{S} + \frac{1}{c} (\sqrt{S + 1} + \sqrt{D + 1}), \quad
        S = \max_j \sum_{i: j \in N(i)} \min(1, e^{2/c} / |N(i)|)

    The proof stands in docs/graph.md. Infinite without LipschitzNorm.

    Args:
        conv: The layer; c is its ``att_norm``.
        edge_index: [2, E], without the self loops that the layer adds.
        num_nodes: Number of nodes.
    """
    if conv.score_norm is None or conv.released_code or not conv.scale_individually:
        return math.inf
    if conv.add_self_loops:
        edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=num_nodes)
    source, target = edge_index
    inverse = 1 / conv.att_norm
    largest = (math.exp(2 * inverse) / degree(target, num_nodes)).clamp_max(1)
    s = scatter(largest[target], source, dim_size=num_nodes).max().item()
    d = degree(source, num_nodes).max().item()
    return math.sqrt(s) + inverse * (math.sqrt(s + 1) + math.sqrt(d + 1))


def layer_profile(
    model: GraphNet, x: Tensor, edge_index: Tensor, y: Tensor, mask: Tensor
) -> dict[str, list[float]]:
    """Measure every layer of a model in evaluation mode; the model's gradients are cleared.

    Args:
        model: The network.
        x: Features, [V, F_in].
        edge_index: [2, E].
        y: Labels, [V].
        mask: Nodes in the loss, [V].

    Returns:
        Lists with one entry per state, the encoder's output first: ``mu``, ``gradient_mu`` (of
        dLoss/dX), ``mean_cosine``, ``dirichlet_energy``; and with one entry per layer:
        ``gradient_norm`` (of the layer's parameters together), and for GAT layers
        ``attention_entropy``, ``score_spread``, ``attention_bound``.
    """
    was_training = model.training
    model.eval()
    model.zero_grad(set_to_none=True)
    logits, states = model.forward_intermediates(x, edge_index)
    parameters = list(model.parameters())
    tracked = [state for state in states if state.requires_grad]
    loss = F.cross_entropy(logits[mask], y[mask])
    gradients = torch.autograd.grad(loss, [*tracked, *parameters], allow_unused=True)
    by_state = dict(zip(map(id, tracked), gradients, strict=False))
    by_parameter: dict[int, Tensor | None] = dict(
        zip(map(id, parameters), gradients[len(tracked) :], strict=True)
    )
    profile: dict[str, list[float]] = {
        "mu": [mu(state).item() for state in states],
        "gradient_mu": [mu(by_state[id(s)]).item() if id(s) in by_state else 0.0 for s in states],
        "mean_cosine": [mean_cosine(state).item() for state in states],
        "dirichlet_energy": [dirichlet_energy(state, edge_index).item() for state in states],
        "gradient_norm": [_norm(layer, by_parameter) for layer in model.layers],
    }
    with torch.no_grad():
        for layer, state in zip(model.layers, states[:-1], strict=True):
            conv = getattr(layer, "conv", None)
            if isinstance(conv, LipschitzGATConv):
                _, (edges, attn) = conv(state, edge_index, return_attention_weights=True)
                entropy, spread = attention_statistics(attn, edges[1], len(x))
                bound = gat_attention_bound(conv, edge_index, len(x))
                for key, value in (
                    ("attention_entropy", entropy),
                    ("score_spread", spread),
                    ("attention_bound", bound),
                ):
                    profile.setdefault(key, []).append(value)
    model.train(was_training)
    return profile


def gradient_norms(model: GraphNet) -> list[float]:
    """2-norm of each layer's gradient as the last backward pass left it, dropout included."""
    gradients = {id(p): p.grad for p in model.parameters()}
    return [_norm(layer, gradients) for layer in model.layers]


def _norm(module: nn.Module, gradients: dict[int, Tensor | None]) -> float:
    parts = [gradients[id(p)] for p in module.parameters()]
    squares = [part.double().square().sum() for part in parts if part is not None]
    return math.sqrt(sum(square.item() for square in squares))
