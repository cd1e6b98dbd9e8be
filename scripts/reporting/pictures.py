"""Small pictures for the page: enlarged, encoded, with their words."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

SIDE = 128  # pixels that the shorter side of a small image is enlarged to, at least


@dataclass(frozen=True)
class Picture:
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
    def of(cls, array: np.ndarray, text: str) -> "Picture":
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


def blended(array: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Colours of tokens over a pale grey form of the image.

    Args:
        array: uint8 [H, W, 3].
        colours: [h, w, 3] in [0, 1], one per token.
    """
    height, width = array.shape[:2]
    grey = np.asarray(Image.fromarray(array).convert("L"), dtype=np.float64)[..., None]
    tiles = Image.fromarray((255 * colours).round().astype(np.uint8))
    over = np.asarray(tiles.resize((width, height), Image.Resampling.NEAREST), dtype=np.float64)
    return (0.75 * over + 0.25 * grey).round().astype(np.uint8)
