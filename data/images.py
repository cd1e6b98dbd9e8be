"""One image to RGB, with one documented outcome for every kind of input.

| input | outcome |
|---|---|
| grey, palette, bilevel, CMYK | converted to RGB by Pillow, as timm and torchvision do |
| transparency | dropped: the stored colours are used, as timm and torchvision do |
| animation (GIF, WebP, APNG) | the first frame |
| EXIF orientation | not applied, as in the published ImageNet figures |
| 16-bit grey | scaled from 0..65535 to 0..255 (Pillow would clip nearly all of it to white) |
| 32-bit integer or float | refused: the range of its values is not known |
| truncated, undecodable, not an image | refused |
| more than `MAX_PIXELS` pixels by its header | refused before anything is decoded |

The content decides, not the file's extension. Damage inside the entropy-coded data of a JPEG that
still decodes cannot be seen.
"""

import io
import warnings
from functools import cached_property
from typing import Protocol

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from data.errors import UnreadableImageError

ADVICE = (
    "; repair it, remove it or name it in data.skip_list "
    "(`python -m scripts.check_data` finds all such files)"
)
MAX_PIXELS = 89_478_485  # where Pillow begins to warn; such an image takes 360 MB as RGB


class Picture(Protocol):
    """An image before its transform: whole, or as the pixels that a crop needs."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        ...

    def image(self) -> Image.Image:
        """The whole image as RGB."""
        ...

    def pixels(self, reduction: int = 1) -> np.ndarray:
        """The image as uint8 [H, W, 3], or smaller: each side divided by up to `reduction`."""
        ...


class ArrayPicture:
    """Pixels in memory: uint8 [H, W] or [H, W, 3]."""

    def __init__(self, array: np.ndarray):
        self.array = array

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.array.shape[1], self.array.shape[0]

    def image(self) -> Image.Image:
        """The image as RGB; grey is repeated."""
        return Image.fromarray(self.array).convert("RGB")

    def pixels(self, reduction: int = 1) -> np.ndarray:
        """The image as uint8 [H, W, 3]; never reduced."""
        grey = self.array.ndim == 2
        return np.repeat(self.array[..., None], 3, axis=2) if grey else self.array


class EncodedPicture:
    """An encoded image.

    Args:
        content: the bytes of an image file.
        name: what messages call it.
    """

    def __init__(self, content: bytes, name: str):
        self.content = content
        self.name = name

    @property
    def size(self) -> tuple[int, int]:
        """Width and height by the header.

        Raises:
            UnreadableImageError: for a header that the module's table refuses.
        """
        return self._plain_jpeg_size or _readable(self._open, self.name).size

    def image(self) -> Image.Image:
        """The whole image as RGB.

        Raises:
            UnreadableImageError: for whatever the module's table refuses.
        """
        return _readable(self._decode, self.name)

    def pixels(self, reduction: int = 1) -> np.ndarray:
        """The image as uint8 [H, W, 3]; a JPEG's sides are divided by `reduction`, rounded up.

        Args:
            reduction: 1, 2, 4 or 8, sizes at which a JPEG decodes faster; other formats ignore it.

        Raises:
            UnreadableImageError: for whatever the module's table refuses.
        """
        if self._plain_jpeg_size:
            width, height = self._plain_jpeg_size
            try:
                return simplejpeg.decode_jpeg(
                    self.content,
                    min_width=-(-width // reduction),
                    min_height=-(-height // reduction),
                    min_factor=reduction,
                )
            except ValueError:
                pass  # anything unusual: Pillow decides what it is
        return _as_array(self.image())

    @cached_property
    def _plain_jpeg_size(self) -> tuple[int, int] | None:
        """Width and height of a grey or colour JPEG of allowed size; None for all else."""
        try:
            height, width, colour, _ = simplejpeg.decode_jpeg_header(self.content)
        except ValueError:
            return None
        size = int(width), int(height)
        plain = colour in ("Gray", "YCbCr", "RGB") and size[0] * size[1] <= MAX_PIXELS
        return size if plain else None

    def _open(self) -> Image.Image:
        image = Image.open(io.BytesIO(self.content))
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width}x{image.height} pixels, at most {MAX_PIXELS} allowed")
        if image.mode in ("I", "F"):
            raise ValueError(f"32-bit values (mode {image.mode}) have no defined range; use 8 bits")
        return image

    def _decode(self) -> Image.Image:
        image = self._open()
        if image.mode.startswith("I;16"):
            grey = np.asarray(image).astype(np.float32) / 257
            return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")


def _as_array(image: Image.Image) -> np.ndarray:
    """A writable copy; in bands, because exporting a large image at once takes its memory twice."""
    width, height = image.size
    array = np.empty((height, width, 3), np.uint8)
    rows = max(1, 2**22 // width)
    for top in range(0, height, rows):
        band = (0, top, width, min(top + rows, height))
        array[top : top + rows] = np.asarray(image.crop(band))
    return array


def read_picture(path: str) -> EncodedPicture:
    """The content of the file at `path`.

    Raises:
        UnreadableImageError: if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return EncodedPicture(file.read(), path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _readable(decode, name: str) -> Image.Image:
    """What `decode` returns, without Pillow's warnings of oddities that the table covers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return decode()
    except UnreadableImageError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly everything on broken input
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> UnreadableImageError:
    reason = str(error).split("\n")[0] or type(error).__name__
    if isinstance(error, UnidentifiedImageError):
        reason = "not an image in a format that Pillow knows"
    return UnreadableImageError(f"cannot read image {name}: {reason}{ADVICE}")
