"""What a step minimizes: timm's training tasks, with or without a teacher."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32
from timm.loss import BinaryCrossEntropy
from timm.task import (
    ClassificationTask,
    LogitDistillationTask,
    TokenDistillationTask,
    TrainingTask,
)
from torch import Tensor, nn

from lipsformer._checks import require
from lipsformer._errors import ConfigError, first_line
from lipsformer.config import Config
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.run_folder import find_weights
from lipsformer.engine.weights import load_model


def load_teacher(config: Config, classes: Sequence[str], sizes: Sequence[int]) -> nn.Module | None:
    """Load the teacher that `loss.teacher` names, on the CPU; None without one.

    Args:
        config: The config of the run.
        classes: Names of the classes, which the teacher must know in this order.
        sizes: Sizes of the training images, which it must take.

    Raises:
        ConfigError: If it cannot be loaded, or its logits are not those of the classes.
    """
    name = config.loss.teacher
    if name is None:
        return None
    try:
        model, known = _named_model(name)
        with torch.no_grad():
            outputs = [model.eval()(torch.zeros(1, 3, size, size)) for size in sizes]
    except Exception as error:  # timm, the hub and a model raise whatever they meet
        more = "" if isinstance(error, CheckpointError | ConfigError) else " cannot be used"
        raise ConfigError(f"loss.teacher={name!r}{more}: {first_line(error)}") from None
    if known is not None and list(known) != list(classes):
        raise ConfigError(
            f"loss.teacher={name!r} was trained on other classes than those of the data: "
            f"{len(known)} from {known[0]!r} on, not {len(classes)} from {classes[0]!r} on"
        )
    if any(output.shape != (1, len(classes)) for output in outputs):
        raise ConfigError(
            f"loss.teacher={name!r} gives outputs of shape {tuple(outputs[0].shape[1:])} for an "
            f"image, but the data have {len(classes)} classes"
        )
    return model.requires_grad_(False)


def _named_model(name: str) -> tuple[nn.Module, Sequence[str] | None]:
    """Return a trained model, and the names of its classes if they are known."""
    if not Path(name).exists() and timm.is_model(name):
        ours = timm.model_entrypoint(name).__module__.startswith("lipsformer.")
        known = None if ours else timm.get_pretrained_cfg(name)
        if not ours and (known is None or not known.has_weights):
            raise ConfigError("timm has no pretrained weights of this name")
        model: Any = timm.create_model(name, pretrained=True)
        return model, model.pretrained_cfg.get("label_names")
    weights = find_weights(name)
    return load_model(weights), weights.classes()


class MarginLoss(nn.Module):
    r"""Cross entropy of the distances to the borders between classes, less a margin.

    .. math:: T \log(1 + \sum_{j \ne y} e^{(\mu - r_j) / T}), \quad r_j = (z_y - z_j) / |w_y - w_j|

    If the network before the classifier has the constant 1, the input can move by :math:`r_j`
    before class j wins. The scale of the classifier has no effect. Targets that are not one class
    weight the losses of the classes.

    Example:
        >>> loss = MarginLoss(nn.Linear(3, 10), margin=0.5, temperature=1.0)
        >>> loss(torch.zeros(2, 10), torch.eye(10)[:2]).shape
        torch.Size([])

    Reference:
        Prach and Lampert 2022, "Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz
        Networks" (temperature and margin); Leino et al. 2021, "Globally-Robust Neural Networks"
        (differences of rows).
    """

    def __init__(self, classifier: nn.Module, margin: float, temperature: float):
        super().__init__()
        self.classifier = (classifier,)  # not a part: the model owns its weights
        self.margin, self.temperature = margin, temperature

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of logits [B, K] and target probabilities [B, K]."""
        weight: Any = self.classifier[0].weight
        rows = weight.float()
        squares = (rows[:, None] - rows).square().sum(-1)
        same = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        lengths = squares.masked_fill(same, 1.0).clamp_min(1e-12).sqrt()
        distances = (logits[:, :, None] - logits[:, None]) / lengths  # [B, right class, other]
        excess = (self.margin - distances).masked_fill(same, 0.0) / self.temperature
        return (targets * excess.logsumexp(-1)).sum(1).mean() * self.temperature


