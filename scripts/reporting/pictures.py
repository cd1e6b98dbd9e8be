"""Small pictures for the page: enlarged, encoded, with a description."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from PIL import Image

SIDE = 128  # smallest number of pixels of the shorter side; smaller images are enlarged


@dataclass(frozen=True)
class InlineImage:
    """An encoded picture: PNG if pixels were enlarged, JPEG otherwise.

    Attributes:
        content: The bytes of its file.
        extension: "png" or "jpg".
        text: A description for screen readers.
    """

    content: bytes
    extension: str
    text: str

    @classmethod
    def of(cls, array: np.ndarray, text: str) -> "InlineImage":
        """Encode uint8 [H, W, 3]; every pixel of a small image is repeated."""
        factor = -(-SIDE // min(array.shape[:2]))
        buffer = io.BytesIO()
        if factor == 1:
            Image.fromarray(array).save(buffer, "JPEG", quality=85)
            return cls(buffer.getvalue(), "jpg", text)
        large = array.repeat(factor, 0).repeat(factor, 1)
        Image.fromarray(large).save(buffer, "PNG", optimize=True)
        return cls(buffer.getvalue(), "png", text)

    @property
    def uri(self) -> str:
        """The picture as a data URI."""
        kind = {"png": "png", "jpg": "jpeg"}[self.extension]
        return f"data:image/{kind};base64,{base64.b64encode(self.content).decode()}"


def overlaid(array: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Draw plasma colors of tokens over the gray image, which shows through low values.

    Args:
        array: uint8 [H, W, 3].
        shares: [h, w] in [0, 1], one per token.
    """
    height, width = array.shape[:2]
    gray = np.asarray(Image.fromarray(array).convert("L"), dtype=np.float64)[..., None]
    tokens = Image.fromarray(shares.astype(np.float32))
    tiles = np.asarray(tokens.resize((width, height), Image.Resampling.NEAREST))
    colors = 255 * colormaps["plasma"](tiles)[..., :3]
    cover = 0.35 + 0.45 * tiles[..., None]
    return (cover * colors + (1 - cover) * gray).round().astype(np.uint8)
