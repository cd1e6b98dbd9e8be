"""Norms of matrices and of Jacobians, bounded from above and never from below.

Theorem 29 of docs/theorems.md proves these bounds.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipsformer._precision import power_of_two

Function = Callable[[Tensor], Tensor]

ITERATIONS = 5
MAX_ITERATED = 64  # rows
POWER_STEPS = 30
INCREASE = 1.02  # factor of a bound that Cholesky refused
CHUNK = 256  # rows of a Jacobian at a time
LANCZOS_STEPS = 24


def gram_sigma_bound(matrices: Tensor) -> Tensor:
    r"""Bound the 2-norms of many matrices from above, by at most 4 percent in practice.

    .. math:: |M|^2 = \lambda_{max}(G) \le |G^{2^k}|_F^{2^{-k}}, \quad G = M M^T

    This is Gram iteration (Delattre et al. 2023) with k = 5, for up to 64 rows. For larger matrices
    power iteration proposes a bound b, and :math:`b^2 I - G` must then have a Cholesky
    decomposition. A proposal without one is increased. Unlike power iteration alone, neither is
    ever below the norm. The norm of a matrix that is not finite is not finite.

    Args:
        matrices: [..., m, n], float64.

    Returns:
        [...].
    """
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    size = wide.abs().amax((-2, -1), keepdim=True)
    wide = wide / torch.where(size > 0.0, size, 1.0)  # squares neither under- nor overflow
    gram = wide @ wide.mT
    square = _iterated(gram) if gram.shape[-1] <= MAX_ITERATED else _verified(gram)
    return square.sqrt() * size[..., 0, 0]


def _iterated(gram: Tensor) -> Tensor:
    """Bound the largest eigenvalues of Gram matrices by Gram iteration."""
    log = torch.zeros_like(gram[..., 0, 0])
    for k in range(ITERATIONS + 1):
        length = gram.flatten(-2).norm(dim=-1).clamp_min(torch.finfo(gram.dtype).tiny)
        log = log + length.log() / 2**k
        gram = gram / length[..., None, None]
        if k < ITERATIONS:
            gram = gram @ gram
    return log.exp()


def _verified(gram: Tensor) -> Tensor:
    """Bound the largest eigenvalues of Gram matrices by power iteration and Cholesky."""
    tiny = torch.finfo(gram.dtype).tiny
    x = (gram.sum(-1) + gram.diagonal(dim1=-2, dim2=-1))[..., None]
    for _ in range(POWER_STEPS):
        x = gram @ (x / x.norm(dim=-2, keepdim=True).clamp_min(tiny))
    square = x.norm(dim=(-2, -1)) * INCREASE + tiny
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    while True:
        info = torch.linalg.cholesky_ex(square[..., None, None] * eye - gram).info
        refused = (info > 0) & square.isfinite()
        if not refused.any():
            return square
        square = torch.where(refused, square * INCREASE, square)


def largest_sigma_bound(matrices: Callable[[Tensor], Tensor], above: Tensor) -> Tensor:
    """Bound the largest of the norms of the channels of every item, [B].

    Only the channels are measured whose first bound exceeds the norm of another one.

    Args:
        matrices: Returns the matrices [B, m, n] of one channel of every item, for channels [B].
        above: First bounds of the norms, [B, C].
    """
    above, items = above.clone(), torch.arange(len(above))
    measured = torch.zeros_like(above, dtype=torch.bool)
    while True:
        channel = above.argmax(1)
        if measured[items, channel].all():
            return above[items, channel]
        norm = gram_sigma_bound(matrices(channel))
        above[items, channel] = torch.minimum(above[items, channel], norm)
        measured[items, channel] = True


def jacobian_sigma_bound(function: Function, x: Tensor) -> Tensor:
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
        norms.append(gram_sigma_bound(jacobian.flatten(1)))
    return torch.stack(norms)


def probed_sigma_bound(function: Function, x: Tensor, failure: float) -> Tensor:
    r"""Bound the Jacobian J of a function at every item of a batch, [B], from a random start.

    .. math:: |J| \le (1 - \epsilon)^{-1/2} |J V|, \quad
        \cosh((2k - 1) \operatorname{artanh} \epsilon^{1/2}) = \sqrt{2 n / \pi}\, /\, p

    V is an orthonormal basis of the first k powers of :math:`J^T J` at a random start (Lanczos),
    here with k = 24. The bound is wrong with at most the probability p, over the draw of the start
    and whatever J is. The smaller the share of the top singular vector in the start, the slower it
    comes up, and a share so small is too improbable.

    Args:
        function: Map that treats the items independently.
        x: [B, ...] with n numbers per item, of the data type of the products.
        failure: Probability p that the bound of an item is wrong, in (0, 1).
    """
    output, backward, *_ = torch.func.vjp(function, x)
    # The product with the Jacobian is the derivative of the one with its transpose, which is
    # linear. Forward differentiation would compute the function again for every product.
    _, forward, *_ = torch.func.vjp(lambda row: backward(row)[0], torch.zeros_like(output))
    start = torch.randn(len(x), x[0].numel(), dtype=torch.float64)
    steps = min(LANCZOS_STEPS, x[0].numel())  # so many make the basis complete
    basis = torch.empty(steps, *start.shape, dtype=start.dtype)
    images = []
    for step in range(steps):
        for _ in range(2):  # the second time for what rounding left
            shares = torch.einsum("kbn,bn->kb", basis[:step], start)
            start = start - torch.einsum("kbn,kb->bn", basis[:step], shares)
            length = start.norm(dim=1, keepdim=True).clamp_min(torch.finfo(start.dtype).tiny)
            start = start / length
        basis[step] = start
        tangent = start.to(x.dtype).reshape(x.shape)
        image = forward(tangent)[0]
        images.append(image.flatten(1).double())
        if step < steps - 1:
            scale = power_of_two(image, tuple(range(1, image.ndim)))  # products leave the range
            start = backward(image / scale)[0].flatten(1).double()
    products = torch.stack(images, 1)  # [B, k, m]
    found = torch.linalg.eigvalsh(products @ products.mT)[:, -1].sqrt()
    return found / math.sqrt(1.0 - missed_share(LANCZOS_STEPS, x[0].numel(), failure))


def missed_share(steps: int, size: int, failure: float) -> float:
    r"""Return the share of :math:`|J|^2` that Lanczos misses with at most a probability."""
    cosh = math.sqrt(2.0 * size / math.pi) / failure
    return math.tanh(math.acosh(cosh) / (2 * steps - 1)) ** 2
