r"""Bounds of scaled cosine attention in the 2-norm over a whole window. Proofs: docs/lipschitz.md.

One head on N tokens: :math:`y_i = \nu \sum_j a_{ij} \tilde v_j` with :math:`a_i = softmax_j(\tau
\tilde q_i \cdot \tilde k_j + b_{ij})`. Its differential is :math:`\nu A\, d\tilde V` plus, row by
row, the covariance under :math:`a_i` of the values with the scores' differential. Values in the
unit ball have a covariance of norm at most 1, which gives

.. math:: |dY| \le \nu \epsilon^{-1/2} ( \tau \sqrt{|dQ|^2 + \min(m, N/2) |dK|^2} + \sqrt m |dV| )

where :math:`m \le N` bounds the column sums of A. Windows are independent, so the bound of one
window is the bound of the map.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipsformer.layers import LipschitzNormAttention


class HeadWeights(NamedTuple):
    """The projections of an attention, each [H, d, C], and the value's bias [H, d]."""

    query: Tensor
    key: Tensor
    value: Tensor
    value_bias: Tensor


def split_qkv(weight: Tensor, bias: Tensor | None, num_heads: int) -> HeadWeights:
    """Cut a fused projection into heads.

    Args:
        weight: [3 H d, C], query, key and value one after the other, heads inside.
        bias: [3 H d] or None.
        num_heads: H.
    """
    weight = weight.detach().double()
    offset = weight.new_zeros(len(weight)) if bias is None else bias.detach().double()
    query, key, value = weight.unflatten(0, (3, num_heads, -1)).unbind(0)
    return HeadWeights(query, key, value, offset.unflatten(0, (3, num_heads, -1))[2])


def max_abs_score(attention: Any) -> Tensor:
    """Return the largest |score| per head, [H], float64: tau, or 1 with LipschitzNorm."""
    tau = 1.0 if isinstance(attention, LipschitzNormAttention) else attention.tau()
    tau = torch.as_tensor(tau).detach().double().cpu().flatten()
    return tau.expand(attention.num_heads)


def column_mass(tau: Tensor, num_tokens: int, bias: Tensor | None = None) -> Tensor:
    r"""Bound the column sums of the attention matrix over all inputs, one value per head.

    The cosines change the odds of every entry by at most :math:`e^{2\tau}` from those of the
    bias alone, p = softmax(b): :math:`a_{ij} \le p_{ij} / (p_{ij} + (1 - p_{ij}) e^{-2\tau})`.

    Args:
        tau: [H].
        num_tokens: N.
        bias: Added to the scores, [H, N, N]; None for none.

    Returns:
        [H], between 1 and N.
    """
    odds = torch.exp(-2.0 * tau.double())
    if bias is None:
        p = torch.full_like(odds, 1.0 / num_tokens)
        return num_tokens * p / (p + (1.0 - p) * odds)
    p = bias.detach().double().cpu().softmax(-1)
    return (p / (p + (1.0 - p) * odds[:, None, None])).sum(-2).amax(-1)


def operator_norms(weights: Tensor) -> Tensor:
    """Return the largest singular value of each [d, C] matrix of [..., d, C]."""
    rows = weights if weights.shape[-2] <= weights.shape[-1] else weights.mT
    return torch.linalg.eigvalsh(rows @ rows.mT)[..., -1].clamp_min(0.0).sqrt()


class AttentionBound(NamedTuple):
    """What one attention (all its heads, before the output projection) contributes.

    Attributes:
        gram: [C, C] with |dY|^2 <= trace(dX gram dX^T).
        paper_squared: Square of the bound by the paper's Theorem 1, heads as root sum of squares.
        radius_squared: Square of the largest length of an output token.
    """

    gram: Tensor
    paper_squared: float
    radius_squared: float


def attention_bound(
    attention: Any,
    heads: HeadWeights,
    num_tokens: int,
    radius: float = math.inf,
    mass: Tensor | None = None,
    local_norm: Tensor | None = None,
    local_radius: float = 0.0,
) -> AttentionBound:
    r"""Bound x -> attention(q(x), k(x), v(x)) + local(v(x)) on one window.

    A head has two paths, scores (query and key stacked, the key times min(m, N/2)^(1/2)) and
    values. With :math:`c_i` their factors and :math:`S = \sum_i c_i |W_i|`, Cauchy and Schwarz give

    .. math:: (\sum_i c_i |W_i dx|)^2 \le S\, dx^T (\sum_i \tfrac{c_i}{|W_i|} W_i^T W_i)\, dx,

    never above :math:`S^2 |dx|^2` and additive over heads and branches.

    Args:
        attention: ``LipschitzNormAttention`` or ``ScaledCosineAttention``; with raw values of the
            latter (``value_scale`` None) the bound is finite only for a finite ``radius``.
        heads: Its projections.
        num_tokens: Tokens of a window, padding included.
        radius: Largest 2-norm of a token x.
        mass: Bound of the column sums of the attention matrix, [H], as of :func:`column_mass`; N if
            None, which holds whatever is added to the scores.
        local_norm: Norm of a linear map of the values that is added to each head's output, [H].
        local_radius: Factor by which that map may lengthen the longest token of values.
    """
    if isinstance(attention, LipschitzNormAttention):
        return _lipschitz_norm_bound(heads, num_tokens, radius, mass, local_norm, local_radius)
    tau = max_abs_score(attention)
    mass = torch.full_like(tau, num_tokens) if mass is None else mass
    steep = attention.eps**-0.5
    norms = [operator_norms(w).cpu() for w in (heads.query, heads.key, heads.value)]
    reach = norms[2] * radius  # raw values lie in a ball of this radius around the bias
    longest = reach + heads.value_bias.norm(dim=1).cpu()
    if attention.value_scale is None:
        spread, value_factor = reach, mass.sqrt()
        attended_radius = longest.square().sum()
        paper_squared = math.inf
    else:
        nu = attention.value_scale.abs().item()
        spread, value_factor = torch.full_like(tau, nu), nu * steep * mass.sqrt()
        attended_radius = torch.tensor(nu**2 * attention.num_heads)
        paper = theorem_bound(num_tokens, nu, tau, attention.eps, norms)
        if local_norm is not None:
            paper = paper + local_norm * norms[2]
        paper_squared = paper.square().sum().item()
    if num_tokens == 1:  # the softmax of one score is constant
        spread = torch.zeros_like(spread)
    if local_norm is not None:
        value_factor = value_factor + local_norm.cpu()
    key_factor = mass.clamp(max=num_tokens / 2).sqrt().to(heads.key)
    scores = torch.cat([heads.query, key_factor[:, None, None] * heads.key], dim=1)
    paths = [
        (scores, operator_norms(scores).cpu(), spread * tau * steep),
        (heads.value, norms[2], value_factor),
    ]
    total = sum(factor * norm for _, norm, factor in paths)
    gram = torch.zeros_like(scores[0].mT @ scores[0])
    for weight, norm, factor in paths:
        share = torch.where(norm > 0.0, total * factor / norm, 0.0).to(weight.device)
        gram = gram + torch.einsum("h,hdi,hdj->ij", share, weight, weight)
    local = local_radius * longest.square().sum().sqrt().item() if local_radius > 0.0 else 0.0
    radius_squared = (attended_radius.sqrt().item() + local) ** 2
    return AttentionBound(gram, paper_squared, radius_squared)


