"""Linear layer over the channels that runs on oneDNN on the CPU."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer.kernels.dispatch import cpu_training
from lipsformer.kernels.pointwise import gelu_backward_, sum_rows


def _conv_1x1(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Linear layer as a 1x1 convolution of one channels-last map, without a copy."""
    y = F.conv2d(_as_map(x), weight[:, :, None, None], bias)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], weight.shape[0])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product a b^T, on oneDNN unless that is to be differentiated or counted."""
    if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0:
        return F.linear(a, b)
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Sum over the tokens of grad x^T ([C_out, C_in])."""
    channels_out, channels_in = grad.shape[-1], x.shape[-1]
    if x.numel() < channels_in**2:  # few tokens: the convolution takes up to half as long again
        return _product(grad.reshape(-1, channels_out).T, x.reshape(-1, channels_in).T)
    weight = grad.new_empty(channels_out, channels_in, 1, 1)
    _, grad_weight, _ = torch.ops.aten.convolution_backward(
        *(_as_map(grad), _as_map(x), weight, None),
        *([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]),
    )
    return grad_weight.reshape(channels_out, channels_in)


def scale_rows(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the layer whose output is multiplied by ``scale`` ([C_out])."""
    if scale is None:
        return weight, bias
    return weight * scale[:, None], None if bias is None else bias * scale


def _as_map(x: Tensor) -> Tensor:
    return x.reshape(1, x.shape[0], -1, x.shape[-1]).permute(0, 3, 1, 2)


class _LinearFunction(torch.autograd.Function):
    """GELU (if wanted), the 1x1 convolution and the scale; keeps the input before GELU alone.

    The gradient of the scale comes from that of the scaled weight: the output is not kept. The
    gradient of the bias is a sum of its own: inside the library's it is slow. That of the input
    comes first, so that GELU, for the weight's, and its derivative are found in one pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, scale: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, scale)
        ctx.gelu = gelu
        return _conv_1x1(F.gelu(x) if gelu else x, *scale_rows(weight, bias, scale))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, scale = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        need_x, need_weight, _, _, need_scale = ctx.needs_input_grad
        scaled, _ = scale_rows(weight, None, scale)
        grad_x = grad_weight = grad_bias = grad_scale = None
        if need_x:
            grad_x = _product(grad, scaled.T)
        if ctx.gelu:
            x = F.gelu(x) if grad_x is None else gelu_backward_(grad_x, x)
        if need_weight or need_scale:
            grad_weight = _weight_gradient(grad, x)
        if bias is not None:
            grad_bias = sum_rows(grad)
        if grad_weight is not None and need_scale:
            grad_scale = (grad_weight * weight).sum(1)
            if bias is not None and grad_bias is not None:
                grad_scale += grad_bias * bias
        if scale is not None:
            grad_weight = None if grad_weight is None else grad_weight * scale[:, None]
            grad_bias = None if grad_bias is None else grad_bias * scale
        return grad_x, grad_weight, grad_bias, None, grad_scale


class Linear(nn.Linear):
    r"""Linear layer over the last dimension, twice as fast as PyTorch's on CPUs where MKL is slow.

    .. math:: y = x W^T + b \quad\text{or}\quad y = \mathrm{GELU}(x) W^T + b

    On the CPU in float32 it is computed as a 1x1 convolution of a channels-last map by oneDNN,
    which uses the full vector width of every processor; elsewhere it is ``nn.Linear``. The 2-norm
    Lipschitz constant per token is :math:`|W|_2`, times 1.1290 with GELU.

    Shape:
        x: [B, ..., C_in]; the output is [B, ..., C_out].
    """

    def forward(self, input: Tensor, gelu: bool = False, scale: Tensor | None = None) -> Tensor:
        """Apply the layer.

        Args:
            input: [B, ..., C_in].
            gelu: Apply GELU to the input first; training on the CPU then recomputes it in the
                backward pass instead of keeping it.
            scale: [C_out], multiplies the output. It is multiplied into the weight, so that no
                pass over the output is needed and its gradient needs no copy of the output.
        """
        if not torch.jit.is_scripting() and input.ndim > 2:
            inference = not torch.is_grad_enabled()
            if cpu_training(input, self.weight, self.training or inference):
                if inference:
                    weight, bias = scale_rows(self.weight, self.bias, scale)
                    return _conv_1x1(F.gelu(input) if gelu else input, weight, bias)
                return _LinearFunction.apply(input, self.weight, self.bias, gelu, scale)
        weight, bias = scale_rows(self.weight, self.bias, scale)
        return F.linear(F.gelu(input) if gelu else input, weight, bias)


register_notrace_module(Linear)  # the choice of the path depends on mode and device
