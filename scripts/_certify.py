"""Certified and attacked accuracy, for `eval.py --certify`."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data import Normalize
from lipsformer._configfile import ConfigError
from lipsformer.analysis.bounds import UnknownModuleError, image_domain, lipschitz_bound
from lipsformer.analysis.certificates import certified_radius
from lipsformer.analysis.robustness import withstood
from lipsformer.config import DataConfig
from lipsformer.engine.steps import SizedBatches

DEFAULT = "36/255"


def parse_distance(text: str) -> float:
    """Return a distance that is written as 36/255 or 0.14.

    Raises:
        ConfigError: If it is not a positive number.
    """
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if value <= 0.0:
        raise ConfigError(f"--certify={text} must be a number > 0 such as 36/255 or 0.14")
    return value


def certify(
    accelerator: Accelerator,
    model: nn.Module,
    classifier: nn.Module,
    batches: SizedBatches,
    data: DataConfig,
    distances: Sequence[float],
) -> dict[str, Any]:
    """Return certified and attacked accuracy in percent, computed in float32.

    Args:
        accelerator: Accelerate's, for device and ranks.
        model: The model, whose proved bound is used.
        classifier: The model, or some of its logits.
        batches: This rank's share of the images.
        data: The preprocessing.
        distances: 2-norms of the change of an image, for pixel values in [0, 1].

    Raises:
        ConfigError: If the model has no proved bound.
    """
    try:
        domain = image_domain((data.img_size, data.img_size), data.mean, data.std)
        bound = lipschitz_bound(model, domain)
    except UnknownModuleError as error:
        raise ConfigError(f"--certify: {error}") from None
    normalize, generator = Normalize(data.mean, data.std), torch.Generator().manual_seed(0)

    def logits(pixels: Tensor) -> Tensor:
        return classifier(normalize(pixels * 255.0))

    counts = torch.zeros(len(distances), 2, dtype=torch.long, device=accelerator.device)
    images_seen = torch.zeros((), dtype=torch.long, device=accelerator.device)
    for images, labels in batches:
        pixels = images.to(accelerator.device) / 255.0
        labels = labels.to(accelerator.device)
        with torch.no_grad():
            # Normalization stretches distances by at most 1 / min(std).
            radius = certified_radius(logits(pixels), bound) * min(data.std)
        for row, distance in zip(counts, distances, strict=True):
            held = withstood(logits, pixels, labels, distance, radius, generator=generator)
            row += torch.stack([part.sum() for part in held])
        images_seen += len(labels)
    counts, images_seen = accelerator.reduce((counts, images_seen), reduction="sum")  # pyright: ignore[reportGeneralTypeIssues]
    shares = (100.0 * counts.double() / images_seen).tolist()
    return {
        "pixel_bound_log10": bound.log10 - math.log10(min(data.std)),
        "robustness": [
            {"eps": distance, "certified": certified, "pgd": attacked}
            for distance, (certified, attacked) in zip(distances, shares, strict=True)
        ],
    }
