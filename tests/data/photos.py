"""Pictures for tests: smooth like photos, with full range and some texture."""

import io

import numpy as np
from PIL import Image


def photo(width: int, height: int) -> Image.Image:
    """A smooth random picture, the same for the same size."""
    rng = np.random.default_rng([width, height])
    small = rng.integers(0, 256, (7, 5, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    texture = rng.integers(-9, 10, smooth.shape)
    return Image.fromarray(np.clip(smooth + texture, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **settings) -> bytes:
    """The image as a file's content."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()
