"""timm's auto-augmentation operations on uint8 arrays [H, W, 3], several times faster.

timm decides which operation runs at which magnitude. These functions replace the Pillow functions
that do the work on the pixels. Table look-ups give exactly Pillow's values. Color, sharpness, shear
and translation differ from Pillow's by at most one level. Rotation uses OpenCV's cubic kernel
(a = -0.75, positions rounded to 1/32 pixel), while Pillow's has a = -1.
"""

import math
from collections.abc import Callable

import cv2
import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment as timms

LEVELS = np.arange(256)
LUMA = np.array([19595, 38470, 7471]) / 65536  # Pillow's weights of R, G, B
SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13  # Pillow's ImageFilter.SMOOTH
JUST_BELOW_HALF = 0.499  # with it, OpenCV's rounding truncates fractions, as Pillow does


def auto_contrast(img: np.ndarray, **_: object) -> np.ndarray:
    """Stretch each channel to 0..255."""
    tables = []
    for histogram in _histograms(img):
        used = np.flatnonzero(histogram)
        low, high = int(used[0]), int(used[-1])
        scale = 255.0 / (high - low) if high > low else 1.0
        offset = -low * scale if high > low else 0.0
        tables.append(np.clip((LEVELS * scale + offset).astype(np.int64), 0, 255))
    return _look_up(img, np.stack(tables, axis=-1))


