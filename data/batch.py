"""What happens to whole batches, on the device: normalise, erase, mix, smooth.

All of it is timm's. Randomness is a function of (seed, update, micro-step, rank).
"""

import torch
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from data.rng import kept, seed_all
from lipsformer.config import AugmentConfig, DataConfig


class Normalize:
    """(images / 255 - mean) / std per channel: uint8 [B, 3, H, W] -> float32 on the same device."""

    def __init__(self, data: DataConfig):
        self.mean = torch.tensor(data.mean).view(3, 1, 1) * 255
        self.std = torch.tensor(data.std).view(3, 1, 1) * 255

    def __call__(self, images: Tensor) -> Tensor:
        # Kept on the device: copying them there would wait for it in every step.
        self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        return images.float().sub_(self.mean).div_(self.std)


class TrainBatchTransform:
    """Normalisation, random erasing, mixup or cutmix, and label smoothing of a micro-batch.

    Args:
        data: mean and std.
        augment: the recipe.
        num_classes: width of the targets.
        seed: of the run.
    """

    def __init__(self, data: DataConfig, augment: AugmentConfig, *, num_classes: int, seed: int):
        self.normalize = Normalize(data)
        self.augment = augment
        self.num_classes = num_classes
        self.seed = seed
        self.mixup = None
        if augment.mixup > 0 or augment.cutmix > 0:
            self.mixup = _Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                prob=augment.mixup_prob,
                switch_prob=augment.mixup_switch_prob,
                label_smoothing=augment.label_smoothing,
                num_classes=num_classes,
            )

    def __call__(
        self, images: Tensor, labels: Tensor, *, update: int, micro_step: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """The model's input and its target distribution.

        Args:
            images: uint8 [B, 3, H, W], on the device.
            labels: [B], on the device.
            update: number of the optimizer update since the start of the run.
            micro_step: number of the micro-batch within the update.
            rank: of this process.

        Returns:
            float32 images [B, 3, H, W] and target probabilities [B, num_classes].
        """
        images = self.normalize(images)
        with kept(images.device):
            seed_all("batch", self.seed, update, micro_step, rank, device=images.device)
            if self.augment.reprob > 0:
                erase = RandomErasing(
                    self.augment.reprob, mode=self.augment.remode, device=str(images.device)
                )
                images = erase(images)
            if self.mixup is not None:
                return self.mixup(images, labels)
        smoothing = self.augment.label_smoothing
        return images, mixup_target(labels, self.num_classes, smoothing=smoothing)


class _Mixup(Mixup):
    """timm's, also for odd batches, whose middle image is mixed with itself."""

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        lam = self._mix_batch(x)
        return x, mixup_target(target, self.num_classes, lam, self.label_smoothing)
