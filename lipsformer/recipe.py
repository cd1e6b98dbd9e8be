"""The sections of a config that make the recipe: augmentation, loss, optimizer, schedule.

docs/recipes.md says which flag of timm's train script each key is.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from lipsformer._checks import optional, require, require_each, require_effect, require_finite

MOST_PIXELS = 16384  # on a side


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Choose the augmentation of training images, in timm's terms.

    If `mixup` or `cutmix` is above 0, each micro-batch is mixed with the probability `mixup_prob`.
    If both are above 0, CutMix is chosen with the probability `mixup_switch_prob`, and mixup
    otherwise.

    Args:
        scale: Smallest and largest share of the area that the random crop keeps, in (0, 1].
        ratio: Smallest and largest aspect ratio of the random crop, width / height, above 0.
        hflip: Probability of a horizontal flip, in [0, 1].
        color_jitter: Strength of random changes of brightness, contrast and saturation, in
            [0, 1e6]; 0 is off. It can follow only those recipes of `auto_augment` whose text
            contains `3a`.
        auto_augment: Recipe in timm's notation, such as `rand-m9-mstd0.5-inc1`, or `3a` for
            3-Augment; null is off.
        img_sizes: Sizes of training images in pixels, from 1 to 16384, in the order of training; an
            empty list for `data.img_size`, which is always the size of evaluation. The position in
            this list moves evenly from its first entry in the first epoch to its last entry in the
            last epoch, and each epoch uses the nearest size.
        repeats: Number of times that every image comes in a row, each time augmented differently
            (repeated augmentation), from 1 to 100; 1 is off. The number of samples in an epoch
            stays about the same.
        reprob: Probability that a random rectangle of an image is erased, in [0, 1]; 0 is off.
        remode: What fills an erased rectangle: `const` the mean color, `rand` one random color, and
            `pixel` a random color for each pixel.
        mixup: Parameter of mixup's Beta distribution, in [0, 1e6]; 0 is off.
        cutmix: Parameter of CutMix's Beta distribution, in [0, 1e6]; 0 is off.
        mixup_prob: Probability that a micro-batch is mixed, in [0, 1].
        mixup_switch_prob: Probability of CutMix in place of mixup if both are on, in [0, 1].
        label_smoothing: Share of the target that is spread evenly over all classes, in [0, 1); 0 is
            off.

    Example:
        >>> AugmentConfig(auto_augment="rand-m9-mstd0.5-inc1", mixup=0.8).hflip
        0.5
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    img_sizes: tuple[int, ...] = ()
    repeats: int = 1
    reprob: float = 0.0
    remode: Literal["const", "rand", "pixel"] = "pixel"
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        require_finite(self, "augment")
        names = ("hflip", "reprob", "mixup_prob", "mixup_switch_prob")
        allowed = "must be a probability in [0, 1]"
        require_each(self, "augment", names, lambda value: 0 <= value <= 1, allowed)
        names = ("color_jitter", "mixup", "cutmix")
        require_each(self, "augment", names, lambda v: 0 <= v <= 1e6, "must be in [0, 1e6]")
        low, high = self.scale
        require(0 < low <= high <= 1, "augment.scale", self.scale, "must be 0 < low <= high <= 1")
        low, high = self.ratio
        require(0 < low <= high, "augment.ratio", self.ratio, "must be 0 < low <= high")
        allowed = f"all must be >= 1 pixel and <= {MOST_PIXELS}"
        fits = all(1 <= size <= MOST_PIXELS for size in self.img_sizes)
        require(fits, "augment.img_sizes", self.img_sizes, allowed)
        allowed = "must be in [1, 100], and 1 is off"
        require(1 <= self.repeats <= 100, "augment.repeats", self.repeats, allowed)
        smoothing = self.label_smoothing
        require(0 <= smoothing < 1, "augment.label_smoothing", smoothing, "must be in [0, 1)")
        both = "both augment.mixup and augment.cutmix"
        for name, works, needs in (
            ("remode", self.reprob > 0, "augment.reprob above 0"),
            ("mixup_prob", self.mixup > 0 or self.cutmix > 0, "augment.mixup or augment.cutmix"),
            ("mixup_switch_prob", self.mixup > 0 and self.cutmix > 0, both),
        ):
            require_effect(self, "augment", name, works, needs)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Choose what training minimizes, in timm's terms.

    `type: margin` is the cross entropy of the distances (z_y - z_j) / |w_y - w_j| to the borders
    between the classes, less `margin` and divided by `margin_temperature`, where w are the rows of
    the classifier. If the network before it has the constant 1, the distances are certified, in the
    units of the normalized images.

    `teacher` switches distillation on. The loss is then `task_loss_weight` times the loss that
    `type` names plus `distill_loss_weight` times that of distillation.

    Args:
        type: Loss of the classes: `ce` is cross entropy, `bce` the binary cross entropy of each
            class, and `margin` the loss above.
        margin: Number that the loss `margin` subtracts from every distance, above 0.
        margin_temperature: Number by which the loss `margin` divides the distances, above 0.
        bce_target_thresh: With `bce`, targets above this value become 1 and the others 0; in
            [0, 1), or null to leave the targets as they are.
        bce_sum: Whether `bce` is summed over the classes. If false, it is averaged over them.
        teacher: Run, checkpoint, folder in timm's format, or timm model with pretrained weights,
            such as `resnet50.a1_in1k`, from which the model learns; null for no distillation.
        distill_type: With `logit` the model learns the teacher's probabilities. With `token` the
            distillation head of a distilled model learns from the teacher.
        token_distill_type: With `soft` the distillation head learns the teacher's probabilities,
            and with `hard` the class that the teacher predicts.
        temperature: Temperature of the probabilities in distillation, above 0.
        task_loss_weight: Weight of the loss that `type` names, at least 0, and at most 1 if it is
            the only weight that is given; null for 1.
        distill_loss_weight: Weight of the loss of distillation, at least 0; null for 1 minus
            `task_loss_weight` if that is given, and for 1 otherwise.

    Example:
        >>> LossConfig(type="bce", bce_target_thresh=0.2).teacher is None
        True
    """

    type: Literal["ce", "bce", "margin"] = "ce"
    margin: float = 1.0
    margin_temperature: float = 1.0
    bce_target_thresh: float | None = None
    bce_sum: bool = False
    teacher: str | None = None
    distill_type: Literal["logit", "token"] = "logit"
    token_distill_type: Literal["soft", "hard"] = "soft"
    temperature: float = 4.0
    task_loss_weight: float | None = None
    distill_loss_weight: float | None = None

    def __post_init__(self) -> None:
        require_finite(self, "loss")
        allowed = "must be in [0, 1), or null for off"
        require_each(self, "loss", ("bce_target_thresh",), optional(lambda v: 0 <= v < 1), allowed)
        names = ("margin", "margin_temperature", "temperature")
        require_each(self, "loss", names, lambda v: v > 0, "must be > 0")
        names = ("task_loss_weight", "distill_loss_weight")
        require_each(self, "loss", names, optional(lambda v: v >= 0), "must be >= 0, or null")
        if self.distill_loss_weight is None:
            allowed = "must be <= 1 without loss.distill_loss_weight, which is then 1 minus it"
            require_each(self, "loss", ("task_loss_weight",), optional(lambda v: v <= 1), allowed)
        require_each(self, "loss", ("teacher",), optional(bool), "must name weights, or be null")
        bce, token = self.type == "bce", self.distill_type == "token"
        soft = not (token and self.token_distill_type == "hard")
        for name, works, needs in (
            ("bce_target_thresh", bce, "loss.type=bce"),
            ("bce_sum", bce, "loss.type=bce"),
            ("margin", self.type == "margin", "loss.type=margin"),
            ("margin_temperature", self.type == "margin", "loss.type=margin"),
            ("distill_type", self.teacher is not None, "loss.teacher"),
            ("token_distill_type", token, "loss.distill_type=token"),
            ("temperature", self.teacher is not None, "loss.teacher"),
            ("temperature", soft, "loss.token_distill_type=soft"),
            ("task_loss_weight", self.teacher is not None, "loss.teacher"),
            ("distill_loss_weight", self.teacher is not None, "loss.teacher"),
        ):
            require_effect(self, "loss", name, works, needs)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Choose the optimizer.

    Optimizers of the Muon family update hidden matrices, and AdamW updates the other parameters at
    the same learning rate.

    Args:
        lr: Peak learning rate, at least 0. It is never rescaled.
        name: Name of one of timm's optimizers, such as `adamw`, `muon`, `nadamuon`, `lion` or
            `lamb`.
        betas: Two or three decay rates of the optimizer's moments, in [0, 1); null for its default.
        eps: Number that the optimizer adds to its divisors, above 0; null for its default.
        momentum: Momentum of the optimizer, in [0, 1); null for its default.
        kwargs: Further arguments of the optimizer's class.
        weight_decay: Weight decay, at least 0. Vectors, scalars and parameters that the model
            exempts are not decayed.
        clip_grad: Largest 2-norm of the gradient of all parameters together, above 0; null for no
            limit.
        layer_decay: Factor in (0, 1] that makes earlier layers learn more slowly: each group of
            layers has the learning rate of the next group, multiplied by this factor. Null is off.
        residual_lr_scale: Factor of the learning rate for the weights of the residual branches, at
            least 0; 1 is off.

    Example:
        >>> OptimConfig(lr=1e-3, clip_grad=1.0).name
        'adamw'
    """

    lr: float
    name: str = "adamw"
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    momentum: float | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.05
    clip_grad: float | None = None
    layer_decay: float | None = None
    residual_lr_scale: float = 1.0

    def __post_init__(self) -> None:
        require_finite(self, "optim")
        require_each(self, "optim", ("lr", "weight_decay"), lambda v: v >= 0, "must be >= 0")
        betas = self.betas
        fits = betas is None or (len(betas) in (2, 3) and all(0 <= beta < 1 for beta in betas))
        require(fits, "optim.betas", betas, "must be two or three numbers in [0, 1), or null")
        require_each(self, "optim", ("eps",), optional(lambda v: v > 0), "must be > 0, or null")
        allowed = "must be in [0, 1), or null"
        require_each(self, "optim", ("momentum",), optional(lambda v: 0 <= v < 1), allowed)
        allowed = "must be > 0, or null for off"
        require_each(self, "optim", ("clip_grad",), optional(lambda v: v > 0), allowed)
        allowed = "must be in (0, 1], or null for off"
        require_each(self, "optim", ("layer_decay",), optional(lambda v: 0 < v <= 1), allowed)
        scale = self.residual_lr_scale
        require(scale >= 0, "optim.residual_lr_scale", scale, "must be >= 0, and 1 is off")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Choose the schedule of the learning rate.

    The schedule is a linear warmup, which is off by default, and then a cosine decay from
    `optim.lr` to `min_lr`.

    Args:
        warmup_epochs: Number of epochs in which the learning rate rises to `optim.lr`, at least 0
            and below `train.epochs`, which includes them; it may be a fraction, and 0 is off.
        min_lr: Learning rate that the cosine approaches, from 0 to `optim.lr`.

    Example:
        >>> ScheduleConfig(min_lr=1e-5).warmup_epochs
        0.0
    """

    warmup_epochs: float = 0.0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        require_finite(self, "schedule")
        names = ("warmup_epochs", "min_lr")
        require_each(self, "schedule", names, lambda v: v >= 0, "must be >= 0")
