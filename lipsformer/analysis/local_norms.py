"""Norms of matrices and of Jacobians, bounded from above and never from below."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

ITERATIONS = 5
POWER_STEPS = 30
STEP = 1.02  # by which a bound that Cholesky refused is increased
CHUNK = 256  # rows of a Jacobian at a time
PROBES, POWERS = 32, 2


def norm_above(matrices: Tensor) -> Tensor:
    r"""Bound the 2-norms of many matrices from above, by at most 3 percent for 32 rows.

    .. math:: |M|^2 = \lambda_{max}(G) \le |G^{2^k}|_F^{2^{-k}}, \quad G = M M^T

    This is Gram iteration (Delattre et al. 2023) with k = 5. Unlike power iteration it is never
    below the norm.

    Args:
        matrices: [..., m, n], float64.

    Returns:
        [...].
    """
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    size = wide.abs().amax((-2, -1), keepdim=True)
    wide = wide / torch.where(size > 0.0, size, 1.0)  # squares neither under- nor overflow
    gram = wide @ wide.mT
    log = torch.zeros_like(gram[..., 0, 0])
    for k in range(ITERATIONS + 1):
        length = gram.flatten(-2).norm(dim=-1).clamp_min(torch.finfo(gram.dtype).tiny)
        log = log + length.log() / 2**k
        gram = gram / length[..., None, None]
        if k < ITERATIONS:
            gram = gram @ gram
    return (0.5 * log).exp() * size[..., 0, 0]


def large_norm_above(matrix: Tensor) -> Tensor:
    r"""Bound the 2-norm of one large matrix from above, by at most 3 percent in practice.

    Power iteration proposes a bound b, and :math:`b^2 I - M M^T` must then have a Cholesky
    decomposition. A proposal without one is increased. A matrix that is not finite has none, and
    the result is not finite either.

    Args:
        matrix: [m, n], float64.

    Returns:
        A scalar.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    gram = wide @ wide.mT
    x = gram.sum(1) + gram.diagonal()
    for _ in range(POWER_STEPS):
        x = gram @ (x / x.norm().clamp_min(torch.finfo(x.dtype).tiny))
    square = x.norm() * STEP + torch.finfo(x.dtype).tiny
    eye = torch.eye(len(gram), dtype=gram.dtype)
    while square.isfinite() and torch.linalg.cholesky_ex(square * eye - gram).info > 0:
        square = square * STEP
    return square.sqrt()


def jacobian_norm(function: Function, x: Tensor) -> Tensor:
    """Bound the Jacobian of a function at every item of a batch, [B], by writing it out.

    Args:
        function: Map that treats the items independently.
        x: [B, ...], float64.
    """
    norms = []
    for item in x.split(1):
        output, backward, *_ = torch.func.vjp(function, item)
        rows = torch.eye(output.numel(), dtype=x.dtype).reshape(-1, *output.shape)
        (jacobian,) = torch.vmap(backward, chunk_size=CHUNK)(rows)
        norms.append(large_norm_above(jacobian.flatten(1)))
    return torch.stack(norms)


def probed_norm(function: Function, x: Tensor, failure: float) -> Tensor:
    r"""Bound the Jacobian J of a function at every item of a batch, [B], by random probes.

    .. math:: |J|^{4q+2} \le \frac{1}{Q} \sum_{i=1}^s |J (J^T J)^q g_i|^2

    The :math:`g_i` are Gaussian and Q is the quantile of :math:`\chi^2_s` at `failure`. The bound
    is wrong with at most that probability, whatever J is: the component of the probes along the
    top singular vector is Gaussian, and the sum is at least :math:`|J|^{4q+2}` times the sum of
    its squares. Here s = 32 and q = 2.

    Args:
        function: Map that treats the items independently.
        x: [B, ...], of the data type of the probes.
        failure: Probability that the bound of an item is wrong, in (0, 1).
    """
    _, backward, *_ = torch.func.vjp(function, x)

    def forward(tangent: Tensor) -> Tensor:
        return torch.func.jvp(function, (x,), (tangent,))[1]

    probes = torch.randn(PROBES, *x.shape, dtype=x.dtype)
    log = torch.zeros(len(x), dtype=x.dtype)
    for _ in range(POWERS):
        (probes,) = torch.vmap(backward)(torch.vmap(forward)(probes))
        scale = probes.flatten(2).norm(dim=(0, 2)).clamp_min(torch.finfo(x.dtype).tiny)
        probes = probes / scale.reshape(1, -1, *[1] * (x.ndim - 1))
        log = log + scale.log()
    last = torch.vmap(forward)(probes).flatten(2).norm(dim=(0, 2))
    log = log + last.clamp_min(torch.finfo(x.dtype).tiny).log()
    quantile = chi_square_quantile(PROBES, failure)
    return ((log - 0.5 * math.log(quantile)) / (2 * POWERS + 1)).exp()


def chi_square_quantile(degrees: int, probability: float) -> float:
    """Return a number that a chi-squared variable falls below with at most this probability."""
    low, high = 0.0, float(degrees)
    half = torch.tensor(degrees / 2.0, dtype=torch.float64)
    for _ in range(60):
        middle = 0.5 * (low + high)
        below = torch.special.gammainc(half, torch.tensor(middle / 2.0, dtype=torch.float64))
        low, high = (middle, high) if below.item() <= probability else (low, middle)
    return low
