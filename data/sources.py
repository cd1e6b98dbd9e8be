"""Sources of images and labels: folders, torchvision's small data sets, scikit-learn's digits.

A source knows the label of every image and the names of the classes, and loads one picture by its
index. Sources are not changed after construction; `WithClasses` and `Subset` wrap them.
"""

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image
from timm.data.transforms import str_to_pil_interp

from data.errors import DataError, DataWarning, first_line
from data.images import ArrayPicture, EncodedPicture, Picture, read_picture

MOST_DIGIT_PIXELS = 1024  # on a side; all digits are kept in memory, which is 1.8 GB then
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

# Of pictures that are not read.
OTHER_PICTURES = {".avif", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".svg"}


class Source(Protocol):
    """Images with labels.

    Attributes:
        classes: Names of the classes.
        labels: For each image the index of its class in `classes`, [N].
    """

    classes: tuple[str, ...]
    labels: np.ndarray

    def load(self, index: int) -> Picture:
        """Return the image of an index, not yet decoded."""
        ...


def held_out(labels: np.ndarray, share: float) -> np.ndarray:
    """Return which images are held out: the same share of every class, evenly over its images.

    Args:
        labels: Class of each image, [N].
        share: Share of the images of each class, in [0, 1). Its number of images is rounded down.

    Returns:
        [N], True for an image that is held out.

    Example:
        >>> held_out(np.array([0, 0, 0, 0, 1, 1]), share=0.5).tolist()
        [False, True, False, True, False, True]
    """
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        (members,) = np.nonzero(labels == label)
        # 100 * 0.29 is a little less than 29 in floating point.
        steps = np.floor(np.arange(len(members) + 1) * share + 1e-9)
        chosen[members] = np.diff(steps) > 0
    return chosen


class FolderSource:
    """A tree with one folder per class, in the layout and order of torchvision's ImageFolder.

    Classes are sorted as strings. Every file with an image's extension belongs to the source, at
    any depth below its class folder. Unlike torchvision, folders whose names begin with a dot, such
    as .ipynb_checkpoints, are no classes.

    Args:
        path: The folder that holds the class folders.
        skip: Files to leave out, relative to `path`.

    Raises:
        DataError: If there is no folder, a class has no images, or a file to skip does not exist.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("cat", "dog"):
        ...     (folder / name).mkdir()
        ...     (folder / name / "1.jpg").touch()
        >>> FolderSource(folder).classes
        ('cat', 'dog')
    """

    def __init__(self, path: Path, *, skip: frozenset[str] = frozenset()):
        expected = f"expected {path}/<class name>/<image files>"
        if not path.is_dir():
            raise DataError(
                f"no data folder {path}: {expected}; set data.root and data.name, or data.holdout "
                "to evaluate a share of the training images"
            )
        self.path = path
        missing = [name for name in skip if not os.path.lexists(path / name)]
        if missing:
            raise DataError(f"{len(missing)} files to skip are not in {path}, such as {missing[0]}")
        entries = [entry for entry in os.scandir(path) if not entry.name.startswith(".")]
        self.classes = tuple(sorted(entry.name for entry in entries if entry.is_dir()))
        files_beside = [entry.name for entry in entries if not entry.is_dir()]
        if not self.classes:
            raise DataError(f"no class folders in {path}: {expected}")
        if loose := [name for name in files_beside if name.lower().endswith(EXTENSIONS)]:
            warnings.warn(
                f"{len(loose)} images of {path} are left out, such as {loose[0]}, because they are "
                "in no class folder",
                DataWarning,
                stacklevel=2,
            )
        files: list[bytes] = []
        labels: list[int] = []
        others: Counter[str] = Counter()
        for label, name in enumerate(self.classes):
            below = files_below(path / name)
            others.update(os.path.splitext(file)[1].lower() for file in below)
            found = [f"{name}{os.sep}{file}" for file in below if _is_image(file)]
            found = [file for file in found if file not in skip]
            if not found:
                raise DataError(
                    f"class folder {path / name} holds no images ({', '.join(EXTENSIONS)}): "
                    "fill it or remove it"
                )
            files += [os.fsencode(file) for file in found]
            labels += [label] * len(found)
        if unread := sorted(others.keys() & OTHER_PICTURES):
            warnings.warn(
                f"{sum(others[extension] for extension in unread)} files of {path} are left out, "
                f"because their names end in {', '.join(unread)}: images end in "
                f"{', '.join(EXTENSIONS)}",
                DataWarning,
                stacklevel=2,
            )
        # Worker processes share one array. A list would be copied page by page, because reading it
        # changes reference counts.
        self.files = np.array(files)
        self.labels = np.array(labels)

    def load(self, index: int) -> EncodedPicture:
        """Read one file."""
        return read_picture(self.file(index))

    def file(self, index: int) -> str:
        """Return the path of an image."""
        return os.path.join(self.path, os.fsdecode(self.files[index]))

    def names(self) -> list[bytes]:
        """Return the paths of all images relative to the folder."""
        return self.files.tolist()


def _is_image(file: str) -> bool:
    return file.lower().endswith(EXTENSIONS)


def image_files(folder: Path) -> list[str]:
    """List the image files at any depth below a folder, in torchvision's order.

    Args:
        folder: The folder. Files count as images if their names end in one of `EXTENSIONS`.

    Returns:
        Paths relative to the folder.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("2.jpg", "1.PNG", "notes.txt"):
        ...     (folder / name).touch()
        >>> image_files(folder)
        ['1.PNG', '2.jpg']
    """
    return [file for file in files_below(folder) if _is_image(file)]


