"""The layers of a folded model: fixed weights, and several operators of a model in one."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer import kernels
from lipsformer._hooks import would_run_hooks
from lipsformer.layers import CenterNorm, DepthwiseConv2d, WeightedResidual
from lipsformer.models.folding import (
    fold_norm_behind,
    full_gain,
    require_kind,
    require_plain,
    scale_output,
)


class FrozenLinear(nn.Linear):
    r"""Linear layer with fixed weights, and GELU after it if asked.

    .. math:: y = x W^T + b \quad\text{or}\quad y = \mathrm{GELU}(x W^T + b)

    Without gradients on the CPU in float32 or bfloat16, it is computed from a copy of the weight
    in the layout of the fastest product, with GELU in the same pass. The copy is made at the first
    call and again when a parameter was written or replaced or the type has changed.
    Elsewhere, and for parameters that were made in inference mode, whose changes PyTorch does not
    count, it is `nn.Linear` and GELU.

    Shape:
        x: [..., C_in]; the output is [..., C_out].

    Example:
        >>> import torch
        >>> from lipsformer.models.folded_layers import FrozenLinear
        >>> FrozenLinear(torch.nn.Linear(3, 5), act_after=True)(torch.zeros(2, 3)).shape
        torch.Size([2, 5])
    """

    def __init__(self, linear: nn.Linear, act_after: bool = False) -> None:
        """Take over the parameters of a layer.

        Args:
            linear: The layer.
            act_after: Apply GELU to the output.

        Raises:
            TypeError: If the layer computes more than its weight and bias say.
        """
        require_plain(linear)
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.act_after = act_after
        self.packed: _Packed | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the packed copy, which can be neither copied nor saved."""
        return {**super().__getstate__(), "packed": None}

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to `input` ([..., C_in])."""
        if input.numel() > 0 and kernels.usable(
            "packed_linear", input, *self._tensors(), unless=self._obstacle
        ):
            dtype = kernels.product_dtype(input)
            packed = self.packed  # read once: another thread may replace it
            if packed is None or packed.is_stale(dtype, self._tensors()):
                packed = self.packed = _Packed(dtype, self._tensors())
            return kernels.packed_linear(
                input.to(dtype), packed.weight, packed.bias, self.act_after
            )
        y = F.linear(input, self.weight, self.bias)
        return F.gelu(y) if self.act_after else y

    def _tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def _obstacle(self) -> str | None:
        """Return why the packed copy of the weight may not be used, or None."""
        if any(tensor.is_inference() for tensor in self._tensors()):
            return "a parameter was made in inference mode"
        return None

    def extra_repr(self) -> str:
        """Show the sizes and whether GELU follows."""
        return f"{super().extra_repr()}, act_after={self.act_after}"


register_notrace_module(FrozenLinear)  # FX cannot trace the choice of a kernel


class _Packed:
    """A copy of a layer's parameters, with the weight in the layout of the fastest product.

    It remembers the tensors that it was made from, so that it can say whether they have changed.
    """

    def __init__(self, dtype: torch.dtype, tensors: list[Tensor]) -> None:
        weight, *bias = (tensor.to(dtype) for tensor in tensors)
        self.weight = kernels.pack_weight(weight)
        self.bias = bias[0].expand(len(weight)).contiguous() if bias else None
        # The sources are kept alive, so that no other tensor can get one of their addresses.
        self.sources = [tensor.detach() for tensor in tensors]
        self.state = self._state(dtype, tensors)

    def is_stale(self, dtype: torch.dtype, tensors: list[Tensor]) -> bool:
        """Return whether a parameter was written or replaced, or another type is wanted."""
        return self._state(dtype, tensors) != self.state

    @staticmethod
    def _state(dtype: torch.dtype, tensors: list[Tensor]) -> Any:
        return dtype, [(tensor.data_ptr(), tensor.stride(), tensor._version) for tensor in tensors]


class FoldedResidual(nn.Module):
    r"""Weighted residual and the CenterNorm after it, folded into the branch's last layer.

    .. math:: CN(x + \alpha \odot f(x)) = \gamma \tfrac{d}{d-1} (x - \mathrm{mean}(x)) + f'(x)

    :math:`f'` is the branch with a changed last layer: :math:`f'(x) = CN(\alpha \odot f(x))`.

    Shape:
        x: [B, ..., C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import CenterNorm, WeightedResidual
        >>> from lipsformer.models.folded_layers import FoldedResidual
        >>> linear, norm, x = torch.nn.Linear(3, 3), CenterNorm(3), torch.randn(5, 3)
        >>> residual = WeightedResidual(linear, dim=3, init_value=0.1)
        >>> expected = norm(residual(x))
        >>> folded = FoldedResidual(residual, linear, norm)
        >>> torch.allclose(folded(x), expected, atol=1e-6)
        True
    """

    gain: Tensor | None

    def __init__(self, residual: WeightedResidual, last: nn.Linear, norm: nn.Module) -> None:
        """Take over the branch and change its last layer.

        Args:
            residual: The residual.
            last: The linear layer that ends its branch.
            norm: CenterNorm of the sum, or an identity.

        Raises:
            TypeError: If one of them computes more than its class says, or `norm` is neither.
        """
        super().__init__()
        require_plain(residual)
        require_kind(norm, CenterNorm, nn.Identity)
        self.branch = residual.branch
        scale_output(last, residual.residual_scale)
        gain = None
        if isinstance(norm, CenterNorm):
            fold_norm_behind(last, norm)
            gain = full_gain(norm).to(norm.weight.dtype)
        self.register_buffer("gain", gain)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the residual to `x` ([B, ..., C])."""
        if self.gain is None:
            return x + self.branch(x)
        return kernels.center(x, self.gain, self.branch(x))


register_notrace_module(FoldedResidual)  # FX cannot trace the choice of a kernel


class FoldedConv(nn.Module):
    r"""Depthwise convolution and the GELU after it, with the residual around both if asked.

    .. math:: y = \mathrm{GELU}(w * x + b) \quad\text{or}\quad
        y = x + \alpha \odot \mathrm{GELU}(w * x + b)

    Without gradients on the CPU in float32 or bfloat16 this is one pass over the map.

    Shape:
        x: [B, H, W, C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import DepthwiseConv2d
        >>> from lipsformer.models.folded_layers import FoldedConv
        >>> FoldedConv(DepthwiseConv2d(8, kernel_size=7))(torch.zeros(2, 5, 11, 8)).shape
        torch.Size([2, 5, 11, 8])
    """

    def __init__(
        self, depthwise: DepthwiseConv2d, residual_scale: nn.Parameter | None = None
    ) -> None:
        """Take over the convolution.

        Args:
            depthwise: The convolution.
            residual_scale: [C], alpha of the residual around it, or None for no residual.
        """
        super().__init__()
        require_plain(depthwise)
        self.depthwise = depthwise
        self.residual_scale = residual_scale

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x` ([B, H, W, C])."""
        conv, scale = self.depthwise, self.residual_scale
        parameters = [conv.weight, conv.bias] if scale is None else [conv.weight, conv.bias, scale]
        if kernels.usable("depthwise_gelu", x, *parameters, unless=lambda: self._obstacle(x)):
            return kernels.depthwise_gelu(x, conv.weight, conv.bias, scale)
        y = F.gelu(conv(x))
        return y if scale is None else torch.addcmul(x, y, scale).to(x.dtype)

    def _obstacle(self, x: Tensor) -> str | None:
        if would_run_hooks((self.depthwise,)):
            return "the convolution has hooks"
        if self.residual_scale is not None and kernels.product_dtype(x) != x.dtype:
            return "the sum keeps the type of the input, which autocast changes"
        if self.residual_scale is not None and self.residual_scale.shape != (self.depthwise.dim,):
            return "the residual scale has another shape"
        return self.depthwise.obstacle(x)


register_notrace_module(FoldedConv)
