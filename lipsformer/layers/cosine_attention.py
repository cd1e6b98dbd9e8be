"""Scaled cosine attention, and attention of any kind within the windows of a map.

Shapes of the attention itself: B batch (times windows), H heads, N tokens, d channels per head.
``attend_in_windows`` takes maps: B images, H x W tokens, C channels of each of P partitions.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import register_notrace_function, register_notrace_module, use_fused_attn
from torch import Tensor, nn

from lipsformer import kernels
from lipsformer.layers.conv import DepthwiseConv2d
from lipsformer.layers.windows import merge_heads, partition_heads

# the arguments of attend_in_windows behind the projected tokens
Arrangement = tuple[
    Sequence[tuple[int, int]], Sequence[nn.Module], Tensor | None, Sequence[nn.Module]
]
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

    .. math:: Lip \le N^2 \nu \tau \epsilon^{-1/2} |W^K| + N \nu \tau \epsilon^{-1/2} |W^Q|
        + 2 N \nu \epsilon^{-1/2} |W^V|.

    This is Theorem 1 of the paper with the softmax constant 1/2. With ``value_scale=None`` the
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
            num_heads: Number of heads H.
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
        """Attend with queries ``q``, keys ``k`` and values ``v``, adding ``bias`` to the scores."""
        q = cosine_normalize(q, self.eps, self.tau(), self.training)
        k = cosine_normalize(k, self.eps, 1.0, self.training)
        if self.value_scale is not None:
            v = cosine_normalize(v, self.eps, self.value_scale, self.training)
        dropout = self.attn_drop if self.training else 0.0
        if self.fused_attn:
            return fused_attention(q, k, v, bias, dropout, self.training)
        return plain_attention(q, k, v, bias, dropout)

    def extra_repr(self) -> str:
        """Show the heads and the scales."""
        return (
            f"{self.num_heads}, logit_scale={self.init_logit_scale:g}, "
            f"learn_logit_scale={self.log_logit_scale is not None}, "
            f"value_scale={self.init_value_scale}, eps={self.eps:g}"
        )


register_notrace_module(ScaledCosineAttention)  # FX cannot trace the choice of a kernel


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, training: bool
) -> Tensor:
    """Compute softmax(q k^T + bias) v without keeping the attention weights.

    The caller has already normalized or scaled q, so the factor of the scores is 1.
    """
    tensors = (q, k, v) if bias is None else (q, k, v, bias)
    if training and dropout == 0.0 and kernels.usable("attention", *tensors, training=True):
        return kernels.recomputed_attention(q, k, v, bias)
    if not torch.compiler.is_compiling() and kernels.active_transform() is not None:
        return plain_attention(q, k, v, bias, dropout)  # PyTorch's kernel has no rule for it
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout, scale=1.0)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    """Compute softmax(q k^T + bias) v one operator after the other."""
    scores = q @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias
    return F.dropout(scores.softmax(dim=-1), dropout) @ v


def attend_in_windows(
    qkv: Tensor,
    windows: Sequence[tuple[int, int]],
    attentions: Sequence[nn.Module],
    bias: Tensor | None = None,
    lepes: Sequence[nn.Module] = (),
) -> Tensor:
    """Attend within the windows of a map.

    A partition is a group of heads that share the shape of their windows. Swin has a single one,
    CSwin has two: vertical and horizontal stripes. Where a kernel is usable, it computes all
    partitions at once from the parameters of the modules, which are then not called.

    Args:
        qkv: [B, H, W, 3, P, C], queries, keys and values of the P partitions of the heads.
        windows: (h, w) in tokens of each partition.
        attentions: The attention of each partition, with its ``num_heads``.
        bias: [1, heads, h * w, h * w], added to the scores; for one partition only.
        lepes: For each partition the LePE of CSwin (locally-enhanced positional encoding): a
            depthwise 3x3 convolution of the values, zero padded at the edge of the window, whose
            result is added to the output. Empty for none.

    Returns:
        [B, H, W, P * C].
    """
    parameters = [p for module in (*attentions, *lepes) for p in module.parameters()]
    tensors = (qkv, *parameters) if bias is None else (qkv, bias, *parameters)
    if kernels.usable(
        "cosine_windows",
        *tensors,
        training=attentions[0].training,
        unless=lambda: cpu_obstacle(qkv.shape[-1], windows, attentions, bias, lepes),
    ):
        tau, nu, eps = tau_nu_eps(attentions)
        return kernels.cosine_windows(qkv, windows, tau, nu, eps, bias, lepe_tensors(lepes))
    if kernels.usable(
        "cosine_windows.gpu",
        qkv,
        training=attentions[0].training,
        unless=lambda: gpu_obstacle(windows, attentions, bias, lepes),
    ) and _gpu_proven(qkv, windows, attentions, bias, lepes):
        return kernels.gpu_cosine_windows(qkv, gpu_arguments(windows, attentions, bias, lepes))
    return _plain_windows(qkv, windows, attentions, bias, lepes)


def _plain_windows(
    qkv: Tensor,
    windows: Sequence[tuple[int, int]],
    attentions: Sequence[nn.Module],
    bias: Tensor | None,
    lepes: Sequence[nn.Module],
) -> Tensor:
    bias = None if bias is None else bias.to(qkv.dtype)
    outputs = []
    for part, (attention, window) in enumerate(zip(attentions, windows, strict=True)):
        num_heads: Any = attention.num_heads
        q, k, v = partition_heads(qkv[..., part, :], window, num_heads).unbind(0)
        out = attention(q, k, v, bias)
        if len(lepes) > 0:
            # contiguous: the convolution would otherwise keep the queries and keys for its backward
            values = rearrange(v, "b n (h w) d -> b h w (n d)", h=window[0]).contiguous()
            local = lepes[part](values)
            out = out + rearrange(local, "b h w (n d) -> b n (h w) d", n=num_heads)
        outputs.append(merge_heads(out, window, (qkv.shape[1], qkv.shape[2])))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def cpu_obstacle(
    channels: int,
    windows: Sequence[tuple[int, int]],
    attentions: Sequence[Any],
    bias: Tensor | None,
    lepes: Sequence[nn.Module],
) -> str | None:
    """Return why the CPU's kernel would not compute what these modules compute.

    The kernel does not check sizes, and would read elsewhere in memory if they did not fit.

    Args:
        channels: Number of channels of each partition.
        windows: As in `attend_in_windows`, like the rest.
        attentions: The attention of each partition.
        bias: [1, heads, h * w, h * w] or None.
        lepes: The positional encodings.
    """
    if any(channels % attention.num_heads for attention in attentions):
        return "the heads do not divide the channels"
    tokens = math.prod(windows[0])
    if bias is not None and bias.shape != (1, attentions[0].num_heads, tokens, tokens):
        return f"the bias has the shape {tuple(bias.shape)}"
    if any(h * w > kernels.MAX_WINDOW_TOKENS for h, w in windows):
        return f"a window has more than {kernels.MAX_WINDOW_TOKENS} tokens"
    obstacle = _module_obstacle(attentions, lepes)
    if obstacle is not None:
        return obstacle
    for attention in attentions:
        if attention.value_scale is not None and attention.value_scale <= 0.0:
            return "the value scale is not positive, which the kernel reads as raw values"
    return None


def gpu_obstacle(
    windows: Sequence[tuple[int, int]],
    attentions: Sequence[Any],
    bias: Tensor | None,
    lepes: Sequence[nn.Module],
) -> str | None:
    """Return why the GPU's kernel would not compute what these modules compute."""
    most = kernels.MAX_GPU_TOKENS if bias is None else kernels.MAX_GPU_TOKENS_WITH_BIAS
    if any(h * w > most for h, w in windows):
        return f"a window has more than {most} tokens"
    obstacle = _module_obstacle(attentions, lepes)
    if obstacle is not None:
        return obstacle
    first, *others = attentions
    for other in others:
        same = other.num_heads == first.num_heads and other.eps == first.eps
        if not same or (other.value_scale is None) != (first.value_scale is None):
            return "the attentions of the partitions differ"
        if isinstance(first.tau(), float) and other.tau() != first.tau():
            return "the attentions of the partitions differ"
    return None


