"""What the Triton kernels take: the sizes, and the arguments of window attention."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Tokens of a window. The gradient of a bias is summed in registers, which hold no larger one.
MAX_GPU_TOKENS, MAX_GPU_TOKENS_WITH_BIAS = 128, 64
GPU_DEPTHWISE_SIZE = 7  # side of the kernels of depthwise convolutions

# `WindowArguments` in the schema of an operator, which has no named tuples.
WINDOW_SCHEMA = (
    "Tensor? bias, Tensor[] tau, Tensor[] nu, Tensor[] lepe, Tensor[] lepe_bias, "
    "SymInt[] windows, SymInt heads, float scale, float eps"
)


class WindowArguments(NamedTuple):
    """What the attention needs beside the projected tokens. A partition is a group of heads.

    Attributes:
        bias: [1, heads, N, N], added to the scores of windows of N tokens; for one partition only.
        tau: Factors of the cosines, one [heads, 1, 1] per partition; empty for `scale` alone.
        nu: Length of the normalized values, one number per partition; empty leaves them as they
            are.
        lepe: Weights [C, 1, 3, 3] of the depthwise convolution of the values of each partition
            that is added to the output; empty for none.
        lepe_bias: Biases [C] of these convolutions.
        windows: Height and width in tokens of the windows of each partition, one after the other.
        heads: Number of heads of a partition.
        scale: Number that multiplies the cosines.
        eps: Smoothing constant of the normalization.
    """

    bias: Tensor | None
    tau: Sequence[Tensor]
    nu: Sequence[Tensor]
    lepe: Sequence[Tensor]
    lepe_bias: Sequence[Tensor]
    windows: Sequence[int]
    heads: int
    scale: float
    eps: float

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors in order."""
        return [self.bias, *self.tau, *self.nu, *self.lepe, *self.lepe_bias]

    def with_tensors(self, tensors: Sequence[Any]) -> "WindowArguments":
        """Return the same arguments with other tensors in the order of `tensors`."""
        bias, *rest = tensors
        groups = []
        for group in (self.tau, self.nu, self.lepe, self.lepe_bias):
            groups.append(rest[: len(group)])
            rest = rest[len(group) :]
        tau, nu, lepe, lepe_bias = groups
        numbers = (self.windows, self.heads, self.scale, self.eps)
        return WindowArguments(bias, tau, nu, lepe, lepe_bias, *numbers)

    def without_tensors(self) -> "WindowArguments":
        """Return the same arguments with None in place of every tensor."""
        return self.with_tensors([None] * len(self.tensors()))
