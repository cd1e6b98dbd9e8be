"""LipschitzNorm: attention scores divided by the norms of their inputs.

A score that grows with its inputs gives attention an unbounded gradient. Dividing each score by the
weight's norm and by the largest input norm of its neighbourhood bounds both the score and its
derivative. One core serves dense attention (the neighbourhood is a window) and graphs (it is the
set of edges that share a target): only ``reduce``, the neighbourhood maximum, differs.

Reference: Dasoulas, Scaman, Virmaux, "Lipschitz Normalization for Self-Attention Layers with
Application to Graph Neural Networks", ICML 2021.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "dense_max",
    "dense_quadratic_scale",
    "linear_attention_bound",
    "linear_scale",
    "quadratic_attention_bound",
    "quadratic_scale",
    "released_linear_scale",
    "segment_max",
    "squared_norm",
    "theorem_bound",
]

Reduce = Callable[[Tensor], Tensor]


def squared_norm(x: Tensor) -> Tensor:
    """Squared Euclidean norm over the last axis, at least in single precision."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    return x.square().sum(dim=-1)


def dense_max(values: Tensor) -> Tensor:
    """Maximum over the last axis, which is kept: [..., N] -> [..., 1]."""
    return values.amax(dim=-1, keepdim=True)


def segment_max(values: Tensor, index: Tensor, num_segments: int) -> Tensor:
    """Maximum of non-negative values by segment; 0 for an empty one.

    Equal maxima share the derivative evenly.

    Args:
        values: [E, H], none negative.
        index: segment of each row, [E].
        num_segments: number of segments N.

    Returns:
        [N, H].
    """
    index = index.unsqueeze(-1).expand_as(values)
    # -1 lies below all values, so that it never shares the derivative of a maximum
    empty = values.new_full((num_segments, values.size(1)), -1)
    return empty.scatter_reduce(0, index, values, "amax").clamp_min(0)


def linear_scale(
    neighbor_sq: Tensor,
    target_sq: Tensor | float,
    weight: Tensor,
    *,
    reduce: Reduce,
    att_norm: float = 4.0,
    scale_individually: bool = True,
    eps: float = 1e-12,
) -> Tensor:
    """Factor that LipschitzNorm puts on a linear score.

    1 / (att_norm |a|_2 sqrt(max_k |h_k|^2 + |h_i|^2)) for the score a_l . h_j + a_r . h_i of
    target i, a = [a_l || a_r]. With ``target_sq=0`` and ``att_norm=1`` it is the paper's
    normalisation of g(X) = Q^T X.

    Args:
        neighbor_sq: squared norms of the inputs, [E, H] for edges or [..., N] for windows.
        target_sq: squared norms of the targets, shaped like what ``reduce`` returns.
        weight: score weights per head, [H, D]; a single head for windows, [1, D].
        reduce: maximum over the neighbourhood, such as ``dense_max`` or ``segment_max``.
        att_norm: constant factor, above 0; the scores then lie within 1/att_norm. The paper's code
            uses 4, twice what the theorem asks for.
        scale_individually: one norm of the weight per head, or one over all heads.
        eps: added to every squared norm, so that zero inputs give score 0 and finite derivatives.

    Returns:
        The factor, shaped like what ``reduce`` returns, in single precision or better.
    """
    weight_sq = squared_norm(weight)
    if not scale_individually:
        weight_sq = weight_sq.sum()
    inputs = (reduce(neighbor_sq) + target_sq + eps).rsqrt()
    return inputs * (weight_sq + eps).rsqrt() / att_norm


