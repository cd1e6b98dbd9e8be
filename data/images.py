"""Decode one image to RGB, with one documented outcome for every kind of input.

| input | outcome |
|---|---|
| gray, palette, bilevel, CMYK | converted to RGB by Pillow, as timm and torchvision do |
| transparency | dropped: the stored colors are used, as timm and torchvision do |
| animation (GIF, WebP, APNG) | the first frame |
| EXIF orientation | not applied, as in the published ImageNet figures |
| 16-bit gray | scaled from 0..65535 to 0..255 (Pillow would clip nearly all of it to white) |
| gray TIFF of 9 to 15 bits | refused: Pillow reads it as if it had 16 |
| 32-bit integer or float | refused: the range of the values is unknown |
| truncated, undecodable, not an image | refused |
| any format that `FORMATS` does not name, such as EPS | refused |
| more than `MAX_PIXELS` pixels by its header | refused before anything is decoded |

The content decides, not the file's extension. A damaged JPEG that still decodes is not detected.
"""

import io
import os
import stat
import warnings
from functools import cached_property
from typing import Protocol

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from data.errors import UnreadableImageError, first_line

ADVICE = (
    "; repair it, or remove it or name it in data.skip_list for a run in another folder "
    "(`lipsformer check-data` finds all such files)"
)
# Pillow's other readers, such as that of EPS, which starts Ghostscript, are never used.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
NO_IMAGE = f"not an image of the formats {', '.join(FORMATS)}"
BITS_PER_SAMPLE, PHOTOMETRIC_INTERPRETATION = 258, 262  # tags of TIFF
MAX_PIXELS = 89_478_485  # Pillow warns above it; it needs 360 MB for such an RGB image


