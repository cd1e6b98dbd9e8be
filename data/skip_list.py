"""The list of images that training and evaluation leave out: `check-data` writes it.

A line is the path of an image relative to the folder of the data, or split/number for parquet
files. Names that are not UTF-8 keep their bytes.
"""

import os
import posixpath
import warnings
from collections.abc import Iterable
from pathlib import Path

from data.errors import DataError, DataWarning
from data.parquet import files_of
from data.sources import EXTENSIONS


def write_skip_list(path: Path, images: Iterable[str]) -> None:
    """Write a list. No name may hold a line break."""
    text = "".join(f"{image}\n" for image in images)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def read_skip_list(path: str, folder: Path, split: str, *, numbered: bool) -> frozenset[str]:
    """Return a split's images that a list names, relative to the split.

    Args:
        path: The list.
        folder: Folder of the data.
        split: Name of the split.
        numbered: Whether the images are those of parquet files.

    Raises:
        DataError: If the list cannot be read, or names something else than images of the folder.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"data.skip_list={path!r} cannot be read: {error}") from error
    lines = text.split("\n")  # splitlines would also break at other characters of a name
    if numbered:
        named = {line.rpartition("/")[0] for line in lines if line}
        if stray := sorted(name for name in named if not files_of(folder, name)):
            raise DataError(
                f"data.skip_list={path!r} names images of the split {stray[0]!r}, of which "
                f"{folder} has no files: its lines are split/number, as {split}/0"
            )
    elif stray := [line for line in lines if line and not _is_inside(folder, line)]:
        raise DataError(
            f"data.skip_list={path!r} names {len(stray)} paths that are no image files in "
            f"{folder}, such as {stray[0]!r}: its paths are relative to that folder, as {split}/..."
        )
    prefix = f"{split}/"
    listed = frozenset(line[len(prefix) :] for line in lines if line.startswith(prefix))
    if listed:
        warnings.warn(
            f"{len(listed)} images of {split} are left out, because {path} names them",
            DataWarning,
            stacklevel=2,
        )
    return listed


def _is_inside(folder: Path, line: str) -> bool:
    """Return whether a line is the one way to write the path of an image file below a folder."""
    written_so = posixpath.normpath(line) == line and not line.startswith(("/", "../"))
    is_image = line.lower().endswith(EXTENSIONS) and not os.path.isdir(folder / line)
    return written_so and is_image and os.path.lexists(folder / line)
