"""Read every image file below a folder, and report which are unreadable or unusual."""

import io
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from data.errors import DataError, first_line
from data.images import FORMATS, NO_IMAGE, EncodedPicture, read_picture
from data.parquet import ParquetSource

ROWS = 256  # images of a task; each task opens the parquet files anew
FAMILY = {"MPO": "JPEG"}  # several JPEGs in one file, as many phones write
ORIENTATION = 0x0112  # EXIF tag: 1 is upright, 2 to 8 are rotated or mirrored


@dataclass(frozen=True)
class Finding:
    """What one file holds.

    Attributes:
        file: Path relative to the folder that was checked.
        error: Why the file cannot be used, or None.
        kind: Format and mode, such as "JPEG RGB".
        size: Width and height.
        rotated: The file has an EXIF orientation, which the loader does not apply.
        animated: The file has several frames, of which the loader reads the first.
        misnamed: The content has another format than the extension says.

    Example:
        >>> Finding("cat/1.jpg", kind="PNG RGB", size=(8, 8), misnamed=True).error is None
        True
    """

    file: str
    error: str | None = None
    kind: str = ""
    size: tuple[int, int] = (0, 0)
    rotated: bool = False
    animated: bool = False
    misnamed: bool = False


def check_file(folder: str, file: str) -> Finding:
    """Decode one image as training does, and inspect its header."""
    return _find(file, lambda: read_picture(os.path.join(folder, file)))


def check_rows(folder: str, split: str, rows: range) -> list[Finding]:
    """Check some images of a split of parquet files, which are called split/number."""
    source = ParquetSource(Path(folder), split)
    return [_find(f"{split}/{row}", partial(source.load, row)) for row in rows]


def _find(name: str, load: Callable[[], EncodedPicture]) -> Finding:
    try:
        picture = load()
        picture.pixels()
    except DataError as error:
        if isinstance(error.__cause__, UnidentifiedImageError):
            return Finding(name, error=NO_IMAGE)
        return Finding(name, error=first_line(error.__cause__ or error))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(picture.content), formats=FORMATS) as image:
            kind = FAMILY.get(image.format or "", image.format)
            extension = os.path.splitext(picture.name)[1].lower()
            return Finding(
                name,
                kind=f"{kind} {image.mode}",
                size=image.size,
                rotated=image.getexif().get(ORIENTATION, 1) in range(2, 9),
                animated=getattr(image, "n_frames", 1) > 1 and kind == image.format,
                misnamed=Image.registered_extensions().get(extension) != kind,
            )


def check_files(folder: Path, files: list[str], workers: int) -> Iterator[Finding]:
    """Check all files in `workers` processes, and yield the findings in the files' order."""
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(partial(check_file, str(folder)), files, chunksize=16)


def check_parquet(folder: Path, split: str, workers: int) -> Iterator[Finding]:
    """Check all images of a split of parquet files, and yield the findings in their order."""
    count = len(ParquetSource(folder, split).labels)
    rows = [range(start, min(start + ROWS, count)) for start in range(0, count, ROWS)]
    with ProcessPoolExecutor(workers) as pool:
        for found in pool.map(partial(check_rows, str(folder), split), rows):
            yield from found
