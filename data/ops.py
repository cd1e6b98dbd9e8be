"""timm's auto-augmentation operations on uint8 arrays [H, W, 3], several times faster.

timm decides which operation runs at which magnitude. These functions replace the Pillow functions
that do the work on the pixels. Table look-ups give exactly Pillow's values. Color, sharpness, shear
and translation differ from Pillow's by at most one level at timm's usual magnitudes, and color by
two at larger ones. Rotation uses OpenCV's cubic kernel (a = -0.75, positions rounded to 1/32
pixel), while Pillow's has a = -1.
"""

import math
from collections.abc import Callable

import cv2
import numpy as np
from PIL import Image
from timm.data import auto_augment as timms

LEVELS = np.arange(256)
LUMA = np.array([19595, 38470, 7471]) / 65536  # Pillow's weights of R, G, B
IDENTITY = np.eye(3)
SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13  # Pillow's ImageFilter.SMOOTH
JUST_BELOW_HALF = 0.499  # with it, OpenCV's rounding truncates fractions, as Pillow does


def auto_contrast(img: np.ndarray, **_: object) -> np.ndarray:
    """Stretch each channel to 0..255."""
    ends = [cv2.minMaxLoc(cv2.extractChannel(img, channel))[:2] for channel in range(3)]
    scales = [255.0 / (high - low) if high > low else 1.0 for low, high in ends]
    offsets = [
        -low * scale if high > low else 0.0 for (low, high), scale in zip(ends, scales, strict=True)
    ]
    return _look_up(img, (LEVELS[:, None] * scales + offsets).clip(0, 255))


def equalize(img: np.ndarray, **_: object) -> np.ndarray:
    """Make each channel's histogram uniform."""
    histograms = [cv2.calcHist([img], [channel], None, [256], [0, 256]) for channel in range(3)]
    histogram = np.concatenate(histograms).reshape(3, 256).T.astype(np.int64)
    below = histogram.cumsum(0) - histogram
    step = (below * (histogram > 0)).max(0) // 255  # without the pixels of the highest level
    table = (below + step // 2) // np.maximum(step, 1)
    return _look_up(img, np.where(step > 0, np.minimum(table, 255), LEVELS[:, None]))


def invert(img: np.ndarray, **_: object) -> np.ndarray:
    """Compute 255 - v."""
    return 255 - img


def posterize(img: np.ndarray, bits_to_keep: int, **_: object) -> np.ndarray:
    """Keep the highest bits. Zero bits or fewer give a black image."""
    return img & np.uint8(256 - (1 << (8 - max(bits_to_keep, 0))))


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
    matrix = np.full((3, 4), -JUST_BELOW_HALF)
    matrix[:, :3] = factor * IDENTITY + (1 - factor) * LUMA
    return cv2.transform(img, matrix)


def sharpness(img: np.ndarray, factor: float, **_: object) -> np.ndarray:
    """Blend with the smoothed image, except on the border."""
    smooth = cv2.filter2D(img, -1, SMOOTH)
    out = cv2.addWeighted(img, factor, smooth, 1 - factor, -JUST_BELOW_HALF)
    for end in (0, -1):
        out[end] = img[end]
        out[:, end] = img[:, end]
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
    # Columns `first` to `last` - 1 come from positions between -0.5 and width - 0.5.
    first = min(max(math.ceil(-0.5 - pixels), 0), width)
    last = min(max(math.ceil(width - 0.5 - pixels), first), width)
    if first == last:
        return np.full_like(img, fillcolor)
    padded = cv2.copyMakeBorder(img, 0, 0, 1, 1, cv2.BORDER_REPLICATE)
    kernel = np.array([_tap_weights(pixels - whole, resample)], np.float32)
    # Column c holds the image at the position c plus the fraction of `pixels`, c = -1 to width.
    between = cv2.filter2D(
        padded, -1, kernel, anchor=(1, 0), delta=-JUST_BELOW_HALF, borderType=cv2.BORDER_REPLICATE
    )
    inside = between[:, first + whole + 1 : last + whole + 1]
    sides = (0, 0, first, width - last)
    return cv2.copyMakeBorder(inside, *sides, cv2.BORDER_CONSTANT, value=fillcolor)


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
    first = np.floor(starts)
    columns = first.astype(np.float32)[:, None] + np.arange(-1, width + 2, dtype=np.float32)
    rows = np.arange(height, dtype=np.float32)[:, None].repeat(width + 3, axis=1)
    taps = cv2.remap(img, columns, rows, cv2.INTER_NEAREST, borderMode=cv2.BORDER_REPLICATE)
    taps = taps.reshape(height, -1).astype(np.float32)
    out = np.zeros((height, 3 * width), np.float32)
    for tap, weights in enumerate(_tap_weights((starts - first).astype(np.float32), resample)):
        neighbors = taps[:, 3 * tap : 3 * (tap + width)]
        cv2.accumulateProduct(neighbors, weights[:, None].repeat(3 * width, axis=1), out)
    out = out.clip(0, 255, out=out).astype(np.uint8).reshape(img.shape)
    pixels = cv2.cvtColor(out, cv2.COLOR_RGB2RGBA).view(np.int32)[..., 0]
    x = starts[:, None] + np.arange(width)
    fill = np.array([*fillcolor, 0], np.uint8).view(np.int32)
    np.copyto(pixels, fill, where=(x < -0.5) | (x >= width - 0.5))
    return cv2.cvtColor(pixels[..., None].view(np.uint8), cv2.COLOR_RGBA2RGB)


def _tap_weights(d, resample: int):
    """Return Pillow's weights of the pixels -1, 0, 1 and 2 for a point d between 0 and 1."""
    if resample == Image.Resampling.BICUBIC:
        return -d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, d**3 - d**2
    return 0 * d, 1 - d, d, 0 * d


def _blend(other: int, factor: float) -> np.ndarray:
    """Blend every level with another one as Pillow does: in single precision, then truncated."""
    values = other + np.float32(factor) * (LEVELS - other).astype(np.float32)
    return values.clip(0, 255)


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
