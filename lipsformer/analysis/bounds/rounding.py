r"""Outward rounding: results in float64 that are never too small, and the errors of float32.

Every bound is an upper bound, so a result may be rounded up and never down. The model of the
arithmetic is the usual one: a sum, product, quotient or root has a relative error of at most u =
2^-53, sums are taken in any order, with or without fused multiply-add, the functions of the
mathematical library err by at most four units in the last place, and nothing underflows.

`outward` covers what a rule computes from non-negative numbers. A largest eigenvalue is proposed by
LAPACK and then proved: if the Cholesky decomposition of :math:`\mu I - G` runs to its end, then
:math:`\lambda_{max}(G) \le \mu` up to an explicit rounding error.

Reference:
    Higham 2002, "Accuracy and Stability of Numerical Algorithms", chapters 3, 10 and 24.
    Rump 2006, "Verification of positive definiteness".
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lipsformer._precision import finite_or_zero, power_of_two

UNIT = 2.0**-53  # unit roundoff of float64
UNIT32 = 2.0**-24  # unit roundoff of float32

# The unit roundoff of float64 is 2^-29 times that of float32, and its functions are at least as
# exact in units of the last place (theorem 32).
FLOAT64_SHARE = 2.0**-28

# Covers 256 roundings of non-negative numbers in a row.
OUTWARD = 1.0 + 2.0**-44

# An entry of a Fourier transform of at most 2^20 points errs by less than this times the sum of the
# absolute values of its terms. Higham's theorem 24.2 gives about 2^-45.
FFT_ERROR = 2.0**-43

# Maps up to this 2-norm do not overflow in float32.
MAX_NORM32 = 2.0**50

# Underflow of float32 adds less than this to the error of a map.
TINY32 = 2.0**-90


def outward(value: float) -> float:
    """Return a value that is not below the exact one.

    Args:
        value: Result of at most 256 additions, multiplications, divisions and roots of non-negative
            numbers.

    Example:
        >>> from lipsformer.analysis.bounds.rounding import outward
        >>> 1.0 < outward(1.0) < 1.0 + 1e-13
        True
    """
    return value * OUTWARD


def gamma(steps: int) -> float:
    r"""Return the largest relative error of n roundings to float32 in a row.

    .. math:: n u / (1 - n u), \quad u = 2^{-24}

    Args:
        steps: Number of roundings n, at least 0.

    Returns:
        The error, rounded up; inf if n u is 1/2 or more.

    Example:
        >>> from lipsformer.analysis.bounds.rounding import gamma
        >>> round(gamma(4) * 2**22, 6)  # four roundings of at most 2^-24 each
        1.0
        >>> gamma(2**24)
        inf
    """
    share = steps * UNIT32
    return outward(share / (1.0 - share)) if share < 0.5 else math.inf


def log10_of(value: float) -> float:
    """Return the decimal logarithm, rounded up: -inf for 0 and inf for inf.

    Args:
        value: A value >= 0, computed as for `outward`.

    Example:
        >>> from lipsformer.analysis.bounds import log10_of
        >>> round(log10_of(1000.0), 9), log10_of(0.0)
        (3.0, -inf)
        >>> log10_of(1000.0) > 3.0  # rounded up
        True
    """
    if value <= 0.0:
        return -math.inf
    log10 = math.log10(value)
    return log10 + 2.0**-44 + 2.0**-50 * abs(log10) if value < math.inf else math.inf


def log10_product(logs: Iterable[float]) -> float:
    """Return the logarithm of a product of at most eight factors, rounded up.

    The product is 0 if any factor is 0, even if another is inf.

    Args:
        logs: Decimal logarithms of the factors; -inf stands for the factor 0.

    Example:
        >>> import math
        >>> from lipsformer.analysis.bounds import log10_product
        >>> round(log10_product([2.0, -1.0]), 9)  # 100 * 0.1 = 10
        1.0
        >>> log10_product([-math.inf, math.inf])  # 0 * inf
        -inf
    """
    logs = list(logs)
    if -math.inf in logs:
        return -math.inf
    return sum(logs) + 2.0**-50 * sum(abs(log) for log in logs)


def log10_one_plus(log10: float) -> float:
    """Return log10(1 + 10^log10), rounded up, without overflow.

    Args:
        log10: Decimal logarithm of the summand; -inf stands for the summand 0.

    Example:
        >>> from lipsformer.analysis.bounds import log10_of, log10_one_plus
        >>> round(log10_one_plus(log10_of(9.0)), 9)  # log10(1 + 9)
        1.0
        >>> round(log10_one_plus(400.0), 9)  # 10^400 is not a float
        400.0
    """
    if log10 == -math.inf:
        return 0.0
    larger = max(log10, 0.0)
    return larger + math.log10(1.0 + 10.0 ** -abs(log10)) + 2.0**-50 * (1.0 + larger)


def power_of_ten(log10: float) -> float:
    """Return 10^log10, rounded up; inf if it exceeds the range of a float.

    Example:
        >>> from lipsformer.analysis.bounds.rounding import power_of_ten
        >>> round(power_of_ten(3.0), 6), power_of_ten(400.0)
        (1000.0, inf)
    """
    if log10 == -math.inf:
        return 0.0
    return outward(10.0**log10) + 5e-324 if log10 < 308.0 else math.inf  # the smallest float


def norm_bound(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Bound 2-norms from above, in float64.

    Args:
        x: Any tensor.
        dim: Dimensions over which the norm is taken; None for all.

    Returns:
        The bounds, in the shape of `x` without the dimensions `dim`.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds.rounding import norm_bound
        >>> norm_bound(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), dim=1).round(decimals=6)
        tensor([5., 2.], dtype=torch.float64)
    """
    x = x.detach().double()
    axes = tuple(range(x.ndim)) if dim is None else dim
    scale = power_of_two(x, axes)
    norm = torch.linalg.vector_norm(x / scale, dim=axes, keepdim=True) * scale
    return norm.squeeze(axes) * (1.0 + 2.0 * UNIT * (x.numel() + 8))


