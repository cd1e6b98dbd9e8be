"""ImageNet's evaluation sets: validation, ReaL labels, V2, A, R, Sketch and C.

Their classes are WordNet ids (wnids), which are matched by name to the model's classes. Labels of
V2 are positions in the standard index, which is sorted by wnid. A and R have 200 classes each; only
the logits of these classes count. An image of ReaL has a set of correct labels; images without a
label are left out. `LAYOUTS` describes the folders, as published.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor

from data.dataset import ImageDataset, match_classes
from data.errors import DataError
from data.sources import FolderSource, Source, Subset, WithClasses
from data.transforms import Transform

STANDARD: tuple[str, ...] = tuple(ImageNetInfo("imagenet-1k").label_names())
STANDARD_WORDS = ImageNetInfo("imagenet-1k").label_descriptions()

# name of the set -> (folder below the data root, layout of the folder)
LAYOUTS = {
    "val": ("imagenet-1k/val", "<wnid>/<images>"),
    "real": ("imagenet-1k/val", "<wnid>/ILSVRC2012_val_<number>.JPEG"),
    "v2": ("imagenetv2-matched-frequency-format-val", "<0 to 999>/<images>"),
    "a": ("imagenet-a", "<wnid>/<images> of 200 classes"),
    "r": ("imagenet-r", "<wnid>/<images> of 200 classes"),
    "sketch": ("imagenet-sketch", "<wnid>/<images>"),
    "c": ("imagenet-c", "<corruption>/<severity 1 to 5>/<wnid>/<images>"),
}

# AlexNet's error on each of ImageNet-C's 15 corruptions, averaged over the severities, as published
# with the set (Hendrycks & Dietterich 2019). Its 4 extra corruptions do not count in the mean.
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
    """One evaluation set.

    Attributes:
        name: Name of the set, such as "v2" or "c/fog/3".
        dataset: The images. Their labels are positions in `outputs`.
        outputs: Which of the model's logits count; None for all.

    Example:
        >>> from data.sources import digits
        >>> from data.transforms import EvalTransform
        >>> images = ImageDataset(digits("val", img_size=32), EvalTransform(32))
        >>> EvalSet("digits", images).outputs is None
        True
    """

    name: str
    dataset: ImageDataset
    outputs: tuple[int, ...] | None = None


class MultiLabelDataset(ImageDataset):
    """Images with a set of correct labels each, as bool [K].

    Args:
        source: The images.
        transform: Turns a picture into uint8 [H, W, 3].
        classes: Names of the K classes.
        label_sets: For each image of the source, the correct indices into `classes`.

    Example:
        >>> from data.sources import digits
        >>> from data.transforms import EvalTransform
        >>> source = digits("val", img_size=32)
        >>> images = MultiLabelDataset(
        ...     source, EvalTransform(32), classes=source.classes, label_sets=[[3, 5]] * 360
        ... )
        >>> images[0][1].nonzero().flatten()
        tensor([3, 5])
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        *,
        classes: Sequence[str],
        label_sets: Sequence[Sequence[int] | np.ndarray],
    ):
        super().__init__(source, transform, classes=classes)
        self.label_sets = label_sets

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        right = torch.zeros(len(self.classes), dtype=torch.bool)
        right[self.label_sets[index]] = True
        return self.transform(self.source.load(index)), right


def find_sets(
    names: Sequence[str],
    *,
    root: Path,
    transform: Transform,
    transform_without_margin: Transform,
    classes: Sequence[str] | None,
    num_classes: int,
) -> list[EvalSet]:
    """Find the named sets and match their classes to the model's, before anything is evaluated.

    Args:
        names: Keys of `LAYOUTS`, each alone or as `name=folder`.
        root: Folder of all data sets.
        transform: Turns a picture into uint8 [H, W, 3].
        transform_without_margin: The same with `crop_pct` 1. The images of C have 224 pixels, and
            its authors evaluate whole images.
        classes: The model's class names: wnids, or the words of the standard index. None means
            that the model's 1,000 classes are the standard index.
        num_classes: The model's number of classes.

    Raises:
        DataError: For an unknown name, a folder that is not as published, or classes that are not
            ImageNet's.
    """
    for entry in names:
        if (name := entry.partition("=")[0]) not in LAYOUTS:
            raise DataError(f"no evaluation set {name!r}: known are {', '.join(LAYOUTS)}")
    wnids = _wnids(classes, num_classes)
    found: list[EvalSet] = []
    for entry in names:
        name, _, folder = entry.partition("=")
        if any(other.name.split("/")[0] == name for other in found):
            raise DataError(f"evaluation set {name} is named twice: name it once")
        default, layout = LAYOUTS[name]
        path = Path(folder) if folder else root / default
        if not path.is_dir():
            raise DataError(
                f"no folder {path} for evaluation set {name}: expected {path}/{layout}; "
                f"give another as {name}=FOLDER"
            )
        if name == "c":
            found += _corruptions(path, transform_without_margin, wnids)
        elif name in ("a", "r"):
            found.append(_subset(name, path, transform, wnids))
        else:
            build = {"real": _real, "v2": _v2}.get(name, _plain)
            found.append(EvalSet(name, build(path, transform, wnids)))
    return found


