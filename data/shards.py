"""Tar shards in WebDataset's layout, with random access.

A split's folder holds `shard-00000.tar`, ... with the members `<key>.<extension>` (an unchanged
image file) and `<key>.cls` (its label in digits). Each shard has an `.npz` file with the offset and
size of every image. `index.json` holds the class names and each shard's checksum. Images are read
by their offsets, so that an epoch has its exact length, follows the seed's order, and can be
resumed at any update, as with a folder of images.
"""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, UnreadableImageError, first_line
from data.images import EncodedPicture, Picture
from data.parquet import ParquetSource
from data.rng import permutation
from data.sources import FolderSource

INDEX = "index.json"
ADVICE = (
    "; `lipsformer make-shards --verify` tells whether the shard is damaged, and "
    "`lipsformer make-shards --skip-list` makes shards without the image"
)
ANEW = "remove the folder, and write the shards again with `lipsformer make-shards`"
PLACES = ("offsets", "sizes", "labels")  # the arrays of a shard's .npz file


class ShardSource:
    """The images of one split in shards, in the order of the shards.

    Args:
        path: The split's folder.

    Raises:
        DataError: If the folder has no index, or a shard is missing or has another size.

    Example:
        >>> from pathlib import Path
        >>> ShardSource(Path("nowhere"))
        Traceback (most recent call last):
        data.errors.DataError: no index.json in nowhere: ...
    """

    def __init__(self, path: Path):
        if not (path / INDEX).is_file():
            raise DataError(
                f"no {INDEX} in {path}: make it from a folder with `lipsformer make-shards`"
            )
        index = read_index(path)
        self.classes = tuple(index["classes"])
        self.shards = [str(path / shard["file"]) for shard in index["shards"]]
        for shard in index["shards"]:
            file = path / shard["file"]
            found = file.stat().st_size if file.exists() else "missing"
            if found != shard["bytes"]:
                raise DataError(
                    f"{file}: expected {shard['bytes']} bytes, found {found}; write the shards "
                    "again with `lipsformer make-shards`"
                )
        places = [_read_places(Path(shard).with_suffix(".npz")) for shard in self.shards]
        self.shard = np.repeat(np.arange(len(places)), [len(place["labels"]) for place in places])
        self.offsets, self.sizes, self.labels = (
            np.concatenate([place[name] for place in places]) for name in PLACES
        )
        if len(self.labels) != index["images"]:
            raise DataError(
                f"{path}: {len(self.labels)} images, {index['images']} in {INDEX}; {ANEW}"
            )
        if self.labels.min() < 0 or self.labels.max() >= len(self.classes):
            raise DataError(f"{path}: labels outside of the {len(self.classes)} classes; {ANEW}")

    def load(self, index: int) -> Picture:
        """Read one image.

        Raises:
            UnreadableImageError: If the shard ends before the image does.
        """
        shard = self.shards[self.shard[index]]
        offset, size = int(self.offsets[index]), int(self.sizes[index])
        name = f"at byte {offset} of {shard}"
        try:
            with open(shard, "rb", buffering=0) as file:
                content = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise UnreadableImageError(f"cannot read image {name}: {error}{ADVICE}") from error
        if len(content) != size:
            raise UnreadableImageError(f"cannot read image {name}: the shard is truncated{ADVICE}")
        return EncodedPicture(content, name, ADVICE)


def read_index(path: Path) -> dict[str, Any]:
    """Read the index of a split's folder.

    Raises:
        DataError: If the file is not a whole index, or names a file of another folder.
    """
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        names = [shard["file"] for shard in index["shards"] if int(shard["bytes"]) >= 0]
        whole = bool(names) and int(index["images"]) > 0 and len(index["classes"]) > 0
    except (OSError, ValueError, KeyError, TypeError):
        index, names, whole = {}, [], False
    if not whole:
        raise DataError(f"{path / INDEX} is damaged: write it again with `lipsformer make-shards`")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(f"{path / INDEX}: {name!r} is not the bare name of a file")
    return index


def _read_places(file: Path) -> dict[str, np.ndarray]:
    """Read the offsets, sizes and labels of a shard's images."""
    try:
        with np.load(file) as found:
            places = {name: found[name] for name in PLACES}
    except FileNotFoundError:
        raise DataError(f"{file} is missing; `lipsformer make-shards` writes it") from None
    except Exception as error:  # NumPy and zipfile raise whatever a damaged file makes them raise
        raise DataError(
            f"{file} is damaged: {first_line(error)}; `lipsformer make-shards` writes it again"
        ) from None
    if len({places[name].shape for name in PLACES}) != 1:
        raise DataError(
            f"{file} is damaged: {', '.join(PLACES)} differ in length; `lipsformer make-shards` "
            "writes it again"
        )
    return places


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.tar"


def shard_members(
    source: FolderSource | ParquetSource, images_per_shard: int, seed: int
) -> list[np.ndarray]:
    """Return the indices of the images of each shard.

    The images of a folder are shuffled, so that every shard mixes the classes. The images of
    parquet files keep their order, in which they can be read fast.
    """
    count = len(source.labels)
    in_folder = isinstance(source, FolderSource)
    order = permutation(count, "shards", seed) if in_folder else np.arange(count)
    return np.split(order, range(images_per_shard, len(order), images_per_shard))


def write_shard(source: FolderSource | ParquetSource, members: np.ndarray, path: Path) -> None:
    """Write one shard and its offsets. The same images give the same bytes.

    The tar file has its final name only when it is complete.
    """
    offsets, sizes = [], []
    temporary = path.with_suffix(".part")
    with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
        for index in members.tolist():
            picture = source.load(index)
            content, extension = picture.content, os.path.splitext(picture.name)[1].lower()
            key = f"{index:09d}"
            offsets.append(tar.offset + tarfile.BLOCKSIZE)
            sizes.append(len(content))
            label = str(source.labels[index]).encode()
            for suffix, data in ((extension, content), (".cls", label)):
                member = tarfile.TarInfo(key + suffix)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())  # a shard with its final name is whole, also after a crash
    np.savez(
        path.with_suffix(".npz"),
        offsets=np.array(offsets, np.int64),
        sizes=np.array(sizes, np.int64),
        labels=source.labels[members].astype(np.int64),
    )
    os.replace(temporary, path)


def write_index(source: FolderSource | ParquetSource, path: Path, checksums: list[str]) -> None:
    """Write `index.json`, which makes the folder a complete split."""
    shards = [
        {
            "file": shard_name(number),
            "bytes": (path / shard_name(number)).stat().st_size,
            "sha256": checksum,
        }
        for number, checksum in enumerate(checksums)
    ]
    index = {"classes": source.classes, "images": len(source.labels), "shards": shards}
    temporary = path / f"{INDEX}.part"
    temporary.write_text(json.dumps(index, indent=1))
    os.replace(temporary, path / INDEX)


def checksum(path: Path) -> str:
    """Return the SHA-256 sum of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def is_complete(shard: Path) -> bool:
    """Return whether a shard is there with all images whose places its `.npz` file lists."""
    try:
        places = _read_places(shard.with_suffix(".npz"))
    except DataError:
        return False
    end = int((places["offsets"] + places["sizes"]).max(initial=0))
    return shard.exists() and shard.stat().st_size >= end


def is_intact(shard: Path, sha256: str) -> bool:
    """Return whether a shard is complete and has the checksum of the index."""
    return is_complete(shard) and checksum(shard) == sha256
