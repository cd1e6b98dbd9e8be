"""Exact Jacobians of small modules, and the climb over their inputs."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def top_singular(function: Function, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest singular value of the Jacobian at every sample, and its two vectors.

    One forward pass over copies of the samples, one copy per output, and one backward pass. It
    runs the module as users do: hooks and kernels act, no transform of `torch.func` is needed.

    Args:
        function: Treats the samples of a batch independently.
        x: [R, ...], float64.

    Returns:
        (sigma [R], left [R, m], right like `x`).
    """
    with torch.no_grad():
        outputs = function(x[:1]).numel()
    copies = x.detach().repeat_interleave(outputs, 0).requires_grad_()
    with torch.enable_grad():
        y = function(copies).reshape(len(copies), outputs)
        own = torch.arange(outputs).repeat(len(x))
        total = y[torch.arange(len(copies)), own].sum()
        if not total.requires_grad:
            rows = torch.zeros_like(copies)
        else:
            rows = torch.autograd.grad(total, copies, materialize_grads=True)[0]
    jacobian = rows.reshape(len(x), outputs, -1).nan_to_num(0.0, 0.0, 0.0)
    wide = outputs <= jacobian.shape[2]
    gram = jacobian @ jacobian.mT if wide else jacobian.mT @ jacobian
    values, vectors = torch.linalg.eigh(gram)
    sigma, vector = values[:, -1].clamp_min(0.0).sqrt(), vectors[:, :, -1]
    safe = sigma.clamp_min(1e-300)[:, None]
    if wide:
        left, right = vector, (jacobian.mT @ vector[:, :, None])[:, :, 0] / safe
    else:
        left, right = (jacobian @ vector[:, :, None])[:, :, 0] / safe, vector
    return sigma, left, right.reshape(x.shape)


def project(x: Tensor, radius: float, token_dim: int) -> Tensor:
    """Bring every token into the ball of the domain."""
    if radius == math.inf:
        return x
    return x * (radius / x.norm(dim=token_dim, keepdim=True).clamp_min(1e-300)).clamp(max=1.0)


def starts(shape: tuple[int, ...], radius: float, token_dim: int, seed: int) -> Tensor:
    """Return inputs of many sizes: small, on the sphere, one long token, zero, equal tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, *shape, generator=generator, dtype=torch.float64)
    unit = 1.0 if radius == math.inf else radius
    x[0] *= 0.03 * unit
    x[1] *= unit
    x[2] *= 30.0 * unit
    x[3] *= 0.01 * unit
    x[3].select(0 if token_dim == -1 else 1, 0).mul_(1e5)
    x[4] = 0.0
    x[5] = unit * x[5].sign()
    return project(x, radius, token_dim)


def climb(
    function: Function, x: Tensor, steps: int, radius: float, token_dim: int
) -> tuple[Tensor, Tensor]:
    """Raise the largest singular value at every sample by gradient steps in the input.

    Args:
        function: As for :func:`top_singular`.
        x: [R, ...], inside the domain.
        steps: Number of steps.
        radius: Radius of the domain.
        token_dim: See `Subject`.

    Returns:
        (sigma [R], inputs like `x`).
    """
    best, left, right = top_singular(function, x)
    ones = [1] * (x.ndim - 1)
    length = torch.full_like(best, 0.3)
    for _ in range(steps):
        uphill = _gain_gradient(function, x, left, right)
        if uphill is None:
            break
        size = x.flatten(1).norm(dim=1).clamp_min(1e-3 * min(radius, 1.0))
        size = size / uphill.flatten(1).norm(dim=1).clamp_min(1e-300)
        moved = project(x + (length * size).reshape(-1, *ones) * uphill, radius, token_dim)
        sigma, new_left, new_right = top_singular(function, moved)
        grew = sigma > best
        best = torch.where(grew, sigma, best)
        x = torch.where(grew.reshape(-1, *ones), moved, x)
        left = torch.where(grew[:, None], new_left, left)
        right = torch.where(grew.reshape(-1, *ones), new_right, right)
        length = torch.where(grew, 2.0 * length, 0.3 * length)
    return best, x


def _gain_gradient(function: Function, x: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    """Return the gradient of u J(x) v in x for fixed u and v; None for an affine function."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x).reshape(len(x), -1)
        if not y.requires_grad:
            return None
        (rows,) = torch.autograd.grad((left * y).sum(), x, create_graph=True, allow_unused=True)
        if rows is None or not rows.requires_grad:
            return None
        (uphill,) = torch.autograd.grad((rows * right).sum(), x, allow_unused=True)
    return None if uphill is None else uphill.nan_to_num(0.0, 0.0, 0.0)