def _gpu_proven(
    qkv: Tensor,
    windows: Sequence[tuple[int, int]],
    attentions: Sequence[Any],
    bias: Tensor | None,
    lepes: Sequence[nn.Module],
) -> bool:
    """Return whether the GPU's kernel is right and faster for attention of this class."""
    count, heads = len(attentions), attentions[0].num_heads
    name = (
        f"windows {list(windows)}, {heads} heads, bias {bias is not None}, LePE {len(lepes) > 0}, "
        f"learned tau {isinstance(attentions[0].tau(), Tensor)}"
    )
    modules: Any = attentions[0]
    if not torch.compiler.is_compiling():  # which cannot trace the copies of a trial
        modules = nn.ModuleList([*attentions, *lepes])
        modules.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach()))

    def parts(m: Any) -> tuple[Any, ...]:
        return windows, list(m)[:count], m.bias, list(m)[count:]

    return kernels.is_proven(
        name,
        modules,
        qkv,
        kernel=lambda m, x: kernels.gpu_cosine_windows(x, gpu_arguments(*parts(m))),
        plain=lambda m, x: _plain_windows(x, *parts(m)),
    )


def gpu_arguments(
    windows: Sequence[tuple[int, int]],
    attentions: Sequence[Any],
    bias: Tensor | None,
    lepes: Sequence[Any],
) -> kernels.WindowArguments:
    """Return what the GPU's kernel computes with, from the arguments of `attend_in_windows`."""
    first = attentions[0]
    tau = first.tau()
    learned = isinstance(tau, Tensor)
    return kernels.WindowArguments(
        bias=bias,
        tau=[attention.tau() for attention in attentions] if learned else [],
        nu=[] if first.value_scale is None else [a.value_scale for a in attentions],
        lepe=[lepe.weight for lepe in lepes],
        offset=[lepe.bias for lepe in lepes],
        windows=[side for window in windows for side in window],
        heads=first.num_heads,
        scale=1.0 if learned else tau,
        eps=first.eps,
    )


