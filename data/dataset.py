"""Map-style data sets of (uint8 image [H, W, 3], label)."""

import hashlib
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.augment import finish
from data.errors import DataError, DataWarning
from data.rng import preserve_rng, seed_all
from data.sources import Source
from data.transforms import TrainTransform, Transform


class ImageDataset(Dataset):
    """Images of a source after a transform, with labels that are indices into `classes`.

    Args:
        source: Images with labels in the source's class order.
        transform: Turns a picture into uint8 [H, W, 3].
        classes: The class order; None takes the source's order. Classes are matched by name. A
            class of the source that is not in `classes` raises; a class without images warns.

    Example:
        >>> from data.sources import digits
        >>> from data.transforms import EvalTransform
        >>> images = ImageDataset(digits("val", img_size=32), EvalTransform(32))
        >>> picture, label = images[0]
        >>> tuple(picture.shape), images.classes[label]
        ((32, 32, 3), '7')
    """

    def __init__(
        self, source: Source, transform: Transform, *, classes: Sequence[str] | None = None
    ):
        self.source = source
        self.transform = transform
        self.classes = tuple(classes) if classes is not None else source.classes
        self.labels = match_classes(source.classes, self.classes)[source.labels]

    @property
    def labels_sha256(self) -> str:
        """The SHA-256 sum of all labels, which changes if an image moves to another class."""
        return hashlib.sha256(self.labels.astype("<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.source.load(index)), int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """Return the items of a batch. torch's loader calls it."""
        return [self[index] for index in indices]


class TrainDataset(ImageDataset):
    """Augmented images. An item is a function of the seed and of its key.

    A key is (epoch, index), or (epoch, index, repeat) where an image comes several times.

    Args:
        source: Images with labels.
        transform: Random transform of a picture.
        seed: Seed of the augmentation.
        by_epoch: One transform for each epoch, used instead of `transform`; empty for none.

    Example:
        >>> from data.sources import digits
        >>> from data.transforms import TrainTransform
        >>> images = TrainDataset(digits("train", img_size=32), TrainTransform(32), seed=0)
        >>> bool((images[0, 7][0] == images[1, 7][0]).all())  # another epoch, another crop
        False
    """

    def __init__(
        self,
        source: Source,
        transform: TrainTransform,
        *,
        seed: int,
        by_epoch: Sequence[TrainTransform] = (),
    ):
        super().__init__(source, transform)
        self.train_transform = transform
        self.seed = seed
        self.by_epoch = by_epoch

    def __getitem__(self, key: tuple[int, ...]) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, ...]]) -> list[tuple[Tensor, int]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the items of a batch. torch's loader calls it."""
        pictures = [self.source.load(key[1]) for key in keys]
        samples = []
        with preserve_rng():
            for key, picture in zip(keys, pictures, strict=True):
                seed_all("augment", self.seed, *key)
                transform = self.by_epoch[key[0]] if self.by_epoch else self.train_transform
                samples.append(transform.draw(picture))
        return [
            (torch.from_numpy(image), int(self.labels[key[1]]))
            for key, image in zip(keys, finish(samples), strict=True)
        ]


def match_classes(found: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Return the index into `classes` of each name in `found`, [len(found)].

    A name in `classes` that is not in `found` warns, because the class has no images.

    Args:
        found: Names of the classes of a source.
        classes: Names of the classes in the order of the model.

    Raises:
        DataError: If a name in `found` is not in `classes`.

    Example:
        >>> match_classes(found=["dog", "cat"], classes=["cat", "dog"]).tolist()
        [1, 0]
    """
    index_of = {name: index for index, name in enumerate(classes)}
    unknown = [name for name in found if name not in index_of]
    if unknown:
        raise DataError(
            f"{len(unknown)} unknown class(es) {_first_names(unknown)}: expected only the "
            f"{len(classes)} classes of the training set, {_first_names(classes)}"
        )
    missing = set(classes).difference(found)
    if missing:
        warnings.warn(
            f"{len(missing)} of {len(classes)} classes have no images: "
            f"{_first_names(sorted(missing))}",
            DataWarning,
            stacklevel=3,
        )
    return np.array([index_of[name] for name in found])


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
