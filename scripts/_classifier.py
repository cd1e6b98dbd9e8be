"""A classifier of pictures, for the server, and what the demo page asks it about one image."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from data import Normalize
from data.images import Picture
from data.transforms import EvalTransform
from lipsformer.analysis.attention_maps import attention_maps
from lipsformer.analysis.estimate import local_lipschitz
from lipsformer.config import DataConfig
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.run_folder import Weights
from lipsformer.engine.weights import load_model
from scripts._certify_picture import PictureCertificate, certify_picture
from scripts._data_config import data_config
from scripts._runtimes import Logits, fold

MAX_UPLOAD = 20 * 2**20  # bytes
POWER_ITERATIONS = 15
Runtime = Callable[[nn.Module], Logits]


@dataclass(frozen=True)
class Noisy:
    """An image with noise.

    Attributes:
        image: uint8 [H, W, 3], clipped to valid values.
        length: 2-norm of the change, for pixel values in [0, 1].
        moved: 2-norm of the change of the logits.
        probabilities: Probabilities of the classes, [K].
    """

    image: np.ndarray
    length: float
    moved: float
    probabilities: Tensor


@dataclass(frozen=True)
class Sensitivity:
    """How strongly the logits can move at an image.

    Attributes:
        constant: Estimated local Lipschitz constant from the image, with pixel values in [0, 1], to
            the logits, both in the 2-norm.
        direction: Length of the worst change in every pixel, [H, W], as a share of the largest.
        margin: Logit of the first class minus logit of the second.
    """

    constant: float
    direction: np.ndarray
    margin: float


class Classifier:
    """A classifier with its class names and its preprocessing.

    Images are uint8 [H, W, 3] of the size that the model takes.

    Args:
        name: Name of the architecture.
        model: The classifier.
        classes: Names of its K outputs.
        data: The preprocessing.
        runtime: Turns the model into the function that computes the logits, such as the same model
            folded for inference.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        classes: list[str],
        data: DataConfig,
        runtime: Runtime = fold,
    ):
        self.name = name
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.run = runtime(self.model)
        self.classes = classes
        self.data = data
        self.transform = EvalTransform(
            data.img_size, crop_pct=data.crop_pct, interpolation=data.interpolation
        )
        self.normalize = Normalize(data.mean, data.std)

    @classmethod
    def from_weights(cls, weights: Weights, runtime: Runtime = fold) -> "Classifier":
        """Build the classifier of weights.

        Raises:
            CheckpointError: If the weights cannot be read, do not fit or are not finite.
            ConfigError: If it is not known which model the weights belong to.
        """
        model = load_model(weights)
        broken = [name for name, x in model.named_parameters() if not x.isfinite().all()]
        if broken:
            raise CheckpointError(
                f"{weights.file} holds NaN or infinite numbers, in {broken[0]} first, so that no "
                "class has a probability: choose other weights"
            )
        known = weights.timm_config() or {}
        classes = weights.classes() or [f"class {i}" for i in range(known["num_classes"])]
        data = data_config(known["pretrained_cfg"], ["source=folder"], origin=str(weights.folder))
        return cls(known["architecture"], model, classes, data, runtime)

    def prepare(self, picture: Picture) -> np.ndarray:
        """Return the image that the model sees of a picture.

        Raises:
            UnreadableImageError: If it cannot be decoded or is too large.
        """
        return self.transform(picture).numpy()

    def probabilities(self, image: np.ndarray) -> Tensor:
        """Return the probabilities of all classes, [K]."""
        return self._logits(image).softmax(-1)

    def attention(self, image: np.ndarray) -> dict[str, np.ndarray]:
        """Return the attention that every token receives: name of the block -> [heads, H', W'].

        Blocks with a single token are left out. Under uniform attention every token receives 1.

        Raises:
            TypeError: If the model has no attention whose map could be drawn.
        """
        maps = attention_maps(self.model, self.normalize(self._batch(image)))
        return {
            name.removesuffix(".attn"): received[0].cpu().numpy()
            for name, received in maps.items()
            if received[0, 0].numel() > 1
        }

    def with_noise(self, image: np.ndarray, level: float) -> Noisy:
        """Add Gaussian noise, always the same sample, of a standard deviation.

        Args:
            image: uint8 [H, W, 3].
            level: Standard deviation for pixel values in [0, 1].
        """
        noise = np.random.default_rng(0).standard_normal(image.shape)
        noisy = np.rint((image + 255 * level * noise).clip(0, 255)).astype(np.uint8)
        logits = self._logits(noisy)
        return Noisy(
            image=noisy,
            length=float(np.linalg.norm((noisy.astype(np.float64) - image) / 255)),
            moved=float((logits - self._logits(image)).norm()),
            probabilities=logits.softmax(-1),
        )

    def sensitivity(self, image: np.ndarray) -> Sensitivity:
        """Estimate the local Lipschitz constant from below by power iteration."""

        def logits(pixels: Tensor) -> Tensor:
            return self.model(self.normalize(255 * pixels))

        pixels = self._batch(image).float() / 255
        generator = torch.Generator().manual_seed(0)
        constant, direction = local_lipschitz(
            logits,
            pixels,
            num_iters=POWER_ITERATIONS,
            rtol=1e-2,
            start=torch.randn(pixels.shape, generator=generator).to(self.device),
        )
        size = direction[0].norm(dim=0).cpu().numpy()
        first, second = self._logits(image).topk(2).values.tolist()
        return Sensitivity(float(constant), size / size.max(), first - second)

    def certify(self, image: np.ndarray) -> PictureCertificate:
        """Certify and attack an image.

        Raises:
            UnknownModuleError: If the model has no proved bound.
        """
        return certify_picture(self.model, self._batch(image)[0], self.data)

    def _batch(self, image: np.ndarray) -> Tensor:
        return torch.from_numpy(image).permute(2, 0, 1)[None].to(self.device)

    @torch.no_grad()
    def _logits(self, image: np.ndarray) -> Tensor:
        return self.run(self.normalize(self._batch(image)))[0].float().cpu()
