"""What the demo page asks of a model about one image."""

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
        length: 2-norm of the change, of pixel values in [0, 1].
        moved: 2-norm of the change of the logits.
        probabilities: [K].
    """

    image: np.ndarray
    length: float
    moved: float
    probabilities: Tensor


@dataclass(frozen=True)
class Sensitivity:
    """How strongly the logits can move at an image.

    Attributes:
        constant: estimated local Lipschitz constant of the logits in the image, 2-norms of all
            pixel values in [0, 1] and of all logits.
        direction: length of the worst change in every pixel, [H, W], as a share of the largest.
        margin: logit of the first class minus that of the second.
    """

    constant: float
    direction: np.ndarray
    margin: float


class DemoModel:
    """A classifier with its class names and its preprocessing.

    Images are uint8 [H, W, 3] of the size that the model takes.

    Args:
        name: of the architecture.
        model: the classifier.
        classes: names of its K outputs.
        data: preprocessing.
    """

    def __init__(self, name: str, model: nn.Module, classes: list[str], data: DataConfig):
        self.name = name
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.classes = classes
        self.data = data
        self.transform = EvalTransform(data)
        self.normalize = Normalize(data)

    @classmethod
    def of_checkpoint(cls, checkpoint: str) -> "DemoModel":
        """The model of a run, a checkpoint or a folder of timm's.

        Raises:
            CheckpointError: if there are no usable weights.
            ConfigError: if it is not said what model they are of, or its images are not known.
        """
        path = locate(Path(checkpoint))
        model = load_model(str(path))
        folder = path if path.is_dir() else path.parent
        card = json.loads((folder / "config.json").read_text())
        classes = card.get("label_names") or [f"class {i}" for i in range(card["num_classes"])]
        data = data_config(card, ["source=folder"], origin=str(folder))
        return cls(card["architecture"], model, classes, data)

    def prepare(self, picture: Picture) -> np.ndarray:
        """The image that the model sees of a picture.

        Raises:
            UnreadableImageError: if it cannot be decoded or is too large.
        """
        return np.ascontiguousarray(self.transform(picture).permute(1, 2, 0).numpy())

    def probabilities(self, image: np.ndarray) -> Tensor:
        """Of all classes, [K]."""
        return self._logits(image).softmax(-1)

    def attention(self, image: np.ndarray) -> dict[str, np.ndarray]:
        """Attention that every token receives, by block and head: name -> [heads, H', W'].

        Blocks with a single token have none. 1 is what a token gets where attention is uniform.

        Raises:
            TypeError: if the model has no attention whose map could be drawn.
        """
        maps = attention_maps(self.model, self.normalize(self._batch(image)))
        return {
            name.removesuffix(".attn"): received[0].cpu().numpy()
            for name, received in maps.items()
            if received[0, 0].numel() > 1
        }

    def with_noise(self, image: np.ndarray, level: float) -> Noisy:
        """Adds Gaussian noise, always the same one, of a standard deviation.

        Args:
            image: uint8 [H, W, 3].
            level: standard deviation for pixel values in [0, 1].
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
        """Estimates the local Lipschitz constant by power iteration: a lower bound."""

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
