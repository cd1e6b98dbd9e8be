"""Unpack ImageNet-1K from its archives into train/ and val/ folders, and check the result.

    python -m scripts.prepare_imagenet datasets/imagenet-1k

The folder holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
ILSVRC2012_devkit_t12.tar.gz. Their MD5 sums are verified. The devkit has the validation labels;
reading it needs SciPy. A split that exists already is only checked: it must have the 1,000 class
folders of the standard index, whose order `data.source=folder` follows, with the published numbers
of images. Exit codes: 0 both splits are complete; 2 something is missing or wrong.
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
from torchvision.datasets import imagenet

from data.errors import DataError
from data.evalsets import STANDARD
from data.sources import FolderSource
from lipsformer._commands import documented_parser, user_errors

IMAGES = {"train": 1_281_167, "val": 50_000}


def unpack(folder: Path, split: str) -> None:
    """Unpack a split's archive into folder/split, which exists only when it is complete.

    Raises:
        DataError: If an archive is missing or damaged, or the split cannot be written.
    """
    part = f"{split}.part"
    shutil.rmtree(folder / part, ignore_errors=True)
    try:
        if split == "val":
            import scipy.io  # noqa: F401  (torchvision reads the devkit with it)

            imagenet.parse_devkit_archive(str(folder))
            imagenet.parse_val_archive(str(folder), folder=part)
        else:
            imagenet.parse_train_archive(str(folder), folder=part)
    except ImportError as error:
        raise DataError(
            "reading ImageNet's devkit needs SciPy: pip install 'lipsformer[imagenet]'"
        ) from error
    except RuntimeError as error:  # not present or corrupted
        raise DataError(" ".join(str(error).split())) from error
    except OSError as error:
        raise DataError(
            f"{folder / split} cannot be written: {error}; make room on the disk and repeat the "
            "command, which unpacks this split from its beginning"
        ) from error
    (folder / part).rename(folder / split)


def check(folder: Path, split: str) -> str:
    """Describe a split after checking it.

    Raises:
        DataError: If its classes or their numbers of images are not ImageNet-1K's.
    """
    source = FolderSource(folder / split)
    if source.classes != STANDARD:
        odd = sorted(set(source.classes) ^ set(STANDARD))
        raise DataError(
            f"{folder / split}: {len(odd)} unexpected or missing classes, such as {odd[0]}"
        )
    per_class = np.bincount(source.labels)
    if len(source.labels) != IMAGES[split] or (split == "val" and len(set(per_class)) != 1):
        raise DataError(
            f"{folder / split}: {len(source.labels)} images, {per_class.min()} to "
            f"{per_class.max()} per class; expected {IMAGES[split]}: remove it and start again"
        )
    return f"{folder / split}: {len(source.labels)} images in the standard order of 1,000 classes"


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("folder", type=Path, help="folder of the archives")
    return parser


@user_errors(DataError)
def main(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    folder = (parser or make_parser()).parse_intermixed_args(argv).folder
    for split in ("val", "train"):
        if not (folder / split).exists():
            unpack(folder, split)
        print(check(folder, split))
    return 0


if __name__ == "__main__":
    sys.exit(main())
