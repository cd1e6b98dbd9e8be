"""Maps of tokens and the bounds of matrices, for `python -m scripts.check_certificate`.

The rules of rounding are in docs/theorems.md, under "Rounding".
"""

import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

U, U32, UP = 2.0**-53, 2.0**-24, 1.0 + 2.0**-44  # float64, float32, rounding up
FFT_ERROR, TINY = 2.0**-43, 2.0**-90
MAX_DENSE_TOKENS, MAX_NORM = 64, 2.0**50


def require(holds: Any, otherwise: str) -> None:
    """Refuse the certificate, with a reason, unless a condition holds."""
    if not holds:
        raise ValueError(otherwise)


class Map(NamedTuple):
    """Maps of tokens; norm, error and ball may be arrays, with one case in each entry."""

    size: tuple[int, ...]
    norm: Any
    error: Any  # of float32
    value: float = 1.0  # constant of the layer that makes them
    ball: Any = math.inf  # distance from the map of one image

    @property
    def rms(self) -> Any:
        """Root mean square of the lengths of the tokens, which float32 computes."""
        total = self.norm + self.error
        known = UP * total / math.sqrt(math.prod(self.size))
        return np.where(total <= MAX_NORM, known, math.inf)


def gamma(steps: int) -> float:
    """Bound the relative error of so many additions and products in float32."""
    return UP * (steps * U32 / (1.0 - steps * U32))


def carried(value: float, error: Any, added: Any, tokens: int) -> Any:
    """Bound the error after a layer: that of its input times its constant, and its own."""
    total = value * error + math.sqrt(tokens) * added
    return np.where(total < math.inf, UP * total + TINY, math.inf)


def layer(value: float, x: Map, shift: float, rounding: Any) -> Map:
    """Return the output of a layer with a constant, the length of its bias, and its rounding."""
    known = ((x.norm, shift), (x.error, rounding), (x.ball, 0.0))
    norm, error, ball = (carried(value, *pair, math.prod(x.size)) for pair in known)
    return Map(x.size, norm, error, UP * value, ball)


def eigenvalue(gram: np.ndarray, terms: int) -> float:
    """Bound the largest eigenvalue: proposed by LAPACK, proved by a Cholesky decomposition."""
    n, trace = len(gram), float(np.trace(gram))
    if trace == 0.0:
        return 0.0
    mu, step, proved = max(float(np.linalg.eigvalsh(gram)[-1]), 0.0), 8.0 * n * U, False
    while not proved:
        mu, step = mu + step * max(mu, trace / n), 8.0 * step
        with contextlib.suppress(np.linalg.LinAlgError):
            proved = np.linalg.cholesky(mu * np.eye(n) - gram) is not None
    return UP * (mu * (1.0 + 4.0 * n * (n + 3) * U) + 4.0 * (terms + 4) * U * trace)


def sigma(matrix: np.ndarray) -> float:
    """Bound the largest singular value of a matrix."""
    scale = 2.0 ** math.frexp(float(np.abs(matrix).max()))[1]
    rows = matrix / scale if matrix.shape[0] <= matrix.shape[1] else matrix.T / scale
    return UP * scale * math.sqrt(eigenvalue(rows @ rows.T, rows.shape[1]))


def product_rounding(matrix: np.ndarray, value: float, bias: float, length: Any) -> Any:
    """Bound the error of matrix x + bias in float32, for |x| of a length and |matrix| = value."""
    m, v, more = np.abs(matrix), np.ones(len(matrix)), 1.0 + 4.0 * U * (sum(matrix.shape) + 8)
    for _ in range(3):
        v = m @ (m.T @ v)
        v = v + 1e-6 * max(v.max(), 1e-300)
    absolute = math.sqrt((m @ (m.T @ v) / v).max()) * more * length + bias
    additions, total = gamma(matrix.shape[1] + 1), value * length + bias
    return gamma(4) * absolute + additions * ((absolute + total) / 2.0 + additions * absolute)


def channel_sigmas(kernels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Bound the norms of zero padded depthwise convolutions, [C, k, k], on maps of a size."""
    k, (height, width) = kernels.shape[-1], size
    if height * width <= MAX_DENSE_TOKENS:
        y, x = np.divmod(np.arange(height * width), width)
        dy, dx = (i[None] - i[:, None] + k // 2 for i in (y, x))
        inside = (dy >= 0) & (dy < k) & (dx >= 0) & (dx < k)
        operators = kernels[:, dy.clip(0, k - 1), dx.clip(0, k - 1)] * inside
        return np.array([sigma(operator) for operator in operators])
    peaks = np.abs(np.fft.rfft2(kernels, s=(16 * k, 16 * k))).max((1, 2))
    sums = np.abs(kernels).sum((1, 2))
    return (peaks + FFT_ERROR * sums) * UP / math.cos(math.pi * (k - 1) / (32 * k)) ** 2
