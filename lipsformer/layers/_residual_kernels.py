"""How `WeightedResidual` leaves out dropped samples, and adds a branch in one pass over the map."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer import kernels
from lipsformer._hooks import has_own_forward, would_run_hooks


def declared(branch: Any, name: str) -> Any:
    """Return the attribute `name` of the class that defines the branch's forward function.

    None if that class does not have it itself, or if a forward function was set on the branch.
    An attribute is a promise about one forward function: a subclass that overrides the function
    inherits the attribute, but need not keep the promise.
    """
    if has_own_forward(branch):
        return None
    cls = next(cls for cls in type(branch).__mro__ if "forward" in vars(cls))
    return vars(cls).get(name)


@dataclass
class Entering:
    """A map, and the samples of it that enter a branch.

    Attributes:
        x: The map for the sum, [B, ..., C].
        inputs: The samples that enter, [K, ..., C].
        mask: Their factors, [K, 1, ..., 1], or None if nothing can be dropped.
        kept: Their indices, [K], or None for all samples.
        training: Whether the residual is in training mode.
    """

    x: Tensor
    inputs: Tensor
    mask: Tensor | None
    kept: Tensor | None
    training: bool

    def masked(self, scale: Tensor) -> Tensor:
        """Return the scale of the channels times the factors of the samples."""
        return scale if self.mask is None else scale * self.mask

    def add(self, output: Tensor, scale: Tensor | None) -> Tensor:
        """Return x + scale * output, where the output is that of the samples that enter."""
        if self.kept is not None:
            output = output if scale is None else output * scale
            return self.x.index_add(0, self.kept, output.to(self.x.dtype))
        if scale is None:
            return self.x + output
        return torch.addcmul(self.x, output, scale).to(self.x.dtype)

    def add_scaled(self, scaled: Tensor) -> Tensor:
        """Add the output of a branch that is already multiplied by alpha."""
        if self.mask is None or scaled.shape != self.inputs.shape:  # the kernel checks no shapes
            return self.add(scaled, self.mask)
        if kernels.usable("residual", self.x, scaled, training=self.training):
            return kernels.residual(self.x, scaled, self.mask, self.kept)
        return self.add(scaled, self.mask)

    def fuses_gelu(self, branch: Any, scale: Tensor) -> bool:
        """Return whether one kernel computes the last GELU of the branch and the sum."""
        usable = kernels.usable("gelu_residual", self.x, scale, training=self.training)
        return usable and not would_run_hooks((branch,))  # a hook sees the output with GELU

    def add_gelu(self, z: Tensor, scale: Tensor) -> Tensor:
        """Return x + scale * GELU(z)."""
        if z.shape == self.inputs.shape:  # the kernel does not check it
            return kernels.gelu_residual(self.x, z, scale, self.kept)
        return self.add(F.gelu(z), scale)


def enter(residual: Any, x: Tensor, context: tuple[Any, ...]) -> Entering:
    """Draw which samples of a map enter the branch.

    Every sample enters in two cases:

    - The branch has further arguments (`context`), which may belong to samples.
    - All samples are dropped. Their factors are 0 then, and every parameter gets a gradient.
    """
    mask, kept = (residual.draw_mask(x), None) if context else draw(residual, x)
    if mask is not None and len(mask) == 0:
        mask, kept = mask.new_zeros(len(x), *mask.shape[1:]), None
    inputs = x
    if kept is not None:
        if kernels.usable("residual", x, training=residual.training):
            x, inputs = kernels.fork(x, kept)
        else:
            inputs = x.index_select(0, kept)
    return Entering(x, inputs, mask, kept, residual.training)


def draw(residual: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask and the indices of the samples that enter; see `Entering`. K may be 0.

    Samples are left out only on the CPU: on a GPU the host would have to wait until it knows how
    many there are.
    """
    mask = residual.draw_mask(x)
    if mask is None or not declared(residual.branch, "treats_samples_alone"):
        return mask, None
    if not kernels.usable("kept_samples", x):
        return mask, None
    kept = mask.flatten().nonzero().flatten()
    return (mask, None) if len(kept) == len(x) else (mask[kept], kept)
