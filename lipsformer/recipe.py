"""The sections of a config that make the recipe: augmentation, loss, optimizer, schedule.

docs/recipes.md says which flag of timm's train script each key is.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from lipsformer._configfile import require, require_effect, require_finite

MOST_PIXELS = 16384  # on a side


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation of training images, in timm's terms. Zero or null switches a part off.

    `scale` is the range of the random crop's share of the area, `ratio` the range of its aspect
    ratio. `auto_augment` is a recipe in timm's notation. `3a` is 3-Augment, the only one that
    `color_jitter` can follow. `img_sizes` are the sizes of training images in pixels, in the order
    of training. The position in this list moves evenly from its first entry in the first epoch to
    its last entry in the last epoch, and each epoch uses the nearest size. Without them the size is
    `data.img_size`, which is always that of evaluation. With `repeats` above 1 (repeated
    augmentation) every image comes so many times in a row, each time augmented differently. The
    number of samples in an epoch stays about the same. `reprob` is the probability of random
    erasing and `remode` what fills the erased part. `mixup` and `cutmix` are the parameters of
    their Beta distributions. `mixup_prob` is the probability that a batch is mixed. If both are on,
    `mixup_switch_prob` is the probability of CutMix.

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
        for name in ("hflip", "reprob", "mixup_prob", "mixup_switch_prob"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"augment.{name}", value, "must be a probability in [0, 1]")
        for name in ("color_jitter", "mixup", "cutmix"):
            value = getattr(self, name)
            require(0 <= value <= 1e6, f"augment.{name}", value, "must be in [0, 1e6]")
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
    """What training minimizes, in timm's terms: cross entropy or BCE, with or without a teacher.

    `type: margin` is the cross entropy of the distances (z_y - z_j) / |w_y - w_j| to the borders
    between the classes, less `margin` and divided by `margin_temperature`, where w are the rows of
    the classifier. If the network before it has the constant 1, the distances are certified, in the
    units of the normalized images. `type: bce` is the binary cross entropy of each class, averaged
    over the classes, or summed with `bce_sum`. Targets above `bce_target_thresh` become 1 and the
    others 0. `teacher` switches distillation on. It is a run, a checkpoint, a folder of timm's
    format, or a timm model with pretrained weights, such as `resnet50.a1_in1k`. With
    `distill_type: logit` the model learns the teacher's probabilities at this `temperature`. With
    `token` the distillation head of a distilled model learns them, or with
    `token_distill_type: hard` the class that the teacher predicts. The loss is `task_loss_weight`
    times the loss above plus `distill_loss_weight` times that of distillation. Both weights are 1
    by default. If only `task_loss_weight` is given, the other weight is 1 minus it.

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
        threshold, task, distill = (
            self.bce_target_thresh,
            self.task_loss_weight,
            self.distill_loss_weight,
        )
        allowed = "must be in [0, 1), or null for off"
        require(
            threshold is None or 0 <= threshold < 1, "loss.bce_target_thresh", threshold, allowed
        )
        for name in ("margin", "margin_temperature"):
            require(getattr(self, name) > 0, f"loss.{name}", getattr(self, name), "must be > 0")
        require(self.temperature > 0, "loss.temperature", self.temperature, "must be > 0")
        require(task is None or task >= 0, "loss.task_loss_weight", task, "must be >= 0, or null")
        allowed = "must be <= 1 without loss.distill_loss_weight, which is then 1 minus it"
        fits = task is None or distill is not None or task <= 1
        require(fits, "loss.task_loss_weight", task, allowed)
        fits = distill is None or distill >= 0
        require(fits, "loss.distill_loss_weight", distill, "must be >= 0, or null")
        require(self.teacher != "", "loss.teacher", self.teacher, "must name weights, or be null")
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
    """The optimizer. `lr` is the peak learning rate. It is never rescaled.

    `name` is one of timm's optimizers (`adamw`, `muon`, `nadamuon`, `lion`, `lamb`, ...). If
    `betas`, `eps` or `momentum` is null, the optimizer's default applies. `kwargs` are further
    arguments of its class. The Muon family updates hidden matrices, and AdamW updates the other
    parameters at the same learning rate. `clip_grad` is the largest 2-norm of the gradient of all
    parameters together. `layer_decay` makes earlier layers learn more slowly: each group of layers
    has the learning rate of the next group, multiplied by this factor. `residual_lr_scale` times
    the learning rate is that of the weights of the residual branches.

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
        require(self.lr >= 0, "optim.lr", self.lr, "must be >= 0")
        betas, eps, momentum = self.betas, self.eps, self.momentum
        fits = betas is None or (len(betas) in (2, 3) and all(0 <= beta < 1 for beta in betas))
        require(fits, "optim.betas", betas, "must be two or three numbers in [0, 1), or null")
        require(eps is None or eps > 0, "optim.eps", eps, "must be > 0, or null")
        fits = momentum is None or 0 <= momentum < 1
        require(fits, "optim.momentum", momentum, "must be in [0, 1), or null")
        decay = self.weight_decay
        require(decay >= 0, "optim.weight_decay", decay, "must be >= 0")
        clip = self.clip_grad
        require(clip is None or clip > 0, "optim.clip_grad", clip, "must be > 0, or null for off")
        decay = self.layer_decay
        allowed = "must be in (0, 1], or null for off"
        require(decay is None or 0 < decay <= 1, "optim.layer_decay", decay, allowed)
        scale = self.residual_lr_scale
        require(scale >= 0, "optim.residual_lr_scale", scale, "must be >= 0, and 1 is off")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Cosine decay from `optim.lr` to `min_lr`, after a linear warmup, which is off by default.

    Example:
        >>> ScheduleConfig(min_lr=1e-5).warmup_epochs
        0.0
    """

    warmup_epochs: float = 0.0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        require_finite(self, "schedule")
        warmup = self.warmup_epochs
        require(warmup >= 0, "schedule.warmup_epochs", warmup, "must be >= 0")
        require(self.min_lr >= 0, "schedule.min_lr", self.min_lr, "must be >= 0")
