"""From the configuration to the data sets of a run."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.dataset import ImageDataset, TrainDataset
from data.errors import DataError
from data.parquet import ParquetSource
from data.shards import ShardSource
from data.sources import (
    FolderSource,
    PartOfSource,
    Source,
    digits,
    held_out,
    torchvision_set,
)
from data.transforms import EvalTransform, FastEvalTransform, TrainTransform, Transform
from lipsformer.config import AugmentConfig, DataConfig

SLOW_GROUP_BYTES = 2**23  # takes several times as long to read as its image to augment


def build_datasets(
    data: DataConfig, augment: AugmentConfig, *, seed: int
) -> tuple[TrainDataset, ImageDataset]:
    """The training set, and the validation set in the training set's class order.

    Args:
        data: which images, where, and how large.
        augment: the training recipe.
        seed: of the augmentation.

    Raises:
        DataError: names what is missing or unexpected, and where.
    """
    source = build_source(data, data.train_split)
    if data.holdout > 0:
        source = PartOfSource(source, np.flatnonzero(~held_out(source.labels, data.holdout)))
    train = TrainDataset(source, TrainTransform(data, augment), seed=seed)
    if isinstance(source, ParquetSource) and source.group_bytes > SLOW_GROUP_BYTES:
        warnings.warn(
            f"to read one image of a shuffled epoch is to read a row group of up to "
            f"{source.group_bytes / 2**20:.0f} MiB: make shards of the parquet files "
            "(`python -m scripts.make_shards --parquet SPLIT`) to train faster",
            stacklevel=2,
        )
    return train, build_eval_dataset(data, classes=train.classes)


def build_eval_dataset(data: DataConfig, *, classes: Sequence[str] | None) -> ImageDataset:
    """The validation set.

    Args:
        data: which images, where, and how large.
        classes: the class order of the model, by default the source's own. Classes are matched by
            name: one that the model does not know raises, one without images warns.

    Raises:
        DataError: names what is missing or unexpected, and where.
    """
    if data.holdout > 0:
        source = build_source(data, data.train_split)
        source = PartOfSource(source, np.flatnonzero(held_out(source.labels, data.holdout)))
    else:
        source = build_source(data, data.val_split)
    return ImageDataset(source, eval_transform(data), classes=classes)


def eval_transform(data: DataConfig) -> Transform:
    """The preprocessing of evaluation that the configuration asks for."""
    return EvalTransform(data) if data.exact_eval else FastEvalTransform(data)


def data_root(data: DataConfig) -> Path:
    """The folder below which all data lie."""
    return Path(data.root or os.environ.get("LIPSFORMER_DATA") or "datasets")


def build_source(data: DataConfig, split: str) -> Source:
    """The images and labels of one split."""
    root = data_root(data)
    folder = root / (data.name or "") / split
    if data.source == "digits":
        return digits(split, img_size=data.img_size, interpolation=data.interpolation)
    if data.source == "folder":
        return FolderSource(folder, skip=_skipped(data, split))
    if data.source == "shards":
        return ShardSource(folder)
    if data.source == "parquet":
        return ParquetSource(root / (data.name or ""), split)
    return torchvision_set(data.source, split, root=root, download=data.download)


def _skipped(data: DataConfig, split: str) -> frozenset[str]:
    """The split's files that `data.skip_list` names, as paths below the split's folder."""
    if data.skip_list is None:
        return frozenset()
    try:
        lines = Path(data.skip_list).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"data.skip_list={data.skip_list!r} cannot be read: {error}") from error
    prefix = f"{split}/"
    skipped = frozenset(line[len(prefix) :] for line in lines if line.startswith(prefix))
    if skipped:
        warnings.warn(
            f"{len(skipped)} images of {split} are left out, as {data.skip_list} says", stacklevel=2
        )
    return skipped
