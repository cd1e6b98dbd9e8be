"""Reads every image file below a folder and says which cannot be used, and what is unusual."""

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from data.errors import UnreadableImageError
from data.images import read_picture
from data.sources import EXTENSIONS

ORIENTATION = 0x0112  # EXIF tag; 1 is upright, 2 to 8 are turned or mirrored


@dataclass(frozen=True)
class Finding:
    """What one file holds.

    Attributes:
        file: path below the folder that was checked.
        error: why it cannot be used, or None.
        kind: format and mode, such as "JPEG RGB".
        size: width and height.
        turned: it has an EXIF orientation, which is not applied.
        animated: it has several frames, of which the first is used.
        misnamed: its content is of another format than its extension says.
    """

    file: str
    error: str | None = None
    kind: str = ""
    size: tuple[int, int] = (0, 0)
    turned: bool = False
    animated: bool = False
    misnamed: bool = False


def image_files(folder: Path) -> list[str]:
    """Paths below the folder of all files with an image's extension, sorted."""
    return sorted(
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(EXTENSIONS)
    )


def check_file(folder: str, file: str) -> Finding:
    """Decode one image as training does, and look at its header."""
    path = os.path.join(folder, file)
    try:
        read_picture(path).pixels()
    except UnreadableImageError as error:
        return Finding(file, error=str(error.__cause__).split("\n")[0] or repr(error.__cause__))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(path) as image:
            extension = os.path.splitext(file)[1].lower()
            return Finding(
                file,
                kind=f"{image.format} {image.mode}",
                size=image.size,
                turned=image.getexif().get(ORIENTATION, 1) in range(2, 9),
                animated=getattr(image, "n_frames", 1) > 1,
                misnamed=Image.registered_extensions().get(extension) != image.format,
            )


def check_files(folder: Path, files: list[str], workers: int) -> Iterator[Finding]:
    """The findings of all files in order, from `workers` processes."""
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(check_file, [str(folder)] * len(files), files, chunksize=16)
