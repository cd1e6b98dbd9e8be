"""Which window attention the kernels compute, and its tensors and numbers.

The kernels do not check the classes, settings or sizes of modules. `channels` is the number of
channels of each partition of an arrangement.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lipsformer import kernels
from lipsformer._hooks import has_own_forward, would_run_hooks
from lipsformer.layers._trial import gpu_kernel_passes
from lipsformer.layers.conv import DepthwiseConv2d
from lipsformer.layers.cosine_attention import ScaledCosineAttention
from lipsformer.layers.windows import Arrangement

# What the kernels compute. A user may set another function on the class.
_ATTENTION_FORWARD, _LEPE_FORWARD = ScaledCosineAttention.forward, DepthwiseConv2d.forward


def cpu_obstacle(channels: int, arrangement: Arrangement) -> str | None:
    """Return why the CPU's kernel would not compute what these modules compute."""
    obstacle = _common_obstacle(channels, arrangement, kernels.MAX_WINDOW_TOKENS)
    if obstacle is not None:
        return obstacle
    for attention in arrangement.attentions:
        if attention.value_scale is not None and attention.value_scale <= 0.0:
            return "the value scale is not positive, which the kernel reads as raw values"
    return None


def gpu_obstacle(channels: int, arrangement: Arrangement) -> str | None:
    """Return why the GPU's kernel would not compute what these modules compute."""
    has_bias = arrangement.bias is not None
    max_tokens = kernels.MAX_GPU_TOKENS_WITH_BIAS if has_bias else kernels.MAX_GPU_TOKENS
    obstacle = _common_obstacle(channels, arrangement, max_tokens)
    if obstacle is not None:
        return obstacle
    first, *others = arrangement.attentions
    for other in others:
        if other.eps != first.eps or (other.value_scale is None) != (first.value_scale is None):
            return "the attentions of the partitions differ"
        if isinstance(first.tau(), float) and other.tau() != first.tau():
            return "the attentions of the partitions differ"
    return None


def _common_obstacle(channels: int, arrangement: Arrangement, max_tokens: int) -> str | None:
    """Return why no kernel with windows of at most `max_tokens` tokens would compute it."""
    if any(h * w > max_tokens for h, w in arrangement.windows):
        return f"a window has more than {max_tokens} tokens"
    return _module_obstacle(arrangement) or _size_obstacle(channels, arrangement)


def _module_obstacle(arrangement: Arrangement) -> str | None:
    """Return which module computes something else than the kernels."""
    attentions, lepes = arrangement.attentions, arrangement.lepes
    for attention in attentions:
        if getattr(type(attention), "forward", None) is not _ATTENTION_FORWARD:
            return f"the attention is {type(attention).__name__}"
        if not attention.fused_attn:
            return "fused attention is switched off"
        if attention.training and attention.attn_drop > 0.0:
            return "the attention weights have dropout"
        if attention.value_scale is not None and attention.value_scale.requires_grad:
            return "the value scale is learned, and the kernels have no gradient of it"
    for lepe in lepes:
        if type(lepe).forward is not _LEPE_FORWARD:
            return f"the positional encoding is {lepe}"
    if any(has_own_forward(module) for module in (*attentions, *lepes)):
        return "a module has a forward function of its own"
    if would_run_hooks((*attentions, *lepes)):
        return "a module has hooks, which the kernel would not call"
    return None


