"""Attention with bounded scores on fused kernels: scaled cosines, or LipschitzNorm.

Shapes in this file: B batch (windows included), H heads, N tokens, d channels per head.
"""

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function, register_notrace_module, use_fused_attn
from torch import Tensor, nn

from lipsformer.kernels.dispatch import cpu_training
from lipsformer.layers.lipschitz_norm import dense_quadratic_scale

MAX_LOGIT_SCALE = 100.0  # the ceiling of a learned temperature, as in SwinV2


class _CosineNormalizeFunction(torch.autograd.Function):
    """Keeps the result, which attention keeps as well, instead of the input for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, length: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()
        y = x * (inverse * length)
        ctx.save_for_backward(y, inverse)
        ctx.length = length
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        y, inverse = ctx.saved_tensors
        (grad,) = grad_outputs
        along = (grad * y).sum(dim=-1, keepdim=True) * (inverse / ctx.length)
        grad_x = grad * (inverse * ctx.length)
        return grad_x.addcmul_(y, along, value=-1.0), None, None


@register_notrace_function  # the CPU path depends on the input's type
def cosine_normalize(
    x: Tensor, eps: float = 1e-2, length: float = 1.0, training: bool = False
) -> Tensor:
    r"""Divide every vector by its smoothed length and multiply it by a new one.

    .. math:: \tilde x = \ell x / \sqrt{|x|_2^2 + \epsilon}

    :math:`|\tilde x|_2 < \ell`; the 2-norm Lipschitz constant is
    :math:`\ell \epsilon^{-1/2}`, reached at x = 0. A zero vector stays zero with a finite
    gradient. Half-precision input is normalised in float32 and rounded to its own type.

    Args:
        x: [..., d].
        eps: Smoothing constant inside the root, > 0.
        length: New length l, > 0.
        training: Allow the first-order gradient that keeps less memory on the CPU.

    Reference:
        Qi et al. 2023 (LipsFormer), scaled cosine similarity attention.
    """
    if not torch.jit.is_scripting() and cpu_training(x, x, training):
        return _CosineNormalizeFunction.apply(x, eps, length)
    wide = x
    if x.dtype == torch.float16 or x.dtype == torch.bfloat16:
        wide = x.float()
    inverse = torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + eps)
    return (wide * (inverse * length)).to(x.dtype)


class ScaledCosineAttention(nn.Module):
    r"""Attention whose scores are scaled cosines, with values of bounded length.

    .. math:: SCSA(Q, K, V) = \nu\, \mathrm{softmax}(\tau \tilde Q \tilde K^T + B) \tilde V,
        \quad \tilde x = x / \sqrt{|x|_2^2 + \epsilon}

    Lipschitz in the 2-norm over the whole [N, C] input on all of space; for one head with
    projections :math:`W^Q, W^K, W^V` (Theorem 1 of the paper with the softmax constant 1/2)

    .. math:: Lip \le N^2 \nu \tau \epsilon^{-1/2} |W^K| + N \nu \tau \epsilon^{-1/2} |W^Q|
        + 2 N \nu \epsilon^{-1/2} |W^V|.

    With ``value_scale=None`` the values enter as they are, as in the released code. The output is
    then linear in V and the constant grows with the length of the values: bounded on bounded
    inputs only.

    Shape:
        q, k, v: [B, H, N, d]; bias: broadcastable to [B, H, N, N]; output [B, H, N, d].

    Reference:
        Qi et al. 2023 (LipsFormer), scaled cosine similarity attention and Theorem 1.

    Deviation:
        The released code divides by max(length, 1e-12), which gives NaN in float16 for a zero
        token; both forms here keep eps inside the root.
    """

    fused_attn: Final[bool]
    value_scale: Tensor | None

    def __init__(
        self,
        num_heads: int,
        logit_scale: float = 10.0,
        learn_logit_scale: bool = False,
        value_scale: float | None = 1.0,
        eps: float = 1e-2,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the temperature.

        Args:
            num_heads: Number of heads H.
            logit_scale: tau, in (0, 100].
            learn_logit_scale: Learn tau per head, as its logarithm, clamped to at most 100.
            value_scale: nu > 0 for normalised values; None leaves the values as they are.
            eps: Smoothing constant of the normalisation, > 0. It sets the slope eps^(-1/2) at a
                zero token: at the default, 10, a blank image has the gradients of any other, while
                1e-6 lets them grow by up to 1000 in every block.
            attn_drop: Dropout probability of the attention weights in training.
            device: Device of the parameters.
            dtype: Type of the parameters.

        Raises:
            ValueError: If ``logit_scale``, ``value_scale`` or ``eps`` is out of range.
        """
        super().__init__()
        if not 0.0 < logit_scale <= MAX_LOGIT_SCALE:
            raise ValueError(f"logit_scale must lie in (0, {MAX_LOGIT_SCALE:g}], got {logit_scale}")
        if value_scale is not None and value_scale <= 0.0:
            raise ValueError(f"value_scale must be > 0 or None for raw values, got {value_scale}")
        if eps <= 0.0:
            raise ValueError(f"eps must be > 0, got {eps}")
        self.num_heads = num_heads
        self.init_logit_scale = logit_scale
        self.init_value_scale = value_scale
        self.eps = eps
        self.attn_drop = attn_drop
        self.fused_attn = use_fused_attn()
        self.log_logit_scale: nn.Parameter | None = None
        if learn_logit_scale:
            shape = (num_heads, 1, 1)
            self.log_logit_scale = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        # saved with the weights: a checkpoint then tells in which of the two forms it was trained
        value_scale_buffer = None
        if value_scale is not None:
            value_scale_buffer = torch.empty((), device=device, dtype=dtype)
        self.register_buffer("value_scale", value_scale_buffer)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set tau and nu to their initial values."""
        if self.log_logit_scale is not None:
            nn.init.constant_(self.log_logit_scale, math.log(self.init_logit_scale))
        if self.value_scale is not None and self.init_value_scale is not None:
            nn.init.constant_(self.value_scale, self.init_value_scale)

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k such that their plain products are the scores: tau sits in q."""
        k = cosine_normalize(k, self.eps, training=self.training)
        if self.log_logit_scale is None:
            return cosine_normalize(q, self.eps, self.init_logit_scale, self.training), k
        scale = self.log_logit_scale.clamp(max=math.log(MAX_LOGIT_SCALE)).exp()
        return cosine_normalize(q, self.eps, training=self.training) * scale.to(q.dtype), k

    @torch.jit.unused
    def kernel_scales(self) -> tuple[Tensor, float, float] | None:
        """Return tau per head, nu (0 for raw values) and eps for ``cosine_windows``.

        None where the kernel does not compute what this layer does: with dropout or unfused.
        """
        if not self.fused_attn or (self.training and self.attn_drop > 0.0):
            return None
        nu = 0.0 if self.value_scale is None else float(self.value_scale)
        if self.log_logit_scale is None:
            tau = torch.full((self.num_heads,), self.init_logit_scale)
        else:
            tau = self.log_logit_scale.clamp(max=math.log(MAX_LOGIT_SCALE)).exp().flatten()
        return tau, nu, self.eps

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend with queries ``q``, keys ``k`` and values ``v``, adding ``bias`` to the scores."""
        q, k = self.normalize(q, k)
        value_scale = self.value_scale
        if value_scale is not None:
            # nu enters after the values are joined, where it costs least
            v = cosine_normalize(v, self.eps, training=self.training)
        out = _attend(q, k, v, bias, self.attn_drop, self.training, self.fused_attn)
        return out if value_scale is None else out * value_scale.to(v.dtype)

    def extra_repr(self) -> str:
        """Show the heads and the scales."""
        return (
            f"{self.num_heads}, logit_scale={self.init_logit_scale:g}, "
            f"learn_logit_scale={self.log_logit_scale is not None}, "
            f"value_scale={self.init_value_scale}, eps={self.eps:g}"
        )


register_notrace_module(ScaledCosineAttention)  # fused or unfused is chosen at run time


class LipschitzNormAttention(nn.Module):
    r"""Dot-product attention whose scores are divided by the norms of its inputs, per head.

    .. math:: \mathrm{softmax}(Q K^T / \max(uv, uw, vw) + B) V, \quad
        u = |Q|_F,\ v = \max_j |k_j|_2,\ w = \max_j |v_j|_2

    Lipschitz in Frobenius norm, jointly in Q, K and V: the constant for m queries and n keys is at
    most :math:`\cosh(1) \sqrt{m / n} + \sqrt 8` without B; the proof is in docs/graph.md.

    Shape:
        q, k, v: [B, H, N, d]; bias: broadcastable to [B, H, N, N]; output [B, H, N, d].

    Reference:
        Dasoulas et al. 2021, LipschitzNorm for quadratic scores.
    """

    fused_attn: Final[bool]

    def __init__(self, num_heads: int, attn_drop: float = 0.0) -> None:
        """Create the layer, which has no parameters.

        Args:
            num_heads: Number of heads H.
            attn_drop: Dropout probability of the attention weights in training.
        """
        super().__init__()
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.fused_attn = use_fused_attn()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend with queries ``q``, keys ``k`` and values ``v``, adding ``bias`` to the scores."""
        q = (q * dense_quadratic_scale(q, k, v)).to(q.dtype)
        return _attend(q, k, v, bias, self.attn_drop, self.training, self.fused_attn)

    def extra_repr(self) -> str:
        """Show the heads."""
        return f"{self.num_heads}"


