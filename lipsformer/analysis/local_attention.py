r"""Scaled cosine attention on a ball around one input: its Jacobian, and how fast that changes.

The global constant (`analysis/bounds/attention.py`) allows for the worst token, :math:`q = 0`, and
the worst attention weights. Here both are known up to what the ball can change: Theorem 28 of
docs/theorems.md.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipsformer.analysis.conv_norms import depthwise_operator
from lipsformer.analysis.local_norms import gram_sigma_bound
from lipsformer.layers import ScaledCosineAttention

PADDED = 1e30  # a length at which the normalization has no slope
TURN = 2.0 / math.sqrt(3.0)  # the largest |D^2 n(x)| (|x|^2 + eps) of the normalization n


@dataclass(frozen=True)
class Normalized:
    """Normalized tokens of every window, and how far they move when the tokens do.

    Attributes:
        lengths: |x| of every token, [W, H, N]; `PADDED` for padding, which never moves.
        values: The normalized tokens, [W, H, N, d].
        eps: Smoothing constant of the normalization; None for tokens that are not normalized.
        length: New length.

    Example:
        >>> import torch
        >>> tokens = torch.tensor([[[[3.0, 4.0]]]], dtype=torch.float64)
        >>> normalized = Normalized.of(tokens, torch.ones(1, 1, 1), eps=1e-2)
        >>> f"{normalized.slope(torch.tensor([[1.0]])).item():.3f}"  # 1 / 4 near a length of 5 - 1
        '0.250'
    """

    lengths: Tensor
    values: Tensor
    eps: float | None
    length: float

    @staticmethod
    def of(x: Tensor, real: Tensor, eps: float | None, length: float = 1.0) -> "Normalized":
        """Normalize tokens [W, H, N, d] as `cosine_normalize` does; `eps=None` leaves them."""
        lengths = x.norm(dim=-1)
        if eps is not None:
            x = x * (length / (lengths**2 + eps).sqrt()[..., None])
        return Normalized(lengths + PADDED * (1.0 - real), x, eps, length)

    def slope(self, radius: Tensor | float = 0.0) -> Tensor:
        """Bound the derivative of the normalization within `radius` ([W, H]), [W, H, N]."""
        if self.eps is None:
            return (self.lengths < PADDED).to(self.lengths.dtype)
        radius = torch.as_tensor(radius, dtype=self.lengths.dtype)
        shortest = (self.lengths - radius[..., None]).clamp_min(0.0)
        return self.length * (shortest**2 + self.eps).rsqrt()

    def moved(self, radius: Tensor) -> Tensor:
        """Bound how far a normalized token moves when its token moves by `radius`, [W, H]."""
        moved = self.slope(radius).amax(-1) * radius
        return moved if self.eps is None else moved.clamp(max=2.0 * self.length)


class LocalAttention:
    r"""What theorem 28 needs to know of the attention of W windows at the center of the ball.

    H heads attend among N tokens of a window. Its tokens before the projections are x, the
    normalized ones q~, k~ and v~, and the attention weights a_ij.

    Attributes:
        tau: Factor of the cosines of every head, [H].
        num_tokens: N.
        query: The normalized queries.
        key: The normalized keys.
        value: The normalized values.
        sigma: Norms of the projections of every head, [3, H].
        norm: Bound of the Jacobian of every head in its window at the center, [W, H], with respect
            to the tokens before the projections.
        slope_q: Norms of the derivatives of q~ by x, [W, H, N].
        slope_k: The same for k~.
        slope_v: The same for v~.
        spread_k: Largest standard deviation of k~ over a direction under a_i, [W, H, N].
        spread_v: The same for v~.
        diameter: Largest distance of two v~ of a window, [W, H].
        largest: max_i a_ij^(1/2), [W, H, N].
        column: (sum_i a_ij)^(1/2), [W, H, N].
        squares: (sum_i a_ij^2)^(1/2), [W, H, N].
        by_query: Largest standard deviation of the scores of row i by its query, [W, H, N].
        by_key_largest: max_ij of a_ij^(1/2) times the derivative of score ij by key j, [W, H].
        by_key_column: The largest column norm of the same matrix, [W, H].

    Example:
        >>> import torch
        >>> qkv = torch.ones(3, 1, 2, 5, 4, dtype=torch.float64)  # equal tokens: no score matters
        >>> core = ScaledCosineAttention(num_heads=2).double()
        >>> weight = torch.eye(4).double().expand(3, 2, 4, 4)
        >>> local = LocalAttention(core, qkv, None, torch.ones(1, 1, 5), weight)
        >>> bool((local.norm < 0.52).all())  # values have the length 2
        True
    """

    def __init__(
        self,
        attention: ScaledCosineAttention,
        qkv: Tensor,
        bias: Tensor | None,
        real: Tensor,
        weight: Tensor,
        lepe: Tensor | None = None,
        window: tuple[int, int] = (1, 1),
        write_out: bool = True,
    ) -> None:
        """Measure the attention at the center.

        Args:
            attention: The attention.
            qkv: [3, W, H, N, d], projected queries, keys and values of W windows, float64.
            bias: Added to the scores, [1, H, N, N]; None for none.
            real: [W, 1, N], 1 for tokens of the map and 0 for padding, whose query, key and value
                stay zero.
            weight: Projections of every head, [3, H, d, C].
            lepe: Kernels of the depthwise convolution of the values, [H * d, 1, 3, 3].
            window: (h, w) in tokens, for `lepe`.
            write_out: Whether to write out the Jacobians, without which `norm` is infinite.
        """
        tau = attention.tau()
        tau = torch.as_tensor(tau, dtype=qkv.dtype).flatten().expand(attention.num_heads)
        self.tau = tau
        self.num_tokens = qkv.shape[-2]
        self.query = Normalized.of(qkv[0], real, attention.eps)
        self.key = Normalized.of(qkv[1], real, attention.eps)
        if attention.value_scale is None:  # raw values
            self.value = Normalized.of(qkv[2], real, eps=None)
        else:
            self.value = Normalized.of(qkv[2], real, attention.eps, float(attention.value_scale))
        self.sigma = gram_sigma_bound(weight)
        weight = _without_silent_inputs(weight)
        q, k, v = self.query.values, self.key.values, self.value.values
        scores = tau[:, None, None] * (q @ k.mT)
        weights = (scores if bias is None else scores + bias).softmax(-1)  # [W, H, N, N]
        mean_k, mean_v = weights @ k, weights @ v
        # Derivatives of the normalized tokens by the projections' inputs, [W, H, N, d, C].
        slopes = [
            _derivative(x) @ w[:, None] * real[..., None, None]
            for x, w in zip((self.query, self.key, self.value), weight, strict=True)
        ]
        self.slope_q, self.slope_k, self.slope_v = (gram_sigma_bound(x) for x in slopes)
        apart_k = weights.sqrt()[..., None] * (k[:, :, None] - mean_k[..., None, :])
        self.by_query = tau[:, None] * gram_sigma_bound(apart_k @ slopes[0])
        direction = torch.einsum("whie,whjec->whijc", q, slopes[1])  # of dk_j that changes score ij
        apart_v = v[:, :, None] - mean_v[..., :, None, :]  # [W, H, i, j, d]
        self.norm = torch.full(qkv.shape[1:3], math.inf, dtype=qkv.dtype)
        if write_out:
            by_score = tau[:, None, None, None] * weights[..., None] * apart_v
            by_query = by_score.mT @ k[:, :, None] @ slopes[0]
            by_key = torch.einsum("whija,whijc->whiajc", by_score, direction)
            by_value = torch.einsum("whij,whjac->whiajc", weights, slopes[2])
            if lepe is not None:
                operator = depthwise_operator(lepe, window).unflatten(0, (len(tau), -1)).mT
                convolved = torch.einsum("haij,hac->hiajc", operator, weight[2])
                by_value = by_value + convolved * real[:, :, None, None, :, None]
            self.norm = _jacobian_norm(by_query, by_key + by_value, real)
        self.spread_k = gram_sigma_bound(apart_k)
        self.spread_v = gram_sigma_bound(weights.sqrt()[..., None] * apart_v)
        exact = "donot_use_mm_for_euclid_dist"
        self.diameter = torch.cdist(v, v, compute_mode=exact).flatten(-2).amax(-1)
        weights = weights * real[..., :, None]  # rows of padded queries are cut off later
        scores = tau[:, None, None] * weights.sqrt() * direction.norm(dim=-1)
        self.by_key_largest = scores.flatten(-2).amax(-1)
        self.by_key_column = scores.norm(dim=-2).amax(-1)
        self.largest = weights.amax(-2).sqrt()
        self.column = weights.sum(-2).sqrt()
        self.squares = weights.norm(dim=-2)

    def curvature(self, radius: Tensor) -> Tensor:
        r"""Bound the second derivative of every head within a radius, [W, H].

        The letters of theorem 28 stand beside its terms.

        Args:
            radius: How far the tokens of a window may move before the projections, [W, 1].
        """
        tau, raw = self.tau, self.value.eps is None
        sigma_q, sigma_k, sigma_v = self.sigma
        moved_q = self.query.moved(radius * sigma_q)
        moved_k = self.key.moved(radius * sigma_k)
        moved_v = self.value.moved(radius * sigma_v)
        slope_q = self.query.slope(radius * sigma_q)
        slope_k = self.key.slope(radius * sigma_k)
        slope_v = self.value.slope(radius * sigma_v)
        root = (tau * (moved_q + moved_k)).exp()  # weights change by at most its square
        up = (..., None)
        spread_k = (root[up] * self.spread_k + moved_k[up]).clamp(max=1.0)
        spread_v = root[up] * self.spread_v + moved_v[up]
        if not raw:
            spread_v = spread_v.clamp(max=self.value.length)
        diameter = self.diameter + 2.0 * moved_v  # V
        # How much the derivatives of the normalized tokens change within the ball.
        turn_q = TURN * sigma_q[:, None] ** 2 * slope_q**2
        turn_k = TURN * sigma_k[:, None] ** 2 * slope_k**2
        turn_v = TURN * sigma_v[:, None] ** 2 * slope_v**2 / self.value.length * (not raw)
        steep_q = self.slope_q + radius[up] * turn_q
        steep_k = self.slope_k + radius[up] * turn_k
        steep_v = self.slope_v + radius[up] * turn_v
        query = (  # A
            root[up] * (self.by_query + tau[:, None] * self.spread_k * radius[up] * turn_q)
            + (tau * moved_k)[up] * steep_q
        ).amax(-1)
        more = moved_q[up] * steep_k + radius[up] * turn_k
        key_largest = root * (self.by_key_largest + tau * (self.largest * more).amax(-1))  # B
        key_column = root * (self.by_key_column + tau * (self.column * more).amax(-1))  # B'
        value_largest = root * (self.largest * steep_v).amax(-1)  # F
        value_column = root * (self.column * steep_v).amax(-1)  # F'
        by_key = root * (self.largest * steep_k).amax(-1)
        crossed = tau * (spread_v * steep_q).amax(-1) * by_key  # E
        turning = (  # T
            tau * (spread_v * spread_k * turn_q).amax(-1)
            + tau * diameter * root**2 * (self.squares * turn_k).amax(-1)
            + root**2 * (self.squares * turn_v).amax(-1)
        )
        mixed = torch.minimum(value_largest * key_column, value_column * key_largest)
        return (
            diameter * (query**2 + 2.0 * query * key_largest + key_largest * key_column)
            + 2.0 * (crossed + query * value_largest + mixed)
            + turning
        )

    def widest(self) -> Tensor:
        """Bound the Jacobian of every head on all of space, without LePE, [H]."""
        if self.value.eps is None or self.query.eps is None:
            return torch.full_like(self.tau, math.inf)
        n, steep = self.num_tokens, self.query.eps**-0.5
        q, k, v = self.sigma
        return self.value.length * steep * (self.tau * (q + (n / 2) ** 0.5 * k) + n**0.5 * v)


def _jacobian_norm(by_own: Tensor, by_all: Tensor, real: Tensor) -> Tensor:
    """Bound the Jacobian of every head in its window, [W, H].

    Args:
        by_own: Derivative of output i by token i through its query, [W, H, N, d, C].
        by_all: Derivative of output i by token j through its key and value, [W, H, N, d, N, C].
        real: [W, 1, N], 1 for tokens of the map and 0 for padding.
    """
    same = torch.eye(real.shape[-1], dtype=by_own.dtype)[:, None, :, None]
    jacobian = (by_all + same * by_own[..., None, :]) * real[..., None, None, None]
    return gram_sigma_bound(jacobian.flatten(-2).flatten(2, 3))


def _without_silent_inputs(weight: Tensor) -> Tensor:
    """Return weights with the same norms of all their products, and at most 3 d inputs.

    The three projections of a head have 3 d outputs together. Inputs that are orthogonal to all of
    their rows change nothing, so the rows are written in an orthonormal basis of their span.

    Args:
        weight: [3, H, d, C].
    """
    rows = weight.transpose(0, 1).flatten(1, 2)  # [H, 3 d, C]
    if rows.shape[1] >= rows.shape[2]:
        return weight
    triangle = torch.linalg.qr(rows.mT, mode="r").R.mT  # [H, 3 d, 3 d]
    return triangle.unflatten(1, (3, -1)).transpose(0, 1)


def _derivative(x: Normalized) -> Tensor:
    """Return the derivative of the normalization at every token, [W, H, N, d, d]."""
    eye = torch.eye(x.values.shape[-1], dtype=x.values.dtype)
    if x.eps is None:
        return eye.expand(*x.values.shape, -1)
    unit = x.values / x.length
    return x.slope()[..., None, None] * (eye - unit[..., :, None] * unit[..., None, :])
