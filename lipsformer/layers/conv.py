"""Depthwise convolution on channels-last maps."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer.kernels.build import name_of, native, run
from lipsformer.kernels.dispatch import cpu_training, first_order_on_cpu


def _native(weight: Tensor, *maps: Tensor) -> bool:
    """Whether the kernels, which autograd cannot look into, may take these maps."""
    return not torch.is_grad_enabled() and native(weight, *maps) and weight.shape[-1] in (3, 7)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, flip: bool = False) -> Tensor:
    """Convolve ``x`` ([B, H, W, C]) with ``weight`` ([C, 1, K, K]) or that flipped."""
    if _native(weight, x):
        x, weight = x.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        y = torch.empty_like(x)
        run(f"depthwise_{name_of(x)}", x, weight, bias, y, *x.shape, weight.shape[-1], flip)
        return y
    weight = weight.flip(2, 3) if flip else weight
    x = x.to(weight.dtype).permute(0, 3, 1, 2)
    y = F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    return y.permute(0, 2, 3, 1)


def _parameter_gradients(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the kernels and the bias.

    The library's take up to ten times as long as the forward pass. That of the kernels is itself a
    convolution, of every channel of every image (as one group) with the map of its output gradient
    as the kernel.
    """
    if _native(weight, x, grad):
        x, grad = x.contiguous(), grad.contiguous()
        grad_weight, grad_bias = torch.empty_like(weight), weight.new_empty(weight.shape[0])
        gradients = (grad_weight, grad_bias)
        run(f"depthwise_parameters_{name_of(x)}", x, grad, *gradients, *x.shape, weight.shape[-1])
        return gradients
    x, grad = x.to(weight.dtype), grad.to(weight.dtype)
    batch, height, width, channels = x.shape
    grad_weight = F.conv2d(
        x.permute(0, 3, 1, 2).reshape(1, batch * channels, height, width),
        grad.permute(0, 3, 1, 2).reshape(batch * channels, 1, height, width),
        padding=weight.shape[-1] // 2,
        groups=batch * channels,
    )
    return grad_weight.reshape(batch, *weight.shape).sum(0), grad.sum((0, 1, 2))


class _DepthwiseConvFunction(torch.autograd.Function):
    """Depthwise convolution with a backward pass of its own, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolve(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_x = _convolve(grad, weight, None, flip=True) if ctx.needs_input_grad[0] else None
        return grad_x, *_parameter_gradients(x, weight, grad)


class DepthwiseConv2d(nn.Module):
    r"""Convolve every channel of a channels-last map with its own kernel, zero padded.

    .. math:: y_c = w_c * x_c + b_c

    2-norm Lipschitz constant over the whole map: at most
    :math:`\max_c \max_f |\hat w_c(f)| \le \max_c |w_c|_1` with :math:`\hat w_c` the Fourier
    transform of the kernel.

    Shape:
        x: [B, H, W, C]; the output has the same shape.
    """

    def __init__(
        self,
        dim: int,
        kernel_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the kernels and the bias.

        Args:
            dim: Number of channels C.
            kernel_size: Side of the square kernels, odd.
            device: Device of the parameters.
            dtype: Type of the parameters.

        Raises:
            ValueError: If ``kernel_size`` is even: the output would not keep the size of the map.
        """
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd to keep the map's size, got {kernel_size}")
        self.dim = dim
        self.padding = kernel_size // 2
        shape = (dim, 1, kernel_size, kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw kernels and bias uniformly within 1 / kernel_size, PyTorch's default."""
        bound = 1.0 / self.weight.shape[-1]
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``x`` ([B, H, W, C]) without copying it to another layout."""
        if not torch.jit.is_scripting():
            y = self._on_cpu(x)
            if y is not None:
                return y
        x = x.permute(0, 3, 1, 2)
        y = F.conv2d(x, self.weight, self.bias, padding=self.padding, groups=self.dim)
        return y.permute(0, 2, 3, 1)

    def _on_cpu(self, x: Tensor) -> Tensor | None:
        """The kernels, in float32 training else the gradient by convolutions; None for neither."""
        autocast = torch.is_autocast_enabled("cpu")
        if autocast:
            x = x.to(torch.get_autocast_dtype("cpu"))
        inference = not torch.is_grad_enabled()
        if not first_order_on_cpu(x, self.training or inference):
            return None
        weight, bias = self.weight.float(), self.bias.float()
        kernels = (
            (autocast or self.weight.dtype == x.dtype)
            and weight.shape[-1] in (3, 7)
            and native(weight, x)
        )
        if inference:
            return _convolve(x, weight, bias) if kernels else None
        if kernels or cpu_training(x, self.weight, self.training):
            return _DepthwiseConvFunction.apply(x, weight, bias)
        return None

    def extra_repr(self) -> str:
        """Show the channels and the kernel size."""
        return f"{self.dim}, kernel_size={self.weight.shape[-1]}"


register_notrace_module(DepthwiseConv2d)  # the choice of the gradient depends on mode and device
