"""The questions that the demo page asks a model about one image."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data import Normalize
from data.images import Picture
from data.transforms import EvalTransform
from eval import data_config
from lipsformer.analysis.attention_maps import attention_maps
from lipsformer.analysis.estimate import local_lipschitz
from lipsformer.config import DataConfig
from lipsformer.engine.checkpoint import locate
from scripts.measure_lipschitz import load_model

POWER_ITERATIONS = 15


@dataclass(frozen=True)
class Noisy:
    """An image with noise.

    Attributes:
        image: uint8 [H, W, 3], clipped to valid values.
        length: 2-norm of the change of the pixel values, which are in [0, 1].
        moved: 2-norm of the change of the logits.
        probabilities: Class probabilities [K].
    """

    image: np.ndarray
    length: float
    moved: float
    probabilities: Tensor


@dataclass(frozen=True)
class Sensitivity:
    """How strongly the logits can move at an image.

    Attributes:
        constant: Estimate of the local Lipschitz constant from pixel values in [0, 1] to logits,
            both in the 2-norm.
        direction: Length of the worst change in every pixel, [H, W], as a share of the largest.
        margin: Largest logit minus the second largest.
    """

    constant: float
    direction: np.ndarray
    margin: float


class DemoModel:
    """A classifier with its class names and its preprocessing.

    Images are uint8 [H, W, 3] in the model's input size.

    Args:
        name: Name of the architecture.
        model: The classifier.
        classes: Names of its K outputs.
        data: Its preprocessing.
    """

    def __init__(self, name: str, model: nn.Module, classes: list[str], data: DataConfig):
        self.name = name
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.classes = classes
        self.data = data
        self.transform = EvalTransform(
            data.img_size, crop_pct=data.crop_pct, interpolation=data.interpolation
        )
        self.normalize = Normalize(data.mean, data.std)

    @classmethod
    def of_checkpoint(cls, checkpoint: str) -> "DemoModel":
        """Load the model of a run, a checkpoint, or a folder that timm wrote.

        Raises:
            CheckpointError: If there are no usable weights.
            ConfigError: If the files do not say to which model and images the weights belong.
        """
        path = locate(Path(checkpoint))
        model = load_model(str(path))
        folder = path if path.is_dir() else path.parent
        card = json.loads((folder / "config.json").read_text())
        classes = card.get("label_names") or [f"class {i}" for i in range(card["num_classes"])]
        data = data_config(card, ["source=folder"], origin=str(folder))
        return cls(card["architecture"], model, classes, data)

    def prepare(self, picture: Picture) -> np.ndarray:
        """Return the model's input for a picture.

        Raises:
            UnreadableImageError: If the picture cannot be decoded or is too large.
        """
        return self.transform(picture).numpy()

    def probabilities(self, image: np.ndarray) -> Tensor:
        """Return the class probabilities [K]."""
        return self._logits(image).softmax(-1)

    def attention(self, image: np.ndarray) -> dict[str, np.ndarray]:
        """Map the name of each block to the attention that every token receives, [heads, H', W'].

        A token receives 1 if the attention is uniform. Blocks with a single token are left out.

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
        """Add Gaussian noise, which is the same in every call.

        Args:
            image: uint8 [H, W, 3].
            level: Standard deviation of the noise, for pixel values in [0, 1].
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
        """Estimate the local Lipschitz constant from below, by power iteration."""

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

    def _batch(self, image: np.ndarray) -> Tensor:
        return torch.from_numpy(image).permute(2, 0, 1)[None].to(self.device)

    @torch.no_grad()
    def _logits(self, image: np.ndarray) -> Tensor:
        return self.model(self.normalize(self._batch(image)))[0].float().cpu()
