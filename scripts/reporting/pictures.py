"""Small pictures for the page: enlarged, encoded, with their words."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from PIL import Image

SIDE = 128  # pixels that the shorter side of a small image is enlarged to, at least


@dataclass(frozen=True)
class InlineImage:
    """An encoded picture: PNG where pixels were enlarged, else JPEG.

    Attributes:
        content: of its file.
        extension: "png" or "jpg".
        text: what it shows, for those who do not see it.
    """

    content: bytes
    extension: str
    text: str

    @classmethod
    def of(cls, array: np.ndarray, text: str) -> "InlineImage":
        """The picture of uint8 [H, W, 3]; of a small one every pixel is repeated."""
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
        """As it stands in the page."""
        kind = {"png": "png", "jpg": "jpeg"}[self.extension]
        return f"data:image/{kind};base64,{base64.b64encode(self.content).decode()}"


def overlaid(array: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Plasma colours of tokens over the image in grey, which shows through where they are low.

    Args:
        array: uint8 [H, W, 3].
        shares: [h, w] in [0, 1], one per token.
    """
    height, width = array.shape[:2]
    grey = np.asarray(Image.fromarray(array).convert("L"), dtype=np.float64)[..., None]
    tokens = Image.fromarray(shares.astype(np.float32))
    tiles = np.asarray(tokens.resize((width, height), Image.Resampling.NEAREST))
    colours = 255 * colormaps["plasma"](tiles)[..., :3]
    cover = 0.35 + 0.45 * tiles[..., None]
    return (cover * colours + (1 - cover) * grey).round().astype(np.uint8)
