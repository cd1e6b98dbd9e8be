"""Windows and stripes: cut a feature map into rectangles of tokens and join them again."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import register_notrace_function
from torch import Tensor


class Arrangement(NamedTuple):
    """How a map is cut into windows, and the attention within them.

    A partition is a group of heads that share the shape of their windows.

    Attributes:
        windows: (h, w) in tokens of each partition.
        attentions: The attention of each partition, with its `num_heads`.
        bias: [1, heads, h * w, h * w], added to the scores; for one partition only.
        lepes: For each partition the LePE of CSwin (locally-enhanced positional encoding): a
            depthwise 3x3 convolution of the values, zero padded at the edge of the window, whose
            result is added to the output. Empty for none.

    Example:
        >>> from lipsformer.layers import Arrangement, ScaledCosineAttention
        >>> Arrangement([(2, 4)], [ScaledCosineAttention(num_heads=2)]).lepes
        ()
    """

    windows: Sequence[tuple[int, int]]
    attentions: Sequence[Any]
    bias: Tensor | None = None
    lepes: Sequence[Any] = ()


def pad_to_even(x: Tensor) -> Tensor:
    """Pad a map [B, H, W, C] with zeros at the bottom and the right to even height and width.

    Example:
        >>> import torch
        >>> from lipsformer.layers import pad_to_even
        >>> pad_to_even(torch.ones(1, 3, 4, 5)).shape
        torch.Size([1, 4, 4, 5])
    """
    return F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))


@register_notrace_function  # einops refuses FX proxies
def partition_heads(x: Tensor, window: tuple[int, int], num_heads: int) -> Tensor:
    """Cut a map of projected tokens into windows and heads in a single copy.

    Args:
        x: [B, H, W, P, num_heads * d] with P tensors side by side (3 for query, key and value).
        window: (h, w) in tokens; the map is padded with zeros at the bottom and the right up to a
            multiple of it.
        num_heads: Number of heads.

    Returns:
        [P, B * num_windows, num_heads, h * w, d], contiguous.

    Example:
        >>> import torch
        >>> from lipsformer.layers import partition_heads
        >>> partition_heads(torch.zeros(1, 5, 7, 3, 8), window=(2, 4), num_heads=2).shape
        torch.Size([3, 6, 2, 8, 4])
    """
    height, width = x.shape[1], x.shape[2]
    h, w = window
    pad_h, pad_w = (h - height % h) % h, (w - width % w) % w
    if pad_h > 0 or pad_w > 0:
        x = F.pad(x, (0, 0, 0, 0, 0, pad_w, 0, pad_h))
    pattern = "b (rows h) (cols w) p (heads d) -> p (b rows cols) heads (h w) d"
    return rearrange(x, pattern, h=h, w=w, heads=num_heads)


@register_notrace_function  # einops refuses FX proxies
def merge_heads(x: Tensor, window: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Join windows and heads to the feature map: the inverse of `partition_heads`.

    Args:
        x: [B * num_windows, num_heads, h * w, d].
        window: (h, w) in tokens.
        size: (H, W) of the feature map; padding beyond it is cut off.

    Returns:
        [B, H, W, num_heads * d].

    Example:
        >>> import torch
        >>> from lipsformer.layers import merge_heads
        >>> merge_heads(torch.zeros(6, 2, 8, 4), window=(2, 4), size=(5, 7)).shape
        torch.Size([1, 5, 7, 8])
    """
    h, w = window
    rows, cols = (size[0] + h - 1) // h, (size[1] + w - 1) // w
    pattern = "(b rows cols) heads (h w) d -> b (rows h) (cols w) (heads d)"
    x = rearrange(x, pattern, rows=rows, cols=cols, h=h)
    return x[:, : size[0], : size[1]]


def relative_position_index(window: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """Return the row of the relative position table for every pair of tokens of a window.

    The table has one row per offset, (2h - 1) * (2w - 1) of them, ordered by vertical and then by
    horizontal offset from -(h - 1), -(w - 1) on.

    Args:
        window: (h, w) in tokens.
        device: Device of the result.

    Returns:
        [h, w, h, w], int64: entry [i, j, k, l] belongs to query (i, j) and key (k, l).

    Example:
        >>> from lipsformer.layers import relative_position_index
        >>> relative_position_index((1, 3)).reshape(3, 3)
        tensor([[2, 1, 0],
                [3, 2, 1],
                [4, 3, 2]])
    """
    h, w = window
    row, col = torch.arange(h, device=device), torch.arange(w, device=device)
    vertical = row[:, None] - row[None, :] + h - 1
    horizontal = col[:, None] - col[None, :] + w - 1
    return vertical[:, None, :, None] * (2 * w - 1) + horizontal[None, :, None, :]