def corruption_summary(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Average ImageNet-C's figures over the severities, and over the corruptions.

    mCE is the mean over the 15 corruptions of error / AlexNet's error, in percent. Both errors are
    averaged over the severities first (Hendrycks & Dietterich 2019).

    Args:
        records: Figures ("top1", "top5" in percent, "loss", "images") by the name of the set.

    Returns:
        One record for each corruption, and one record "c" for those of the 15 corruptions that were
        evaluated. Its "mce" is None unless all 15 were.
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
    """Return the wnid of each of the model's outputs."""
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


def _plain(path: Path, transform: Transform, wnids: tuple[str, ...]) -> ImageDataset:
    return ImageDataset(FolderSource(path), transform, classes=wnids)


def _v2(path: Path, transform: Transform, wnids: tuple[str, ...]) -> ImageDataset:
    source = FolderSource(path)
    numbers = {str(number): wnid for number, wnid in enumerate(STANDARD)}
    other = [name for name in source.classes if name not in numbers]
    if other:
        raise DataError(f"{path / other[0]}: the class folders of V2 are named 0 to 999")
    renamed = WithClasses(source, [numbers[name] for name in source.classes])
    return ImageDataset(renamed, transform, classes=wnids)


def _real(path: Path, transform: Transform, wnids: tuple[str, ...]) -> ImageDataset:
    source = FolderSource(path)
    published = RealLabelsImagenet([""] * 50_000).real_labels
    names = [Path(source.file(index)).name for index in range(len(source.labels))]
    other = [name for name in names if name not in published]
    if other:
        raise DataError(
            f"{path}: {other[0]} has not the name of a validation image of ImageNet, "
            "ILSVRC2012_val_00000001.JPEG to 00050000; the ReaL labels belong to these names"
        )
    model_index = match_classes(STANDARD, wnids)
    label_sets = [model_index[published[name]] for name in names]
    labeled = [index for index, labels in enumerate(label_sets) if len(labels)]
    return MultiLabelDataset(
        Subset(source, labeled),
        transform,
        classes=wnids,
        label_sets=[label_sets[index] for index in labeled],
    )


def _folders(path: Path) -> list[Path]:
    """Return the folders in a folder, without those whose names begin with a dot."""
    return sorted(e for e in path.iterdir() if e.is_dir() and not e.name.startswith("."))


def _subset(name: str, path: Path, transform: Transform, wnids: tuple[str, ...]) -> EvalSet:
    folders = {entry.name for entry in _folders(path)}
    outputs = tuple(index for index, wnid in enumerate(wnids) if wnid in folders)
    if len(folders) != 200 or len(outputs) != 200:
        raise DataError(
            f"{path}: {len(folders)} class folders, of which the model knows {len(outputs)}; "
            f"expected the 200 of set {name}"
        )
    subset = tuple(wnids[index] for index in outputs)
    return EvalSet(name, _plain(path, transform, subset), outputs)


def _corruptions(path: Path, transform: Transform, wnids: tuple[str, ...]) -> list[EvalSet]:
    found = []
    for corruption in _folders(path):
        severities = {entry.name for entry in _folders(corruption)}
        if severities != {*SEVERITIES}:
            raise DataError(
                f"{corruption}: expected the folders 1 to 5 of ImageNet-C's severities, found "
                f"{', '.join(sorted(severities)[:6]) or 'none'}"
            )
        for severity in SEVERITIES:
            dataset = _plain(corruption / severity, transform, wnids)
            found.append(EvalSet(f"c/{corruption.name}/{severity}", dataset))
    if not found:
        raise DataError(f"{path}: no corruptions; expected {path}/{LAYOUTS['c'][1]}")
    return found
