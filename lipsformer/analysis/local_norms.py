"""Norms of matrices, bounded from above and never from below."""

import torch
from torch import Tensor

ITERATIONS = 5
POWER_STEPS = 30
STEP = 1.02  # by which a bound that Cholesky refused is increased


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
    gram = wide @ wide.mT
    log = torch.zeros_like(gram[..., 0, 0])
    for k in range(ITERATIONS + 1):
        length = gram.flatten(-2).norm(dim=-1).clamp_min(torch.finfo(gram.dtype).tiny)
        log = log + length.log() / 2**k
        gram = gram / length[..., None, None]
        if k < ITERATIONS:
            gram = gram @ gram
    return (0.5 * log).exp()


def large_norm_above(matrix: Tensor) -> Tensor:
    r"""Bound the 2-norm of one large matrix from above, by at most 3 percent in practice.

    Power iteration proposes a bound b, and :math:`b^2 I - M M^T` must then have a Cholesky
    decomposition. A proposal without one is increased.

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
    while torch.linalg.cholesky_ex(square * eye - gram).info > 0:
        square = square * STEP
    return square.sqrt()
