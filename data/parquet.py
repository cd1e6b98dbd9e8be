"""Hugging Face's parquet data sets, with one column of images and one of class labels.

The image column holds {bytes, path}. The schema's metadata name the features of the columns, and
the classes in the order of their numbers. Parquet reads whole row groups. The source keeps the last
row group, so that reading in the files' order is cheap. In a shuffled epoch nearly every image
costs one row group.
"""

import glob
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, first_line
from data.images import ADVICE, EncodedPicture

MAX_GROUP_BYTES = 2**30  # the largest row group that is read into memory
PATTERNS = ("{}-*.parquet", "data/{}-*.parquet", "{}/*.parquet")  # of the files of a split
PNG = b"\x89PNG"


class ParquetSource:
    """The images of one split, in the order of the files and of their rows.

    Args:
        folder: Holds `<split>-*.parquet`, `data/<split>-*.parquet` or `<split>/*.parquet`.
        split: Name of the split, such as "train" or "validation".
        skip: Numbers of images to leave out.

    Raises:
        DataError: If files are missing, or hold no images with class labels.

    Example:
        >>> from pathlib import Path
        >>> ParquetSource(Path("nowhere"), "train")
        Traceback (most recent call last):
        data.errors.DataError: no parquet files of split 'train' in nowhere: ...
    """

    def __init__(self, folder: Path, split: str, skip: Collection[int] = ()):
        self.files = [str(file) for file in _files(folder, split)]
        labels, group_sizes, self.group_bytes = [], [], 0
        self._groups: list[tuple[int, int]] = []  # (file, row group within it)
        for number, file in enumerate(self.files):
            with _opened(file) as parquet:
                found = _features(parquet.schema_arrow, file)
                if number == 0:
                    self.image_column, self.label_column, self.classes = found
                elif found != (self.image_column, self.label_column, self.classes):
                    raise DataError(f"{file}: other columns or classes than {self.files[0]}")
                for group in range(parquet.metadata.num_row_groups):
                    described = parquet.metadata.row_group(group)
                    self._groups.append((number, group))
                    group_sizes.append(described.num_rows)
                    self.group_bytes = max(self.group_bytes, described.total_byte_size)
                column = parquet.read([self.label_column], use_threads=False).column(0)
                labels.append(column.fill_null(-1).to_numpy())
        if self.group_bytes > MAX_GROUP_BYTES:
            raise DataError(
                f"{folder}: a row group of {self.group_bytes / 2**30:.1f} GiB, at most "
                f"{MAX_GROUP_BYTES / 2**30:.0f} allowed: write the files with row_group_size=100"
            )
        self.labels = np.concatenate(labels).astype(np.int64)
        if len(self.labels) == 0:
            raise DataError(f"{folder}: {split} has no images")
        bad = np.flatnonzero((self.labels < 0) | (self.labels >= len(self.classes)))
        if len(bad):
            raise DataError(
                f"{folder}: image {bad[0]} of {split} has the label {self.labels[bad[0]]}; "
                f"expected 0 to {len(self.classes) - 1}"
            )
        if skip and max(skip) >= len(self.labels):
            raise DataError(
                f"{folder}: image {max(skip)} of {split} shall be left out, but there are "
                f"{len(self.labels)}"
            )
        self._numbers = np.setdiff1d(np.arange(len(self.labels)), list(skip))
        self.labels = self.labels[self._numbers]
        if len(self.labels) == 0:
            raise DataError(f"{folder}: all images of {split} shall be left out")
        self._ends = np.cumsum(group_sizes)
        self._held: tuple[int, Any] = (-1, None)

    def names(self) -> list[bytes]:
        """Return the numbers of all images in the split."""
        return [str(number).encode() for number in self._numbers.tolist()]

    def load(self, index: int) -> EncodedPicture:
        """Read one image, and first its row group unless it is the group of the last image.

        Raises:
            DataError: If the file is damaged, or holds only a reference to the image.
        """
        index = int(self._numbers[index])
        group = int(np.searchsorted(self._ends, index, side="right"))
        file = self.files[self._groups[group][0]]
        if self._held[0] != group:
            self._held = (-1, None)  # free the memory before the next group is read
            with _opened(file) as parquet:
                columns = [self.image_column]
                rows = parquet.read_row_group(self._groups[group][1], columns, use_threads=False)
            self._held = (group, rows.column(0))
        rows = self._held[1]
        image = rows[index - int(self._ends[group]) + len(rows)].as_py() or {}
        if image.get("bytes") is None:
            raise DataError(f"{file}: image {index} is not in the file: {image.get('path')}")
        path = image.get("path") or ("image.png" if image["bytes"][:4] == PNG else "image.jpg")
        return EncodedPicture(image["bytes"], f"{file}/{index}/{path}", ADVICE)


def files_of(folder: Path, split: str) -> list[Path]:
    """Return the split's files in order; none if there is no such split."""
    patterns = [pattern.format(glob.escape(split)) for pattern in PATTERNS] if split else []
    return next((files for p in patterns if (files := sorted(folder.glob(p)))), [])


def _files(folder: Path, split: str) -> list[Path]:
    """Find the split's files in order, and check their number against the one in their names."""
    found = files_of(folder, split)
    if not found:
        expected = ", ".join(pattern.format(split) for pattern in PATTERNS)
        raise DataError(
            f"no parquet files of split {split!r} in {folder}: expected {expected}; "
            "set data.root, data.name and data.train_split or data.val_split"
        )
    stated = {int(n) for file in found for n in re.findall(r"-of-(\d+)", file.name)}
    if stated and stated != {len(found)}:
        raise DataError(f"{found[0].parent}: {len(found)} files of {found[0].name}'s set are there")
    return found


def _features(schema, file: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the image column, the label column and the class names."""
    try:
        features = dict(json.loads(schema.metadata[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError):  # other metadata than Hugging Face's, or none
        features = {}
    # Hugging Face describes a column of lists by a list.
    single = {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    of_kind = {
        kind: [name for name, feature in single.items() if feature.get("_type") == kind]
        for kind in ("Image", "ClassLabel")
    }
    for kind, names in of_kind.items():
        if len(names) != 1:
            raise DataError(
                f"{file}: {len(names)} columns of Hugging Face's feature {kind}"
                f"{' (' + ', '.join(names) + ')' if names else ''}, expected 1"
            )
    image, label = of_kind["Image"][0], of_kind["ClassLabel"][0]
    classes = tuple(features[label]["names"])
    if len({*classes}) != len(classes):
        raise DataError(f"{file}: two classes of column {label} have the same name")
    return image, label, classes


@contextmanager
def _opened(file: str) -> Iterator[Any]:
    """Open a parquet file, and name it in errors."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError("parquet files need pyarrow: pip install 'lipsformer[parquet]'") from error
    try:
        with parquet.ParquetFile(file, memory_map=True) as opened:
            yield opened
    except (ArrowException, OSError) as error:
        raise DataError(f"cannot read parquet file {file}: {first_line(error)}") from error
