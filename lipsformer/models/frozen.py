"""Layers of a model that is run and no longer trained."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer.kernels.dispatch import cpu_training
from lipsformer.layers.cosine_attention import MAX_LOGIT_SCALE, ScaledCosineAttention


class FrozenLinear(nn.Linear):
    r"""Linear layer with fixed weights and, if wanted, GELU behind it.

    .. math:: y = x W^T + b \quad\text{or}\quad y = \mathrm{GELU}(x W^T + b)

    Without gradients on the CPU in float32 oneDNN computes it in one pass from a copy of the weight
    in its own layout; made at the first call and again when the weight has changed. Elsewhere it is
    ``nn.Linear`` and GELU.

    Shape:
        x: [..., C_in]; the output is [..., C_out].
    """

    def __init__(self, linear: nn.Linear, gelu: bool = False) -> None:
        """Take over a layer's parameters.

        Args:
            linear: The layer.
            gelu: Apply GELU to the output.
        """
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.gelu = gelu
        self.packed: tuple[tuple[int, int], Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the copy, which can be neither copied nor saved."""
        return {**super().__getstate__(), "packed": None}

    def forward(self, input: Tensor, scale: None = None) -> Tensor:
        """Apply the layer; ``scale`` is there for the call of ``Linear`` only."""
        inference = not torch.is_grad_enabled() and input.numel() > 0
        if cpu_training(input, self.weight, inference):
            state = (self.weight.data_ptr(), self.weight._version)
            if self.packed is None or self.packed[0] != state:
                weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
                self.packed = (state, weight)
            act, approximate = ("gelu", "none") if self.gelu else ("none", "")
            return torch.ops.mkldnn._linear_pointwise(
                input, self.packed[1], self.bias, act, [], approximate
            )
        y = F.linear(input, self.weight, self.bias)
        return F.gelu(y) if self.gelu else y

    def extra_repr(self) -> str:
        """Show the sizes and whether GELU follows."""
        return f"{super().extra_repr()}, gelu={self.gelu}"


register_notrace_module(FrozenLinear)  # the choice of the path depends on mode and device


class FrozenCosineAttention(nn.Module):
    """Scaled cosine attention with fixed tau and nu, which cost nothing inside the normalisation.

    Shape:
        q, k, v: [B, H, N, d]; bias: broadcastable to [B, H, N, N]; output [B, H, N, d].
    """

    scale_q: Tensor
    scale_v: Tensor | None

    def __init__(self, attention: ScaledCosineAttention) -> None:
        """Take over tau, nu and eps from ``attention``."""
        super().__init__()
        self.num_heads = attention.num_heads
        self.fused_attn = attention.fused_attn
        self.eps = attention.eps
        nu, log_tau = attention.value_scale, attention.log_logit_scale
        if log_tau is None:
            tau = torch.tensor(attention.init_logit_scale)
        else:
            tau = log_tau.detach().double().exp().clamp(max=MAX_LOGIT_SCALE).to(log_tau.dtype)
        self.register_buffer("scale_q", tau)
        self.register_buffer("scale_v", None if nu is None else nu.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend with queries ``q``, keys ``k`` and values ``v``, adding ``bias`` to the scores."""
        q, k = self._normalize(q, self.scale_q), self._normalize(k, None)
        if self.scale_v is not None:
            v = self._normalize(v, self.scale_v)
        return F.scaled_dot_product_attention(q, k, v, bias, scale=1.0)

    def kernel_scales(self) -> tuple[Tensor, float, float] | None:
        """Return tau per head, nu (0 for raw values) and eps for ``cosine_windows``."""
        if not self.fused_attn:
            return None
        nu = 0.0 if self.scale_v is None else float(self.scale_v)
        return self.scale_q.flatten().expand(self.num_heads), nu, self.eps

    def _normalize(self, x: Tensor, scale: Tensor | None) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.rsqrt(length.square() + self.eps)
        return (wide * (inverse if scale is None else inverse * scale)).to(x.dtype)


register_notrace_module(FrozenCosineAttention)  # the normalisation depends on the input's type
