"""Transforms from a picture to uint8 [H, W, 3]: timm's recipes up to their last step.

timm's last step, normalization, follows on the device, with random erasing and mixup
(`data.batch`).
"""

import math
import re
from collections.abc import Callable
from functools import lru_cache

import cv2
import numpy as np
import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_pil_interp
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torchvision.transforms.v2 import functional

from data.augment import Sample, Step, finish, on_arrays, recorded
from data.errors import DataError
from data.images import Picture
from data.resize import from_batch, resize, to_batch

Transform = Callable[[Picture], Tensor]


# timm's notation: a policy and its options, each at most once. timm itself drops unknown options.
_INT, _REAL = r"\d+", r"\d+(\.\d+)?"
_RECIPES = {
    "rand": (
        *(rf"m{_INT}", rf"n{_INT}", r"p(0(\.\d+)?|1(\.0+)?)", rf"mstd{_REAL}"),
        *(rf"mmax{_INT}", r"inc[01]", r"t(weights|3aw|3a)"),
    ),
    "augmix": (rf"m{_INT}", rf"w{_INT}", rf"d{_INT}", rf"a{_REAL}", r"b[01]", rf"mstd{_REAL}"),
    **dict.fromkeys(("original", "originalr", "v0", "v0r", "3a"), (rf"mstd{_REAL}",)),
}


def _is_recipe(text: str) -> bool:
    """Return whether timm knows a recipe and reads every part of it."""
    policy, *parts = text.split("-")
    found = [[o for o in _RECIPES.get(policy, ()) if re.fullmatch(o, part)] for part in parts]
    options = [option for fitting in found for option in fitting]
    return policy in _RECIPES and all(found) and len({*options}) == len(parts)


class TrainTransform:
    """Random resized crop, flip, and auto augmentation or color jitter.

    The transform draws the same random numbers as timm's recipe in the same order. It works on
    arrays where timm works on Pillow images: a JPEG decodes at a reduced size if the crop stays
    larger than the output, `data.resize` resizes (antialiased), and OpenCV augments.

    Args:
        img_size: Height and width of the output.
        scale: Range of the crop's share of the area.
        ratio: Range of the crop's aspect ratio.
        hflip: Probability of a horizontal flip.
        color_jitter: Strength of timm's color jitter; 0 for none.
        auto_augment: Recipe in timm's notation, such as "rand-m9-mstd0.5-inc1"; None for none.
        interpolation: Filter of the resize, "bicubic" or "bilinear".
        mean: Mean of each channel for values in [0, 1]; timm fills borders with it.
        std: Standard deviation of each channel, which timm's recipe asks for.

    Raises:
        DataError: If timm does not know the auto augmentation, or would ignore the color jitter.

    Example:
        >>> import numpy as np
        >>> from data.images import ArrayPicture
        >>> picture = ArrayPicture(np.zeros((40, 60, 3), np.uint8))
        >>> TrainTransform(32, auto_augment="rand-m9-mstd0.5-inc1")(picture).shape
        torch.Size([32, 32, 3])
    """

    def __init__(
        self,
        img_size: int,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        hflip: float = 0.5,
        color_jitter: float = 0.0,
        auto_augment: str | None = None,
        interpolation: str = "bicubic",
        mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN,
        std: tuple[float, ...] = IMAGENET_DEFAULT_STD,
    ):
        self.img_size = img_size
        self.scale = scale
        self.ratio = ratio
        self.hflip = float(np.float32(hflip))  # torch draws in single precision
        self.interpolation = interpolation
        if auto_augment and color_jitter and "3a" not in auto_augment:
            raise DataError(
                f"augment.color_jitter={color_jitter} has no effect with augment.auto_augment="
                f"{auto_augment!r}, which jitters colors itself: set one of them"
            )
        if auto_augment and not _is_recipe(auto_augment):
            raise DataError(
                f"augment.auto_augment={auto_augment!r} is not in timm's notation, "
                "such as 'rand-m9-mstd0.5-inc1'"
            )
        stages = transforms_imagenet_train(
            img_size=img_size,
            color_jitter=color_jitter or None,  # pyright: ignore[reportArgumentType]
            auto_augment=auto_augment,
            interpolation=interpolation,
            mean=mean,
            std=std,
            separate=True,
        )
        assert isinstance(stages, tuple)
        self.color = [on_arrays(transform) for transform in stages[1].transforms]
        self.recorders = recorded(stages[1].transforms)

    def __call__(self, picture: Picture) -> Tensor:
        return torch.from_numpy(finish([self.draw(picture)])[0])

    def draw(self, picture: Picture) -> Sample:
        """Draw the numbers for a picture, and leave the work on its pixels to `finish`."""
        box = self._draw_box(*picture.size)
        steps: list[Step] = [(_crop, (box, self.img_size, self.interpolation), {})]
        if self.hflip > 0 and torch.rand(1).item() < self.hflip:
            steps.append((cv2.flip, (1,), {}))
        if self.recorders is not None:
            for record in self.recorders:
                record(steps)
            return Sample(picture, steps)
        (img,) = finish([Sample(picture, steps)])
        for transform in self.color:
            img = transform(img)
        return Sample(img, [])

    def _draw_box(self, full_width: int, full_height: int) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the crop."""
        top, left, height, width = RandomResizedCropAndInterpolation.get_params(
            _of_size(full_height, full_width), self.scale, self.ratio
        )
        # For images of a few pixels, timm's crop can be empty or begin outside.
        return min(top, full_height - 1), min(left, full_width - 1), max(height, 1), max(width, 1)


def _crop(
    picture: Picture, box: tuple[int, int, int, int], size: int, interpolation: str
) -> np.ndarray:
    """Cut a part out of the picture and resize it, [size, size, 3]."""
    top, left, height, width = box
    reduction = 1
    while reduction < 8 and min(height, width) >= 2 * reduction * size:
        reduction *= 2
    img = picture.pixels(reduction)
    # Round to the pixels of the decoded image, which is smaller only if it is a JPEG.
    reduction = round(picture.size[0] / img.shape[1])
    top, bottom = round(top / reduction), round((top + height) / reduction)
    left, right = round(left / reduction), round((left + width) / reduction)
    return resize(img[top:bottom, left:right], size, interpolation)


@lru_cache(maxsize=1024)
def _of_size(height: int, width: int) -> Tensor:
    """Return a stand-in for an image, of which timm's code reads only the size."""
    return torch.empty(height, width, device="meta")


