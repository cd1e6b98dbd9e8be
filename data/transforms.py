"""Picture to uint8 tensor: timm's training and evaluation recipes without their last, float, step.

Normalisation, random erasing and mixing follow in batches on the device (`data.batch`).
"""

import math
from collections.abc import Callable

import cv2
import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment as timms
from timm.data.transforms import (
    RandomResizedCropAndInterpolation,
    str_to_interp_mode,
    str_to_pil_interp,
)
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms.v2 import functional

from data.errors import DataError
from data.images import Picture
from data.ops import ON_ARRAYS
from lipsformer.config import AugmentConfig, DataConfig

Transform = Callable[[Picture], Tensor]


class TrainTransform:
    """Random resized crop, flip, auto augmentation or colour jitter: picture -> uint8 [3, H, W].

    Draws the same numbers as timm's recipe in the same order, and works on arrays where timm works
    on Pillow images: JPEGs decode at a reduced size where the crop stays larger than the output,
    torch resizes (antialiased), OpenCV augments.

    Raises:
        DataError: if timm does not know the auto augmentation, or would ignore the colour jitter.
    """

    def __init__(self, data: DataConfig, augment: AugmentConfig):
        self.img_size = data.img_size
        self.scale = augment.scale
        self.ratio = augment.ratio
        self.hflip = augment.hflip
        self.interpolation = data.interpolation
        self.colour = _colour_stage(data, augment)

    def __call__(self, picture: Picture) -> Tensor:
        """The augmented image, in memory as [H, W, 3]."""
        img = self.crop(picture)
        if self.hflip > 0 and torch.rand(1) < self.hflip:
            img = cv2.flip(img, 1)
        for transform in self.colour:
            img = transform(img)
        return torch.from_numpy(img).permute(2, 0, 1)

    def crop(self, picture: Picture) -> np.ndarray:
        """A random part of the picture at the output size, [H, W, 3]."""
        size, (full_width, full_height) = self.img_size, picture.size
        top, left, height, width = RandomResizedCropAndInterpolation.get_params(
            torch.empty(full_height, full_width, device="meta"), self.scale, self.ratio
        )
        # Of images of a few pixels timm takes less than one.
        top, left = min(top, full_height - 1), min(left, full_width - 1)
        height, width = max(height, 1), max(width, 1)
        reduction = max(f for f in (1, 2, 4, 8) if f == 1 or min(height, width) >= f * size)
        img = picture.pixels(reduction)
        # To the nearest pixel of what was decoded, which was reduced only if it is a JPEG.
        reduction = round(full_width / img.shape[1])
        top, bottom = round(top / reduction), round((top + height) / reduction)
        left, right = round(left / reduction), round((left + width) / reduction)
        # Contiguous as [B, H, W, 3], which torch resizes fastest and returns likewise.
        part = torch.from_numpy(np.ascontiguousarray(img[top:bottom, left:right]))[None]
        part = part.permute(0, 3, 1, 2)
        part = interpolate(part, (size, size), mode=self.interpolation, antialias=True)
        return part.permute(0, 2, 3, 1)[0].numpy()


def _colour_stage(data: DataConfig, augment: AugmentConfig) -> list[Callable]:
    """timm's transforms after crop and flip, made to work on arrays."""
    if augment.auto_augment and augment.color_jitter and "3a" not in augment.auto_augment:
        raise DataError(
            f"augment.color_jitter={augment.color_jitter} has no effect with augment.auto_augment="
            f"{augment.auto_augment!r}, which jitters colours itself: set one of them"
        )
    try:
        stages = transforms_imagenet_train(
            img_size=data.img_size,
            color_jitter=augment.color_jitter or None,  # pyright: ignore[reportArgumentType]
            auto_augment=augment.auto_augment,
            interpolation=data.interpolation,
            mean=data.mean,
            std=data.std,
            separate=True,
        )
    except (AssertionError, ValueError) as error:
        raise DataError(
            f"augment.auto_augment={augment.auto_augment!r} is not in timm's notation, "
            "such as 'rand-m9-mstd0.5-inc1'"
        ) from error
    assert isinstance(stages, tuple)
    return [_on_arrays(transform) for transform in stages[1].transforms]


