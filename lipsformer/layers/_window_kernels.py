"""Which window attention the kernels compute, and its tensors and numbers.

The kernels do not check the classes, settings or sizes of modules.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer import kernels
from lipsformer.layers._hooks import has_hooks
from lipsformer.layers._trial import gpu_kernel_passes
from lipsformer.layers.conv import DepthwiseConv2d
from lipsformer.layers.cosine_attention import ScaledCosineAttention
from lipsformer.layers.windows import Arrangement


def cpu_obstacle(channels: int, arrangement: Arrangement) -> str | None:
    """Return why the CPU's kernel would not compute what these modules compute.

    Args:
        channels: Number of channels of each partition.
        arrangement: The windows and modules.
    """
    if any(h * w > kernels.MAX_WINDOW_TOKENS for h, w in arrangement.windows):
        return f"a window has more than {kernels.MAX_WINDOW_TOKENS} tokens"
    obstacle = _module_obstacle(arrangement) or _size_obstacle(channels, arrangement)
    if obstacle is not None:
        return obstacle
    for attention in arrangement.attentions:
        if attention.value_scale is not None and attention.value_scale <= 0.0:
            return "the value scale is not positive, which the kernel reads as raw values"
    return None


def gpu_obstacle(channels: int, arrangement: Arrangement) -> str | None:
    """Return why the GPU's kernel would not compute what these modules compute.

    Args:
        channels: Number of channels of each partition.
        arrangement: The windows and modules.
    """
    windows, attentions, bias, _ = arrangement
    most = kernels.MAX_GPU_TOKENS if bias is None else kernels.MAX_GPU_TOKENS_WITH_BIAS
    if any(h * w > most for h, w in windows):
        return f"a window has more than {most} tokens"
    obstacle = _module_obstacle(arrangement) or _size_obstacle(channels, arrangement)
    if obstacle is not None:
        return obstacle
    first, *others = attentions
    for other in others:
        if other.eps != first.eps or (other.value_scale is None) != (first.value_scale is None):
            return "the attentions of the partitions differ"
        if isinstance(first.tau(), float) and other.tau() != first.tau():
            return "the attentions of the partitions differ"
    return None


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
    count, heads = len(attentions), attentions[0].num_heads
    name = (
        f"windows {list(windows)}, {heads} heads, bias {bias is not None}, LePE {len(lepes) > 0}, "
        f"learned tau {isinstance(attentions[0].tau(), Tensor)}"
    )
    modules: Any = attentions[0]
    if not torch.compiler.is_compiling():  # which cannot trace the copies of a trial
        modules = nn.ModuleList([*attentions, *lepes])
        modules.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach()))

    def arranged(m: Any) -> Arrangement:
        return Arrangement(windows, list(m)[:count], m.bias, list(m)[count:])

    return gpu_kernel_passes(
        name,
        modules,
        qkv,
        kernel=lambda m, x: kernels.gpu_cosine_windows(x, gpu_arguments(arranged(m))),
        plain=lambda m, x: plain(x, arranged(m)),
    )


def gpu_arguments(arrangement: Arrangement) -> kernels.WindowArguments:
    """Return what the GPU's kernel computes with."""
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
    if channels % heads:
        return "the heads do not divide the channels"
    tokens = math.prod(windows[0])
    if bias is not None and bias.shape != (1, heads, tokens, tokens):
        return f"the bias has the shape {tuple(bias.shape)}"
    for lepe in lepes:
        if lepe.weight.shape != (channels, 1, 3, 3) or lepe.bias.shape != (channels,):
            return f"the positional encoding is {lepe}"
    return None


def _module_obstacle(arrangement: Arrangement) -> str | None:
    """Return why no kernel would compute what these modules compute, None if it would."""
    _, attentions, _, lepes = arrangement
    for attention in attentions:
        if getattr(type(attention), "forward", None) is not ScaledCosineAttention.forward:
            return f"the attention is {type(attention).__name__}"
        if not attention.fused_attn:
            return "fused attention is switched off"
        if attention.training and attention.attn_drop > 0.0:
            return "the attention weights have dropout"
        if attention.value_scale is not None and attention.value_scale.requires_grad:
            return "the value scale is learned, and the kernels have no gradient of it"
    for lepe in lepes:
        if type(lepe).forward is not DepthwiseConv2d.forward:
            return f"the positional encoding is {lepe}"
    compiling = torch.compiler.is_compiling()  # which cannot ask for global hooks
    hooked = not compiling and bool(torch.nn.modules.module._has_any_global_hook())
    hooked |= any(has_hooks(module) for module in (*attentions, *lepes))
    return "a module has hooks, which the kernel would not call" if hooked else None


def cpu_arguments(arrangement: Arrangement) -> tuple[Tensor, list[kernels.Partition]]:
    """Return tau ([P, heads]) and the partitions for the CPU's kernel."""
    taus, partitions = [], []
    options: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults of torch are
    for window, attention in zip(arrangement.windows, arrangement.attentions, strict=True):
        tau = attention.tau()
        fixed = isinstance(tau, float)
        taus.append(torch.full((attention.num_heads,), tau, **options) if fixed else tau.flatten())
        nu = 0.0 if attention.value_scale is None else float(attention.value_scale)
        partitions.append(kernels.Partition(window, nu, attention.eps))
    return torch.stack(taus), partitions


def lepe_tensors(lepes: Sequence[Any]) -> list[Tensor]:
    """Return the kernels ([C, 1, 3, 3]) of all partitions, and then their biases ([C])."""
    return [*(lepe.weight for lepe in lepes), *(lepe.bias for lepe in lepes)]
