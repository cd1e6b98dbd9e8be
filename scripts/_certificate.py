"""The file that `eval.py --certify` writes, for `python -m scripts.check_certificate`.

Claims are written a relative 2e-9 weaker than what was computed, so that a checker with another
linear algebra library, whose bounds differ in the last digits, can derive them.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.transforms import str_to_pil_interp

from data.dataset import ImageDataset
from data.evalsets import EvalSet
from lipsformer.analysis.bounds import Bound, flatten_bound
from lipsformer.config import DataConfig
from lipsformer.engine.run_files import manifest_entry

FILE = "certificate.json"
FORMAT = "lipsformer certificate 2"
SLACK = 1e-9
PREPROCESSING = ("source", "img_size", "crop_pct", "interpolation", "exact_eval", "mean", "std")

SAYS = {
    "real": "No image within this distance has another class under the exact network.",
    "executed": "No image within this distance gets another class from the program on a CPU, in "
    "float32 or float64 as dtype says. The rounding of both images is subtracted from the margin.",
    "logit_rounding": "Largest error of the logits in float32, as a 2-norm.",
    "distance": "2-norm over the pixels of the network's input. All pixel values lie in [0, 1].",
    "own_pixel_factors": "A change of the data's own pixels grows by at most this factor up to the "
    "network's pixels, if Pillow's resize rounds neither values nor filter weights.",
    "norms": "In float64, the input of a module is for an image at most levels/16 of these long. "
    "The name of the model itself is empty.",
    "premises": "Only this file states logits, norms and levels (computed in float64), labels, the "
    "source of the data, sizes of its images in pixels and channels, and which logits count. All "
    "else follows from the weights.",
}

# The theorem of docs/theorems.md that proves the constant of a class. Others are chains (24).
PROOFS = {
    **dict.fromkeys(("Linear", "NonDynamicallyQuantizableLinear"), "theorem 1: linear layers"),
    "CenterNorm": "theorem 2: CenterNorm",
    **dict.fromkeys(("Conv2d", "PatchConv2d", "DepthwiseConv2d"), "theorem 3: convolutions"),
    "GELU": "theorem 4: activations",
    **dict.fromkeys(
        ("SelectAdaptivePool2d", "Identity", "Dropout", "DropPath", "PatchDropout"),
        "theorem 5: pooling, cutting and joining",
    ),
    **dict.fromkeys(("FoldShift", "JoinTokens"), "theorem 30: folds, shifts and joins"),
    "ContractiveResidual": "theorem 31: attention whose residual keeps the constant 1",
    **dict.fromkeys(
        ("WindowAttention", "StripeAttention", "CosineAttention", "CosineWindowAttention"),
        "theorem 11: heads, projections, windows",
    ),
}
CHAIN = "theorem 24: chains and weighted residuals"


def certificate(
    bound: Bound,
    *,
    weights: Path,
    model: Mapping[str, Any],
    data: DataConfig,
    sets: Mapping[str, tuple[EvalSet, Sequence[Mapping[str, Any]], Mapping[str, float]]],
    distances: Sequence[float],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the certificate of a model on some sets of images.

    Args:
        bound: The proved bound of the logits.
        weights: The file of weights.
        model: timm's description of the model, with `architecture` and `model_args`.
        data: The preprocessing.
        sets: For each name, the set, logits and radii of its images in order, and norms of maps.
        distances: The distances for which shares are stated.
        dtype: Data type of the program.
    """
    settings = asdict(data)
    preprocessing = {key: settings[key] for key in PREPROCESSING}
    return {
        "format": FORMAT,
        "says": SAYS,
        "weights": {"file": weights.name, "sha256": manifest_entry(weights)["sha256"]},
        "model": {key: model[key] for key in ("architecture", "model_args")},
        "preprocessing": {**preprocessing, "sha256": digest(preprocessing)},
        "domain": {"size": bound.input.size, "pixels": [0, 1], "radius": bound.input.radius},
        "layers": [
            {
                "name": name,
                "class": part.kind,
                "proof": PROOFS.get(part.kind, CHAIN),
                "log10": weaker(part.log10),
            }
            for name, part in flatten_bound(bound)
        ],
        "dtype": str(dtype).removeprefix("torch."),
        "logit_rounding": bound.output.error * (1.0 + SLACK),
        "sets": {name: set_claims(*content, data, distances) for name, content in sets.items()},
    }