register_notrace_module(LipschitzNormAttention)  # likewise


class _AttendFunction(torch.autograd.Function):
    """Attention that computes its weights again in the backward pass instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        return _weights(q, k, bias) @ v

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        (grad,) = grad_outputs
        attn = _weights(q, k, bias)
        grad_attn = grad @ v.transpose(-2, -1)
        grad_scores = torch.ops.aten._softmax_backward_data(grad_attn, attn, -1, attn.dtype)
        return (
            grad_scores @ k,
            grad_scores.transpose(-2, -1) @ q,
            attn.transpose(-2, -1) @ grad,
            grad_scores.sum_to_size(bias.shape) if ctx.needs_input_grad[3] else None,
        )


def _weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    if bias is not None:
        scores += bias
    return scores.softmax(dim=-1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_drop: float,
    training: bool,
    fused: bool,
) -> Tensor:
    """softmax(q k^T + bias) v: the plain products of q and k are the scores."""
    dropout = attn_drop if training else 0.0
    if not fused:
        return F.dropout(_weights(q, k, bias), dropout) @ v
    if not torch.jit.is_scripting() and cpu_training(q, v, training and dropout == 0.0):
        # the library has no fused kernel for a bias that learns; without one it is no faster
        # for windows and stripes, and keeps the output besides
        return _AttendFunction.apply(q, k, v, bias)
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout, scale=1.0)
