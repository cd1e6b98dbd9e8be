"""Build the data sets and transforms of a run from its config.

This is the only module of the package that knows the config.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.batch import Normalize, TrainBatchTransform
from data.dataset import ImageDataset, TrainDataset
from data.errors import DataError, DataWarning
from data.evalsets import EvalSet, find_sets
from data.parquet import ParquetSource
from data.root import data_root
from data.shards import ShardSource
from data.skip_list import read_skip_list
from data.sources import (
    FolderSource,
    InMemory,
    Source,
    Subset,
    WithClasses,
    digits,
    held_out,
    torchvision_set,
)
from data.transforms import EvalTransform, FastEvalTransform, TrainTransform, Transform
from lipsformer.config import AugmentConfig, DataConfig

SLOW_GROUP_BYTES = 2**23  # reading such a row group takes several times as long as augmenting


def build_datasets(
    data: DataConfig, augment: AugmentConfig, *, seed: int, epochs: int = 1
) -> tuple[TrainDataset, ImageDataset]:
    """Build the training set, and the validation set in the training set's class order.

    Args:
        data: Which images, where they are, and their size.
        augment: The augmentation.
        seed: Seed of the augmentation.
        epochs: Number of epochs, over which `augment.img_sizes` are spread.

    Raises:
        DataError: If something is missing or unexpected.

    Example:
        >>> data = DataConfig(source="digits", img_size=32)
        >>> train, val = build_datasets(data, AugmentConfig(), seed=0)
        >>> len(train), len(val), train.classes == val.classes
        (1437, 360, True)
    """
    source = build_source(data, data.train_split)
    if isinstance(source, ParquetSource) and source.group_bytes > SLOW_GROUP_BYTES:
        warnings.warn(
            f"reading one image of a shuffled epoch reads a row group of up to "
            f"{source.group_bytes / 2**20:.0f} MiB: make shards of the parquet files "
            "(`lipsformer make-shards --parquet SPLIT`) to train faster",
            DataWarning,
            stacklevel=2,
        )
    if data.holdout > 0:
        source = Subset(source, np.flatnonzero(~held_out(source.labels, data.holdout)).tolist())
    if data.train_share < 1:
        kept = _share(source, data.train_share, "train_share")
        times = np.arange(len(source.labels)) * len(kept) // len(source.labels)
        source = Subset(source, kept[times].tolist())  # each as often as any other, or once more
    sizes = {size: train_transform(data, augment, size) for size in augment.img_sizes}
    by_epoch = [sizes[size] for size in sizes_by_epoch(augment.img_sizes, epochs)]
    train = TrainDataset(source, train_transform(data, augment), seed=seed, by_epoch=by_epoch)
    return train, build_eval_dataset(data, classes=train.classes)


def build_eval_dataset(
    data: DataConfig, *, classes: Sequence[str] | None, class_map: str | None = None
) -> ImageDataset:
    """Build the validation set: the split `data.val_split`, or the share `data.holdout` of another.

    With `data.holdout` above 0 the images are those of `data.train_split` that training leaves out.

    Args:
        data: Which images, where they are, and their size.
        classes: The model's class order; None takes the source's order. Classes are matched by
            name. A class that the model does not know raises, a class without images warns.
        class_map: JSON file that gives classes of the data the names of the model's classes.

    Raises:
        DataError: If something is missing or unexpected.

    Example:
        >>> data = DataConfig(source="digits", img_size=32)
        >>> as_found = build_eval_dataset(data, classes=None)
        >>> as_model = build_eval_dataset(data, classes=list("9876543210"))
        >>> as_found[0][1], as_model[0][1]  # both are the same seven
        (7, 2)
    """
    if data.holdout > 0:
        source = build_source(data, data.train_split)
        source = Subset(source, _share(source, data.holdout, "holdout").tolist())
    else:
        source = build_source(data, data.val_split)
    if class_map is not None:
        source = WithClasses(source, _mapped(source.classes, class_map))
    return ImageDataset(source, eval_transform(data), classes=classes)


def _share(source: Source, share: float, key: str) -> np.ndarray:
    """Return the indices of the same share of every class, and warn of classes without images.

    Raises:
        DataError: If it is no image of any class.
    """
    kept = np.flatnonzero(held_out(source.labels, share))
    if len(kept) == 0:
        raise DataError(
            f"data.{key}={share} is less than one image of every class: give a larger share"
        )
    lost = sorted(set(source.labels.tolist()) - set(source.labels[kept].tolist()))
    if lost:
        warnings.warn(
            f"data.{key}={share} is less than one image of {len(lost)} classes, such as "
            f"{source.classes[lost[0]]!r}, which have none there",
            DataWarning,
            stacklevel=3,
        )
    return kept


def _mapped(classes: Sequence[str], file: str) -> list[str]:
    """Return the names of the classes after the map in a JSON file; others keep theirs."""
    try:
        mapping = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the class map {file!r} cannot be read: {error}") from error
    if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
        raise DataError(
            f"the class map {file!r} must hold one JSON object, such as "
            '{"name in the data": "name of the model"}'
        )
    if unknown := sorted(set(mapping).difference(classes)):
        raise DataError(
            f"the class map {file!r} names {len(unknown)} classes that the data do not have, "
            f"such as {unknown[0]!r}"
        )
    return [mapping.get(name, name) for name in classes]


def build_eval_sets(
    names: Sequence[str], data: DataConfig, classes: Sequence[str] | None, num_classes: int
) -> list[EvalSet]:
    """Build ImageNet's evaluation sets that `data.evalsets.find_sets` documents.

    Args:
        names: Names of sets, each alone or as `name=folder`.
        data: The root of the folders that `names` does not give, and the preprocessing.
        classes: The model's class names; None for the 1,000 of ImageNet in their standard order.
        num_classes: The model's number of classes.

    Raises:
        DataError: If a name or folder is not known, or the classes are not ImageNet's.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())  # in place of ImageNet-Sketch
        >>> (folder / "n01440764").mkdir()
        >>> (folder / "n01440764" / "tench.jpg").touch()
        >>> data, classes = DataConfig(source="folder"), ["n01440764"]
        >>> sets = build_eval_sets([f"sketch={folder}"], data, classes, num_classes=1)
        >>> [(found.name, len(found.dataset)) for found in sets]
        [('sketch', 1)]
    """
    return find_sets(
        names,
        root=data_root(data.root),
        transform=eval_transform(data),
        transform_without_margin=eval_transform(replace(data, crop_pct=1.0)),
        classes=classes,
        num_classes=num_classes,
    )


def build_batch_transform(
    data: DataConfig, augment: AugmentConfig, *, num_classes: int, seed: int
) -> TrainBatchTransform:
    """Build the transform of training batches, which runs on the device.

    Args:
        data: Mean and standard deviation, with which images are normalized.
        augment: Random erasing, mixup, CutMix and label smoothing.
        num_classes: Number of classes K of the targets, [B, K].
        seed: Seed of the run.

    Example:
        >>> import torch
        >>> data = DataConfig(source="digits", mean=(0.0, 0.0, 0.0), std=(0.5, 0.5, 0.5))
        >>> augment = AugmentConfig(label_smoothing=0.2)
        >>> transform = build_batch_transform(data, augment, num_classes=2, seed=0)
        >>> white, labels = torch.full((1, 3, 4, 4), 255, dtype=torch.uint8), torch.tensor([1])
        >>> images, targets = transform(white, labels, update=0, micro_step=0, rank=0)
        >>> images.unique(), targets  # white becomes (1 - 0) / 0.5
        (tensor([2.]), tensor([[0.1000, 0.9000]]))
    """
    return TrainBatchTransform(
        Normalize(data.mean, data.std),
        num_classes=num_classes,
        seed=seed,
        reprob=augment.reprob,
        remode=augment.remode,
        mixup=augment.mixup,
        cutmix=augment.cutmix,
        mixup_prob=augment.mixup_prob,
        mixup_switch_prob=augment.mixup_switch_prob,
        label_smoothing=augment.label_smoothing,
    )


def sizes_by_epoch(sizes: Sequence[int], epochs: int) -> list[int]:
    """Return the size of the training images of each epoch; nothing if no sizes are given.

    The position on the list moves evenly from its first entry in the first epoch to its last entry
    in the last epoch, and the nearest size is taken, as in timm's progressive schedule without
    spread. Halfway between two sizes it is the earlier one.

    Args:
        sizes: Sizes in pixels, in the order of training.
        epochs: Number of epochs.

    Example:
        >>> sizes_by_epoch([128, 160, 192], epochs=5)
        [128, 128, 160, 160, 192]
    """
    if not sizes or epochs == 1:
        return list(sizes[-1:])
    steps, last = len(sizes) - 1, epochs - 1
    # ceil(epoch * steps / last - 1 / 2) in whole numbers, which have no rounding
    return [sizes[-(-(2 * epoch * steps - last) // (2 * last))] for epoch in range(epochs)]


def train_transform(
    data: DataConfig, augment: AugmentConfig, size: int | None = None
) -> TrainTransform:
    """Build the transform of training images.

    Args:
        data: Size, filter, mean and standard deviation. The images are not normalized yet: the mean
            fills the borders that the augmentation leaves.
        augment: Crop, flip, color jitter and auto augmentation.
        size: Height and width in pixels; None for `data.img_size`.

    Raises:
        DataError: If timm does not know the auto augmentation, or would ignore the color jitter.

    Example:
        >>> data, augment = DataConfig(source="digits", img_size=32), AugmentConfig()
        >>> picture = digits("train", img_size=64).load(0)
        >>> train_transform(data, augment)(picture).shape
        torch.Size([32, 32, 3])
        >>> train_transform(data, augment, size=24)(picture).shape
        torch.Size([24, 24, 3])
    """
    return TrainTransform(
        size or data.img_size,
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        color_jitter=augment.color_jitter,
        auto_augment=augment.auto_augment,
        interpolation=data.interpolation,
        mean=data.mean,
        std=data.std,
    )


def eval_transform(data: DataConfig) -> Transform:
    """Build the transform of evaluation images: exact, or fast if `data.exact_eval` is false.

    Args:
        data: Size, share of the center crop, and filter.

    Returns:
        A transform that turns a picture into uint8 [H, W, 3].

    Example:
        >>> import numpy as np
        >>> from data.images import ArrayPicture
        >>> white = ArrayPicture(np.full((40, 60, 3), 255, np.uint8))
        >>> image = eval_transform(DataConfig(source="digits", img_size=32))(white)
        >>> image.shape, image.unique()
        (torch.Size([32, 32, 3]), tensor([255], dtype=torch.uint8))
    """
    kind = EvalTransform if data.exact_eval else FastEvalTransform
    return kind(data.img_size, crop_pct=data.crop_pct, interpolation=data.interpolation)


def build_source(data: DataConfig, split: str) -> Source:
    """Find the images and labels of one split.

    Args:
        data: Which images, and where they are.
        split: Name of the split, such as "train" or "val".

    Raises:
        DataError: If the images or `data.skip_list` are missing or unexpected.

    Example:
        >>> source = build_source(DataConfig(source="digits", img_size=32), "val")
        >>> len(source.labels), source.classes[source.labels[0]]
        (360, '7')
    """
    root = data_root(data.root)
    folder = root / (data.name or "") / split
    if data.source == "digits":
        return digits(split, img_size=data.img_size, interpolation=data.interpolation)
    if data.source == "folder":
        images = FolderSource(folder, skip=_listed(data, split))
        return InMemory(images) if data.in_memory else images
    if data.source == "shards":
        return ShardSource(folder)
    if data.source == "parquet":
        listed = _listed(data, split)
        if odd := sorted(line for line in listed if not line.isdecimal()):
            raise DataError(
                f"data.skip_list={data.skip_list!r} names {split}/{odd[0]}, but images of parquet "
                f"files are listed by their numbers, as {split}/0"
            )
        return ParquetSource(root / (data.name or ""), split, skip={int(line) for line in listed})
    return torchvision_set(data.source, split, root=root, download=data.download)


def _listed(data: DataConfig, split: str) -> frozenset[str]:
    """Return the split's images that `data.skip_list` names, relative to the split."""
    if data.skip_list is None:
        return frozenset()
    folder = data_root(data.root) / (data.name or "")
    return read_skip_list(data.skip_list, folder, split, numbered=data.source == "parquet")