def _lipschitz_norm_bound(
    heads: HeadWeights,
    num_tokens: int,
    radius: float,
    mass: Tensor | None,
    local_norm: Tensor | None,
    local_radius: float,
) -> AttentionBound:
    r"""Bound attention whose scores LipschitzNorm keeps within [-1, 1], local path included.

    Per head :math:`|dY| \le 2 |dQ| + 2^{-1/2} |dK| + (1 + \sqrt m) |dV|`, the worst of the three
    cases of the normalising maximum. The theorem of Dasoulas et al. for quadratic scores stands in
    the place of the paper's.
    """
    stacked = torch.cat(heads[:3], dim=1)
    mass = torch.full((len(stacked),), float(num_tokens)).double() if mass is None else mass
    local = torch.zeros_like(mass) if local_norm is None else local_norm
    squared = 4.5 + (1.0 + mass.sqrt() + local).square()
    gram = torch.einsum("h,hdi,hdj->ij", squared.to(stacked.device), stacked, stacked)
    theorem = lipschitz_norm_theorem(num_tokens, num_tokens, math.sqrt(3.0)) + local
    paper = torch.maximum(theorem, squared.sqrt()) * operator_norms(stacked).cpu()
    longest = operator_norms(heads.value).cpu() * radius + heads.value_bias.norm(dim=1).cpu()
    reach = (1.0 + local_radius) * longest.square().sum().sqrt().item()
    return AttentionBound(gram, paper.square().sum().item(), reach**2)


def lipschitz_norm_theorem(num_queries: int, num_inputs: int, alpha: float = 1.0) -> float:
    r"""Return the bound that Dasoulas et al. 2021 state for LipschitzNorm, in Frobenius norm.

    .. math:: e^{\alpha} \sqrt{m/n} + \alpha \sqrt 8

    Args:
        num_queries: m.
        num_inputs: n.
        alpha: 1 for linear scores, sqrt(3) for dot-product scores.
    """
    return math.exp(alpha) * math.sqrt(num_queries / num_inputs) + alpha * math.sqrt(8.0)


def gram_norm(gram: Tensor) -> float:
    """Return the bound that a sum of Gram matrices stands for."""
    if not gram.isfinite().all():
        return math.inf
    return torch.linalg.eigvalsh(gram)[-1].clamp_min(0.0).sqrt().item()


def theorem_bound(
    num_tokens: int, nu: float, tau: Tensor, eps: float, norms: list[Tensor]
) -> Tensor:
    r"""Return the bound of the paper's Theorem 1, per head.

    .. math:: \nu \epsilon^{-1/2} ( 2 (N-1) \tau |W^Q| + 2 N (N-1) \tau |W^K| + 2 N |W^V| )

    Args:
        num_tokens: N.
        nu: Length of the values.
        tau: [H].
        eps: Smoothing constant of the normalisation.
        norms: 2-norms of the query's, key's and value's projection, each [H].
    """
    query, key, value = norms
    n = num_tokens
    return nu * eps**-0.5 * (2 * (n - 1) * tau * (query + n * key) + 2 * n * value)


def refined_theorem_bound(
    num_tokens: int, nu: float, tau: Tensor, eps: float, norms: list[Tensor]
) -> Tensor:
    r"""Return Theorem 1 with the softmax's own constant 1/2, per head (Nair 2025).

    .. math:: \nu \epsilon^{-1/2} ( N \tau |W^Q| + N^2 \tau |W^K| + 2 N |W^V| )

    Args:
        num_tokens: N.
        nu: Length of the values.
        tau: [H].
        eps: Smoothing constant of the normalisation.
        norms: 2-norms of the query's, key's and value's projection, each [H].
    """
    query, key, value = norms
    n = num_tokens
    return nu * eps**-0.5 * (n * tau * (query + n * key) + 2 * n * value)
