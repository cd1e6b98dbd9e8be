"""How `WeightedResidual` leaves out dropped samples, and adds a branch in one pass over the map.

`x` is the map for the sum, `inputs` are the samples of it that enter the branch, and `kept` are
their indices, or None for all samples.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer import kernels
from lipsformer.layers._hooks import has_hooks


def declared(branch: Any, name: str) -> Any:
    """Return `name` of the class that defines the branch's forward function, None without it.

    A subclass with its own forward function inherits the attribute, but need not do what it says.
    """
    cls = next(cls for cls in type(branch).__mro__ if "forward" in vars(cls))
    return vars(cls).get(name)


def entering_samples(
    residual: Any, x: Tensor, context: tuple[Any, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Draw the mask, and the samples that the branch computes.

    The branch computes all samples if it has further arguments, which may belong to samples, or if
    no sample is kept: the factors are 0 then, so that every parameter gets a gradient.
    """
    if context:
        return residual.draw_mask(x), None
    mask, kept = residual.draw(x)
    if mask is not None and len(mask) == 0:
        return mask.new_zeros(len(x), *mask.shape[1:]), None
    return mask, kept


def kept_samples(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return the indices of the samples whose branch must be computed; None for all samples.

    Samples are left out only on the CPU: on a GPU the host would have to wait until it knows how
    many there are.
    """
    if mask is None or not kernels.usable("kept_samples", x, training=True):
        return None
    kept = mask.flatten().nonzero().flatten()
    return None if kept.shape[0] == x.shape[0] else kept


def enter(residual: Any, x: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x for the sum, and the samples of x that enter the branch."""
    if kept is None:
        return x, x
    if kernels.usable("residual", x, training=residual.training):
        return kernels.fork(x, kept)
    return x, x.index_select(0, kept)


def add_scaled(
    residual: Any,
    x: Tensor,
    inputs: Tensor,
    scaled: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
) -> Tensor:
    """Add the output of a branch that is already multiplied by alpha."""
    if mask is None or scaled.shape != inputs.shape:  # the kernel does not check shapes
        return add(x, scaled, mask, kept)
    if kernels.usable("residual", x, scaled, training=residual.training):
        return kernels.residual(x, scaled, mask, kept)
    return add(x, scaled, mask, kept)


def applies_gelu(residual: Any, x: Tensor, scale: Tensor) -> bool:
    """Return whether one kernel computes the last GELU of the branch and the sum."""
    usable = kernels.usable("gelu_residual", x, scale, training=residual.training)
    return usable and not has_hooks(residual.branch)  # a hook sees the output with GELU


def add_gelu(x: Tensor, inputs: Tensor, z: Tensor, scale: Tensor, kept: Tensor | None) -> Tensor:
    """Return x + scale * GELU(z), where z may hold only the samples `kept`."""
    if z.shape == inputs.shape:  # the kernel does not check it
        return kernels.gelu_residual(x, z, scale, kept)
    return add(x, F.gelu(z), scale, kept)


def add(x: Tensor, output: Tensor, scale: Tensor | None, kept: Tensor | None) -> Tensor:
    """Return x + scale * output, where the branch's output may hold only the samples `kept`."""
    if kept is not None:
        output = output if scale is None else output * scale
        return x.index_add(0, kept, output.to(x.dtype))
    return x + output if scale is None else torch.addcmul(x, output, scale).to(x.dtype)