def _size_obstacle(channels: int, arrangement: Arrangement) -> str | None:
    """Return which sizes do not fit: the kernels would read elsewhere in memory."""
    windows, attentions, bias, lepes = arrangement
    partitions = len(attentions)
    # `attend_in_windows` refuses this, but a whole block comes here without it.
    if not len(windows) == (len(lepes) or partitions) == partitions:
        return "not every partition has its window and its positional encoding"
    heads = attentions[0].num_heads
    if any(attention.num_heads != heads for attention in attentions):
        return "the partitions have different numbers of heads"
    for attention in attentions:
        scale, value_scale = attention.log_logit_scale, attention.value_scale
        if scale is not None and scale.shape != (heads, 1, 1):
            return f"the logit scale has the shape {tuple(scale.shape)}"
        if value_scale is not None and value_scale.numel() != 1:
            return f"the value scale has the shape {tuple(value_scale.shape)}"
    if channels % heads:
        return "the heads do not divide the channels"
    tokens = math.prod(windows[0])
    if bias is not None and bias.shape != (1, heads, tokens, tokens):
        return f"the bias has the shape {tuple(bias.shape)}"
    for lepe in lepes:
        if lepe.weight.shape != (channels, 1, 3, 3) or lepe.bias.shape != (channels,):
            return f"the positional encoding is {lepe}"
    return None


def cpu_arguments(
    arrangement: Arrangement,
) -> tuple[list[kernels.Partition], Tensor, Tensor | None, list[Tensor]]:
    """Return what the CPU's kernel takes after the projected tokens; see `cosine_windows`."""
    windows, attentions, bias, lepes = arrangement
    partitions, taus = [], []
    for window, attention in zip(windows, attentions, strict=True):
        nu = 0.0 if attention.value_scale is None else float(attention.value_scale)
        partitions.append(kernels.Partition(window, nu, attention.eps))
        tau = attention.tau()
        if isinstance(tau, float):  # torch's default type and device may be others
            tau = torch.full((attention.num_heads,), tau, dtype=torch.float32, device="cpu")
        taus.append(tau.flatten())
    lepe = [*(lepe.weight for lepe in lepes), *(lepe.bias for lepe in lepes)]
    return partitions, torch.stack(taus), bias, lepe


def gpu_arguments(arrangement: Arrangement) -> kernels.WindowArguments:
    """Return what the GPU's kernel takes after the projected tokens."""
    windows, attentions, bias, lepes = arrangement
    first = attentions[0]
    tau = first.tau()
    learned = isinstance(tau, Tensor)
    return kernels.WindowArguments(
        bias=bias,
        tau=[attention.tau() for attention in attentions] if learned else [],
        nu=[] if first.value_scale is None else [a.value_scale for a in attentions],
        lepe=[lepe.weight for lepe in lepes],
        lepe_bias=[lepe.bias for lepe in lepes],
        windows=[side for window in windows for side in window],
        heads=first.num_heads,
        scale=1.0 if learned else tau,
        eps=first.eps,
    )


def gpu_windows_pass(
    plain: Callable[[Tensor, Arrangement], Tensor], qkv: Tensor, arrangement: Arrangement
) -> bool:
    """Return whether the GPU's kernel is right and faster for attention of this class.

    Args:
        plain: Computes with PyTorch's operators.
        qkv: See `attend_in_windows`.
        arrangement: The windows and modules.
    """
    windows, attentions, bias, lepes = arrangement
    name = (
        f"windows {list(windows)}, {attentions[0].num_heads} heads, bias {bias is not None}, "
        f"LePE {len(lepes) > 0}, learned tau {isinstance(attentions[0].tau(), Tensor)}"
    )
    # The compiler cannot trace the making of a module. Compiled code only reads the verdict.
    copied = attentions[0] if torch.compiler.is_compiling() else _Copied(arrangement)
    return gpu_kernel_passes(
        name,
        copied,
        qkv,
        kernel=lambda m, x: kernels.gpu_cosine_windows(x, gpu_arguments(m.arrangement())),
        plain=lambda m, x: plain(x, m.arrangement()),
    )


class _Copied(nn.Module):
    """What an arrangement holds, as one module, of which a trial makes copies."""

    def __init__(self, arrangement: Arrangement) -> None:
        super().__init__()
        self.windows, attentions, bias, lepes = arrangement
        self.bias = None if bias is None else nn.Parameter(bias.detach())
        self.attentions, self.lepes = nn.ModuleList(attentions), nn.ModuleList(lepes)

    def arrangement(self) -> Arrangement:
        return Arrangement(self.windows, list(self.attentions), self.bias, list(self.lepes))
