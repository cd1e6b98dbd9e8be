r"""Measured local Lipschitz constants: lower bounds at given inputs, without forming a Jacobian.

The local 2-norm constant of f at x is :math:`\sigma_{max}(J_f(x))`. Power iteration on
:math:`J^T J` through forward and reverse mode products finds it for a whole batch at once; every
iterate is a lower bound of the Lipschitz constant on any set around x.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

Function = Callable[[Tensor], Tensor]


def _sample_norm(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1))


def _unit(x: Tensor) -> Tensor:
    return x / _sample_norm(x).clamp_min(torch.finfo(x.dtype).tiny)


def local_lipschitz(
    function: Function,
    x: Tensor,
    *,
    num_iters: int = 100,
    rtol: float = 1e-5,
    start: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate the local Lipschitz constant at every sample of a batch.

    Args:
        function: Treats the samples of a batch independently; a module must be in evaluation mode.
        x: Inputs, [B, ...].
        num_iters: Largest number of power iterations.
        rtol: Stop once no estimate grows by more than this share in an iteration.
        start: First direction, shaped like ``x``; random if None.
        generator: Source of randomness for the first direction.

    Returns:
        (sigma [B], direction like ``x``): the largest singular values found and their right
        singular vectors, of unit length.
    """
    x = x.detach()
    if start is None:
        start = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    direction = _unit(start)
    sigma = x.new_zeros(len(x))
    # fused attention kernels know no forward mode
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        pull_back = vjp(function, x)[1]
        for _ in range(num_iters):
            pushed = jvp(function, (x,), (direction,))[1]
            previous, sigma = sigma, pushed.flatten(1).norm(dim=1).detach()
            direction = _unit(pull_back(pushed)[0].detach())
            if (sigma - previous <= rtol * sigma).all():
                break
        sigma = jvp(function, (x,), (direction,))[1].flatten(1).norm(dim=1).detach()
    return sigma, direction


def adversarial_lipschitz(
    function: Function,
    x: Tensor,
    *,
    steps: int = 50,
    step_size: float = 0.1,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Raise the estimate by moving the inputs uphill: a lower bound of the global constant.

    Every step follows the gradient of |J(x) v|^2 in x for the current singular vector v, by
    ``step_size`` of the input's own length, halved whenever the constant does not grow.

    Args:
        function: As in :func:`local_lipschitz`.
        x: Where to start, [B, ...].
        steps: Number of steps.
        step_size: First length of a step, as a share of the length of the input.
        generator: Source of randomness for the first direction.

    Returns:
        (sigma [B], inputs like ``x``): the largest constants found and where.
    """

    def gain(inputs: Tensor, direction: Tensor) -> Tensor:
        return jvp(function, (inputs,), (direction,))[1].square().sum()

    best_x = x.detach()
    best, direction = local_lipschitz(function, best_x, generator=generator)
    length = torch.full_like(best, step_size)
    for _ in range(steps):
        with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            uphill = _unit(grad(gain)(best_x, direction).detach())
        share = length.reshape(-1, *[1] * (x.ndim - 1))
        moved = best_x + share * _sample_norm(best_x) * uphill
        sigma, turned = local_lipschitz(function, moved, num_iters=10, start=direction)
        grew = sigma > best
        wide = grew.reshape(-1, *[1] * (x.ndim - 1))
        best, best_x = torch.where(grew, sigma, best), torch.where(wide, moved, best_x)
        direction = torch.where(wide, turned, direction)
        length = torch.where(grew, 1.5 * length, 0.5 * length)
    return best, best_x


def capture_inputs(model: nn.Module, names: Iterable[str], x: Tensor) -> dict[str, Tensor]:
    """Run a model and return the input that each named submodule received.

    Args:
        model: The model, in evaluation mode.
        names: Dotted names; "" is the model itself.
        x: The model's input.
    """
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: inputs.update({name: args[0].detach()})

    handles = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in names]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def estimate_submodules(
    model: nn.Module, names: Iterable[str], x: Tensor, *, num_iters: int = 20
) -> dict[str, float]:
    """Estimate the local constants of submodules at the inputs that real data give them.

    Args:
        model: The model; set to evaluation mode while it runs.
        names: Dotted names of modules that take one tensor; "" is the model itself.
        x: The model's input, [B, ...].
        num_iters: Power iterations.

    Returns:
        Name to the largest estimate over the batch.
    """
    training = model.training
    model.eval()
    try:
        inputs = capture_inputs(model, names, x)
        return {
            name: local_lipschitz(model.get_submodule(name), value, num_iters=num_iters)[0]
            .max()
            .item()
            for name, value in inputs.items()
        }
    finally:
        model.train(training)
