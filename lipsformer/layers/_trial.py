"""The trial of a kernel that computes what some modules compute, on copies of these modules."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer import kernels

Apply = Callable[[Any, Tensor], Tensor]  # takes modules and their input


def gpu_kernel_passes(
    name: str, modules: nn.Module, x: Tensor, kernel: Apply, plain: Apply
) -> bool:
    """Return whether a kernel for GPUs is right and faster for inputs of this class.

    `kernels.passes_trial` says how that is decided.

    The compiler cannot trace a trial. It takes a kernel whose verdict is known and plain operators
    otherwise. On the CPU, where kernels for GPUs are only predicted or interpreted, there is
    nothing to try, and the result is True.

    Args:
        name: The operator with those of its settings that the shape of the input does not show.
        modules: What both ways compute; its parameters get gradients.
        x: [B, ...].
        kernel: Takes copies of the modules and of `x`, and computes with the kernel.
        plain: Does the same with PyTorch's operators.
    """
    if not x.is_cuda:
        return True
    name = f"{name}, {x.dtype}, {list(x.shape[1:])}, gradients {torch.is_grad_enabled()}"
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return kernels.stored_verdict(name)
    return try_kernel(name, modules, x, kernel, plain)


def try_kernel(name: str, modules: nn.Module, x: Tensor, kernel: Apply, plain: Apply) -> bool:
    """Return the verdict on a kernel, whatever the device; see `gpu_kernel_passes`."""
    few, many = min(len(x), kernels.TRIAL_SAMPLES), kernels.TIMED_SAMPLES
    return kernels.passes_trial(
        name,
        kernel=_Work(kernel, modules, x, few),
        plain=_Work(plain, modules, x, few),
        exact=_Work(plain, modules, x, few, exact=True),
        inner_dtype=kernels.product_dtype(x),
        timed=(_Work(kernel, modules, x, many), _Work(plain, modules, x, many)),
    )


class _Work:
    """A call on copies of the modules and of some samples, with the gradients of all of them.

    The copies are made at the first call, because a verdict that is known needs none.
    """

    def __init__(
        self, apply: Apply, modules: nn.Module, x: Tensor, samples: int, exact: bool = False
    ) -> None:
        self.apply, self.modules, self.x, self.samples = apply, modules, x, samples
        self.exact = exact  # in float64, without autocast

    @cached_property
    def copies(self) -> tuple[nn.Module, Tensor]:
        repeated = torch.arange(self.samples, device=self.x.device) % len(self.x)
        modules, x = copy.deepcopy(self.modules), self.x.detach()[repeated]
        if self.exact:
            modules, x = modules.double(), x.double()
        return modules, x.requires_grad_(torch.is_grad_enabled())

    def __call__(self) -> list[Tensor]:
        modules, x = self.copies
        with torch.autocast(x.device.type, enabled=False) if self.exact else nullcontext():
            out = self.apply(modules, x)
        if not torch.is_grad_enabled():
            return [out]
        leaves = [x, *(p for p in modules.parameters() if p.requires_grad)]
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]