def _on_arrays(transform) -> Callable[[np.ndarray], np.ndarray]:
    """The transform of Pillow images as one of arrays, without the detour where there is a way."""
    if isinstance(transform, timms.RandAugment):
        ops = list(transform.ops)
    elif isinstance(transform, timms.AutoAugment):
        ops = [op for sub_policy in transform.policy for op in sub_policy]
    else:
        return _ThroughPillow(transform)
    for op in ops:
        op.aug_fn = ON_ARRAYS.get(op.aug_fn) or _ThroughPillow(op.aug_fn)
    return transform


class _ThroughPillow:
    def __init__(self, function: Callable[..., Image.Image]):
        self.function = function

    def __call__(self, img: np.ndarray, *args, **kwargs) -> np.ndarray:
        return np.array(self.function(Image.fromarray(img), *args, **kwargs))


class EvalTransform:
    """Resize of the short side to img_size / crop_pct, centre crop: picture -> uint8 [3, H, W].

    Equal to timm's bit for bit, but what the crop leaves out is resized only where it must be:
    Pillow's filter weights follow from the whole width and height, yet its two passes, first along
    the rows and then along the columns, can be asked for one at a time. Of strips more than 100
    times as long as wide, the middle alone is resized: 1x5000 pixels would otherwise become a
    gigabyte.
    """

    def __init__(self, data: DataConfig):
        self.img_size = data.img_size
        self.resized = math.floor(data.img_size / data.crop_pct)
        self.resampling = str_to_pil_interp(data.interpolation)

    def __call__(self, picture: Picture) -> Tensor:
        img = _middle(picture.pixels())
        size, (height, width) = self.img_size, img.shape[:2]
        short = min(height, width)
        new_height, new_width = (int(self.resized * side / short) for side in (height, width))
        top, left = (round((side - size) / 2) for side in (new_height, new_width))
        if (new_height, new_width) != (height, width):
            # The rows that count, and those that the filter reaches beyond them.
            scale = height / new_height
            reach = math.ceil(2 * max(scale, 1)) + 1
            first = max(0, math.floor(top * scale) - reach)
            last = min(height, math.ceil((top + size) * scale) + reach)
            rows = Image.fromarray(img[first:last]).resize(
                (new_width, last - first), self.resampling
            )
            columns = Image.new("RGB", (size, height))
            columns.paste(rows.crop((left, 0, left + size, last - first)), (0, first))
            img = np.array(
                columns.resize((size, new_height), self.resampling).crop((0, top, size, top + size))
            )
        else:
            img = np.ascontiguousarray(img[top : top + size, left : left + size])
        return torch.from_numpy(img).permute(2, 0, 1)


class FastEvalTransform:
    """`EvalTransform` with torch's resize, several times faster: at most two levels of 255 apart.

    Torch's filter weights have 16 bits where Pillow's have 23, which alone changes a pass by less
    than 0.1 levels, so that its rounded values differ by one at most. The second pass turns one
    into at most 1.25, the sum of the absolute weights of the bicubic filter, which rounds to two
    at most.
    """

    def __init__(self, data: DataConfig):
        self.img_size = data.img_size
        self.resized = math.floor(data.img_size / data.crop_pct)
        self.interpolation = str_to_interp_mode(data.interpolation)

    def __call__(self, picture: Picture) -> Tensor:
        part = torch.from_numpy(np.ascontiguousarray(_middle(picture.pixels())))[None]
        part = part.permute(0, 3, 1, 2)
        part = functional.resize(part, [self.resized], self.interpolation, antialias=True)
        return functional.center_crop(part, [self.img_size])[0]


def _middle(img: np.ndarray) -> np.ndarray:
    """The part [H, W, 3] around the centre that is at most 100 times as long as wide."""
    height, width = img.shape[:2]
    x, y = max(0, width - 100 * height) // 2, max(0, height - 100 * width) // 2
    return img[y : height - y, x : width - x]