class EvalTransform:
    """Resize the short side to `img_size / crop_pct` and crop the center, bit for bit as timm does.

    Pixels outside the crop are resized only where the result needs them. Pillow's filter weights
    depend on the whole width and height, but its two passes, along the rows and then along the
    columns, can be run separately on parts. Of an image more than 100 times as long as wide only
    the middle is resized: 1x5000 pixels would otherwise take a gigabyte.

    Args:
        img_size: Height and width of the output.
        crop_pct: Share of each side that the center crop keeps.
        interpolation: Filter of the resize, "bicubic" or "bilinear".

    Example:
        >>> import numpy as np
        >>> from data.images import ArrayPicture
        >>> EvalTransform(32)(ArrayPicture(np.zeros((40, 60), np.uint8))).shape
        torch.Size([32, 32, 3])
    """

    def __init__(self, img_size: int, *, crop_pct: float = 0.875, interpolation: str = "bicubic"):
        self.img_size = img_size
        self.resized = math.floor(img_size / crop_pct)
        self.resampling = str_to_pil_interp(interpolation)

    def __call__(self, picture: Picture) -> Tensor:
        img = _middle(picture.pixels())
        size, (height, width) = self.img_size, img.shape[:2]
        short = min(height, width)
        new_height, new_width = (int(self.resized * side / short) for side in (height, width))
        top, left = (round((side - size) / 2) for side in (new_height, new_width))
        if (new_height, new_width) == (height, width):
            return torch.from_numpy(np.ascontiguousarray(img[top : top + size, left : left + size]))
        # The rows of the crop, and the rows outside it that the filter reads.
        scale = height / new_height
        reach = math.ceil(2 * max(scale, 1)) + 1
        first = max(0, math.floor(top * scale) - reach)
        last = min(height, math.ceil((top + size) * scale) + reach)
        rows = Image.fromarray(img[first:last]).resize((new_width, last - first), self.resampling)
        columns = Image.new("RGB", (size, height))
        columns.paste(rows.crop((left, 0, left + size, last - first)), (0, first))
        resized = columns.resize((size, new_height), self.resampling)
        return torch.from_numpy(np.array(resized.crop((0, top, size, top + size))))


class FastEvalTransform(EvalTransform):
    """`EvalTransform` with torch's resize: several times faster, and at most 2 of 255 levels off.

    torch's filter weights have 16 bits, Pillow's have 23. This changes a pass by less than 0.1
    levels, so that its rounded values differ by at most one. The second pass multiplies that by at
    most 1.25, the sum of the absolute weights of the bicubic filter, which rounds to at most two.

    Example:
        >>> import numpy as np
        >>> from data.images import ArrayPicture
        >>> FastEvalTransform(32)(ArrayPicture(np.zeros((40, 60), np.uint8))).shape
        torch.Size([32, 32, 3])
    """

    def __call__(self, picture: Picture) -> Tensor:
        batch = to_batch(_middle(picture.pixels()))
        batch = functional.resize(batch, [self.resized], self.resampling, antialias=True)
        return from_batch(functional.center_crop(batch, [self.img_size]))


def _middle(img: np.ndarray) -> np.ndarray:
    """Return the part [H, W, 3] around the center that is at most 100 times as long as wide."""
    height, width = img.shape[:2]
    x, y = max(0, width - 100 * height) // 2, max(0, height - 100 * width) // 2
    return img[y : height - y, x : width - x]
