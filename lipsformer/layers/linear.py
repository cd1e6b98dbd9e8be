"""Linear layer over the channels."""

import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer import kernels


class Linear(nn.Linear):
    r"""Linear layer over the last dimension, with GELU before it and a scale of its output.

    .. math:: y = s \odot (x W^T + b) \quad\text{or}\quad y = s \odot (\mathrm{GELU}(x) W^T + b)

    On the CPU `lipsformer.kernels` chooses the fastest product; elsewhere it is `nn.Linear`.
    The 2-norm Lipschitz constant per token is :math:`|W|_2`, times 1.1290 with GELU.

    Shape:
        x: [B, ..., C_in]; the output is [B, ..., C_out].

    Example:
        >>> import torch
        >>> from lipsformer.layers import Linear
        >>> Linear(3, 5)(torch.zeros(2, 7, 3), act_before=True).shape
        torch.Size([2, 7, 5])
    """

    def forward(  # by name only, so that no edges of a graph are taken for `act_before`
        self, input: Tensor, *, act_before: bool = False, output_scale: Tensor | None = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            input: [B, ..., C_in].
            act_before: Apply GELU to the input first. Training on the CPU computes it again in the
                backward pass instead of keeping it.
            output_scale: [C_out], multiplies the output. The kernel multiplies it into the weight
                instead, which saves a pass over the output and, for its gradient, a copy of it.
                In float32 it does so only if there are at least as many tokens as input channels.
        """
        if kernels.usable("linear", input, self.weight, training=self.training):
            return kernels.fused_linear(input, self.weight, self.bias, act_before, output_scale)
        weight, bias = self.weight, self.bias
        if output_scale is not None:
            weight = weight * output_scale[:, None]
            bias = None if bias is None else bias * output_scale
        return F.linear(F.gelu(input) if act_before else input, weight, bias)


def apply_linear(
    layer: nn.Module, x: Tensor, act_before: bool = False, output_scale: Tensor | None = None
) -> Tensor:
    """Apply a linear layer, with GELU before it and a scale of its output.

    A layer that stands in the place of `Linear`, such as an adapter, knows neither, so they are
    computed around it.

    Args:
        layer: From [..., C_in] to [..., C_out].
        x: [..., C_in].
        act_before: Apply GELU to the input first.
        output_scale: [C_out], multiplies the output.

    Example:
        >>> import torch
        >>> from lipsformer.layers import Linear, apply_linear
        >>> layer, x = Linear(3, 5), torch.randn(2, 3)
        >>> plain = torch.nn.Sequential(layer)  # knows neither GELU nor scale
        >>> arguments = {"act_before": True, "output_scale": torch.full((5,), 0.5)}
        >>> torch.allclose(apply_linear(plain, x, **arguments), layer(x, **arguments))
        True
    """
    if type(layer).forward is Linear.forward:
        return layer(x, act_before=act_before, output_scale=output_scale)
    y = layer(F.gelu(x) if act_before else x)
    return y if output_scale is None else y * output_scale


register_notrace_module(Linear)  # FX cannot trace the choice of a kernel
