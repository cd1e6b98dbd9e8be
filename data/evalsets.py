"""ImageNet's evaluation sets: validation, ReaL labels, V2, A, R, Sketch and C.

Their classes are WordNet ids (wnids), matched by name to the model's. Labels of V2 are positions in
the standard index, whose order is that of the wnids. On A and R, which have 200 classes each, only
these classes' logits count. An image of ReaL has a set of right labels; images without any are left
out. The layouts, as published, are in `LAYOUTS`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor

from data.build import data_root, eval_transform
from data.dataset import ImageDataset, match_classes
from data.errors import DataError
from data.sources import FolderSource
from lipsformer.config import DataConfig

STANDARD: tuple[str, ...] = tuple(ImageNetInfo("imagenet-1k").label_names())
STANDARD_WORDS = ImageNetInfo("imagenet-1k").label_descriptions()

# set -> (folder below the data root, what it holds)
LAYOUTS = {
    "val": ("imagenet/val", "<wnid>/<images>"),
    "real": ("imagenet/val", "<wnid>/ILSVRC2012_val_<number>.JPEG"),
    "v2": ("imagenetv2-matched-frequency-format-val", "<0 to 999>/<images>"),
    "a": ("imagenet-a", "<wnid>/<images> of 200 classes"),
    "r": ("imagenet-r", "<wnid>/<images> of 200 classes"),
    "sketch": ("imagenet-sketch", "<wnid>/<images>"),
    "c": ("imagenet-c", "<corruption>/<severity 1 to 5>/<wnid>/<images>"),
}

# Mean error of AlexNet over the severities of each of ImageNet-C's 15 corruptions, as published
# with the set (Hendrycks & Dietterich 2019). Its 4 extra corruptions are not in the mean.
ALEXNET_ERROR = {
    **{"gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640},
    **{"defocus_blur": 0.819880, "glass_blur": 0.826268, "motion_blur": 0.785948},
    **{"zoom_blur": 0.798360, "snow": 0.866816, "frost": 0.826572, "fog": 0.819324},
    **{"brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056},
    **{"pixelate": 0.717840, "jpeg_compression": 0.606500},
}
SEVERITIES = ("1", "2", "3", "4", "5")


@dataclass(frozen=True)
class EvalSet:
    """One set to evaluate on.

    Attributes:
        name: such as "v2" or "c/fog/3".
        dataset: the images; their labels are positions in `outputs`.
        outputs: which of the model's logits count; all if None.
    """

    name: str
    dataset: ImageDataset
    outputs: tuple[int, ...] | None = None


class MultiLabelDataset(ImageDataset):
    """Images with a set of right labels each, given as bool [K].

    Args:
        source: the images.
        transform: picture -> uint8 [3, H, W].
        classes: names of the K classes.
        label_sets: indices into `classes`, for each image of the source.
    """

    def __init__(self, source, transform, *, classes, label_sets: Sequence[np.ndarray]):
        super().__init__(source, transform, classes=classes)
        self.label_sets = label_sets

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        right = torch.zeros(len(self.classes), dtype=torch.bool)
        right[self.label_sets[index]] = True
        return self.transform(self.source.load(index)), right


def find_sets(
    names: Sequence[str], data: DataConfig, classes: Sequence[str] | None, num_classes: int
) -> list[EvalSet]:
    """The named sets, all found and matched to the model before anything is evaluated.

    Args:
        names: of `LAYOUTS`, each by itself or as `name=folder`.
        data: root of the folders, and preprocessing. Images of C, which have 224 px, are resized
            without a margin (`crop_pct` 1), as its authors evaluate.
        classes: the model's class names: wnids, or the words of the standard index.
        num_classes: of the model; without names, 1,000 are the standard index.

    Raises:
        DataError: for an unknown name, a folder that is not as published, or classes that are not
            ImageNet's.
    """
    wnids = _wnids(classes, num_classes)
    found: list[EvalSet] = []
    for entry in names:
        name, _, folder = entry.partition("=")
        if name not in LAYOUTS:
            raise DataError(f"no evaluation set {name!r}: known are {', '.join(LAYOUTS)}")
        if any(other.name.split("/")[0] == name for other in found):
            raise DataError(f"evaluation set {name} is named twice: evaluate it once at a time")
        default, layout = LAYOUTS[name]
        path = Path(folder) if folder else data_root(data) / default
        if not path.is_dir():
            raise DataError(
                f"no folder {path} for evaluation set {name}: expected {path}/{layout}; "
                f"give another as {name}=FOLDER"
            )
        if name == "c":
            found += _corruptions(path, data, wnids)
        elif name in ("a", "r"):
            found.append(_subset(name, path, data, wnids))
        else:
            build = {"real": _real, "v2": _v2}.get(name, _plain)
            found.append(EvalSet(name, build(path, data, wnids)))
    return found


def corruption_summary(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means of ImageNet-C's figures over the severities, and over its corruptions.

    mCE is the mean over the 15 corruptions of error / AlexNet's error, in percent, where either
    error is the mean over the severities (Hendrycks & Dietterich 2019).

    Args:
        records: figures ("top1", "top5" in percent, "loss", "images") by the name of the set.

    Returns:
        one record for each corruption, and one of set "c" for those of the 15 that are there; its
        "mce" is None unless all are.
    """
    names = {name.split("/")[1] for name in records if name.startswith("c/")}
    rows = []
    for name in [*(n for n in ALEXNET_ERROR if n in names), *sorted(names - {*ALEXNET_ERROR})]:
        rows.append({"set": f"c/{name}", **_mean([records[f"c/{name}/{s}"] for s in SEVERITIES])})
    standard = [row for row in rows if row["set"][2:] in ALEXNET_ERROR]
    if standard:
        ratios = [(100 - row["top1"]) / ALEXNET_ERROR[row["set"][2:]] for row in standard]
        complete = len(standard) == len(ALEXNET_ERROR)
        rows.append(
            {
                "set": "c",
                **_mean(standard),
                "corruptions": len(standard),
                "mce": sum(ratios) / len(ratios) if complete else None,
            }
        )
    return rows


