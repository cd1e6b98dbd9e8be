"""Antialiased resize of uint8 arrays [H, W, 3], as Pillow and timm do it."""

from functools import lru_cache

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

MATRICES_UP_TO = 48  # pixels on a side; torch's kernel is faster for larger images
HALF_UP = 2e-5  # with it, OpenCV's rounding takes halves up, as Pillow does


def resize(img: np.ndarray, size: int, interpolation: str) -> np.ndarray:
    """Resize an image [H, W, 3] to [size, size, 3].

    It is done in two passes that round, as Pillow does it, and differs from it by at most 2 levels.
    torch's resize is one call for large images. Small ones are multiplied by its filter weights,
    because the call takes longer than the work.

    Args:
        img: uint8.
        size: Height and width of the output.
        interpolation: "bicubic" or "bilinear".

    Example:
        >>> resize(np.full((30, 20, 3), 7, np.uint8), 32, "bicubic").shape
        (32, 32, 3)
    """
    if max(size, *img.shape) <= MATRICES_UP_TO:
        return _resize_rows(_resize_rows(img, size, interpolation), size, interpolation)
    batch = interpolate(to_batch(img), (size, size), mode=interpolation, antialias=True)
    return from_batch(batch).numpy()


def to_batch(img: np.ndarray) -> Tensor:
    """View an image [H, W, 3] as [1, 3, H, W] in the memory format channels_last.

    torch resizes this format fastest, and returns it.
    """
    return torch.from_numpy(np.ascontiguousarray(img))[None].permute(0, 3, 1, 2)


def from_batch(batch: Tensor) -> Tensor:
    """View a batch [1, 3, H, W] as an image [H, W, 3]."""
    return batch.permute(0, 2, 3, 1)[0]


def _resize_rows(img: np.ndarray, size: int, interpolation: str) -> np.ndarray:
    """Resize each row and transpose: [H, W, 3] becomes [size, H, 3]."""
    height, width = img.shape[:2]
    columns = cv2.transpose(img).reshape(width, 3 * height).astype(np.float32)
    resized = _weights(width, size, interpolation) @ columns
    # Values below 0 become 0. The conversion to uint8 rounds the others and limits them to 255.
    _, resized = cv2.threshold(resized, 0, 0, cv2.THRESH_TOZERO)
    return cv2.convertScaleAbs(resized, beta=HALF_UP).reshape(size, height, 3)


@lru_cache(maxsize=MATRICES_UP_TO**2)
def _weights(length: int, size: int, interpolation: str) -> np.ndarray:
    """Return torch's weights [size, length]: what it makes of the rows of an identity matrix."""
    identity = torch.eye(length)[None, None]
    weights = interpolate(identity, (length, size), mode=interpolation, antialias=True)
    return weights[0, 0].T.contiguous().numpy()
