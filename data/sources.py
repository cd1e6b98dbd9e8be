"""Where images and labels come from: folders, torchvision's small sets, the embedded digits.

A source knows its class names in the order of its labels, and gives the picture of an index.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image
from timm.data.transforms import str_to_pil_interp

from data.errors import DataError
from data.images import ArrayPicture, EncodedPicture, Picture, read_picture

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class Source(Protocol):
    """Images with labels: `labels[i]` is an index into `classes`."""

    classes: tuple[str, ...]
    labels: np.ndarray

    def load(self, index: int) -> Picture:
        """The image of `index`, not yet decoded."""
        ...


class PartOfSource:
    """Some images of a source, in the order given.

    Args:
        source: The whole.
        indices: Positions in the source, [K].
    """

    def __init__(self, source: Source, indices: np.ndarray):
        self.source = source
        self.indices = indices
        self.classes = source.classes
        self.labels = source.labels[indices]

    def load(self, index: int) -> Picture:
        """Return the image of `index`, not yet decoded."""
        return self.source.load(int(self.indices[index]))


def held_out(labels: np.ndarray, share: float) -> np.ndarray:
    """Return which images are held out: the same share of every class, evenly over its images.

    Args:
        labels: Class of each image, [N].
        share: Of the images, in [0, 1).

    Returns:
        [N], True for an image that is held out.
    """
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        (members,) = np.nonzero(labels == label)
        steps = np.floor(np.arange(len(members) + 1) * share)
        chosen[members] = np.diff(steps) > 0
    return chosen


class FolderSource:
    """An ImageFolder tree: one folder per class, labels by torchvision's order (string sort).

    Files count at any depth below a class folder, by their extension.

    Args:
        path: the folder that holds the class folders.
        skip: files to leave out, as paths below `path`.
    """

    def __init__(self, path: Path, *, skip: frozenset[str] = frozenset()):
        expected = f"expected {path}/<class name>/<image files>"
        if not path.is_dir():
            raise DataError(f"no data folder {path}: {expected}; set data.root and data.name")
        self.path = path
        missing = [name for name in skip if not (path / name).exists()]
        if missing:
            raise DataError(f"{len(missing)} files to skip are not in {path}, such as {missing[0]}")
        self.classes = tuple(sorted(entry.name for entry in os.scandir(path) if entry.is_dir()))
        if not self.classes:
            raise DataError(f"no class folders in {path}: {expected}")
        files: list[bytes] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            found = [file[len(str(path)) + 1 :] for file in _image_files(path / name)]
            found = [file for file in found if file not in skip]
            if not found:
                raise DataError(
                    f"class folder {path / name} holds no images ({', '.join(EXTENSIONS)}): "
                    "fill it or remove it"
                )
            files += [os.fsencode(file) for file in found]
            labels += [label] * len(found)
        # One fixed-width array: worker processes share it, where a list would be copied page by
        # page as its reference counts change.
        self.files = np.array(files)
        self.labels = np.array(labels)

    def load(self, index: int) -> EncodedPicture:
        """Read one file."""
        return read_picture(self.file(index))

    def file(self, index: int) -> str:
        """Path of the file of `index`."""
        return os.path.join(self.path, os.fsdecode(self.files[index]))


def _image_files(folder: Path) -> list[str]:
    """Image files below `folder` in torchvision's order."""
    return [
        os.path.join(parent, name)
        for parent, _, names in sorted(os.walk(folder, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(EXTENSIONS)
    ]


class ArraySource:
    """Images held in memory.

    Args:
        images: uint8, [N, H, W] grey or [N, H, W, 3] RGB.
        labels: [N], indices into `classes`.
        classes: class names.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: Sequence[str]):
        self.images = images
        self.labels = labels
        self.classes = tuple(classes)

    def load(self, index: int) -> Picture:
        """One image."""
        return ArrayPicture(self.images[index])


def digits(split: str, *, img_size: int, interpolation: str) -> ArraySource:
    """scikit-learn's 1,797 handwritten digits (8x8, grey), enlarged to `img_size`.

    The values 0..16 become round(255 v / 16); Pillow resamples with `interpolation`. The held-out
    fifth is stratified by class and the same for every run.

    Args:
        split: "train" (1,437 images) or "val" (360).
        img_size: side in pixels.
        interpolation: timm's name of the resampling filter.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataError("the digits need scikit-learn: pip install 'lipsformer[demo]'") from error
    values, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    train, val = train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    chosen = _split_of(split, train=train, val=val)
    small = np.rint(values[chosen].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    resampling = str_to_pil_interp(interpolation)
    images = [
        np.asarray(Image.fromarray(image).resize((img_size, img_size), resampling))
        for image in small
    ]
    return ArraySource(np.stack(images), labels[chosen], [str(digit) for digit in range(10)])


def torchvision_set(source: str, split: str, *, root: Path, download: bool) -> ArraySource:
    """CIFAR-10, CIFAR-100 or Fashion-MNIST as torchvision stores them.

    Args:
        source: "cifar10", "cifar100" or "fashion_mnist".
        split: "train" or "val" (the published test set).
        root: torchvision's root folder.
        download: fetch the set if it is not there.
    """
    from torchvision import datasets

    kind = {
        "cifar10": datasets.CIFAR10,
        "cifar100": datasets.CIFAR100,
        "fashion_mnist": datasets.FashionMNIST,
    }[source]
    try:
        loaded = kind(str(root), train=_split_of(split, train=True, val=False), download=download)
    except RuntimeError as error:  # torchvision's "not found or corrupted"
        raise DataError(
            f"{kind.__name__} is not in {root} or is incomplete; set data.download=true to fetch "
            "it, or put torchvision's files there"
        ) from error
    return ArraySource(np.asarray(loaded.data), np.asarray(loaded.targets), loaded.classes)


def _split_of(split: str, *, train, val):
    """What belongs to the split; sources with fixed splits know two."""
    if split not in ("train", "val"):
        raise DataError(f"no split {split!r} in this source: use 'train' or 'val'")
    return train if split == "train" else val