def _mean(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {key: sum(r[key] for r in records) / len(records) for key in ("top1", "top5", "loss")}
    return {**means, "images": sum(r["images"] for r in records)}


def _wnids(classes: Sequence[str] | None, num_classes: int) -> tuple[str, ...]:
    """The wnid of each of the model's outputs."""
    if classes is None:
        if num_classes != len(STANDARD):
            raise DataError(
                f"the checkpoint has no class names and {num_classes} outputs: ImageNet's "
                f"evaluation sets need the names, or the {len(STANDARD)} standard classes"
            )
        return STANDARD
    by_words: dict[str, str] = {}
    for wnid, words in zip(STANDARD, STANDARD_WORDS, strict=True):
        by_words[f"{words}2" if words in by_words else words] = wnid  # the Hub's second crane
    wnids = tuple(by_words.get(name, name) for name in classes)
    other = [name for name in wnids if not re.fullmatch(r"n\d{8}", name)]
    if other:
        raise DataError(
            f"{len(other)} of the model's {len(wnids)} classes are not ImageNet's, such as "
            f"{other[0]!r}: expected WordNet ids such as {STANDARD[0]}"
        )
    return wnids


def _plain(path: Path, data: DataConfig, wnids: tuple[str, ...]) -> ImageDataset:
    return ImageDataset(FolderSource(path), eval_transform(data), classes=wnids)


def _v2(path: Path, data: DataConfig, wnids: tuple[str, ...]) -> ImageDataset:
    source = FolderSource(path)
    numbers = {str(number): wnid for number, wnid in enumerate(STANDARD)}
    other = [name for name in source.classes if name not in numbers]
    if other:
        raise DataError(f"{path / other[0]}: the class folders of V2 are named 0 to 999")
    source.classes = tuple(numbers[name] for name in source.classes)
    return ImageDataset(source, eval_transform(data), classes=wnids)


def _real(path: Path, data: DataConfig, wnids: tuple[str, ...]) -> ImageDataset:
    source = FolderSource(path)
    published = RealLabelsImagenet([""] * 50_000).real_labels
    names = [Path(source.file(index)).name for index in range(len(source.labels))]
    other = [name for name in names if name not in published]
    if other:
        raise DataError(
            f"{path}: {other[0]} is not named as ImageNet's validation images are, "
            "by which the ReaL labels go: ILSVRC2012_val_00000001.JPEG to 00050000"
        )
    model_index = match_classes(STANDARD, wnids)
    label_sets = [model_index[published[name]] for name in names]
    kept = [index for index, labels in enumerate(label_sets) if len(labels)]
    source.files, source.labels = source.files[kept], source.labels[kept]
    return MultiLabelDataset(
        source,
        eval_transform(data),
        classes=wnids,
        label_sets=[label_sets[index] for index in kept],
    )


def _subset(name: str, path: Path, data: DataConfig, wnids: tuple[str, ...]) -> EvalSet:
    folders = {entry.name for entry in path.iterdir() if entry.is_dir()}
    outputs = tuple(index for index, wnid in enumerate(wnids) if wnid in folders)
    if len(folders) != 200 or len(outputs) != 200:
        raise DataError(
            f"{path}: {len(folders)} class folders, of which the model knows {len(outputs)}; "
            f"expected the 200 of set {name}"
        )
    subset = tuple(wnids[index] for index in outputs)
    return EvalSet(name, _plain(path, data, subset), outputs)


def _corruptions(path: Path, data: DataConfig, wnids: tuple[str, ...]) -> list[EvalSet]:
    found = []
    for corruption in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        severities = {entry.name for entry in corruption.iterdir() if entry.is_dir()}
        if severities != {*SEVERITIES}:
            raise DataError(
                f"{corruption}: expected the folders 1 to 5 of ImageNet-C's severities, found "
                f"{', '.join(sorted(severities)[:6]) or 'none'}"
            )
        for severity in SEVERITIES:
            dataset = _plain(corruption / severity, replace(data, crop_pct=1.0), wnids)
            found.append(EvalSet(f"c/{corruption.name}/{severity}", dataset))
    if not found:
        raise DataError(f"{path}: no corruptions; expected {path}/{LAYOUTS['c'][1]}")
    return found
