"""Attention of any kind within the windows of a map.

Shapes: B images, H x W tokens, C channels of each of P partitions.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn

from lipsformer import kernels
from lipsformer.layers._window_kernels import (
    cpu_arguments,
    cpu_obstacle,
    gpu_arguments,
    gpu_obstacle,
    gpu_windows_pass,
)
from lipsformer.layers.conv import DepthwiseConv2d
from lipsformer.layers.windows import Arrangement, merge_heads, partition_heads


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
        windows: The windows of each partition; for this and the rest see `Arrangement`.
        attentions: The attention of each partition.
        bias: Added to the scores; None for none.
        lepes: The positional encodings; empty for none.

    Returns:
        [B, H, W, P * C].

    Raises:
        ValueError: If qkv has another shape, a side of a window is below 1, not every partition has
            a window and an attention, there are positional encodings but not one for each, one of
            them does not have C channels, or there is a bias and more than one partition.

    Example:
        >>> import torch
        >>> from lipsformer.layers import ScaledCosineAttention, attend_in_windows
        >>> qkv = torch.randn(1, 5, 7, 3, 1, 8)
        >>> attend_in_windows(qkv, [(2, 4)], [ScaledCosineAttention(num_heads=2)]).shape
        torch.Size([1, 5, 7, 8])
    """
    if qkv.dim() != 6 or qkv.shape[3] != 3:
        raise ValueError(f"qkv has the shape {tuple(qkv.shape)}: it must be [B, H, W, 3, P, C]")
    partitions, channels = qkv.shape[4:]
    if not len(windows) == len(attentions) == (len(lepes) or partitions) == partitions:
        raise ValueError(
            f"qkv has {partitions} partitions, but there are {len(windows)} windows, "
            f"{len(attentions)} attentions and {len(lepes)} positional encodings: give one of each "
            "for every partition, or no positional encodings"
        )
    if any(min(window) < 1 for window in windows):
        raise ValueError(f"windows={list(windows)}: every side must be at least 1")
    if bias is not None and partitions > 1:
        raise ValueError(
            f"qkv has {partitions} partitions, but a bias needs a single one: call "
            "attend_in_windows for every partition by itself, or pass no bias"
        )
    for lepe in lepes:
        if isinstance(lepe, DepthwiseConv2d) and lepe.dim != channels:
            raise ValueError(
                f"a positional encoding has {lepe.dim} channels, but a partition of qkv has "
                f"{channels}: create it by DepthwiseConv2d({channels}, kernel_size=3)"
            )
    arrangement = Arrangement(windows, attentions, bias, lepes)
    parameters = [p for module in (*attentions, *lepes) for p in module.parameters()]
    tensors = (qkv, *parameters) if bias is None else (qkv, bias, *parameters)
    if kernels.usable(
        "cosine_windows",
        *tensors,
        training=attentions[0].training,
        unless=lambda: cpu_obstacle(channels, arrangement),
    ):
        return kernels.cosine_windows(qkv, *cpu_arguments(arrangement))
    if kernels.usable(
        "cosine_windows.gpu",
        qkv,
        training=attentions[0].training,
        unless=lambda: gpu_obstacle(channels, arrangement),
    ) and gpu_windows_pass(_plain_windows, qkv, arrangement):
        return kernels.gpu_cosine_windows(qkv, gpu_arguments(arrangement))
    return _plain_windows(qkv, arrangement)


def _plain_windows(qkv: Tensor, arrangement: Arrangement) -> Tensor:
    windows, attentions, bias, lepes = arrangement
    bias = None if bias is None else bias.to(qkv.dtype)
    outputs = []
    for part, (attention, window) in enumerate(zip(attentions, windows, strict=True)):
        num_heads = attention.num_heads
        q, k, v = partition_heads(qkv[..., part, :], window, num_heads).unbind(0)
        out = attention(q, k, v, bias)
        if len(lepes) > 0:
            # contiguous: the convolution would otherwise keep the queries and keys for its backward
            values = rearrange(v, "b n (h w) d -> b h w (n d)", h=window[0]).contiguous()
            local = lepes[part](values)
            out = out + rearrange(local, "b h w (n d) -> b n (h w) d", n=num_heads)
        outputs.append(merge_heads(out, window, (qkv.shape[1], qkv.shape[2])))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