def released_linear_scale(
    neighbor_sq: Tensor,
    weight: Tensor,
    index: Tensor,
    num_nodes: int,
    *,
    att_norm: float = 4.0,
    scale_individually: bool = True,
    eps: float = 1e-12,
) -> Tensor:
    """Factor on a linear score as the authors' code computes it, for comparison only.

    Deviation: the maxima [N, H] are flattened and then looked up by node, which reads another
    node's or head's value when H > 1, and the source's norm stands in place of the target's.

    Args:
        neighbor_sq: squared norms of the sources, [E, H].
        weight: score weights per head, [H, D].
        index: target of each edge, [E].
        num_nodes: number of targets N.
        att_norm: see ``linear_scale``.
        scale_individually: see ``linear_scale``.
        eps: see ``linear_scale``.

    Returns:
        One factor per edge and head, [E, H].
    """

    def misread_maximum(values: Tensor) -> Tensor:
        return segment_max(values, index, num_nodes).flatten()[index].unsqueeze(-1)

    return linear_scale(
        neighbor_sq,
        neighbor_sq,
        weight,
        reduce=misread_maximum,
        att_norm=att_norm,
        scale_individually=scale_individually,
        eps=eps,
    )


def quadratic_scale(
    query_sq: Tensor, key_sq: Tensor, value_sq: Tensor, *, reduce: Reduce, eps: float = 1e-12
) -> Tensor:
    """Factor that LipschitzNorm puts on a dot-product score.

    1 / max(uv, uw, vw) with u = |Q|_F, v = max_k |k_k|_2 and w = max_k |v_k|_2.

    Args:
        query_sq: squared Frobenius norm of the queries, shaped like what ``reduce`` returns.
        key_sq: squared norms of the keys, [E, H] for edges or [..., N] for windows.
        value_sq: squared norms of the values, shaped like ``key_sq``.
        reduce: maximum over the neighbourhood.
        eps: added to every squared norm, so that zero inputs give score 0 and finite derivatives.

    Returns:
        The factor, shaped like what ``reduce`` returns, in single precision or better.
    """
    u = (query_sq + eps).rsqrt()
    v = (reduce(key_sq) + eps).rsqrt()
    w = (reduce(value_sq) + eps).rsqrt()
    return torch.minimum(torch.minimum(u * v, u * w), v * w)


def dense_quadratic_scale(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-12) -> Tensor:
    """LipschitzNorm's factor for dense attention, one per head: scores = (q k^T) * factor.

    Multiply the queries by it and fused attention kernels stay usable. The factor is in single
    precision or better and may be as large as 1/eps, so cast the product, not the factor.

    Args:
        q: queries, [B, heads, M, d].
        k: keys, [B, heads, N, d].
        v: values, [B, heads, N, d].
        eps: see ``quadratic_scale``.

    Returns:
        [B, heads, 1, 1].
    """
    query_sq = squared_norm(q).sum(dim=-1, keepdim=True)
    scale = quadratic_scale(query_sq, squared_norm(k), squared_norm(v), reduce=dense_max, eps=eps)
    return scale.unsqueeze(-1)


def theorem_bound(num_queries: int, num_inputs: int, alpha: float = 1.0) -> float:
    """Paper's bound on the Lipschitz constant of normalised attention, Frobenius norm.

    e^alpha sqrt(m/n) + alpha sqrt(8); alpha = 1 for linear and sqrt(3) for quadratic scores.
    """
    return math.exp(alpha) * math.sqrt(num_queries / num_inputs) + alpha * math.sqrt(8)


def linear_attention_bound(num_queries: int, num_inputs: int, att_norm: float = 1.0) -> float:
    """Proved bound of X -> X softmax(g)^T, g = Q^T X / (att_norm |Q|_F max_j |x_j|), Q fixed.

    cosh(1/att_norm) sqrt(m/n) + 2/att_norm in Frobenius norm, below ``theorem_bound``; the proof
    stands in docs/graph.md.
    """
    return math.cosh(1 / att_norm) * math.sqrt(num_queries / num_inputs) + 2 / att_norm


def quadratic_attention_bound(num_queries: int, num_inputs: int) -> float:
    """Proved bound of (Q, K, V) -> V softmax(Q^T K / max(uv, uw, vw))^T, jointly in all three.

    cosh(1) sqrt(m/n) + 2 sqrt(2) in Frobenius norm, below ``theorem_bound``; the proof stands in
    docs/graph.md.
    """
    return math.cosh(1) * math.sqrt(num_queries / num_inputs) + 2 * math.sqrt(2)
