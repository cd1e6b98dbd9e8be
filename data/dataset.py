"""Map-style data sets of (uint8 image [3, H, W], label)."""

import warnings
from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from data.errors import DataError
from data.rng import kept, seed_all
from data.sources import Source
from data.transforms import Transform


class ImageDataset(Dataset):
    """Images of a source after a transform, with labels as indices into `classes`.

    Args:
        source: images with labels in the source's own class order.
        transform: picture -> uint8 [3, H, W].
        classes: the class order to use, by default the source's. Labels are matched by name: a
            class of the source that is not among them raises, one that the source lacks warns.
    """

    def __init__(
        self, source: Source, transform: Transform, *, classes: Sequence[str] | None = None
    ):
        self.source = source
        self.transform = transform
        self.classes = tuple(classes) if classes is not None else source.classes
        self.labels = match_classes(source.classes, self.classes)[source.labels]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.source.load(index)), int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """The items of a batch, as torch's loader asks for them."""
        return [self[index] for index in indices]


class TrainDataset(ImageDataset):
    """Augmented images, addressed by (epoch, index): augmentation = f(seed, epoch, index)."""

    def __init__(self, source: Source, transform: Transform, *, seed: int):
        super().__init__(source, transform)
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[tuple[Tensor, int]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The items of a batch, as torch's loader asks for them."""
        items = []
        with kept():
            for epoch, index in keys:
                seed_all("augment", self.seed, epoch, index)
                items.append(super().__getitem__(index))
        return items


def match_classes(found: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Index into `classes` of each name in `found`."""
    index_of = {name: index for index, name in enumerate(classes)}
    unknown = [name for name in found if name not in index_of]
    if unknown:
        raise DataError(
            f"{len(unknown)} unknown class(es) {_some(unknown)}: expected only the "
            f"{len(classes)} classes of the training set, {_some(classes)}"
        )
    missing = set(classes).difference(found)
    if missing:
        warnings.warn(
            f"{len(missing)} of {len(classes)} classes have no images: {_some(sorted(missing))}",
            stacklevel=3,
        )
    return np.array([index_of[name] for name in found])


def _some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
