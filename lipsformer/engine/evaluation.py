"""Evaluation: top-1, top-5 and cross entropy over a data set that is spread over ranks."""

import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from lipsformer._ranks import sum_over_ranks
from lipsformer._sharding import resharded
from lipsformer.engine.metrics import NonFiniteError
from lipsformer.engine.parts import SizedBatches


class EvalSums:
    """Top-1, top-5 and cross entropy over a data set whose images are spread over ranks.

    Counts are integers and losses are summed in float64. Ranks may have different numbers of
    batches.

    Example:
        >>> sums = EvalSums()
        >>> sums.add(torch.tensor([[0.0, 9.0], [9.0, 0.0]]), torch.tensor([1, 1]))
        >>> result = sums.result(Accelerator(cpu=True))
        >>> result["top1"], result["images"]
        (50.0, 2)
    """

    def __init__(self) -> None:
        self._batches: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits [B, K] and labels without waiting for the device.

        Labels are [B], or bool [B, K] where several classes are right. The cross entropy is then
        the one with the uniform distribution over these classes.
        """
        logits = logits.float()
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices
        if labels.ndim == 2:
            top = labels.gather(1, top)
            labels = labels / labels.sum(dim=1, keepdim=True)
        else:
            top = top == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="none")
        self._batches.append(torch.stack([loss, top[:, 0].float(), top.any(dim=1).float()]))

    def result(self, accelerator: Accelerator) -> dict[str, float | int]:
        """Return means over the images of all ranks, and their number. Every rank must call it."""
        rows = torch.cat([torch.zeros(3, 0), *(batch.cpu() for batch in self._batches)], dim=1)
        sums = torch.cat([rows.double().sum(dim=1), torch.tensor([rows.shape[1]]).double()])
        if accelerator.num_processes > 1:
            sums = sum_over_ranks(sums.to(accelerator.device)).cpu()
        loss, top1, top5, images = sums.tolist()
        return {
            "top1": 100 * top1 / images,
            "top5": 100 * top5 / images,
            "loss": loss / images,
            "images": int(images),
        }


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    module: nn.Module,
    batches: SizedBatches,
    *,
    normalize: Callable[[Tensor], Tensor],
    num_images: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, float | int] | None:
    """Return top-1 and top-5 in percent, mean cross entropy, and the number of images.

    Args:
        accelerator: Accelerate's, for device, precision and ranks.
        module: The model without DDP around it, because ranks may have different numbers of
            batches.
        batches: This rank's share of the data set. Over all ranks, every image comes once. With a
            sharded model every rank needs at least one batch.
        normalize: Turns uint8 images into the model's input.
        num_images: Length of the data set, for comparison with the number of images counted.
        interrupted: Called before every batch, equally often on all ranks; true ends it here.

    Returns:
        The figures; None if interrupted.

    Raises:
        NonFiniteError: If the mean loss is not finite.
        RuntimeError: If the batches of all ranks do not hold `num_images` images.

    Example:
        >>> images = torch.tensor([[[0, 9]], [[9, 0]]], dtype=torch.uint8)
        >>> batches = [(images, torch.tensor([1, 1]))]  # one batch of two images, both of class 1
        >>> accelerator, pixels = Accelerator(cpu=True), nn.Flatten()  # the logits are the pixels
        >>> evaluate(accelerator, pixels, batches, normalize=Tensor.float, num_images=2)["top1"]
        50.0
    """
    module.eval()
    sums = EvalSums()
    own = torch.tensor(len(batches), device=accelerator.device)
    rounds = int(accelerator.gather(own).max())  # pyright: ignore[reportAttributeAccessIssue]
    iterator = iter(batches)
    batch: Any = None  # each rank of a sharded model has at least one
    with resharded(module):
        for index in range(rounds):
            if interrupted():
                return None
            counted = index < len(batches)
            if counted:
                batch = next(iterator)
            elif not isinstance(module, FSDPModule):
                continue  # only a sharded model needs all ranks in each pass: repeat a batch
            images, labels = (tensor.to(accelerator.device, non_blocking=True) for tensor in batch)
            with accelerator.autocast():
                logits = module(normalize(images))
            if counted:
                sums.add(logits, labels)
    result = sums.result(accelerator)
    if result["images"] != num_images:
        raise RuntimeError(f"evaluated {result['images']} images of a data set of {num_images}")
    if not math.isfinite(result["loss"]):
        raise NonFiniteError(f"the evaluation loss over {num_images} images is {result['loss']}")
    return result
