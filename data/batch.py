"""Operations on whole batches on the device: normalize, erase, mix, smooth the labels.

All of them are timm's. The random numbers are a function of (seed, update, micro-step, rank).
"""

from collections.abc import Sequence

import torch
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from data.rng import preserve_rng, seed_all


class Normalize:
    """Compute `(images / 255 - mean) / std` per channel, on the images' device.

    Takes uint8 or floating-point images [B, 3, H, W] with values from 0 to 255.

    Args:
        mean: Mean of each channel, for values in [0, 1].
        std: Standard deviation of each channel, for values in [0, 1].
        dtype: Data type in which it is computed and returned.

    Example:
        >>> import torch
        >>> normalize = Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
        >>> normalize(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)).unique()
        tensor([2.])
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
    ):
        self.mean = torch.tensor(mean, dtype=dtype).view(3, 1, 1) * 255
        self.std = torch.tensor(std, dtype=dtype).view(3, 1, 1) * 255

    def __call__(self, images: Tensor) -> Tensor:
        # Both stay on the device: a copy in every step would wait for the device.
        self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        return (images.to(self.mean.dtype) - self.mean).div_(self.std)


class TrainBatchTransform:
    """Normalize a micro-batch, erase random parts, apply mixup or CutMix, and smooth the labels.

    Args:
        normalize: The normalization.
        num_classes: Number of classes K.
        seed: Seed of the run.
        reprob: Probability of random erasing.
        remode: What fills an erased part: "const", "rand" or "pixel".
        mixup: Parameter of mixup's Beta distribution; 0 for no mixup.
        cutmix: Parameter of CutMix's Beta distribution; 0 for no CutMix.
        mixup_prob: Probability that a batch is mixed.
        mixup_switch_prob: Probability of CutMix if both are on.
        label_smoothing: Share of the target that is spread evenly over the classes.

    Example:
        >>> import torch
        >>> normalize = Normalize(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        >>> transform = TrainBatchTransform(normalize, num_classes=2, seed=0, label_smoothing=0.2)
        >>> images, labels = torch.zeros(1, 3, 4, 4, dtype=torch.uint8), torch.tensor([1])
        >>> transform(images, labels, update=0, micro_step=0, rank=0)[1]
        tensor([[0.1000, 0.9000]])
    """

    def __init__(
        self,
        normalize: Normalize,
        *,
        num_classes: int,
        seed: int,
        reprob: float = 0.0,
        remode: str = "pixel",
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mixup_prob: float = 1.0,
        mixup_switch_prob: float = 0.5,
        label_smoothing: float = 0.0,
    ):
        self.normalize = normalize
        self.num_classes = num_classes
        self.seed = seed
        self.reprob = reprob
        self.remode = remode
        self.label_smoothing = label_smoothing
        self.mixup = None
        if mixup > 0 or cutmix > 0:
            self.mixup = _Mixup(
                mixup_alpha=mixup,
                cutmix_alpha=cutmix,
                prob=mixup_prob,
                switch_prob=mixup_switch_prob,
                label_smoothing=label_smoothing,
                num_classes=num_classes,
            )

    def __call__(
        self, images: Tensor, labels: Tensor, *, update: int, micro_step: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Return the model's input and its target distribution.

        Args:
            images: uint8 [B, 3, H, W], on the device.
            labels: Class indices [B], on the device.
            update: Number of the optimizer update since the start of the run.
            micro_step: Number of the micro-batch within the update.
            rank: Rank of this process.

        Returns:
            float32 images [B, 3, H, W] and target probabilities [B, K].
        """
        images = self.normalize(images)
        with preserve_rng(images.device):
            seed_all("batch", self.seed, update, micro_step, rank, device=images.device)
            if self.reprob > 0:
                erase = RandomErasing(self.reprob, mode=self.remode, device=str(images.device))
                images = erase(images)
            if self.mixup is not None:
                return self.mixup(images, labels)
        return images, mixup_target(labels, self.num_classes, smoothing=self.label_smoothing)


class _Mixup(Mixup):
    """timm's mixup, also for odd batch sizes: the middle image is mixed with itself."""

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        lam = self._mix_batch(x)
        return x, mixup_target(target, self.num_classes, lam, self.label_smoothing)
