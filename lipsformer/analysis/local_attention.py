r"""The Lipschitz constant of scaled cosine attention on a ball around one input.

The global constant (`analysis/bounds/attention.py`) allows for the worst token, :math:`q = 0`, and
the worst attention weights. Here both are known up to what the ball can change. The theorem and its
proof stand in docs/lipschitz.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lipsformer.layers import ScaledCosineAttention

ITERATIONS = 5
PADDED = 1e30  # a length at which the normalization has no slope


def norm_above(matrices: Tensor) -> Tensor:
    r"""Bound the 2-norms of matrices [..., m, n] from above, by at most 3 percent for 32 rows.

    .. math:: |M|^2 = \lambda_{max}(G) \le |G^{2^k}|_F^{2^{-k}}, \quad G = M M^T

    This is Gram iteration (Delattre et al. 2023) with k = 5. Unlike power iteration it is never
    below the norm.

    Args:
        matrices: [..., m, n], float64.

    Returns:
        [...].
    """
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    gram = wide @ wide.mT
    log = torch.zeros_like(gram[..., 0, 0])
    for k in range(ITERATIONS + 1):
        length = gram.flatten(-2).norm(dim=-1).clamp_min(torch.finfo(gram.dtype).tiny)
        log = log + length.log() / 2**k
        gram = gram / length[..., None, None]
        if k < ITERATIONS:
            gram = gram @ gram
    return (0.5 * log).exp()


def positive_norm_above(matrices: Tensor, steps: int = 4) -> Tensor:
    r"""Bound the 2-norms of matrices of numbers >= 0 from above.

    For any positive vector x, Collatz and Wielandt give
    :math:`|M|^2 \le \max_j (M^T M x)_j / x_j`. A few power iterations make x good.

    Args:
        matrices: [..., m, n], all entries >= 0.
        steps: Number of power iterations.

    Returns:
        [...].
    """
    x = torch.ones_like(matrices[..., 0, :, None])
    ratio = x
    for _ in range(steps):
        image = matrices.mT @ (matrices @ x)
        ratio = image / x
        x = image / image.amax(-2, keepdim=True).clamp_min(1e-300) + 1e-6  # stays positive
    return ratio.flatten(-2).amax(-1).sqrt()


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

    def steeper(self, radius: Tensor) -> Tensor:
        """Bound by which factor a derivative grows within `radius`, [W, H]."""
        return (self.slope(radius) / self.slope().clamp_min(1.0 / PADDED)).amax(-1)

    def moved(self, radius: Tensor) -> Tensor:
        """Bound how far a normalized token moves when its token moves by `radius`, [W, H]."""
        moved = self.slope(radius).amax(-1) * radius
        return moved if self.eps is None else moved.clamp(max=2.0 * self.length)


class LocalAttention:
    r"""What the ball theorem needs to know of an attention at the center of the ball.

    For window w and head h, :math:`|dY| \le f_q |dQ| + f_k |dK| + f_v |dV|` on the ball.

    Example:
        >>> import torch
        >>> qkv = torch.ones(3, 1, 2, 5, 4, dtype=torch.float64)  # equal tokens: no score matters
        >>> core = ScaledCosineAttention(num_heads=2).double()
        >>> local = LocalAttention(core, qkv, None, torch.ones(1, 1, 5))
        >>> query, key, value = local.factors((torch.zeros(1, 2),) * 3)
        >>> bool((query < 1e-6).all() and (value < 0.51).all())  # values have the length 2
        True
    """

    def __init__(
        self, attention: ScaledCosineAttention, qkv: Tensor, bias: Tensor | None, real: Tensor
    ) -> None:
        """Measure the attention at the center.

        Args:
            attention: The attention.
            qkv: [3, W, H, N, d], projected queries, keys and values of W windows, float64.
            bias: Added to the scores, [1, H, N, N]; None for none.
            real: [W, 1, N], 1 for tokens of the map and 0 for padding, whose query, key and value
                stay zero.
        """
        tau = attention.tau()
        tau = torch.as_tensor(tau, dtype=qkv.dtype).flatten().expand(attention.num_heads)
        nu = attention.value_scale
        self.tau = tau
        self.num_tokens = qkv.shape[-2]
        self.query = Normalized.of(qkv[0], real, attention.eps)
        self.key = Normalized.of(qkv[1], real, attention.eps)
        raw = nu is None
        self.value = Normalized.of(
            qkv[2], real, None if raw else attention.eps, 1.0 if raw else float(nu)
        )
        q, k, v = self.query.values, self.key.values, self.value.values
        scores = tau[:, None, None] * (q @ k.mT)
        weights = (scores if bias is None else scores + bias).softmax(-1)  # [W, H, N, N]
        mean_k, mean_v = weights @ k, weights @ v
        self.spread_k = _spread(weights, k, mean_k)
        self.spread_v = _spread(weights, v, mean_v)
        second = torch.einsum("whij,whjd,whje->whide", weights, v, k)
        self.covariance = norm_above(second - mean_v[..., :, None] * mean_k[..., None, :])
        distance_v = torch.cdist(mean_v, v)
        self.mean_distance_k = (weights * torch.cdist(mean_k, k)).sum(-1)
        self.mean_distance_v = (weights * distance_v).sum(-1)
        weights = weights * real[..., :, None]  # rows of padded queries are cut off later
        by_key = weights * self.key.slope()[..., None, :]
        self.key_norm = positive_norm_above(by_key * distance_v)
        self.key_mass_norm = positive_norm_above(by_key)
        self.value_norm = positive_norm_above(weights * self.value.slope()[..., None, :])
        self.real = real

    def factors(self, radii: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return :math:`f_q, f_k, f_v` on the ball, each [W, H].

        Args:
            radii: How far a query, a key and a value of the window may move, each [W, H].
        """
        tau, n = self.tau, self.num_tokens
        moved_q, moved_k = self.query.moved(radii[0]), self.key.moved(radii[1])
        moved_v = self.value.moved(radii[2])
        change = tau * (moved_q + moved_k).clamp(max=2.0)  # of any score
        odds = (2.0 * change).exp()  # weights change by at most this factor
        more, root = odds - 1.0, odds.sqrt()
        up = (..., None)
        shift_v = moved_v[up] + more[up] * self.mean_distance_v
        shift_k = moved_k[up] + more[up] * self.mean_distance_k
        spread_v = root[up] * self.spread_v + moved_v[up]
        spread_k = root[up] * self.spread_k + moved_k[up]
        if self.value.eps is not None:
            spread_v = spread_v.clamp(max=self.value.length)
        near = (
            self.covariance
            + more[up] * self.spread_v * self.spread_k
            + root[up] * (moved_v[up] * self.spread_k + moved_k[up] * self.spread_v)
            + moved_v[up] * moved_k[up]
            + shift_v * shift_k
        )
        covariance = torch.minimum(near, spread_v * spread_k.clamp(max=1.0))
        f_q = tau * (covariance * self.query.slope(radii[0])).amax(-1)
        steeper_k = self.key.steeper(radii[1])
        steeper_v = self.value.steeper(radii[2])
        reach = moved_v + (shift_v * self.real).amax(-1)
        f_k = tau * odds * steeper_k * (self.key_norm + reach * self.key_mass_norm)
        f_v = odds * steeper_v * self.value_norm
        # The constants of the global theorem, which hold on all of space.
        steep = self.key.slope(self.key.lengths.amax(-1)).amax(-1)
        f_k = torch.minimum(f_k, tau * (n / 2) ** 0.5 * steep * spread_v.amax(-1))
        f_v = torch.minimum(f_v, n**0.5 * self.value.slope(self.value.lengths.amax(-1)).amax(-1))
        return f_q, f_k, f_v


def _spread(weights: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """Bound the largest standard deviation of x over a direction, under every row, [W, H, N]."""
    second = torch.einsum("whij,whjd,whje->whide", weights, x, x)
    return norm_above(second - mean[..., :, None] * mean[..., None, :]).sqrt()
