"""The pictures of the league, decoded once."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.league.bodies import IMAGE_SIZE

FOLDERS = {"cifar10": "cifar10/train", "imagenette": "imagenette-160/train"}
HELD_OUT = 10  # every tenth training image


class Images(NamedTuple):
    """Images as bytes [N, 3, 32, 32] and their classes [N], for training and held out."""

    train: Tensor
    train_labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return int(self.train_labels.max()) + 1


def normalize(images: Tensor) -> Tensor:
    """Return bytes as floats from -1 to 1."""
    return images.float().div_(127.5).sub_(1.0)


def cache_images(data: str, root: Path, runs: Path) -> Path:
    """Decode all training images of a data set into one file, unless it is there.

    Images of another size than 32 x 32 are squashed to it.

    Args:
        data: A key of `FOLDERS`.
        root: Folder of the data sets.
        runs: Folder of the file.

    Raises:
        FileNotFoundError: If the folder of the images is missing.
    """
    path, folder = runs / f"{data}.pt", root / FOLDERS[data]
    if path.exists():
        return path
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: set LIPSFORMER_DATA to its parent")
    runs.mkdir(parents=True, exist_ok=True)
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    files = [
        (f, label) for label, name in enumerate(classes) for f in sorted((folder / name).iterdir())
    ]
    size = (IMAGE_SIZE, IMAGE_SIZE)
    images = torch.empty(len(files), 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.uint8)
    for index, (file, _) in enumerate(files):
        with Image.open(file) as picture:
            small = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
        images[index] = torch.from_numpy(np.array(small)).permute(2, 0, 1)
    half = path.with_suffix(".half")
    torch.save({"images": images, "labels": torch.tensor([label for _, label in files])}, half)
    half.rename(path)
    return path


def load_images(path: Path) -> Images:
    """Read the file of `cache_images`; every tenth image of the sorted list is held out."""
    cached = torch.load(path, mmap=True)
    images, labels = cached["images"], cached["labels"]
    held_out = torch.arange(len(labels)) % HELD_OUT == 0
    return Images(images[~held_out], labels[~held_out], images[held_out], labels[held_out])
