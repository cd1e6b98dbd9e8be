"""LipschitzNorm: attention scores divided by the norms of their inputs.

A score that grows with its inputs gives attention an unbounded gradient. Dividing each score by the
weight's norm and by the largest input norm of its neighborhood bounds both the score and its
derivative. The same formulas serve dense attention (the neighborhood is a window) and graphs (it is
the set of edges that share a target): only `reduce`, the neighborhood maximum, differs.

Reference: Dasoulas, Scaman, Virmaux, "Lipschitz Normalization for Self-Attention Layers with
Application to Graph Neural Networks", ICML 2021.
"""

from collections.abc import Callable

import torch
from timm.layers import register_notrace_module, use_fused_attn
from torch import Tensor, nn

from lipsformer._arguments import check_count, check_fraction
from lipsformer.layers.cosine_attention import attend

__all__ = [
    "LipschitzNormAttention",
    "dense_max",
    "dense_quadratic_scale",
    "linear_scale",
    "quadratic_scale",
    "released_linear_scale",
    "segment_max",
    "squared_norm",
]

Reduce = Callable[[Tensor], Tensor]


def squared_norm(x: Tensor) -> Tensor:
    """Return the squared Euclidean norm over the last axis, at least in single precision.

    Args:
        x: [..., d].

    Returns:
        [...].

    Example:
        >>> import torch
        >>> from lipsformer.layers.lipschitz_norm import squared_norm
        >>> squared_norm(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        tensor([25.,  4.])
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    return x.square().sum(dim=-1)


def dense_max(values: Tensor) -> Tensor:
    """Return the maximum over the last axis, which is kept: [..., N] -> [..., 1].

    Example:
        >>> import torch
        >>> from lipsformer.layers.lipschitz_norm import dense_max
        >>> dense_max(torch.tensor([1.0, 9.0, 4.0]))
        tensor([9.])
    """
    return values.amax(dim=-1, keepdim=True)


def segment_max(values: Tensor, index: Tensor, num_segments: int) -> Tensor:
    """Return the maximum of non-negative values by segment, and 0 for an empty segment.

    Equal maxima share the derivative evenly.

    Args:
        values: [E, H], none negative.
        index: Segment of each row, [E], int64 in [0, N).
        num_segments: Number of segments N.

    Returns:
        [N, H].

    Example:
        >>> import torch
        >>> from lipsformer.layers.lipschitz_norm import segment_max
        >>> segment_max(torch.tensor([[1.0], [9.0], [4.0]]), torch.tensor([0, 0, 1]), 3).flatten()
        tensor([9., 4., 0.])
    """
    index = index.unsqueeze(-1).expand_as(values)
    # -1 lies below all values, so that it never shares the derivative of a maximum
    empty = values.new_full((num_segments, values.size(1)), -1)
    largest = empty.scatter_reduce(0, index, values, "amax")
    return largest.masked_fill(largest < 0, 0.0)  # clamp_min has no derivative at a maximum of 0


def linear_scale(
    neighbor_sq: Tensor,
    target_sq: Tensor | float,
    weight: Tensor,
    *,
    reduce: Reduce,
    att_norm: Tensor | float = 4.0,
    scale_individually: bool = True,
    eps: float = 1e-12,
) -> Tensor:
    """Return the factor by which LipschitzNorm multiplies a linear score.

    The factor is 1 / (att_norm |a|_2 sqrt(max_k |h_k|^2 + |h_i|^2)) for the score
    a_l . h_j + a_r . h_i of target i, with a = [a_l || a_r]. With `target_sq=0` and `att_norm=1` it
    is the paper's normalization of g(X) = Q^T X.

    Args:
        neighbor_sq: Squared norms of the inputs, [E, H] for edges or [..., N] for windows.
        target_sq: Squared norms of the targets, shaped like what `reduce` returns.
        weight: Score weights per head, [H, D]; a single head for windows, [1, D].
        reduce: Maximum over the neighborhood, such as `dense_max` or `segment_max`.
        att_norm: Constant factor, above 0, a number or one per head [H]; the scores then lie within
            1/att_norm. The paper's code uses 4, twice what the theorem asks for.
        scale_individually: True divides each head by the norm of its own weight, False divides all
            heads by the norm of all weights.
        eps: Added to every squared norm, so that zero inputs give score 0 and finite derivatives.

    Returns:
        The factor, shaped like what `reduce` returns, in single precision or better.

    Example:
        >>> import torch
        >>> from lipsformer.layers.lipschitz_norm import dense_max, linear_scale
        >>> neighbor_sq, weight = torch.tensor([1.0, 16.0]), torch.tensor([[3.0, 4.0]])
        >>> linear_scale(neighbor_sq, 9.0, weight, reduce=dense_max, att_norm=1.0)  # 1 / (5 * 5)
        tensor([0.0400])
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
    att_norm: Tensor | float = 4.0,
    scale_individually: bool = True,
    eps: float = 1e-12,
) -> Tensor:
    """Return the factor on a linear score as the authors' code computes it, for comparison.

    It differs from `linear_scale` in two ways. The authors' code flattens the maxima [N, H] and
    then looks them up by node, which reads the value of another node or head if H > 1. And it uses
    the norm of the source in place of that of the target.

    Args:
        neighbor_sq: Squared norms of the sources, [E, H].
        weight: Score weights per head, [H, D].
        index: Target of each edge, [E].
        num_nodes: Number of targets N.
        att_norm: See `linear_scale`.
        scale_individually: See `linear_scale`.
        eps: See `linear_scale`.

    Returns:
        One factor per edge and head, [E, H].

    Example:
        >>> import torch
        >>> from lipsformer.layers.lipschitz_norm import released_linear_scale
        >>> one_edge, weight = torch.tensor([[16.0, 9.0]]), torch.ones(2, 1)  # two heads
        >>> scale = released_linear_scale(one_edge, weight, torch.tensor([0]), 1, att_norm=1.0)
        >>> scale[0, 1]  # 1 / sqrt(16 + 9), although the 16 belongs to the other head
        tensor(0.2000)
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
    """Return the factor by which LipschitzNorm multiplies a dot-product score.

    The factor is 1 / max(uv, uw, vw) with u = |Q|_F, v = max_j |k_j|_2 and w = max_j |v_j|_2.

    Args:
        query_sq: Squared Frobenius norm of the queries, shaped like what `reduce` returns.
        key_sq: Squared norms of the keys, [E, H] for edges or [..., N] for windows.
        value_sq: Squared norms of the values, shaped like `key_sq`.
        reduce: Maximum over the neighborhood, such as `dense_max` or `segment_max`.
        eps: Added to every squared norm, so that zero inputs give score 0 and finite derivatives.

    Returns:
        The factor, shaped like what `reduce` returns, in single precision or better.

    Example:
        >>> import torch
        >>> from lipsformer.layers.lipschitz_norm import dense_max, quadratic_scale
        >>> query_sq, key_sq, value_sq = map(torch.tensor, ([4.0], [1.0, 0.0], [25.0, 9.0]))
        >>> quadratic_scale(query_sq, key_sq, value_sq, reduce=dense_max)  # 1 / (2 * 5)
        tensor([0.1000])
    """
    u = (query_sq + eps).rsqrt()
    v = (reduce(key_sq) + eps).rsqrt()
    w = (reduce(value_sq) + eps).rsqrt()
    return torch.minimum(torch.minimum(u * v, u * w), v * w)


def dense_quadratic_scale(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-12) -> Tensor:
    """Return LipschitzNorm's factor for dense attention, one per head: scores = (q k^T) * factor.

    Multiply the queries by it and fused attention kernels stay usable. The factor is in single
    precision or better and may be as large as 1/eps, so cast the product, not the factor.

    Args:
        q: Queries, [B, heads, M, d].
        k: Keys, [B, heads, N, d].
        v: Values, [B, heads, N, d].
        eps: See `quadratic_scale`.

    Returns:
        [B, heads, 1, 1].

    Example:
        >>> import torch
        >>> from lipsformer.layers.lipschitz_norm import dense_quadratic_scale
        >>> q, k = 2.0 * torch.ones(1, 1, 4, 1), torch.ones(1, 1, 3, 1)  # u = 4, v = w = 1
        >>> scale = dense_quadratic_scale(q, k, k)
        >>> ((q * scale) @ k.mT)[0, 0, 0]
        tensor([0.5000, 0.5000, 0.5000])
    """
    query_sq = squared_norm(q).sum(dim=-1, keepdim=True)
    scale = quadratic_scale(query_sq, squared_norm(k), squared_norm(v), reduce=dense_max, eps=eps)
    return scale.unsqueeze(-1)


class LipschitzNormAttention(nn.Module):
    r"""Dot-product attention whose scores are divided by the norms of its inputs, per head.

    .. math:: \mathrm{softmax}(Q K^T / \max(uv, uw, vw) + B) V, \quad
        u = |Q|_F,\ v = \max_j |k_j|_2,\ w = \max_j |v_j|_2

    Lipschitz in Frobenius norm, jointly in Q, K and V, with the constant
    :math:`\cosh(1) \sqrt{m/n} + 2 \sqrt 2` for m queries and n keys if there is no bias B. With a
    bias it is at most :math:`\sqrt{4.5 + (1 + \sqrt m)^2}` (proofs: docs/theorems.md, theorem 13).

    Shape:
        q, k, v: [B, H, N, d]; bias: broadcastable to [B, H, N, N]; output [B, H, N, d].

    Example:
        >>> import torch
        >>> from lipsformer.layers import LipschitzNormAttention
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)  # 2 heads, 5 tokens, 8 channels
        >>> LipschitzNormAttention(num_heads=2)(q, k, v).shape
        torch.Size([1, 2, 5, 8])

    Reference:
        Dasoulas et al. 2021, LipschitzNorm for quadratic scores.
    """

    def __init__(self, num_heads: int, attn_drop: float = 0.0) -> None:
        """Create the layer, which has no parameters.

        Args:
            num_heads: Number of heads H, at least 1.
            attn_drop: Dropout probability of the attention weights in training.

        Raises:
            ValueError: If `num_heads` is below 1, or `attn_drop` is not in [0, 1].
        """
        super().__init__()
        check_count("num_heads", num_heads)
        check_fraction("attn_drop", attn_drop)
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.fused_attn = use_fused_attn()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend with queries `q`, keys `k` and values `v`, adding `bias` to the scores.

        A boolean bias says which keys take part in the softmax, as in PyTorch's attention. The
        factor of the scores is that of all keys. Queries without a key get 0.
        """
        # The scaled queries have at most eps^(-1/2), which must be a number of float16.
        eps = 1e-9 if q.dtype is torch.float16 else 1e-12
        q = (q * dense_quadratic_scale(q, k, v, eps)).to(q.dtype)
        return attend(
            q, k, v, bias, dropout=self.attn_drop, fused=self.fused_attn, training=self.training
        )

    def extra_repr(self) -> str:
        """Show the heads."""
        return f"{self.num_heads}"


register_notrace_module(LipschitzNormAttention)  # FX cannot trace the choice of a kernel
