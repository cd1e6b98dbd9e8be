"""When the CPU paths of the layers apply."""

import torch
from torch import Tensor


@torch.jit.unused
def cpu_training(x: Tensor, weight: Tensor, training: bool) -> bool:
    """Whether a layer may use gradients written for float32 training on the CPU.

    They are first-order only: evaluation and ``torch.func`` keep the plain operators, which can be
    differentiated twice, forward and per sample. Autocast and the compiler keep them too.
    """
    return (
        not torch.compiler.is_compiling()  # first: the compiler cannot follow the others
        and training
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled("cpu")
    )
