"""Windows and stripes: cut a feature map into rectangles of tokens and join them again."""

import torch
import torch.nn.functional as F
from torch import Tensor


def fit_window(size: int, max_window: int) -> int:
    """Return the side of the equal windows that cover ``size`` with the least padding.

    The side is at most ``max_window`` and, among the divisions into the fewest windows, the
    smallest: 56 in windows of at most 7 gives 7, 24 gives 6, 16 gives 6 (three windows, two rows
    of padding instead of five), 5 gives 5.

    Args:
        size: Extent of the feature map in tokens, >= 1.
        max_window: Largest allowed side in tokens, >= 1.
    """
    num_windows = (size + max_window - 1) // max_window
    return (size + num_windows - 1) // num_windows


def partition_heads(x: Tensor, window: tuple[int, int], num_heads: int) -> Tensor:
    """Cut a map of projected tokens into windows and heads in a single copy.

    Args:
        x: [B, H, W, P, num_heads * d] with P tensors side by side (3 for query, key and value).
        window: (h, w) in tokens; the map is padded with zeros at the bottom and the right up to a
            multiple of it.
        num_heads: Number of heads.

    Returns:
        [P, B * num_windows, num_heads, h * w, d], contiguous.
    """
    batch, height, width, parts, channels = x.shape
    h, w = window
    pad_h, pad_w = (h - height % h) % h, (w - width % w) % w
    if pad_h > 0 or pad_w > 0:
        x = F.pad(x, (0, 0, 0, 0, 0, pad_w, 0, pad_h))
    rows, cols = (height + pad_h) // h, (width + pad_w) // w
    head_dim = channels // num_heads
    x = x.reshape(batch, rows, h, cols, w, parts, num_heads, head_dim)
    x = x.permute(5, 0, 1, 3, 6, 2, 4, 7)
    return x.reshape(parts, batch * rows * cols, num_heads, h * w, head_dim)


def merge_heads(x: Tensor, window: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Join windows and heads to the feature map: the inverse of :func:`partition_heads`.

    Args:
        x: [B * num_windows, num_heads, h * w, d].
        window: (h, w) in tokens.
        size: (H, W) of the feature map; padding beyond it is cut off.

    Returns:
        [B, H, W, num_heads * d].
    """
    h, w = window
    rows, cols = (size[0] + h - 1) // h, (size[1] + w - 1) // w
    num_heads, head_dim = x.shape[1], x.shape[3]
    x = x.reshape(-1, rows, cols, num_heads, h, w, head_dim)
    x = x.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, rows * h, cols * w, num_heads * head_dim)
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
    """
    h, w = window
    row, col = torch.arange(h, device=device), torch.arange(w, device=device)
    vertical = row[:, None] - row[None, :] + h - 1
    horizontal = col[:, None] - col[None, :] + w - 1
    return vertical[:, None, :, None] * (2 * w - 1) + horizontal[None, :, None, :]
