"""Depthwise convolution on channels-last maps."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer import kernels


class DepthwiseConv2d(nn.Module):
    r"""Convolve every channel of a channels-last map with its own kernel, zero padded.

    .. math:: y_c = w_c * x_c + b_c

    2-norm Lipschitz constant over the whole map: at most
    :math:`\max_c \max_f |\hat w_c(f)| \le \max_c |w_c|_1` with :math:`\hat w_c` the Fourier
    transform of the kernel.

    Shape:
        x: [B, H, W, C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import DepthwiseConv2d
        >>> DepthwiseConv2d(8, kernel_size=7)(torch.zeros(2, 5, 11, 8)).shape
        torch.Size([2, 5, 11, 8])
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
            dtype: Data type of the parameters.

        Raises:
            ValueError: If `kernel_size` is even: the output would not keep the size of the map.
        """
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} must be odd to keep the size of the map")
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
        """Convolve `x` ([B, H, W, C]) without copying it to another layout."""
        tensors = x, self.weight, self.bias
        if kernels.usable(
            "depthwise", *tensors, training=self.training, unless=lambda: self.obstacle(x)
        ):
            return kernels.depthwise_conv(x, self.weight, self.bias)
        x = x.permute(0, 3, 1, 2)
        y = F.conv2d(x, self.weight, self.bias, padding=self.padding, groups=self.dim)
        return y.permute(0, 2, 3, 1)

    def obstacle(self, x: Tensor) -> str | None:
        """Return why the CPU's kernel does not compute `x`, or None."""
        size = self.weight.shape[-1]
        if size not in kernels.DEPTHWISE_SIZES:
            return f"it has no kernel of {size} x {size}"
        if self.weight.shape != (self.dim, 1, size, size) or self.bias.shape != (self.dim,):
            return "the weight or the bias was replaced by one of another shape"
        if x.shape[-1] != self.dim:
            return f"the input has {x.shape[-1]} channels and the layer {self.dim}"
        return None

    def extra_repr(self) -> str:
        """Show the channels and the kernel size."""
        return f"{self.dim}, kernel_size={self.weight.shape[-1]}"


register_notrace_module(DepthwiseConv2d)  # FX cannot trace the choice of a kernel