def set_claims(
    eval_set: EvalSet,
    rows: Sequence[Mapping[str, Any]],
    norms: Mapping[str, float],
    data: DataConfig,
    distances: Sequence[float],
) -> dict[str, Any]:
    """Return the premises, radii and shares of one set of images.

    Args:
        eval_set: The set.
        rows: Label, logits, level and radii of each image, in order.
        norms: Largest norms of the inputs of modules.
        data: The preprocessing.
        distances: The distances for which shares are stated.
    """
    own = own_sizes(eval_set.dataset, data)
    sizes = sorted(set(own))
    premises = {
        "outputs": eval_set.outputs,
        "sizes": sizes,
        "size_of": [sizes.index(size) for size in own],
        "labels": [row["label"] for row in rows],
        "logits": [row["logits"] for row in rows],
        "norms": dict(norms),
        "levels": [row["level"] for row in rows],
    }
    scale = 1.0 - 3.0 * SLACK  # SLACK in the decimal logarithm is 2.3 times as much in the value
    radii = {key: [row[key] * scale for row in rows] for key in ("real", "executed")}
    return {
        "premises": premises,
        "premises_sha256": digest(premises),
        "own_pixel_factors": [own_factor(size, data) for size in sizes],
        **radii,
        "shares": [
            {"distance": distance, **shares(premises, radii, distance)} for distance in distances
        ],
    }


def weaker(log10: float) -> float:
    """Return a logarithm with some slack. A constant of 0, which JSON lacks, is written as -400."""
    return max(log10, -400.0) + SLACK


def shares(
    premises: Mapping[str, Any], radii: Mapping[str, Sequence[float]], distance: float
) -> dict[str, float]:
    """Return the share of images, in percent, that keep the right class within a distance."""
    right = np.argmax(premises["logits"], axis=1) == np.array(premises["labels"])
    return {
        key: 100.0 * float((right & (np.array(values) > distance)).mean())
        for key, values in radii.items()
    }


def digest(content: Any) -> str:
    """Return the SHA-256 of the canonical JSON of a value."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def pixel_scale(data: DataConfig) -> float:
    """Return the factor from certified distances of normalized images to those of pixels.

    Normalization stretches distances by at most 1 / min(std). The factor is rounded down.
    """
    return min(data.std) * (1.0 - 2.0**-44)


def own_sizes(dataset: ImageDataset, data: DataConfig) -> list[tuple[int, int, int]]:
    """Return height, width and channels of each image before any resizing."""
    if data.source == "digits":  # enlarged when they are loaded
        return [(8, 8, 1)] * len(dataset)
    pictures = (dataset.source.load(index) for index in range(len(dataset)))
    return [(p.size[1], p.size[0], p.channels) for p in pictures]


def own_factor(size: tuple[int, int, int], data: DataConfig) -> float:
    """Bound the norm of the linear map from the data's pixels to those of the network.

    A resize is the product of an operator along the columns and one along the rows. Repeating a
    gray value three times has the norm sqrt(3). The center crop has norm 1.
    """
    height, width, channels = size
    factor = math.sqrt(3.0 / channels)
    if data.source == "digits":
        factor *= resize_norm(height, data.img_size, data) * resize_norm(width, data.img_size, data)
        height = width = data.img_size
    resized, short = math.floor(data.img_size / data.crop_pct), min(height, width)
    for side in (height, width):
        factor *= resize_norm(side, int(resized * side / short), data)
    return factor * (1.0 + 5e-7)  # the operators are in float32


def resize_norm(old: int, new: int, data: DataConfig) -> float:
    """Return the largest singular value of Pillow's resize of a line of pixels."""
    if old == new:
        return 1.0
    lines = Image.fromarray(np.eye(old, dtype=np.float32))
    operator = np.asarray(lines.resize((new, old), str_to_pil_interp(data.interpolation)))
    return float(np.linalg.svd(operator.astype(np.float64), compute_uv=False)[0])
