"""WeightedResidual: the shortcut whose branch enters with a small learnable weight."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer.kernels.dispatch import first_order_on_cpu, float32_on_cpu
from lipsformer.kernels.pointwise import add_gelu, add_gelu_backward


class _GeluResidualFunction(torch.autograd.Function):
    """x + scale * GELU(z), where z may hold the samples of ``index`` alone; keeps z."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, scale: Tensor, index: Tensor | None) -> Tensor:
        ctx.save_for_backward(z, scale, index)
        return add_gelu(x, z.float(), scale, index)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        z, scale, index = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_z, grad_scale = add_gelu_backward(grad, z.float(), scale, index)
        return grad, grad_z.to(z.dtype), grad_scale, None


def kept_samples(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the samples of ``x`` whose branch is not dropped: only they need computing.

    On the CPU alone: elsewhere the host would have to wait for the number of samples. If every
    sample is dropped all are returned, so that each parameter gets a gradient.

    Args:
        x: [B, ..., C].
        mask: Drawn by ``WeightedResidual.draw_mask``.

    Returns:
        [K, ..., C], 1 <= K <= B, in the order of ``x``.
    """
    if mask is None or torch.jit.is_scripting() or not first_order_on_cpu(x, True):
        return x
    index = _kept_index(mask)
    return x if index.shape[0] in (0, x.shape[0]) else x.index_select(0, index)


def _kept_index(mask: Tensor) -> Tensor:
    return mask.flatten().nonzero().flatten()


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

    def draw_mask(self, x: Tensor) -> Tensor | None:
        """Draw which samples of ``x`` ([B, ..., C]) keep their branch.

        Returns:
            [B, 1, ..., 1] of 0 or 1 / (1 - drop_path); None where nothing can be dropped.
        """
        if not self.training or self.drop_path == 0.0:
            return None
        keep = 1.0 - self.drop_path
        shape = [x.shape[0]] + [1] * (x.ndim - 1)
        scale = self.residual_scale
        return torch.empty(shape, dtype=scale.dtype, device=x.device).bernoulli_(keep) / keep

    def forward(
        self,
        x: Tensor,
        branch: Tensor,
        mask: Tensor | None = None,
        gelu: bool = False,
        scaled: bool = False,
    ) -> Tensor:
        """Add the branch.

        Args:
            x: [B, ..., C].
            branch: f(x), or its value before a last GELU; of all samples or of those that
                ``kept_samples`` returned.
            mask: Drawn by ``draw_mask``.
            gelu: Apply that GELU here; training on the CPU then recomputes it in the backward pass
                instead of keeping it.
            scaled: The branch has been multiplied by ``residual_scale`` already, as its last
                linear layer can do for nothing.

        Raises:
            ValueError: If branches are to be dropped and ``mask`` is missing.
        """
        if mask is None and self.training and self.drop_path > 0.0:
            raise ValueError(
                f"training with drop_path={self.drop_path} needs the mask of draw_mask(x)"
            )
        index: Tensor | None = None
        if mask is not None and branch.shape[0] != x.shape[0]:
            index = _kept_index(mask)
            mask = mask[index]
        scale = self.residual_scale
        if scaled:
            if mask is None:
                return x + branch
            scale = mask
        elif mask is not None:
            scale = scale * mask  # [B, 1, ..., C] instead of one more pass over x
        if gelu:
            if not torch.jit.is_scripting():
                inference = not torch.is_grad_enabled()
                if float32_on_cpu(x, scale, self.training or inference):
                    if inference:
                        return add_gelu(x, branch.float(), scale, index)
                    return _GeluResidualFunction.apply(x, branch, scale, index)
            branch = F.gelu(branch)
        if index is not None:
            return x.index_add(0, index, (branch * scale).to(x.dtype))
        return torch.addcmul(x, branch, scale.to(x.dtype))

    def extra_repr(self) -> str:
        """Show the initial value and the drop path rate."""
        return f"init_value={self.init_value:.4g}, drop_path={self.drop_path:.3g}"


register_notrace_module(WeightedResidual)  # drop path depends on the mode
