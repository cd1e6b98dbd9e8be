"""The trial of a kernel that computes what some modules compute, on copies of these modules."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from lipsformer import kernels

Apply = Callable[[nn.Module, Tensor], Tensor]


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
    differentiates = torch.is_grad_enabled()
    name = f"{name}, {x.dtype}, {list(x.shape[1:])}, gradients {differentiates}"
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return kernels.stored_verdict(name)
    return try_kernel(name, modules, x, kernel, plain)


def try_kernel(name: str, modules: nn.Module, x: Tensor, kernel: Apply, plain: Apply) -> bool:
    """Return the verdict on a kernel, whatever the device; see `gpu_kernel_passes`."""
    differentiates = torch.is_grad_enabled()

    few = min(len(x), kernels.TRIAL_SAMPLES)

    def work(apply: Apply, exact: bool = False, samples: int = few) -> Callable[[], list[Tensor]]:
        @functools.cache  # not before the first call: a known verdict needs no copies
        def prepared() -> tuple[nn.Module, Tensor, list[Tensor]]:
            twin = copy.deepcopy(modules)
            inputs = x.detach()[torch.arange(samples, device=x.device) % len(x)]
            if exact:
                twin, inputs = twin.double(), inputs.double()
            inputs.requires_grad_(differentiates)
            return twin, inputs, [inputs, *(p for p in twin.parameters() if p.requires_grad)]

        def run() -> list[Tensor]:
            twin, inputs, leaves = prepared()
            with torch.autocast(x.device.type, enabled=False) if exact else nullcontext():
                out = apply(twin, inputs)
            if not differentiates:
                return [out]
            return [out, *torch.autograd.grad(out.square().sum(), leaves)]

        return run

    inner_dtype = kernels.product_dtype(x)
    many = kernels.TIMED_SAMPLES
    timed = (work(kernel, samples=many), work(plain, samples=many))
    return kernels.passes_trial(
        name, work(kernel), work(plain), work(plain, exact=True), inner_dtype, timed
    )
