r"""Bounds of attention in the 2-norm over a whole window. Proofs: docs/theorems.md.

One head of scaled cosine attention on N tokens computes
:math:`y_i = \nu \sum_j a_{ij} \tilde v_j` with
:math:`a_i = softmax_j(\tau \tilde q_i \cdot \tilde k_j + b_{ij})`. Its differential is the sum of
:math:`\nu A\, d\tilde V` and, row by row, the covariance under :math:`a_i` of the values with the
differential of the scores. Values in the unit ball have a covariance of norm at most 1. It follows
that

.. math:: |dY| \le \nu \epsilon^{-1/2} ( \tau \sqrt{|dQ|^2 + \min(m, N/2) |dK|^2} + \sqrt m |dV| )

where :math:`m \le N` bounds the column sums of A. Windows are independent of each other, so the
bound of one window is the bound of the whole map.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipsformer.analysis.bounds.composition import (
    Bound,
    Domain,
    carried,
    max_abs,
)
from lipsformer.analysis.bounds.core import (
    UnknownModuleError,
    require_unchanged,
)
from lipsformer.analysis.bounds.layers import (
    PASSIVE,
    bias_norm,
    linear_rounding,
    linear_sigma_bound,
)
from lipsformer.analysis.bounds.rounding import (
    MAX_NORM32,
    OUTWARD,
    UNIT,
    eigenvalue_bound,
    gamma,
    log10_of,
    log10_product,
    norm_bound,
    outward,
    sigma_bound,
)
from lipsformer.layers import Linear, LipschitzNormAttention, ScaledCosineAttention
from lipsformer.layers.cosine_attention import MAX_LOGIT_SCALE

# Relative error of exp in float32. PyTorch's least exact exponential allows 20 units in the last
# place, which is 2.4e-6. A slow test goes through all floats.
EXP_ERROR = 2.0**-18

# With a smaller eps the squares of tokens, which eps is added to, might underflow in float32.
LEAST_EPS = 2.0**-100

# Products of the weights of an attention may underflow in float64. What a Gram matrix loses in this
# way is less than this, for factors of the paths below 2^50.
TINY_SQUARE = 2.0**-900


class HeadWeights(NamedTuple):
    """The projections of an attention, head by head.

    Attributes:
        query: W^Q, [H, d, C].
        key: W^K, [H, d, C].
        value: W^V, [H, d, C].
        value_bias: Bias of the values, [H, d].

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds.attention import split_qkv
        >>> split_qkv(torch.randn(3 * 8, 8), bias=None, num_heads=2).query.shape
        torch.Size([2, 4, 8])
    """

    query: Tensor
    key: Tensor
    value: Tensor
    value_bias: Tensor


def split_qkv(weight: Tensor, bias: Tensor | None, num_heads: int) -> HeadWeights:
    """Split a fused projection into heads.

    Args:
        weight: [3 * H * d, C]: query, key and value in this order, each split into H heads.
        bias: [3 * H * d]; None for none.
        num_heads: H.
    """
    weight = weight.detach().double()
    offset = weight.new_zeros(len(weight)) if bias is None else bias.detach().double()
    query, key, value = weight.unflatten(0, (3, num_heads, -1)).unbind(0)
    return HeadWeights(query, key, value, offset.unflatten(0, (3, num_heads, -1))[2])


def check_attention(module: Any, num_heads: int, *cores: nn.Module) -> None:
    """Raise `UnknownModuleError` unless the parts of an attention are those that the proofs cover.

    Args:
        module: Attention with the parts `qkv`, `proj` and `proj_drop`.
        num_heads: Number of heads of each core.
        *cores: The parts that attend on queries, keys and values.
    """
    for projection in (module.qkv, module.proj):
        require_unchanged(projection, Linear, nn.Linear)
    require_unchanged(module.proj_drop, *PASSIVE)
    for core in cores:
        check_core(core, num_heads)


def check_core(core: Any, num_heads: int) -> None:
    """Raise `UnknownModuleError` unless attention on `num_heads` heads is what the proofs cover."""
    require_unchanged(core, ScaledCosineAttention, LipschitzNormAttention)
    if core.num_heads != num_heads:
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {core.num_heads} heads in the attention of "
            f"{num_heads} heads"
        )
    if isinstance(core, LipschitzNormAttention):
        return
    if core.value_scale is not None and core.value_scale.numel() != 1:
        raise UnknownModuleError(
            f"no Lipschitz bound is known for a value scale of shape "
            f"{tuple(core.value_scale.shape)}: use one number"
        )
    fixed, learned, eps = core.init_logit_scale, core.log_logit_scale, core.eps
    numbers = isinstance(fixed, (int, float)) and isinstance(eps, (int, float))
    if not numbers or not LEAST_EPS <= eps < math.inf:
        raise UnknownModuleError(f"no Lipschitz bound is known for tau={fixed} with eps={eps}")
    if learned is not None and learned.shape != (num_heads, 1, 1):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for a logit scale of shape {tuple(learned.shape)}: "
            f"use [{num_heads}, 1, 1], one number per head"
        )


def max_abs_score(attention: Any) -> Tensor:
    """Return the largest possible |score| per head, [H], float64.

    It is tau for `ScaledCosineAttention` and 1 for `LipschitzNormAttention`.
    """
    if isinstance(attention, LipschitzNormAttention):
        tau = 1.0
    elif attention.log_logit_scale is None:
        tau = attention.tau()
    else:  # in double precision: `attention.tau` rounds to float32
        learned = attention.log_logit_scale.detach().double()
        tau = learned.clamp(max=math.log(MAX_LOGIT_SCALE)).exp() * OUTWARD
    size = torch.as_tensor(tau, dtype=torch.float64).abs()
    return size.cpu().flatten().expand(attention.num_heads)


def projection_rounding(qkv: nn.Linear, domain: Domain) -> float:
    """Bound the error that float32 adds to the projections of a token, as a root mean square."""
    sigma = linear_sigma_bound(qkv.weight)
    if sigma * domain.norm + math.sqrt(domain.tokens) * bias_norm(qkv.bias) > MAX_NORM32:
        return math.inf  # float32 might overflow
    return linear_rounding(qkv.weight, qkv.bias, None, domain.rms, sigma)


def column_mass(tau: Tensor, num_tokens: int, bias: Tensor | None = None) -> Tensor:
    r"""Bound the column sums of the attention matrix over all inputs, one value per head.

    Without scores, the bias gives the weights p = softmax(b). Scores in [-tau, tau] change the odds
    of an entry by at most :math:`e^{2\tau}`. It follows that
    :math:`a_{ij} \le p_{ij} / (p_{ij} + (1 - p_{ij}) e^{-2\tau})`.

    Args:
        tau: [H].
        num_tokens: N.
        bias: Bias that is added to the scores, [H, N, N]; None for none.

    Returns:
        The bounds, [H], between 1 and N, rounded up.
    """
    odds = torch.exp(-2.0 * tau.double())
    # The exponentials err by at most 2 tau u, the sums by N u.
    upward = OUTWARD * (1.0 + 4.0 * UNIT * (num_tokens + 500.0))
    if bias is None:
        p = torch.full_like(odds, 1.0 / num_tokens)
        return upward * num_tokens * p / (p + (1.0 - p) * odds)
    p = bias.detach().double().cpu().softmax(-1)
    return upward * (p / (p + (1.0 - p) * odds[:, None, None])).sum(-2).amax(-1)


class AttentionBound(NamedTuple):
    """Bound of all heads of an attention, before the output projection.

    Attributes:
        gram: Matrix [C, C] with |dY|^2 <= trace(dX gram dX^T), up to rounding.
        terms: Number of products that are summed in an entry of `gram`.
        paper_squared: Square of the bound that follows from the paper's Theorem 1. The bounds of
            the heads are combined as the root of their sum of squares.
        radius_squared: Square of the largest 2-norm of an output token.
        rounding: Largest error of float32, as the root of the mean square over the output tokens,
            for inputs of the projections that are exact.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds.attention import AttentionBound
        >>> bound = AttentionBound(4.0 * torch.eye(3), 1, paper_squared=9.0, radius_squared=1.0)
        >>> f"{bound.value:.6f}"
        '2.000000'
    """

    gram: Tensor
    terms: int
    paper_squared: float
    radius_squared: float
    rounding: float = math.inf

    @property
    def value(self) -> float:
        """The bound: the root of the largest eigenvalue of `gram`, rounded up."""
        if not self.gram.isfinite().all():
            return math.inf
        largest = eigenvalue_bound(self.gram, self.terms).item()
        return outward(math.sqrt(largest + TINY_SQUARE))


class Window(NamedTuple):
    """What is known of the windows of an attention. The bound of one holds for the whole map.

    Attributes:
        num_tokens: Number of tokens of a window, padding included.
        radius: Largest 2-norm of a token x.
        mass: Bounds of the column sums of the attention matrix, [H], from `column_mass`. None
            stands for N, which holds for every bias and mask.
        largest_bias: Largest |bias| or |mask| that is added to the scores; None if nothing is. The
            theorem of Dasoulas et al. excludes a bias.
        padded: Whether a window may hold tokens whose query, key and value are zero.
        local_norm: Norm of a linear map of the values that is added to the output, per head, [H].
        local_radius: Largest factor by which that map increases the 2-norm of the longest value.
        qkv_rounding: Error of float32 in the projections of a token, as a root mean square over the
            tokens; inf if it is not known.

    Example:
        >>> Window(num_tokens=49).radius
        inf
    """

    num_tokens: int
    radius: float = math.inf
    mass: Tensor | None = None
    largest_bias: float | None = None
    padded: bool = False
    local_norm: Tensor | None = None
    local_radius: float = 0.0
    qkv_rounding: float = math.inf


def attention_bound(attention: Any, heads: HeadWeights, window: Window) -> AttentionBound:
    """Bound x -> attention(q(x), k(x), v(x)) + local(v(x)) on one window.

    Args:
        attention: `LipschitzNormAttention` or `ScaledCosineAttention`. If the latter attends to raw
            values (`value_scale=None`), the bound is finite only if the radius is finite.
        heads: The projections.
        window: The window.
    """
    if not isinstance(attention, LipschitzNormAttention):
        return _scaled_cosine_bound(attention, heads, window)
    bound = _lipschitz_norm_bound(heads, window)
    return bound if window.largest_bias is None else bound._replace(paper_squared=math.inf)


def _scaled_cosine_bound(attention: Any, heads: HeadWeights, window: Window) -> AttentionBound:
    r"""Bound scaled cosine attention and the local map.

    A head depends on its input in two ways: through the scores (the query stacked on the key times
    min(m, N/2)^(1/2)) and through the values. With :math:`c_i` the factors of the two and
    :math:`S = \sum_i c_i |W_i|`, the inequality of Cauchy and Schwarz gives

    .. math:: (\sum_i c_i |W_i dx|)^2 \le S\, dx^T (\sum_i \tfrac{c_i}{|W_i|} W_i^T W_i)\, dx.

    The right side is at most :math:`S^2 |dx|^2`, and the matrices of heads and partitions add up.
    """
    num_tokens, tau = window.num_tokens, max_abs_score(attention)
    mass = torch.full_like(tau, num_tokens) if window.mass is None else window.mass
    steep = attention.eps**-0.5
    norms = [sigma_bound(w).cpu() for w in (heads.query, heads.key, heads.value)]
    reach = norms[2] * window.radius  # The values lie in a ball of this radius around the bias.
    longest = reach + norm_bound(heads.value_bias, dim=1).cpu()
    if attention.value_scale is None:
        # A ball of half the length of the longest value holds that ball and 0.
        spread = torch.maximum(reach, longest / 2) if window.padded else reach
        value_factor = mass.sqrt()
        attended_radius = longest.square().sum()
        paper_squared = math.inf
    else:
        nu = attention.value_scale.abs().item()
        spread, value_factor = torch.full_like(tau, nu), nu * steep * mass.sqrt()
        attended_radius = torch.tensor(nu**2 * attention.num_heads, dtype=torch.float64)
        paper = scaled_cosine_theorem(num_tokens, nu, tau, attention.eps, norms)
        if window.local_norm is not None:
            paper = paper + window.local_norm * norms[2]
        paper_squared = paper.square().sum().item()
    if num_tokens == 1:  # The softmax of a single score is constant.
        spread = torch.zeros_like(spread)
    if window.local_norm is not None:
        value_factor = value_factor + window.local_norm.cpu()
    key_factor = mass.clamp(max=num_tokens / 2).sqrt().to(heads.key)
    scores = torch.cat([heads.query, key_factor[:, None, None] * heads.key], dim=1)
    paths = [
        (scores, sigma_bound(scores).cpu(), spread * tau * steep),
        (heads.value, norms[2], value_factor),
    ]
    gram = paths_gram(paths)
    local = 0.0
    if window.local_radius > 0.0:
        local = window.local_radius * longest.square().sum().sqrt().item()
    radius_squared = (attended_radius.sqrt().item() + local) ** 2
    slope = spread * tau * steep * key_factor.cpu().clamp_min(1.0) + value_factor
    rounding = slope.max().item() * window.qkv_rounding
    rounding += attended_radius.sqrt().item() * core_rounding(
        tau.max().item(), num_tokens, heads.query.shape[1], window.largest_bias or 0.0
    )
    terms = gram_terms(heads)
    return AttentionBound(gram, terms, paper_squared, radius_squared, outward(rounding))


def side_by_side(parts: Sequence[AttentionBound]) -> AttentionBound:
    """Bound attentions whose outputs are channels of one token."""
    return AttentionBound(
        gram=torch.as_tensor(sum(part.gram for part in parts)),
        terms=sum(part.terms for part in parts),
        paper_squared=sum(part.paper_squared for part in parts),
        radius_squared=sum(part.radius_squared for part in parts),
        rounding=math.sqrt(sum(part.rounding**2 for part in parts)),
    )


def gram_terms(heads: HeadWeights) -> int:
    """Return how many products the entries of a bound's Gram matrix sum: three for each row."""
    return 3 * heads.query.shape[0] * heads.query.shape[1]


