"""Scaled cosine attention.

Shapes: B batch (times windows), H heads, N tokens, d channels per head.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function, register_notrace_module, use_fused_attn
from torch import Tensor, nn

from lipsformer import kernels
from lipsformer._arguments import check_count, check_fraction, check_positive

MAX_LOGIT_SCALE = 100.0  # the ceiling of a learned logit scale, as in SwinV2


@register_notrace_function  # FX cannot trace the choice of a kernel
def cosine_normalize(
    x: Tensor, eps: float = 1e-2, length: Tensor | float = 1.0, training: bool = False
) -> Tensor:
    r"""Divide every vector by its smoothed length and multiply it by a new one.

    .. math:: \tilde x = \ell x / \sqrt{|x|_2^2 + \epsilon}

    :math:`|\tilde x|_2 < \ell`; the 2-norm Lipschitz constant is
    :math:`\ell \epsilon^{-1/2}`, reached at x = 0. A zero vector stays zero with a finite
    gradient. Half-precision input is normalized in float32 and rounded to its own type.

    Args:
        x: [..., d].
        eps: Smoothing constant inside the root, > 0.
        length: New length l, > 0, a number or a tensor that broadcasts to [..., 1].
        training: Allow the kernel on the CPU, which keeps less memory and whose gradient cannot
            be differentiated again.

    Example:
        >>> import torch
        >>> from lipsformer.layers import cosine_normalize
        >>> cosine_normalize(torch.tensor([3.0, 4.0]), eps=1e-2, length=10.0)
        tensor([5.9988, 7.9984])

    Reference:
        Qi et al. 2023 (LipsFormer), scaled cosine similarity attention.
    """
    if kernels.usable("cosine_normalize", x, training=training):
        return kernels.normalize_rows(x, eps, length)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    inverse = torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + eps)
    return (wide * (inverse * length)).to(x.dtype)


class ScaledCosineAttention(nn.Module):
    r"""Attention whose scores are scaled cosines, with values of bounded length.

    .. math:: SCSA(Q, K, V) = \nu\, \mathrm{softmax}(\tau \tilde Q \tilde K^T + B) \tilde V,
        \quad \tilde x = x / \sqrt{|x|_2^2 + \epsilon}

    Lipschitz in the 2-norm over the whole [N, C] input on all of space; for one head with
    projections :math:`W^Q, W^K, W^V`

    .. math:: Lip \le \nu \epsilon^{-1/2} \left(\tau \sqrt{|W^Q|^2 + N |W^K|^2 / 2}
        + \sqrt{N} |W^V|\right).

    This is Theorem 10 of docs/theorems.md, which uses a smaller number than N where the scores
    allow it. Theorem 1 of the paper grows with the square of N. With `value_scale=None` the
    values enter as they are, as in the released code. The output is then linear in V, and the
    constant is finite on bounded inputs only.

    Shape:
        q, k, v: [B, H, N, d]; bias: broadcastable to [B, H, N, N]; output [B, H, N, d].

    Example:
        >>> import torch
        >>> from lipsformer.layers import ScaledCosineAttention
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)  # 2 heads, 5 tokens, 8 channels
        >>> ScaledCosineAttention(num_heads=2)(q, k, v).shape
        torch.Size([1, 2, 5, 8])

    Reference:
        Qi et al. 2023 (LipsFormer), scaled cosine similarity attention and Theorem 1.

    Deviation:
        The released code divides by max(length, 1e-12), which gives NaN in float16 for a zero
        token; both forms here keep eps inside the root.
    """

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
        """Create the logit scale.

        Args:
            num_heads: Number of heads H, at least 1.
            logit_scale: tau, in (0, 100]. It multiplies the cosines.
            learn_logit_scale: Learn tau per head, as its logarithm, clamped to at most 100.
            value_scale: nu > 0 for normalized values; None leaves the values as they are.
            eps: Smoothing constant of the normalization, > 0. It sets the slope eps^(-1/2) at a
                zero token. With the default the slope is 10 and a blank image has ordinary
                gradients; with 1e-6 they may grow by up to 1000 in every block.
            attn_drop: Dropout probability of the attention weights in training.
            device: Device of the parameters.
            dtype: Data type of the parameters.

        Raises:
            ValueError: If a number is out of range.
        """
        super().__init__()
        check_count("num_heads", num_heads)
        if not 0.0 < logit_scale <= MAX_LOGIT_SCALE:
            raise ValueError(f"logit_scale={logit_scale} must be in (0, {MAX_LOGIT_SCALE:g}]")
        if value_scale is not None:
            check_positive("value_scale", value_scale)
        check_positive("eps", eps)
        check_fraction("attn_drop", attn_drop)
        self.num_heads = num_heads
        self.init_logit_scale = float(logit_scale)  # YAML gives an int for 12
        self.init_value_scale = value_scale
        self.eps = float(eps)
        self.attn_drop = attn_drop
        self.fused_attn = use_fused_attn()
        self.log_logit_scale: nn.Parameter | None = None
        if learn_logit_scale:
            shape = (num_heads, 1, 1)
            self.log_logit_scale = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        # nu is a buffer, so that a checkpoint shows whether it was trained with normalized values
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

    def tau(self) -> Tensor | float:
        """Return the logit scale that applies: a number, or [H, 1, 1] if it is learned."""
        if self.log_logit_scale is None:
            return self.init_logit_scale
        return self.log_logit_scale.clamp(max=math.log(MAX_LOGIT_SCALE)).exp()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend with queries `q`, keys `k` and values `v`, adding `bias` to the scores.

        A boolean bias says which keys take part, as in PyTorch's attention. Queries without a key
        get 0.
        """
        q = cosine_normalize(q, self.eps, self.tau(), self.training)
        k = cosine_normalize(k, self.eps, 1.0, self.training)
        if self.value_scale is not None:
            v = cosine_normalize(v, self.eps, self.value_scale, self.training)
        return attend(
            q, k, v, bias, dropout=self.attn_drop, fused=self.fused_attn, training=self.training
        )

    def extra_repr(self) -> str:
        """Show the heads and the scales."""
        return (
            f"{self.num_heads}, logit_scale={self.init_logit_scale:g}, "
            f"learn_logit_scale={self.log_logit_scale is not None}, "
            f"value_scale={self.init_value_scale}, eps={self.eps:g}"
        )


