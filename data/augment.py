"""timm's augmentation in two parts: the draws for one image, then the work on a batch of them.

timm's classes decide which operations an image gets. For a batch it is much faster to draw for all
images first: then the same code works on one image after the other.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import cv2
import numpy as np
from PIL import Image
from timm.data import auto_augment as timms

from data.ops import ON_ARRAYS

Step = tuple[Callable[..., np.ndarray], tuple, dict[str, Any]]


class Sample(NamedTuple):
    """An image and what is left to do with it.

    Attributes:
        image: What the first step takes; an array [H, W, 3] if there are no steps.
        steps: Functions of the image with their other arguments, in order. They draw no numbers.

    Example:
        >>> Sample(np.zeros((2, 2, 3), np.uint8), [(np.add, (1,), {})]).steps[0][1]
        (1,)
    """

    image: Any
    steps: list[Step]


def finish(samples: Sequence[Sample]) -> list[np.ndarray]:
    """Make the images of a batch.

    All first steps are made, then all second steps, and so on. Those with the same function follow
    each other, so that the processor finds its code in the cache. For images of 32 pixels this
    saves a quarter of the loader's time.

    Returns:
        For each sample uint8 [H, W, 3].

    Example:
        >>> image = np.full((2, 2, 3), 7, np.uint8)
        >>> int(finish([Sample(image, [(np.add, (1,), {}), (np.multiply, (2,), {})])])[0].max())
        16
    """
    # The loader's processes are the parallelism. Set at every use (0.4 us), before OpenCV starts
    # threads, which a forked process could not stop.
    cv2.setNumThreads(0)
    images = [sample.image for sample in samples]
    for stage in range(max(len(sample.steps) for sample in samples)):
        due = [
            (sample.steps[stage], index)
            for index, sample in enumerate(samples)
            if stage < len(sample.steps)
        ]
        for (function, args, kwargs), index in sorted(due, key=lambda item: id(item[0][0])):
            images[index] = function(images[index], *args, **kwargs)
    return images


def recorded(transforms: Sequence[Callable]) -> list[Callable[[list[Step]], list[Step]]] | None:
    """Turn timm's transforms of images into transforms that add their steps to a list.

    Returns:
        The transforms; None if one of them has no form on arrays, because it may draw numbers while
        it works.
    """
    try:
        return [_with_operations(transform, _Recorder) for transform in transforms]
    except KeyError:
        return None


def on_arrays(transform: Callable) -> Callable[[np.ndarray], np.ndarray]:
    """Turn timm's transform of Pillow images into the same transform of arrays."""
    try:
        return _with_operations(transform, lambda fn: ON_ARRAYS.get(fn) or _ThroughPillow(fn))
    except KeyError:
        return _ThroughPillow(transform)


def _with_operations(transform: Callable, replace: Callable[[Callable], Callable]) -> Callable:
    """Copy timm's transform, with other functions in its operations.

    Raises:
        KeyError: If the transform does not consist of timm's operations.
    """

    def replaced(op: timms.AugmentOp) -> timms.AugmentOp:
        op = copy(op)
        op.aug_fn = replace(op.aug_fn)
        return op

    if isinstance(transform, timms.RandAugment):
        ops = [replaced(op) for op in transform.ops]
        return _RandAugment(ops, transform.num_layers, transform.choice_weights)
    if isinstance(transform, timms.AutoAugment):
        return timms.AutoAugment([[replaced(op) for op in policy] for policy in transform.policy])
    raise KeyError(transform)


class _RandAugment(timms.RandAugment):
    """timm's class with the same draws at half the cost.

    It draws numbers of operations. timm draws from their list, of which NumPy makes an array first.
    """

    def __call__(self, img):
        count, weights = len(self.ops), self.choice_weights
        if weights is None:
            drawn = np.random.randint(count, size=self.num_layers)  # noqa: NPY002
        else:
            drawn = np.random.choice(count, self.num_layers, replace=False, p=weights)  # noqa: NPY002
        for index in drawn:
            img = self.ops[index](img)
        return img


class _Recorder:
    """Stands in for timm's function of an image, and adds its form on arrays to a list of steps."""

    def __init__(self, function: Callable):
        self.function = ON_ARRAYS[function]

    def __call__(self, steps: list[Step], *args, **kwargs) -> list[Step]:
        steps.append((self.function, args, kwargs))
        return steps


class _ThroughPillow:
    def __init__(self, function: Callable[..., Image.Image]):
        self.function = function

    def __call__(self, img: np.ndarray, *args, **kwargs) -> np.ndarray:
        return np.array(self.function(Image.fromarray(img), *args, **kwargs))