def make_criterion(
    config: Config, num_classes: int, model: nn.Module
) -> Callable[[Tensor, Tensor], Tensor]:
    """Build the mean loss of logits [B, K] and target probabilities [B, K], in float32.

    Args:
        config: The config of the run.
        num_classes: Number of classes K.
        model: The model, of whose classifier the margin loss reads the weight.

    Raises:
        ConfigError: If the threshold of the targets makes all classes, or none, the target, or the
            margin loss finds no linear classifier.

    Example:
        >>> from lipsformer._configfile import read_config
        >>> config = read_config(Config, "configs/demo.yaml")
        >>> criterion = make_criterion(config, 10, nn.Linear(3, 10))
        >>> criterion(torch.zeros(1, 10), torch.eye(10)[:1]).item()  # log(10)
        2.302585...
    """
    loss, smoothing = config.loss, config.augment.label_smoothing
    criterion: nn.Module = nn.CrossEntropyLoss()
    if loss.type == "bce":
        threshold, low = loss.bce_target_thresh, smoothing / num_classes
        if threshold is not None:
            allowed = (
                f"augment.label_smoothing={smoothing} makes targets of {low:g} and "
                f"{1 - smoothing + low:g} for {num_classes} classes, and it must separate them"
            )
            fits = low <= threshold < 1 - smoothing + low
            require(fits, "loss.bce_target_thresh", threshold, allowed)
        criterion = BinaryCrossEntropy(target_threshold=threshold, sum_classes=loss.bce_sum)
    if loss.type == "margin":
        classifier = getattr(model, "get_classifier", lambda: None)()
        if not isinstance(classifier, nn.Linear):
            raise ConfigError(
                f"loss.type='margin' needs a model with one linear classifier, and model.name="
                f"{config.model.name!r} has {type(classifier).__name__}"
            )
        criterion = MarginLoss(classifier, loss.margin, loss.margin_temperature)
    return lambda logits, targets: criterion(logits.float(), targets)


def make_task(
    config: Config,
    model: nn.Module,
    accelerator: Accelerator,
    *,
    teacher: nn.Module | None,
    num_classes: int,
) -> TrainingTask:
    """Build timm's task, which computes the mean loss of a micro-batch.

    Args:
        config: The config of the run.
        model: The prepared model.
        accelerator: Accelerate's, for device and precision.
        teacher: The model to learn from, or None.
        num_classes: Number of classes.

    Raises:
        ConfigError: If the model has no distillation head for `loss.distill_type=token`.

    Example:
        >>> from lipsformer._configfile import read_config
        >>> config = read_config(Config, "configs/demo.yaml")
        >>> model, accelerator = nn.Identity(), Accelerator(cpu=True)  # the inputs are the logits
        >>> task = make_task(config, model, accelerator, teacher=None, num_classes=10)
        >>> task(torch.zeros(1, 10), torch.eye(10)[:1])["loss"].item()  # log(10)
        2.302585...
    """
    loss, device = config.loss, accelerator.device
    criterion = make_criterion(config, num_classes, accelerator.unwrap_model(model))
    if teacher is None:
        return ClassificationTask(model, criterion, device=device, verbose=False)
    if accelerator.is_fsdp2:  # it leaves logits in the precision of the forward pass, unlike DDP
        model.register_forward_hook(lambda module, args, logits: convert_to_fp32(logits))
    settings = {
        # mixed precision and float32 logits, as in the model that learns, but no DDP and no FSDP
        "teacher_model": accelerator.prepare_model(teacher.to(device), evaluation_mode=True),
        "criterion": criterion,
        "temperature": loss.temperature,
        "task_loss_weight": loss.task_loss_weight,
        "distill_loss_weight": loss.distill_loss_weight,
        "device": device,
        "verbose": False,
    }
    if loss.distill_type == "logit":
        return LogitDistillationTask(model, **settings)
    try:
        return TokenDistillationTask(model, distill_type=loss.token_distill_type, **settings)
    except ValueError:
        raise ConfigError(
            f"loss.distill_type='token' needs a model with a distillation head, and model.name="
            f"{config.model.name!r} has none: use one such as deit_tiny_distilled_patch16_224"
        ) from None


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 sum of the names and values of a model's weights and buffers, in hex.

    Example:
        >>> model, copy = nn.Linear(3, 2), nn.Linear(3, 2)
        >>> fingerprint(model) == fingerprint(copy)  # each draws its own weights
        False
        >>> _ = copy.load_state_dict(model.state_dict())
        >>> fingerprint(model) == fingerprint(copy)
        True
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