register_notrace_module(ScaledCosineAttention)  # FX cannot trace the choice of a kernel


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    dropout: float,
    fused: bool,
    training: bool,
) -> Tensor:
    """Compute softmax(q k^T + bias) v, where a query without a key gets 0.

    Args:
        q: Queries, [B, H, N, d], already normalized or scaled.
        k: Keys, [B, H, N, d].
        v: Values, [B, H, N, d].
        bias: Added to the scores, or True for the keys that take part; None for no bias.
        dropout: Dropout probability of the attention weights in training.
        fused: Use PyTorch's fused attention, or our kernel for training on the CPU.
        training: Whether the module is in training mode.
    """
    bias, has_key = additive_bias(bias, q)
    dropout = dropout if training else 0.0
    if fused:
        out = fused_attention(q, k, v, bias, dropout, training)
    else:
        out = plain_attention(q, k, v, bias, dropout)
    return out if has_key is None else out.where(has_key, 0.0)


def additive_bias(bias: Tensor | None, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to the scores, and which queries have a key; None if all have one.

    A boolean bias becomes 0 and -inf, but only 0 for a query without a key, whose softmax would be
    NaN.
    """
    if bias is None or bias.dtype != torch.bool:
        return bias, None
    has_key = bias.any(-1, keepdim=True)
    return torch.zeros_like(bias, dtype=q.dtype).masked_fill(has_key & ~bias, -math.inf), has_key


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, training: bool
) -> Tensor:
    """Compute softmax(q k^T + bias) v without keeping the attention weights.

    The caller has already normalized or scaled q, so the factor of the scores is 1.
    """
    tensors = (q, k, v) if bias is None else (q, k, v, bias)
    if training and dropout == 0.0 and kernels.usable("attention", *tensors, training=True):
        return kernels.recomputed_attention(q, k, v, bias)
    if not torch.compiler.is_compiling():
        # PyTorch's kernel has no rule for transforms, and on a CPU no second derivatives.
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        twice = differentiated and not training and q.is_cpu
        if twice or kernels.active_transform() is not None:
            return plain_attention(q, k, v, bias, dropout)
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout, scale=1.0)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    """Compute softmax(q k^T + bias) v one operator after the other."""
    scores = q @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias
    return F.dropout(scores.softmax(dim=-1), dropout) @ v