def _module_obstacle(attentions: Sequence[Any], lepes: Sequence[Any]) -> str | None:
    """Return why no kernel would compute what these modules compute, None if it would."""
    for attention in attentions:
        if getattr(type(attention), "forward", None) is not ScaledCosineAttention.forward:
            return f"the attention is {type(attention).__name__}"
        if not attention.fused_attn:
            return "fused attention is switched off"
        if attention.training and attention.attn_drop > 0.0:
            return "the attention weights have dropout"
    for lepe in lepes:
        if type(lepe).forward is not DepthwiseConv2d.forward or lepe.weight.shape[1:] != (1, 3, 3):
            return f"the positional encoding is {lepe}"
    compiling = torch.compiler.is_compiling()  # which cannot ask for global hooks
    hooked = not compiling and bool(torch.nn.modules.module._has_any_global_hook())
    for module in (*attentions, *lepes):
        hooked |= bool(module._forward_hooks or module._forward_pre_hooks)
        hooked |= bool(module._backward_hooks or module._backward_pre_hooks)
    return "a module has hooks, which the kernel would not call" if hooked else None


def tau_nu_eps(attentions: Sequence[Any]) -> tuple[Tensor, list[float], list[float]]:
    """Return tau ([P, heads]), nu (0 for raw values) and eps of every partition."""
    taus, nu = [], []
    options: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults of torch are
    for attention in attentions:
        tau = attention.tau()
        fixed = isinstance(tau, float)
        taus.append(torch.full((attention.num_heads,), tau, **options) if fixed else tau.flatten())
        nu.append(0.0 if attention.value_scale is None else float(attention.value_scale))
    return torch.stack(taus), nu, [attention.eps for attention in attentions]


def lepe_tensors(lepes: Sequence[Any]) -> list[Tensor]:
    """Return the kernels ([C, 1, 3, 3]) of all partitions, and then their biases ([C])."""
    return [*(lepe.weight for lepe in lepes), *(lepe.bias for lepe in lepes)]
