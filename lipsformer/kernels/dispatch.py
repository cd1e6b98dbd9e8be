"""When the CPU paths of the layers apply."""

import torch
from torch import Tensor


@torch.jit.unused
def first_order_on_cpu(x: Tensor, training: bool) -> bool:
    """Whether a layer may use gradients written for training on the CPU in float32 or bfloat16.

    They are first-order only: evaluation and ``torch.func`` keep the plain operators, which can be
    differentiated twice, forward and per sample. The compiler keeps them too.
    """
    return (
        not torch.compiler.is_compiling()  # first: the compiler cannot follow the others
        and training
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and not torch._C._are_functorch_transforms_active()
    )


@torch.jit.unused
def float32_on_cpu(x: Tensor, weight: Tensor, training: bool) -> bool:
    """The same for those in float32 alone, with autocast too: they call nothing that it changes."""
    return first_order_on_cpu(x, training) and x.dtype == weight.dtype == torch.float32


@torch.jit.unused
def cpu_training(x: Tensor, weight: Tensor, training: bool) -> bool:
    """The same for those on oneDNN, without autocast."""
    return (
        float32_on_cpu(x, weight, training)
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
    )