class Picture(Protocol):
    """An image before its transform. It is decoded only when its pixels are asked for."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        ...

    @property
    def channels(self) -> int:
        """1 if the file stores one gray value for each pixel; otherwise 3."""
        ...

    def image(self) -> Image.Image:
        """Return the whole image as RGB."""
        ...

    def pixels(self, reduction: int = 1) -> np.ndarray:
        """Return uint8 [H, W, 3]; each side may be divided by up to `reduction`."""
        ...


class ArrayPicture:
    """An image in memory.

    Args:
        array: uint8, gray [H, W] or RGB [H, W, 3].

    Example:
        >>> import numpy as np
        >>> ArrayPicture(np.zeros((4, 6), np.uint8)).pixels().shape
        (4, 6, 3)
    """

    def __init__(self, array: np.ndarray):
        self.array = array

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.array.shape[1], self.array.shape[0]

    @property
    def channels(self) -> int:
        """1 if the array is gray, and 3 if it is RGB."""
        return 1 if self.array.ndim == 2 else 3

    def image(self) -> Image.Image:
        """Return the image as RGB; gray is repeated."""
        return Image.fromarray(self.array).convert("RGB")

    def pixels(self, reduction: int = 1) -> np.ndarray:
        """Return uint8 [H, W, 3] at full size, whatever the `reduction`."""
        gray = self.channels == 1
        return np.repeat(self.array[..., None], 3, axis=2) if gray else self.array


class EncodedPicture:
    """The content of an image file.

    Args:
        content: The bytes of the file.
        name: The name of the image in messages.
        advice: What to do if the image is refused, for the end of the message.

    Example:
        >>> import io
        >>> from PIL import Image
        >>> buffer = io.BytesIO()
        >>> Image.new("L", (40, 30)).save(buffer, "PNG")
        >>> EncodedPicture(buffer.getvalue(), "a black image").pixels().shape
        (30, 40, 3)
    """

    def __init__(self, content: bytes, name: str, advice: str = ""):
        self.content = content
        self.name = name
        self.advice = advice

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, from the header.

        Raises:
            UnreadableImageError: If the table of this module refuses the header.
        """
        return self._plain_jpeg_size or _readable(self._open, self.name, self.advice).size

    @property
    def channels(self) -> int:
        """1 if the file stores gray values, with or without transparency, and 3 for other files.

        Gray pictures in a GIF or WebP file, or with a palette, are among the others.

        Raises:
            UnreadableImageError: If the table of this module refuses the header.
        """
        mode = _readable(self._open, self.name, self.advice).mode
        return 1 if mode in ("1", "L", "LA", "I") or mode.startswith("I;16") else 3

    def image(self) -> Image.Image:
        """Return the whole image as RGB.

        Raises:
            UnreadableImageError: If the table of this module refuses the image.
        """
        return _readable(self._decode, self.name, self.advice)

    def pixels(self, reduction: int = 1) -> np.ndarray:
        """Return uint8 [H, W, 3]. A JPEG's sides are divided by `reduction` and rounded up.

        Args:
            reduction: 1, 2, 4 or 8. A reduced JPEG decodes faster. Other formats ignore it.

        Raises:
            UnreadableImageError: If the table of this module refuses the image.
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
                pass  # the JPEG is unusual: Pillow decodes or refuses it
        return _as_array(self.image())

    @cached_property
    def _plain_jpeg_size(self) -> tuple[int, int] | None:
        """Width and height of a gray or color JPEG of allowed size; None for other images."""
        try:
            height, width, color, _ = simplejpeg.decode_jpeg_header(self.content)
        except ValueError:
            return None
        size = int(width), int(height)
        plain = color in ("Gray", "YCbCr", "RGB") and size[0] * size[1] <= MAX_PIXELS
        return size if plain else None

    def _open(self) -> Image.Image:
        image = Image.open(io.BytesIO(self.content), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width}x{image.height} pixels, at most {MAX_PIXELS} allowed")
        scaled = image.mode == "I" and image.format == "PPM"  # PGM of 16 bits
        if image.mode in ("I", "F") and not scaled:
            raise ValueError(f"32-bit values (mode {image.mode}) have no defined range; use 8 bits")
        return image

    def _decode(self) -> Image.Image:
        image = self._open()
        if image.mode.startswith("I"):
            gray = _gray_of_16_bits(image) / 257
            return Image.fromarray(gray.round().astype(np.uint8)).convert("RGB")
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")


def _gray_of_16_bits(image: Image.Image) -> np.ndarray:
    """Return gray values from 0 to 65535 as float32, [H, W].

    Pillow reads TIFF files of 9 to 15 bits as if they had 16, which are refused here, and does not
    invert the values of files in which 0 is white, which is done here.
    """
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
    if bits != 16:
        raise ValueError(f"gray values of {bits} bits are not read; use 8 or 16 bits")
    gray = np.asarray(image).astype(np.float32)
    return 65535 - gray if tags.get(PHOTOMETRIC_INTERPRETATION) == 0 else gray


def _as_array(image: Image.Image) -> np.ndarray:
    """Copy an image to a writable array, in bands, to not need the memory of a second copy."""
    width, height = image.size
    rows = max(1, 2**22 // width)
    if rows >= height:
        return np.array(image)
    array = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, rows):
        band = (0, top, width, min(top + rows, height))
        array[top : top + rows] = np.asarray(image.crop(band))
    return array


def read_picture(path: str) -> EncodedPicture:
    """Read the file at `path`.

    Raises:
        UnreadableImageError: If the file cannot be read.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("it is a pipe or a device, not a file")  # perhaps without an end
            return EncodedPicture(file.read(), path, ADVICE)
    except OSError as error:
        raise _unreadable(path, error, ADVICE) from error


def size_and_time(path: str) -> tuple[int, int]:
    """Return the size of the file at `path` and the time of its last change, in nanoseconds.

    Raises:
        UnreadableImageError: If there is no such file.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error, ADVICE) from error
    return found.st_size, found.st_mtime_ns


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a named pipe would otherwise wait until another process writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _readable(decode, name: str, advice: str) -> Image.Image:
    """Call `decode` without Pillow's warnings, and name the image in its errors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return decode()
    except Exception as error:  # Pillow's decoders raise nearly everything on broken input
        raise _unreadable(name, error, advice) from error


def _unreadable(name: str, error: Exception, advice: str) -> UnreadableImageError:
    reason = NO_IMAGE if isinstance(error, UnidentifiedImageError) else first_line(error)
    return UnreadableImageError(f"cannot read image {name}: {reason}{advice}")