def core_rounding(tau: float, num_tokens: int, dim: int, largest_bias: float) -> float:
    r"""Bound the error of attention in float32, relative to the longest value.

    A normalized vector has a relative error of at most :math:`\gamma_{d+8}`, which gives the error
    :math:`\delta` of a score. An attention weight is a quotient of exponentials, so its relative
    error is at most :math:`4 \delta`, and four times the errors of the argument and of the value
    of an exponential, for every rescaling of a fused softmax over blocks of at least 32 tokens.

    Args:
        tau: Largest logit scale.
        num_tokens: N.
        dim: Number of products in a score and in a norm.
        largest_bias: Largest |bias|.
    """
    score = tau * (gamma(3 * dim + 24) + EXP_ERROR) + gamma(2) * (tau + largest_bias)
    exponential = gamma(2) * 2.0 * (tau + largest_bias) + EXP_ERROR
    weight = 4.0 * score + 4.0 * (2 + num_tokens // 32) * exponential + gamma(2 * num_tokens + 8)
    return weight + gamma(dim + num_tokens + 16) if weight < 0.25 else math.inf


def paths_gram(paths: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    r"""Return the matrix G, [C, C], with :math:`(\sum_i c_i |W_i dx|)^2 \le dx^T G dx`.

    The matrices of the heads are added up.

    Args:
        paths: The matrices W_i [H, d, C], their 2-norms [H] and the factors c_i [H].
    """
    total = sum(factor * norm for _, norm, factor in paths)
    gram = torch.zeros_like(paths[0][0][0].mT @ paths[0][0][0])
    for weight, norm, factor in paths:
        share = torch.where(norm > 0.0, total * factor / norm, 0.0).to(weight.device)
        gram = gram + torch.einsum("h,hdi,hdj->ij", share, weight, weight)
    return gram


def _lipschitz_norm_bound(heads: HeadWeights, window: Window) -> AttentionBound:
    r"""Bound attention with LipschitzNorm, whose scores lie in [-1, 1], and the local map.

    Per head :math:`|dY| \le 2 |dQ| + 2^{-1/2} |dK| + (1 + \sqrt m) |dV|`, which is the worst of the
    three cases of the maximum in the normalization. `paper_squared` uses the theorem of Dasoulas et
    al. for quadratic scores.
    """
    stacked = torch.cat(heads[:3], dim=1)
    num_tokens, mass = window.num_tokens, window.mass
    mass = stacked.new_full((len(stacked),), num_tokens).cpu() if mass is None else mass
    local = torch.zeros_like(mass) if window.local_norm is None else window.local_norm
    squared = 4.5 + (1.0 + mass.sqrt() + local).square()
    gram = torch.einsum("h,hdi,hdj->ij", squared.to(stacked.device), stacked, stacked)
    theorem = lipschitz_norm_theorem(num_tokens, num_tokens, math.sqrt(3.0)) + local.cpu()
    paper = theorem * sigma_bound(stacked).cpu()
    reach = sigma_bound(heads.value).cpu() * window.radius
    longest = reach + norm_bound(heads.value_bias, dim=1).cpu()
    attended = longest.square().sum().sqrt().item()
    # The norms of the scores sum over all tokens of a window.
    products = num_tokens * heads.query.shape[1]
    rounding = squared.sqrt().max().item() * window.qkv_rounding
    rounding += attended * core_rounding(1.0, num_tokens, products, window.largest_bias or 0.0)
    radius_squared = ((1.0 + window.local_radius) * attended) ** 2
    paper_squared = paper.square().sum().item()
    terms = gram_terms(heads)
    return AttentionBound(gram, terms, paper_squared, radius_squared, outward(rounding))


def scaled_cosine_theorem(
    num_tokens: int, nu: float, tau: Tensor, eps: float, norms: list[Tensor]
) -> Tensor:
    r"""Return the bound of Theorem 1 of the LipsFormer paper, per head.

    .. math:: \nu \epsilon^{-1/2} ( 2 (N-1) \tau |W^Q| + 2 N (N-1) \tau |W^K| + 2 N |W^V| )

    Args:
        num_tokens: N.
        nu: Length of the values.
        tau: Logit scale, [H].
        eps: Smoothing constant of the normalization.
        norms: 2-norms of the projections of query, key and value, each [H].

    Reference:
        Qi et al. 2023 (LipsFormer), Theorem 1.
    """
    query, key, value = norms
    n = num_tokens
    return nu * eps**-0.5 * (2 * (n - 1) * tau * (query + n * key) + 2 * n * value)


def lipschitz_norm_theorem(num_queries: int, num_inputs: int, alpha: float = 1.0) -> float:
    r"""Return the bound of attention with LipschitzNorm by Dasoulas et al., in Frobenius norm.

    .. math:: e^\alpha \sqrt{m / n} + \alpha \sqrt 8

    Args:
        num_queries: m.
        num_inputs: n.
        alpha: 1 for linear scores and sqrt(3) for quadratic scores.

    Reference:
        Dasoulas et al. 2021, "Lipschitz Normalization for Self-Attention Layers".
    """
    return math.exp(alpha) * math.sqrt(num_queries / num_inputs) + alpha * math.sqrt(8)


def projected_bound(
    attended: AttentionBound,
    proj: nn.Linear,
    domain: Domain,
    scale: Tensor | None,
    factor: float = 1.0,
) -> Bound:
    """Return the bound of attention followed by a constant factor and an output projection.

    Args:
        attended: Bound of the attention.
        proj: The output projection.
        domain: Inputs of the attention.
        scale: Factor per channel that multiplies the output of the projection; None for none.
        factor: Constant >= 0 that multiplies the input of the projection.
    """
    sigma = linear_sigma_bound(proj.weight, scale)
    paper_sigma = linear_sigma_bound(proj.weight) * max_abs(scale)
    value, paper = factor * attended.value, factor * math.sqrt(attended.paper_squared)
    longest = outward(factor * math.sqrt(attended.radius_squared))
    # Errors are carried through the attention first, then through the projection.
    error = carried(value, domain.error, factor * attended.rounding, domain.tokens)
    norm = outward(math.sqrt(domain.tokens) * longest)
    between = Domain(size=domain.size, radius=longest, norm=norm, error=error)
    rounding = linear_rounding(proj.weight, proj.bias, scale, between.rms, sigma)
    radius = outward(sigma * longest + bias_norm(proj.bias, scale))
    output = Domain(
        size=domain.size,
        radius=radius,
        norm=outward(math.sqrt(domain.tokens) * radius),
        error=carried(sigma, error, rounding, domain.tokens),
        channels=len(proj.weight),
        channels_first=False,
    )
    return Bound(
        log10=log10_product((log10_of(sigma), log10_of(value))),
        paper_log10=log10_product((log10_of(paper_sigma), log10_of(paper))),
        output=output,
        input=domain,
    )
