"""Certified and attacked accuracy, for `eval.py --certify`."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from data import Normalize
from data.evalsets import EvalSet
from lipsformer._errors import ConfigError
from lipsformer._files import require_writable
from lipsformer.analysis.bounds import Bound, UnknownModuleError, image_domain, lipschitz_bound
from lipsformer.analysis.certificates import (
    certified_radius,
    executed_errors,
    local_bounds,
    real_errors,
    watch_norms,
)
from lipsformer.analysis.robustness import robust_mask
from lipsformer.config import DataConfig
from lipsformer.engine.parts import SizedBatches
from scripts._certificate import FILE, certificate, pixel_scale
from scripts._histogram import histogram

DEFAULT_DISTANCE = "36/255"
BOUNDED_PRECISIONS = ("fp32", "fp64")  # the precisions whose rounding is bounded


def parse_distance(text: str) -> float:
    """Return a distance that is written as 36/255 or 0.14.

    Raises:
        ConfigError: If it is not a positive number.
    """
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        value = 0.0
    if value <= 0.0:
        raise ConfigError(f"--certify={text} must be a number > 0 such as 36/255 or 0.14")
    return value


def model_bound(accelerator: Accelerator, model: nn.Module, data: DataConfig) -> Bound:
    """Return the proved bound of the logits, for normalized images of pixel values in [0, 1].

    Raises:
        ConfigError: If the model has no proved bound, or products may round more than float32's.
    """
    if accelerator.device.type != "cpu" or accelerator.num_processes > 1:
        raise ConfigError(
            "--certify covers the rounding of programs on a CPU: run one process with "
            "ACCELERATE_USE_CPU=true"
        )
    backends: Any = torch.backends
    parts = (backends, backends.mkldnn.matmul, backends.mkldnn.conv)
    full = {part.fp32_precision for part in parts} <= {"none", "ieee"}
    if not full or torch.get_float32_matmul_precision() != "highest":
        raise ConfigError(
            "--certify needs products in full float32: leave torch.set_float32_matmul_precision at "
            "'highest', and fp32_precision of torch.backends and its parts at 'none' or 'ieee'"
        )
    if not backends.mkldnn.enabled:
        raise ConfigError(
            "--certify needs torch.backends.mkldnn.enabled=True: without it, NNPACK's convolutions "
            "round more than the certificate allows for"
        )
    try:
        domain = image_domain((data.img_size, data.img_size), data.mean, data.std)
        return lipschitz_bound(model, domain)
    except UnknownModuleError as error:
        raise ConfigError(f"--certify: {error}") from None


class Certification:
    """Certifies the images of one set after the other, and writes the certificate of all.

    Args:
        accelerator: Accelerate's, for the device.
        model: The model on this device, in the data type of the program: float32 or float64.
        data: The preprocessing.
        weights: The file of weights; the certificate lies beside it.
        distances: 2-norms of the change of an image, for pixel values in [0, 1].
        attack_every: N, of every N images the first is attacked.

    Raises:
        ConfigError: If the certificate cannot be written, or the model has no proved bound here.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        data: DataConfig,
        weights: Path,
        distances: Sequence[float],
        attack_every: int = 1,
    ) -> None:
        self.data, self.weights, self.distances = data, weights, distances
        self.attack_every, self.dtype = attack_every, next(model.parameters()).dtype
        self.file = weights.parent / FILE
        require_writable("--certify", self.file)
        self.bound = model_bound(accelerator, model, data)
        self.images: dict[str, tuple[EvalSet, list[dict[str, Any]], dict[str, float]]] = {}

    def certify(self, eval_set: EvalSet, classifier: Any, batches: SizedBatches) -> dict[str, Any]:
        """Certify the images of a set, and attack them.

        The images are certified with logits in float64. The attack runs the program itself.

        Args:
            eval_set: The set.
            classifier: The program: the model, or the logits of it that count in the set.
            batches: The images of the set.

        Returns:
            Figures with certified and attacked accuracy in percent. Label, logits, level and radii
            of each image are kept for `write`, with the largest norms of the inputs of modules.
        """
        exact, outputs = copy.deepcopy(classifier).double(), eval_set.outputs
        model, watched = (x if outputs is None else x.model for x in (classifier, exact))
        norms = watch_norms(watched)
        logits, labels = self._exact_logits(exact, batches)
        real, executed, levels, largest = self._radii(model, logits, norms, outputs)
        real, executed = real * pixel_scale(self.data), executed * pixel_scale(self.data)
        right = logits.argmax(1) == labels
        held, attacked = self._attack(classifier, batches, executed)

        def share(radii: Tensor, distance: float) -> float:
            return 100.0 * int((right & (radii > distance)).sum()) / len(labels)

        values = (labels, logits, real, executed, levels)
        rows = [
            {"label": label, "logits": z, "real": r, "executed": e, "level": level}
            for label, z, r, e, level in zip(*(value.tolist() for value in values), strict=True)
        ]
        self.images[eval_set.name] = eval_set, rows, largest
        return {
            "pixel_bound_log10": self.bound.log10 - math.log10(min(self.data.std)),
            "logit_rounding": self.bound.output.error,
            "dtype": str(self.dtype).removeprefix("torch."),
            "attacked": attacked,
            "robustness": [
                {
                    "eps": distance,
                    "certified": share(executed, distance),
                    "certified_real": share(real, distance),
                    "pgd": 100.0 * kept / attacked,
                }
                for distance, kept in zip(self.distances, held, strict=True)
            ],
            "radii": {"real": histogram(real.tolist()), "executed": histogram(executed.tolist())},
        }

    def write(self, description: Mapping[str, Any]) -> None:
        """Write the certificate of all sets so far; `description` is timm's, of the model."""
        content = certificate(
            self.bound,
            weights=self.weights,
            model=description,
            data=self.data,
            sets=self.images,
            distances=self.distances,
            dtype=self.dtype,
        )
        self.file.write_text(json.dumps(content, indent=1) + "\n")

    @torch.no_grad()
    def _exact_logits(self, exact: nn.Module, batches: SizedBatches) -> tuple[Tensor, Tensor]:
        """Return the logits of all images in float64, [N, K], and their labels, [N]."""
        normalize = Normalize(self.data.mean, self.data.std, torch.float64)
        shown = tqdm(batches, "certify", unit="batch", leave=False, disable=None)
        computed = [(exact(normalize(x)), y) for x, y in shown]
        logits, labels = (torch.cat(parts) for parts in zip(*computed, strict=True))
        return logits, labels

    def _radii(
        self,
        model: nn.Module,
        logits: Tensor,
        norms: Mapping[str, list[Tensor]],
        outputs: Sequence[int] | None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
        """Return the certified radii of all images, in units of normalized images.

        Returns:
            Radii of the exact network, [N], and of the program, [N]; the level of the local bound
            that gives the latter, [N]; the largest norms of the inputs of modules.
        """
        bound = self.bound
        num_logits = logits.shape[1] if bound.last is None else len(bound.last.weight)
        real = certified_radius(logits, bound, real_errors(bound, num_logits), outputs)
        largest, levels, bounds = local_bounds(model, bound, norms, real)
        executed = real.clone()  # which bounds the balls
        for level, local in bounds.items():
            here, errors = levels == level, executed_errors(local, num_logits, self.dtype)
            radii = certified_radius(logits[here], bound, errors, outputs)
            executed[here] = torch.minimum(real[here], radii)
        return real, executed, levels, largest

    def _attack(
        self, classifier: nn.Module, batches: SizedBatches, radii: Tensor
    ) -> tuple[list[int], int]:
        """Attack the program.

        Returns:
            How many images keep their label, for each distance, and how many were attacked.

        Raises:
            RuntimeError: If the attack breaks a certificate.
        """
        generator = torch.Generator().manual_seed(0)
        normalize = Normalize(self.data.mean, self.data.std, self.dtype)

        def logits(pixels: Tensor) -> Tensor:
            return classifier(normalize(pixels * 255.0))

        held, attacked, start = [0] * len(self.distances), 0, 0
        for images, labels in tqdm(batches, "attack", unit="batch", leave=False, disable=None):
            chosen = slice(-start % self.attack_every, None, self.attack_every)
            pixels = images[chosen].to(self.dtype) / 255.0
            proved = radii[start:][: len(images)][chosen]
            start, attacked = start + len(images), attacked + len(pixels)
            if len(pixels) == 0:  # no image of this batch is attacked
                continue
            for index, distance in enumerate(self.distances):
                at = (pixels, labels[chosen], distance, proved)
                held[index] += int(robust_mask(logits, *at, generator=generator)[1].sum())
        return held, attacked
