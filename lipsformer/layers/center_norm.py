"""CenterNorm: the Lipschitz-continuous replacement of LayerNorm."""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer.kernels.dispatch import float32_on_cpu
from lipsformer.kernels.pointwise import center, center_backward

MAX_OFFSET = 64.0  # |bias / gain| up to which the output gives the centred input back


class _CenterNormFunction(torch.autograd.Function):
    """Keeps its result, which the next layer keeps as well, and nothing else.

    The gradient of the gain needs the centred input, (result - bias) / gain, as in Rota Bulo et
    al. 2018 (in-place activated batch norm). Where the gain is too small beside the bias for that,
    down to zero, the channel's centred input is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = center(x, weight * _factor(weight), bias)
        lost = (bias.abs() > MAX_OFFSET * weight.abs()) | (weight == 0.0)
        centred = (x[..., lost] - x.mean(dim=-1, keepdim=True)) if lost.any() else None
        ctx.save_for_backward(y, weight, bias, lost, centred)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, weight, bias, lost, centred = ctx.saved_tensors
        (grad,) = grad_outputs
        factor = _factor(weight)
        grad_x, offset, grad_bias = center_backward(grad, y, weight * factor, bias)
        grad_weight = offset / weight
        if centred is not None:
            grad_weight[lost] = (grad[..., lost] * centred).flatten(0, -2).sum(0) * factor
        return grad_x, grad_weight, grad_bias


def _factor(weight: Tensor) -> float:
    return len(weight) / (len(weight) - 1)


class CenterNorm(nn.Module):
    r"""Centre each token over its channels, then scale and shift it.

    .. math:: CN(x) = \gamma \odot \frac{d}{d-1} (x - \mathrm{mean}(x)) + \beta

    The map is affine. Its 2-norm Lipschitz constant per token is
    :math:`\sigma_{max}(\mathrm{diag}(\gamma) \frac{d}{d-1} (I - 11^T/d)) \le \max|\gamma| d/(d-1)`,
    with equality at initialisation. LayerNorm divides by the standard deviation of the token and
    has no Lipschitz constant.

    Shape:
        x: [..., C], channels last; the output has the same shape.

    Reference:
        Qi et al. 2023 (LipsFormer), CenterNorm.
    """

    def __init__(
        self,
        dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the gain (ones) and the bias (zeros).

        Args:
            dim: Number of channels C, at least 2: one channel minus its own mean is always zero.
            device: Device of the parameters.
            dtype: Type of the parameters.

        Raises:
            ValueError: If ``dim`` is below 2.
        """
        super().__init__()
        if dim < 2:
            raise ValueError(f"CenterNorm needs dim >= 2 to scale by dim/(dim - 1), got dim={dim}")
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain to one and the bias to zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ([..., C])."""
        if not torch.jit.is_scripting():
            inference = not torch.is_grad_enabled()
            if float32_on_cpu(x, self.weight, self.training or inference):
                if inference:
                    return center(x, self.weight * _factor(self.weight), self.bias)
                return _CenterNormFunction.apply(x, self.weight, self.bias)
        centred = x - x.mean(dim=-1, keepdim=True)
        return torch.addcmul(self.bias, centred, self.weight * (self.dim / (self.dim - 1)))

    def extra_repr(self) -> str:
        """Show the number of channels."""
        return f"{self.dim}"


register_notrace_module(CenterNorm)  # the choice of the gradient depends on mode and device
