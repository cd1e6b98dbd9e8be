r"""Measured local Lipschitz constants: lower bounds at given inputs.

The local constant of f at x in the 2-norm is :math:`\sigma_{max}(J_f(x))`. Power iteration on
:math:`J^T J` finds it for a whole batch at once. It needs only products with J and its transpose,
never the Jacobian J itself. Every iterate is a lower bound of the Lipschitz constant on any set
that contains a neighborhood of x.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipsformer._modes import modes_restored
from lipsformer._precision import power_of_two

Function = Callable[[Tensor], Tensor]

FIRST_STEP = 0.1  # of an input, as a fraction of its length


def sample_norm(x: Tensor) -> Tensor:
    """Return the 2-norm of every sample of a batch, in a shape that divides the batch.

    Args:
        x: [B, ...].

    Returns:
        [B, 1, ...], with as many dimensions as `x`.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.estimate import sample_norm
        >>> sample_norm(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        tensor([[5.],
                [2.]])
    """
    rows = x.flatten(1)
    size = power_of_two(rows, 1)  # squares neither under- nor overflow
    return ((rows / size).norm(dim=1, keepdim=True) * size).reshape(-1, *[1] * (x.ndim - 1))


def _unit(x: Tensor) -> Tensor:
    """Return samples of length 1; those that are 0 stay 0."""
    x = x / power_of_two(x, tuple(range(1, x.ndim)))
    norm = sample_norm(x)
    return x / torch.where(norm > 0.0, norm, 1.0)


def local_lipschitz(
    function: Function,
    x: Tensor,
    *,
    num_iters: int = 100,
    rtol: float = 1e-5,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate the local Lipschitz constant at every sample of a batch.

    Args:
        function: Function of a batch that treats its samples independently. A module must be in
            evaluation mode.
        x: Inputs, [B, ...].
        num_iters: Largest number of power iterations.
        rtol: Stop when no estimate has grown by more than this fraction in one iteration.
        start: First direction, shaped like `x`; None for a random one.

    Returns:
        The largest singular values that were found, [B], and their right singular vectors of unit
        length, shaped like `x`.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.estimate import local_lipschitz
        >>> sigma, _ = local_lipschitz(lambda x: 3.0 * x, torch.randn(2, 5))
        >>> [f"{value:.3f}" for value in sigma]
        ['3.000', '3.000']
    """
    x = x.detach()
    if start is None:
        start = torch.randn_like(x)
    direction = _unit(start)
    sigma = x.new_zeros(len(x))
    # Fused attention kernels do not support forward-mode derivatives.
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        pull_back = vjp(function, x)[1]
        for _ in range(num_iters):
            pushed = jvp(function, (x,), (direction,))[1]
            previous, sigma = sigma, sample_norm(pushed).flatten().detach()
            direction = _unit(pull_back(_unit(pushed))[0].detach())
            if (sigma - previous <= rtol * sigma).all():
                break
        sigma = sample_norm(jvp(function, (x,), (direction,))[1]).flatten().detach()
    return sigma, direction


def adversarial_lipschitz(
    function: Function,
    x: Tensor,
    *,
    steps: int = 50,
) -> tuple[Tensor, Tensor]:
    """Increase the estimate by moving the inputs: a lower bound of the global constant.

    Every step moves an input along the gradient of |J(x) v| in x, where v is the current singular
    vector. The length of a step is a fraction of the length of the input. It shrinks by half when
    the constant does not grow, and grows by half when it does.

    Args:
        function: As in `local_lipschitz`.
        x: First inputs, [B, ...].
        steps: Number of steps.

    Returns:
        The largest constants that were found, [B], and the inputs where they were found, shaped
        like `x`.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.estimate import adversarial_lipschitz
        >>> sigma, x = adversarial_lipschitz(torch.sin, torch.tensor([[1.0]]))
        >>> f"{sigma.item():.2f}"  # the slope of the sine is 1 at zero
        '1.00'
    """

    def gain(inputs: Tensor, direction: Tensor) -> Tensor:
        pushed = jvp(function, (inputs,), (direction,))[1]
        return (pushed * _unit(pushed.detach())).sum()  # the gradients of this and of |J v| agree

    best_x = x.detach()
    best, direction = local_lipschitz(function, best_x)
    length = torch.full_like(best, FIRST_STEP)
    for _ in range(steps):
        with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            uphill = _unit(grad(gain)(best_x, direction).detach())
        share = length.reshape(-1, *[1] * (x.ndim - 1))
        moved = best_x + share * sample_norm(best_x) * uphill
        sigma, turned = local_lipschitz(function, moved, num_iters=10, start=direction)
        grew = sigma > best
        wide = grew.reshape(-1, *[1] * (x.ndim - 1))
        best, best_x = torch.where(grew, sigma, best), torch.where(wide, moved, best_x)
        direction = torch.where(wide, turned, direction)
        length = torch.where(grew, 1.5 * length, 0.5 * length)
    return best, best_x


def capture_inputs(model: nn.Module, names: Iterable[str], x: Tensor) -> dict[str, Tensor]:
    """Run a model and return the input that each named submodule received in its last call.

    Args:
        model: The model, in evaluation mode.
        names: Dotted names of submodules whose first argument is a tensor; "" is the model itself.
        x: Input of the model.

    Returns:
        The first argument of each submodule, by name, without the submodules that were not called.

    Raises:
        AttributeError: If the model has no submodule of a name.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.estimate import capture_inputs
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Identity())
        >>> capture_inputs(model, ["1"], torch.tensor([[-1.0, 2.0]]))
        {'1': tensor([[0., 2.]])}
    """
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: inputs.update({name: args[0].detach()})

    with torch.no_grad(), ExitStack() as hooks:
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(keep(name)))
        model(x)
    return inputs


def estimate_submodules(
    model: nn.Module, names: Iterable[str], x: Tensor, *, num_iters: int = 20
) -> dict[str, float]:
    """Estimate the local constants of submodules at the inputs that they receive from real data.

    A submodule that the model calls several times is estimated at the input of its last call.

    Args:
        model: The model. It runs in evaluation mode and is set back to its mode.
        names: Dotted names of submodules that take one tensor; "" is the model itself.
        x: Input of the model, [B, ...].
        num_iters: Number of power iterations.

    Returns:
        The largest estimate over the batch, by name, without the submodules that were not called.

    Raises:
        AttributeError: If the model has no submodule of a name.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.estimate import estimate_submodules
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> model[0].weight.data, model[1].weight.data = 2.0 * torch.eye(2), 3.0 * torch.eye(2)
        >>> found = estimate_submodules(model, ["0", "1", ""], torch.randn(5, 2))
        >>> {name: round(value, 3) for name, value in sorted(found.items())}
        {'': 6.0, '0': 2.0, '1': 3.0}
    """
    with modes_restored(model):
        inputs = capture_inputs(model.eval(), names, x)
        return {
            name: local_lipschitz(model.get_submodule(name), value, num_iters=num_iters)[0]
            .max()
            .item()
            for name, value in inputs.items()
        }