def eigenvalue_bound(gram: Tensor, terms: int) -> Tensor:
    r"""Bound the largest eigenvalue of computed Gram matrices.

    With :math:`\mu` so that the decomposition of :math:`\mu I - G` succeeds,

    .. math:: \lambda_{max} \le \mu + 4 n (n + 3) u \mu + 4 (terms + 4) u \, \mathrm{tr} G.

    The second summand is the error of the decomposition (Higham, theorem 10.3; the factor 4 covers
    complex numbers). The third is the error of the entries of G, whose norm is at most that
    multiple of the trace, because G is a sum of products of a matrix with its own adjoint.

    Args:
        gram: [..., n, n], real or complex, the computed value of such a sum.
        terms: Number of products that are summed in an entry.

    Returns:
        [...], float64; inf if an entry is not finite.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds.rounding import eigenvalue_bound
        >>> matrix = torch.diag(torch.tensor([3.0, 5.0])).double()
        >>> eigenvalue_bound(matrix @ matrix.T, terms=2).round(decimals=6)
        tensor(25., dtype=torch.float64)
    """
    gram = gram.to(torch.promote_types(gram.dtype, torch.float64))
    gram, finite = finite_or_zero(gram)
    n = gram.shape[-1]
    trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)
    proposed = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0)
    mu = torch.where(trace > 0.0, proposed, 1.0)
    identity, step = torch.eye(n, dtype=gram.dtype, device=gram.device), 8.0 * n * UNIT
    failed = torch.ones_like(mu, dtype=torch.bool)
    while failed.any():  # The first step nearly always suffices.
        mu = torch.where(failed, mu + step * torch.maximum(mu, trace / n), mu)
        shifted = mu[..., None, None] * identity - gram
        failed = torch.linalg.cholesky_ex(shifted).info != 0
        step *= 8.0
    bound = mu * (1.0 + 4.0 * n * (n + 3) * UNIT) + 4.0 * (terms + 4) * UNIT * trace
    return torch.where(finite, torch.where(trace > 0.0, bound * OUTWARD, 0.0), math.inf)


def sigma_bound(matrices: Tensor) -> Tensor:
    """Bound the largest singular value of matrices from above.

    Args:
        matrices: [..., m, n], float64 or complex128.

    Returns:
        [...], float64, above the true value by a relative 1e-9 at most for dimensions up to 1000;
        inf if an entry is not finite.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds.rounding import sigma_bound
        >>> 0.0 <= sigma_bound(torch.diag(torch.tensor([3.0, 5.0]).double())).item() - 5.0 < 1e-12
        True
    """
    finite = matrices.isfinite().all(-1).all(-1)
    scale = power_of_two(matrices, (-2, -1))
    rows = torch.where(finite[..., None, None], matrices / scale, 0.0)
    if min(rows.shape[-2:]) == 1:  # such as the symbol of a depthwise convolution
        norm = torch.linalg.vector_norm(rows, dim=(-2, -1))
        bound = norm * (1.0 + 4.0 * UNIT * (max(rows.shape[-2:]) + 8))
    else:
        rows = rows if rows.shape[-2] <= rows.shape[-1] else rows.mH
        bound = eigenvalue_bound(rows @ rows.mH, rows.shape[-1]).sqrt()
    return torch.where(finite, bound * scale[..., 0, 0] * OUTWARD, math.inf)


def abs_sigma_bound(matrix: Tensor) -> float:
    r"""Bound the 2-norm of the matrix of absolute values, with which rounding errors grow.

    For a matrix M without negative entries and any v > 0, the largest eigenvalue of :math:`M M^T`
    is at most :math:`\max_i (M M^T v)_i / v_i` (Collatz and Wielandt).

    Args:
        matrix: [m, n], float64, finite.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds.rounding import abs_sigma_bound
        >>> turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]]).double()  # its own norm is sqrt(2)
        >>> round(abs_sigma_bound(turn), 6)
        2.0
    """
    largest = matrix.abs().max().item()
    if largest == 0.0:
        return 0.0
    m = matrix.abs() / largest
    v = torch.ones_like(m[:, 0])
    for _ in range(3):
        v = m @ (m.mT @ v)
        v = v + 1e-6 * v.max()  # positive, even where a row is zero
    ratio = (m @ (m.mT @ v) / v).max().item()
    return largest * math.sqrt(ratio) * (1.0 + 4.0 * UNIT * (sum(matrix.shape) + 8))
