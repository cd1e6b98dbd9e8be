"""SimpleNorm: a norm right after every linear map, and no other norm in a block."""

from typing import Any

import torch
from torch import Tensor, nn

from lipsformer.layers import DepthwiseConv2d


class RMSNorm(nn.RMSNorm):
    r"""Divide each token by its root mean square: :math:`\gamma \odot \sqrt{d} x / |x|_2`."""

    def __init__(self, dim: int, parts: int = 1) -> None:
        """Create the gain.

        Args:
            dim: Number of channels.
            parts: Number of equal parts of the channels that are normalized one by one.
        """
        super().__init__(dim // parts, eps=1e-6, elementwise_affine=False)
        self.parts = parts
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` ([..., C])."""
        return super().forward(x.unflatten(-1, (self.parts, -1))).flatten(-2) * self.gain


def simple_norm_(layer: nn.Module, parts: int = 1) -> None:
    r"""Normalize the output of a linear layer or a depthwise convolution.

    .. math:: y = \gamma \odot \frac{\sqrt{d}\, W x}{|W x|_2}

    The layer loses its bias. In SimpleGPT every linear map of a block is followed by this norm,
    which takes the place of all others but the last one before the classifier.

    Args:
        layer: Its output is channels last; changed in place by a hook.
        parts: Number of maps that the layer computes at once, such as 3 for q, k and v.

    Reference:
        Chen et al. 2026, "SimpleGPT: Improving GPT via A Simple Normalization Strategy",
        arXiv:2602.01212.
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if isinstance(layer, DepthwiseConv2d):
        nn.init.zeros_(layer.bias).requires_grad_(False)
    else:
        layer.register_parameter("bias", None)
    layer.output_norm = RMSNorm(len(weight), parts)  # pyright: ignore

    def normalize(module: Any, _: Any, output: Tensor) -> Tensor:
        return module.output_norm(output)

    layer.register_forward_hook(normalize)
