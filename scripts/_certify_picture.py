"""What is proved about one picture, and what an attack finds."""

import contextlib
import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipsformer.analysis.bounds import UnknownModuleError, image_domain, lipschitz_bound
from lipsformer.analysis.certificates import certified_radius
from lipsformer.analysis.local_certificates import local_certificates
from lipsformer.analysis.robustness import margins, smallest_margins
from lipsformer.config import DataConfig
from scripts._certificate import pixel_scale

FAILURE = 1e-12  # probability that the local certificate is wrong
LARGEST = 64  # pixels: larger images have no local certificate, which would take minutes
DISTANCES = [2.0 ** (k / 2) for k in range(-16, 9)]  # increasing; the attack searches within them


@dataclass(frozen=True)
class PictureCertificate:
    """How far a picture may move before its predicted class changes.

    All distances are 2-norms of the change, for pixel values in [0, 1]. Rounding is not counted.

    Attributes:
        margin: Logit of the predicted class minus the second logit.
        constant_log10: log10 of the proved Lipschitz constant from pixels to logits.
        everywhere: Distance that this constant proves.
        around: Distance that a local certificate proves; None where there is none.
        found: The smallest margin that the attack found within each of `DISTANCES`.
    """

    margin: float
    constant_log10: float
    everywhere: float
    around: float | None
    found: list[float]

    @property
    def attacked(self) -> float:
        """The smallest distance at which the attack changes the class; inf if there is none."""
        pairs = zip(DISTANCES, self.found, strict=True)
        return next((distance for distance, margin in pairs if margin <= 0.0), math.inf)


def certify_picture(model: nn.Module, pixels: Tensor, data: DataConfig) -> PictureCertificate:
    """Certify and attack one picture.

    Args:
        model: The model. It is copied to the CPU.
        pixels: [3, H, W], values in [0, 255].
        data: The preprocessing.

    Raises:
        UnknownModuleError: If the model has no proved bound.
    """
    model = copy.deepcopy(model).cpu().float().eval()
    bound = lipschitz_bound(model, image_domain(tuple(pixels.shape[1:]), data.mean, data.std))
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (data.mean, data.std))
    image = pixels[None].cpu().double() / 255.0
    around = None
    with torch.no_grad():
        logits = copy.deepcopy(model).double()((image - mean) / std)
        if max(pixels.shape[1:]) <= LARGEST:
            with contextlib.suppress(UnknownModuleError):  # local proofs cover fewer models
                around = local_certificates(model, (image - mean) / std, FAILURE)[1].item()
    label = logits.argmax(1)
    everywhere = certified_radius(logits, bound).item()

    def function(x: Tensor) -> Tensor:
        return model((x - mean.float()) / std.float())

    copies = image.float().expand(len(DISTANCES), -1, -1, -1)
    eps = torch.tensor(DISTANCES)[:, None, None, None]
    random = torch.Generator().manual_seed(0)
    found = smallest_margins(
        function, copies, label.expand(len(DISTANCES)), eps, generator=random
    ).cummin(0)
    return PictureCertificate(
        margin=margins(logits, label).item(),
        constant_log10=bound.log10 - math.log10(min(data.std)),
        everywhere=everywhere * pixel_scale(data),
        around=None if around is None else around * pixel_scale(data),
        found=found.values.tolist(),
    )
