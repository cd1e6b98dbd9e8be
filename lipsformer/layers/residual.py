"""WeightedResidual: the shortcut whose branch enters with a small learnable weight."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer.layers._cpu import cpu_training


class _GeluResidualFunction(torch.autograd.Function):
    """x + scale * GELU(z); keeps z alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(z, scale)
        return torch.addcmul(x, F.gelu(z), scale)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, scale = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_scale = (grad * F.gelu(z)).sum_to_size(scale.shape)
        return grad, torch.ops.aten.gelu_backward(grad * scale, z), grad_scale


class WeightedResidual(nn.Module):
    r"""Add a branch to its input with a learnable weight per channel, and drop path.

    .. math:: y = x + \alpha \odot \mathrm{DropPath}(f(x))

    2-norm Lipschitz constant per token: at most :math:`1 + \max|\alpha| Lip(f)` in evaluation and
    :math:`1 + \max|\alpha| Lip(f) / (1 - p)` in training with drop path rate p. With
    :math:`\alpha = 1/L` over L branches the product over the network is at most
    :math:`e^{\max Lip(f)}`.

    Shape:
        x, branch: [B, ..., C], channels last; the output has the same shape.

    Reference:
        Qi et al. 2023 (LipsFormer), weighted residual shortcut and Theorem 2.
    """

    def __init__(
        self,
        dim: int,
        init_value: float,
        drop_path: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the residual scale.

        Args:
            dim: Number of channels C.
            init_value: Initial value of every channel's weight; the paper uses 1 / (number of
                blocks).
            drop_path: Probability, in [0, 1), of dropping the branch of a sample in training.
            device: Device of the parameter.
            dtype: Type of the parameter.

        Raises:
            ValueError: If ``drop_path`` is outside [0, 1).
        """
        super().__init__()
        if not 0.0 <= drop_path < 1.0:
            raise ValueError(f"drop_path must lie in [0, 1), got {drop_path}")
        self.init_value = init_value
        self.drop_path = drop_path
        self.residual_scale = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every channel's weight to its initial value."""
        nn.init.constant_(self.residual_scale, self.init_value)

    def forward(
        self, x: Tensor, branch: Tensor, gelu: bool = False, scaled: bool = False
    ) -> Tensor:
        """Add the branch.

        Args:
            x: [B, ..., C].
            branch: f(x), or its value before a last GELU.
            gelu: Apply that GELU here; training on the CPU then recomputes it in the backward pass
                instead of keeping it.
            scaled: The branch has been multiplied by ``residual_scale`` already, as its last
                linear layer can do for nothing.
        """
        scale = self.residual_scale
        if self.training and self.drop_path > 0.0:
            # the mask is folded into the scale: [B, 1, ..., C] instead of one more pass over x
            keep = 1.0 - self.drop_path
            shape = [x.shape[0]] + [1] * (x.ndim - 1)
            mask = torch.empty(shape, dtype=scale.dtype, device=x.device).bernoulli_(keep) / keep
            scale = mask if scaled else scale * mask
        elif scaled:
            return x + branch
        if gelu:
            if not torch.jit.is_scripting() and cpu_training(x, scale, self.training):
                return _GeluResidualFunction.apply(x, branch, scale)
            branch = F.gelu(branch)
        return torch.addcmul(x, branch, scale.to(x.dtype))

    def extra_repr(self) -> str:
        """Show the initial value and the drop path rate."""
        return f"init_value={self.init_value:.4g}, drop_path={self.drop_path:.3g}"


register_notrace_module(WeightedResidual)  # drop path depends on the mode