def equalize(img: np.ndarray, **_: object) -> np.ndarray:
    """Make each channel's histogram uniform."""
    tables = []
    for histogram in _histograms(img):
        used = histogram[histogram > 0]
        step = int(used[:-1].sum()) // 255
        before = step // 2 + np.cumsum(histogram) - histogram
        tables.append(np.minimum(before // step, 255) if step else LEVELS)
    return _look_up(img, np.stack(tables, axis=-1))


def invert(img: np.ndarray, **_: object) -> np.ndarray:
    """Compute 255 - v."""
    return 255 - img


def posterize(img: np.ndarray, bits_to_keep: int, **_: object) -> np.ndarray:
    """Keep the highest bits. Zero bits give a black image, which Pillow 13 refuses."""
    return img & np.uint8(256 - (1 << (8 - bits_to_keep)))


def solarize(img: np.ndarray, thresh: int, **_: object) -> np.ndarray:
    """Invert values that are not below the threshold."""
    return _look_up(img, np.where(LEVELS < thresh, LEVELS, 255 - LEVELS))


def solarize_add(img: np.ndarray, add: int, thresh: int = 128, **_: object) -> np.ndarray:
    """Brighten values that are below the threshold."""
    return _look_up(img, np.where(LEVELS < thresh, np.minimum(LEVELS + add, 255), LEVELS))


def brightness(img: np.ndarray, factor: float, **_: object) -> np.ndarray:
    """Blend with black."""
    return _look_up(img, _blend(0, factor))


def contrast(img: np.ndarray, factor: float, **_: object) -> np.ndarray:
    """Blend with the mean gray value."""
    mean = int(cv2.mean(cv2.transform(img, LUMA[None]))[0] + 0.5)
    return _look_up(img, _blend(mean, factor))


def color(img: np.ndarray, factor: float, **_: object) -> np.ndarray:
    """Blend with the gray image."""
    matrix = factor * np.eye(3) + (1 - factor) * LUMA
    return cv2.transform(img, np.column_stack([matrix, np.full(3, -JUST_BELOW_HALF)]))


def sharpness(img: np.ndarray, factor: float, **_: object) -> np.ndarray:
    """Blend with the smoothed image, except on the border."""
    smooth = cv2.filter2D(img, -1, SMOOTH)
    out = cv2.addWeighted(img, factor, smooth, 1 - factor, -JUST_BELOW_HALF)
    out[[0, -1]] = img[[0, -1]]
    out[:, [0, -1]] = img[:, [0, -1]]
    return out


def shear_x(img: np.ndarray, factor: float, **kwargs) -> np.ndarray:
    """Take pixel (x, y) from (x + factor y, y), counted from pixel corners."""
    return _shift_rows(img, factor * (np.arange(len(img)) + 0.5), **kwargs)


def shear_y(img: np.ndarray, factor: float, **kwargs) -> np.ndarray:
    """Take pixel (x, y) from (x, y + factor x), counted from pixel corners."""
    return cv2.transpose(shear_x(cv2.transpose(img), factor, **kwargs))


def translate_x_abs(img: np.ndarray, pixels: float, *, resample, fillcolor) -> np.ndarray:
    """Take pixel (x, y) from (x + pixels, y)."""
    width, whole = img.shape[1], math.floor(pixels)
    padded = cv2.copyMakeBorder(img, 0, 0, 1, 1, cv2.BORDER_REPLICATE)
    kernel = _tap_weights(np.array([pixels - whole]), resample).T
    # Column c holds the image at the position c plus the fraction of `pixels`, c = -1 to width.
    between = cv2.filter2D(
        padded, -1, kernel, anchor=(1, 0), delta=-JUST_BELOW_HALF, borderType=cv2.BORDER_REPLICATE
    )
    x = np.arange(width) + pixels
    inside = np.flatnonzero((x >= -0.5) & (x < width - 0.5))
    out = np.empty_like(img)
    out[:] = fillcolor
    if len(inside):
        first, last = int(inside[0]), int(inside[-1]) + 1
        out[:, first:last] = between[:, first + whole + 1 : last + whole + 1]
    return out


def translate_y_abs(img: np.ndarray, pixels: float, **kwargs) -> np.ndarray:
    """Take pixel (x, y) from (x, y + pixels)."""
    return cv2.transpose(translate_x_abs(cv2.transpose(img), pixels, **kwargs))


def translate_x_rel(img: np.ndarray, pct: float, **kwargs) -> np.ndarray:
    """Take pixel (x, y) from (x + pct width, y)."""
    return translate_x_abs(img, pct * img.shape[1], **kwargs)


def translate_y_rel(img: np.ndarray, pct: float, **kwargs) -> np.ndarray:
    """Take pixel (x, y) from (x, y + pct height)."""
    return translate_y_abs(img, pct * img.shape[0], **kwargs)


def rotate(img: np.ndarray, degrees: float, *, resample, fillcolor) -> np.ndarray:
    """Rotate counterclockwise around the center."""
    height, width = img.shape[:2]
    center = ((width - 1) / 2, (height - 1) / 2)
    return cv2.warpAffine(
        img,
        cv2.getRotationMatrix2D(center, degrees, 1.0),
        (width, height),
        flags=cv2.INTER_CUBIC if resample == Image.Resampling.BICUBIC else cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=fillcolor,
    )


def _shift_rows(img: np.ndarray, starts: np.ndarray, *, resample, fillcolor) -> np.ndarray:
    """Interpolate each row at starts[row], starts[row] + 1, ...; outside is `fillcolor`."""
    height, width = img.shape[:2]
    pixels = torch.from_numpy(cv2.cvtColor(img, cv2.COLOR_RGB2RGBA).view(np.int32)[..., 0])
    first = np.floor(starts)
    column = torch.from_numpy(first.astype(np.int64))[:, None] + torch.arange(-1, width + 2)
    taps = pixels.gather(1, column.clamp_(0, width - 1)).view(torch.uint8)
    taps = taps.view(height, width + 3, 4).float()
    d = (starts - first).astype(np.float32)
    if resample == Image.Resampling.BICUBIC:
        weights = np.stack(
            [-d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, d**3 - d**2]
        )
    else:
        weights = np.stack([0 * d, 1 - d, d, 0 * d])
    weights = torch.from_numpy(weights)[..., None, None]
    out = taps[:, :width] * weights[0]
    for tap in (1, 2, 3):
        out.addcmul_(taps[:, tap : tap + width], weights[tap])
    out = out.clamp_(0, 255).byte().view(torch.int32)[..., 0]
    x = torch.from_numpy(starts)[:, None] + torch.arange(width)
    outside = (x < -0.5).logical_or_(x >= width - 0.5)
    fill = int(np.array([*fillcolor, 0], np.uint8).view(np.int32)[0])
    out = out.masked_fill_(outside, fill).numpy()
    return cv2.cvtColor(out[..., None].view(np.uint8), cv2.COLOR_RGBA2RGB)


def _tap_weights(d: np.ndarray, resample: int) -> np.ndarray:
    """Return Pillow's weights [4, N] of the pixels -1, 0, 1, 2 for points d between 0 and 1."""
    if resample == Image.Resampling.BICUBIC:
        weights = (-d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, d**3 - d**2)
    else:
        weights = (0 * d, 1 - d, d, 0 * d)
    return np.stack(weights).astype(np.float32)


def _histograms(img: np.ndarray) -> list[np.ndarray]:
    return [
        cv2.calcHist([img], [channel], None, [256], [0, 256]).ravel().astype(np.int64)
        for channel in range(3)
    ]


def _blend(other: int, factor: float) -> np.ndarray:
    """Blend every level with another one as Pillow does: in single precision, then truncated."""
    values = other + np.float32(factor) * (LEVELS - other).astype(np.float32)
    return np.clip(values, 0, 255)


def _look_up(img: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Map values through a table [256], or through one table per channel [256, 3]."""
    return cv2.LUT(img, table.astype(np.uint8).reshape(1, 256, -1))


ON_ARRAYS: dict[Callable, Callable[..., np.ndarray]] = {
    getattr(timms, function.__name__): function
    for function in (
        *(auto_contrast, equalize, invert, posterize, solarize, solarize_add),
        *(brightness, contrast, color, sharpness, rotate),
        *(shear_x, shear_y, translate_x_rel, translate_y_rel, translate_x_abs, translate_y_abs),
    )
}