def files_below(folder: Path) -> list[str]:
    """List the files at any depth below `folder`, relative to it, in torchvision's order."""
    top = os.path.join(folder, "")
    start = len(top)  # os.path.relpath takes 10 us per file
    return [
        os.path.join(parent, name)[start:]
        for parent, _, names in sorted(os.walk(top, followlinks=True))
        for name in sorted(names)
    ]


class ArraySource:
    """Images in memory.

    Args:
        images: uint8, gray [N, H, W] or RGB [N, H, W, 3].
        labels: Indices into `classes`, [N].
        classes: Class names.

    Example:
        >>> import numpy as np
        >>> images = np.zeros((2, 8, 8), np.uint8)
        >>> ArraySource(images, np.array([0, 1]), ["a", "b"]).load(1).size
        (8, 8)
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: Sequence[str]):
        self.images = images
        self.labels = labels
        self.classes = tuple(classes)

    def load(self, index: int) -> Picture:
        """Return one image."""
        return ArrayPicture(self.images[index])


class WithClasses:
    """A source under other class names.

    Args:
        source: The source.
        classes: The new name of each class, in the order of the source's labels.

    Example:
        >>> source = WithClasses(digits("val", img_size=8), [f"digit {n}" for n in range(10)])
        >>> source.classes[3]
        'digit 3'
    """

    def __init__(self, source: Source, classes: Sequence[str]):
        self.source = source
        self.classes = tuple(classes)
        self.labels = source.labels

    def load(self, index: int) -> Picture:
        """Return one image of the source."""
        return self.source.load(index)


class InMemory:
    """A source whose images stay in memory, decoded, after they were first loaded.

    Every worker process of a loader has a copy of its own.

    Args:
        source: The source.

    Example:
        >>> kept = InMemory(digits("val", img_size=8))
        >>> kept.load(3).size
        (8, 8)
    """

    def __init__(self, source: Source):
        self.source = source
        self.classes = source.classes
        self.labels = source.labels
        self.pictures: dict[int, ArrayPicture] = {}

    def load(self, index: int) -> ArrayPicture:
        """Return one image."""
        if index not in self.pictures:
            picture = self.source.load(index)
            pixels = picture.pixels()
            gray = picture.channels == 1
            self.pictures[index] = ArrayPicture(pixels[..., 0].copy() if gray else pixels)
        return self.pictures[index]


class Subset:
    """Some images of a source.

    Args:
        source: The source.
        indices: Indices of the images to keep, in the order to keep; an index may come again.

    Example:
        >>> len(Subset(digits("val", img_size=8), [4, 2]).labels)
        2
    """

    def __init__(self, source: Source, indices: Sequence[int]):
        self.source = source
        self.indices = np.array(indices, dtype=np.int64)
        self.classes = source.classes
        self.labels = source.labels[self.indices]

    def load(self, index: int) -> Picture:
        """Return one image of the source."""
        return self.source.load(int(self.indices[index]))


def digits(split: str, *, img_size: int, interpolation: str = "bicubic") -> ArraySource:
    """Load scikit-learn's 1,797 handwritten digits (8x8, gray), enlarged to `img_size`.

    A value v in 0..16 becomes round(255 v / 16), and Pillow resizes the image. One fifth is held
    out for validation. It is stratified by class and the same for every run.

    Args:
        split: "train" (1,437 images) or "val" (360).
        img_size: Height and width in pixels.
        interpolation: timm's name of the resampling filter.

    Raises:
        DataError: If scikit-learn is not installed, the split has another name, or `img_size` is
            above 1024, because the images would fill the memory.

    Example:
        >>> source = digits("val", img_size=32)
        >>> source.load(0).size, source.classes[source.labels[0]]
        ((32, 32), '7')
    """
    if img_size > MOST_DIGIT_PIXELS:
        raise DataError(
            f"data.img_size={img_size}: the digits are kept in memory, enlarged to at most "
            f"{MOST_DIGIT_PIXELS} pixels"
        )
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
    """Load CIFAR-10, CIFAR-100 or Fashion-MNIST as torchvision stores them.

    Args:
        source: "cifar10", "cifar100" or "fashion_mnist".
        split: "train" or "val" (the published test set).
        root: torchvision's root folder.
        download: Fetch the data set if it is not there.

    Raises:
        DataError: If the data set is not there and cannot be fetched, or the split has another
            name.

    Example:
        >>> torchvision_set("cifar10", "val", root=Path("nowhere"), download=False)
        Traceback (most recent call last):
        data.errors.DataError: CIFAR10 is not in nowhere or is incomplete; ...
    """
    from torchvision import datasets

    kind = {
        "cifar10": datasets.CIFAR10,
        "cifar100": datasets.CIFAR100,
        "fashion_mnist": datasets.FashionMNIST,
    }[source]
    train = _split_of(split, train=True, val=False)
    try:
        loaded = kind(str(root), train=train, download=download)
    except Exception as error:  # of torchvision, of the network, or of a damaged archive
        if download:
            raise DataError(
                f"data.download=true: {kind.__name__} cannot be fetched into {root}: "
                f"{first_line(error)}; copy torchvision's files there"
            ) from error
        raise DataError(
            f"{kind.__name__} is not in {root} or is incomplete; set data.download=true to fetch "
            "it, or copy torchvision's files there"
        ) from error
    return ArraySource(np.asarray(loaded.data), np.asarray(loaded.targets), loaded.classes)


def _split_of(split: str, *, train, val):
    """Choose the value of a split in a source that has only the two fixed splits."""
    if split not in ("train", "val"):
        raise DataError(
            f"no split {split!r} in this source: data.train_split and data.val_split can be "
            "'train' or 'val'"
        )
    return train if split == "train" else val
