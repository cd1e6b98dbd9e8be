"""The schema of a training run: frozen dataclasses, filled from YAML and `key=value` overrides."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf

from lipsformer._configfile import ConfigError, require, require_finite


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which timm model to build. `checkpoint` holds initial weights for fine-tuning."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.name), "model.name", self.name, "name a timm model")
        for key, why in {
            "num_classes": "it follows from the data",
            "pretrained": "give model.checkpoint",
            "checkpoint_path": "give model.checkpoint",
            "img_size": "set data.img_size",
        }.items():
            if key in self.kwargs:
                raise ConfigError(f"model.kwargs.{key} must not be set: {why}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how they reach the model.

    `root` defaults to the environment variable LIPSFORMER_DATA, else `datasets`. `name` is the
    folder below it for `source: folder`, `shards` (made by `scripts.make_shards`) and `parquet`
    (as Hugging Face stores images, which may name the splits differently).
    With `holdout` above 0 this share of the training images of each class is left out of training
    and evaluated in place of `val_split`, so that settings can be chosen without the test images.
    An image that cannot be read is an error, unless the file `skip_list` names it: one path below
    the data folder per line, as `scripts.check_data` writes them. `crop_pct` is the share of the
    image that evaluation keeps; `mean` and `std` are per RGB channel, for values in [0, 1].
    Evaluation images are prepared by Pillow, bit for bit as timm does; `exact_eval: false` lets
    torch resize them, which is faster and changes few values by one or two of 255 levels.
    """

    source: Literal["digits", "folder", "shards", "parquet", "cifar10", "cifar100", "fashion_mnist"]
    root: str | None = None
    name: str | None = None
    train_split: str = "train"
    val_split: str = "val"
    holdout: float = 0.0
    img_size: int = 224
    num_workers: int = 4
    download: bool = False
    skip_list: str | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    crop_pct: float = 0.875
    exact_eval: bool = True
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        require_finite(self, "data")
        require(self.img_size >= 1, "data.img_size", self.img_size, "must be >= 1 pixel")
        require(self.num_workers >= 0, "data.num_workers", self.num_workers, "must be >= 0")
        require(0 <= self.holdout < 1, "data.holdout", self.holdout, "must be in [0, 1)")
        require(0 < self.crop_pct <= 1, "data.crop_pct", self.crop_pct, "must be in (0, 1]")
        require(min(self.std) > 0, "data.std", self.std, "all must be > 0")
        for name, sources in (
            ("name", ("folder", "shards", "parquet")),
            ("skip_list", ("folder",)),
        ):
            value = getattr(self, name)
            if self.source not in sources and value is not None:
                raise ConfigError(
                    f"data.{name}={value!r} has no effect with data.source={self.source!r}: "
                    f"remove it or use data.source={' or '.join(sources)}"
                )


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation of training images, in timm's terms. Zero or null switches a part off.

    `scale` is the area share and `ratio` the aspect ratio of the random crop, `reprob` and
    `remode` steer random erasing, `mixup` and `cutmix` are the parameters of their Beta
    distributions, `mixup_prob` how often either is applied to a batch and `mixup_switch_prob` how
    often it is CutMix when both are on.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
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
            require(value >= 0, f"augment.{name}", value, "must be >= 0")
        low, high = self.scale
        require(0 < low <= high <= 1, "augment.scale", self.scale, "must be 0 < low <= high <= 1")
        low, high = self.ratio
        require(0 < low <= high, "augment.ratio", self.ratio, "must be 0 < low <= high")
        smoothing = self.label_smoothing
        require(0 <= smoothing < 1, "augment.label_smoothing", smoothing, "must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer. `lr` is the peak learning rate and is used as stated: nothing scales it.

    `name` is one of timm's (`adamw`, `muon`, `nadamuon`, `lion`, `lamb`, ...). `betas`, `eps` and
    `momentum` are its own defaults where they are null, and `kwargs` are further arguments of its
    class. The Muon family updates hidden matrices; AdamW updates everything else at the same
    learning rate. `clip_grad` bounds the 2-norm of the whole gradient. `layer_decay` multiplies the
    learning rate of each group of layers once more per step away from the head.
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


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Cosine from `optim.lr` to `min_lr`, after a linear warmup that is off by default."""

    warmup_epochs: float = 0.0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        require_finite(self, "schedule")
        warmup = self.warmup_epochs
        require(warmup >= 0, "schedule.warmup_epochs", warmup, "must be >= 0")
        require(self.min_lr >= 0, "schedule.min_lr", self.min_lr, "must be >= 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, in which batches and in which precision.

    `global_batch_size` is the number of images of one update over all devices. With
    `batch_size_per_device: null` every device takes its share at once; a smaller number makes it
    accumulate gradients. `max_nonfinite_updates` updates in a row may be skipped because their
    loss or gradient is not finite; one more stops the run.

    `deterministic` forbids operations whose result depends on the order of threads: equal runs give
    equal weights on a GPU too, as they do on a CPU without it. On a CPU it cost 2.7 % of an update
    of 46 ms and 0.2 % of one of 340 ms; on a GPU it was not measured, expect more.
    """

    epochs: int
    global_batch_size: int
    batch_size_per_device: int | None = None
    eval_batch_size: int = 256
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    ema_decay: float | None = None
    ema_warmup: bool = False
    compile: bool = False
    grad_checkpointing: bool = False
    drop_last: bool = True
    seed: int = 0
    deterministic: bool = False
    max_nonfinite_updates: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "global_batch_size", "eval_batch_size"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name}", value, "must be >= 1")
        for name in ("seed", "max_nonfinite_updates"):
            value = getattr(self, name)
            require(value >= 0, f"train.{name}", value, "must be >= 0")
        micro, batch = self.batch_size_per_device, self.global_batch_size
        if micro is not None:
            require(micro >= 1, "train.batch_size_per_device", micro, "must be >= 1, or null")
            allowed = f"must divide train.global_batch_size={batch}"
            require(batch % micro == 0, "train.batch_size_per_device", micro, allowed)
        decay = self.ema_decay
        allowed = "must be in (0, 1), or null for off"
        require(decay is None or 0 < decay < 1, "train.ema_decay", decay, allowed)
        if self.precision == "fp16" and self.max_nonfinite_updates < 10:
            raise ConfigError(
                f"train.max_nonfinite_updates={self.max_nonfinite_updates} is too few for fp16, "
                "whose gradient scaler finds its scale by skipping updates: allow at least 10"
            )
        if self.ema_warmup and decay is None:
            raise ConfigError("train.ema_warmup=True has no effect without train.ema_decay")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes, when it saves, and what it continues from.

    `resume: auto` continues the run in `output_dir` if there is one, `none` demands an empty
    place, a path starts from that checkpoint of the same config. `keep` is the number of newest
    checkpoints that stay; the best one always stays. The first `dense_updates` updates are logged
    one by one, later ones as means over `log_every`. At its end `report` writes report.html.
    """

    output_dir: str
    resume: str = "auto"
    allow_world_size_change: bool = False
    log_every: int = 50
    dense_updates: int = 100
    save_every_epochs: int = 1
    save_every_updates: int | None = None
    keep: int = 2
    trackers: tuple[str, ...] = ()
    report: bool = True

    def __post_init__(self) -> None:
        require(bool(self.output_dir), "run.output_dir", self.output_dir, "name a folder")
        require(bool(self.resume), "run.resume", self.resume, "auto, none or a path")
        for name in ("log_every", "save_every_epochs", "keep"):
            value = getattr(self, name)
            require(value >= 1, f"run.{name}", value, "must be >= 1")
        dense, updates = self.dense_updates, self.save_every_updates
        require(dense >= 0, "run.dense_updates", dense, "must be >= 0")
        allowed = "must be >= 1, or null for off"
        require(updates is None or updates >= 1, "run.save_every_updates", updates, allowed)


@dataclass(frozen=True, kw_only=True)
class LipschitzConfig:
    """What watches and holds Lipschitz constants in training; null switches a part off.

    `monitor_every` is the number of updates from one record to the next of singular values,
    residual scales, attention, gradients and the proved bound. `sigma_cap` is the largest norm of a
    linear layer or convolution, `residual_scale_cap` and `gain_cap` are the largest absolute
    weights of residual branches and gains of CenterNorm. `cap_mode: project` holds the caps after
    every update; `soft` takes back the share `cap_strength` of the excess, and all of it at the end
    of an epoch. `update_limit` bounds the norm of an update by a share of the norm of its weight.
    `bound_limit` is the value that the proved bound of the model, measured at every evaluation,
    must not exceed: the run stops if it does.
    """

    monitor_every: int | None = None
    sigma_cap: float | None = None
    residual_scale_cap: float | None = None
    gain_cap: float | None = None
    cap_mode: Literal["project", "soft"] = "project"
    cap_strength: float = 0.1
    update_limit: float | None = None
    bound_limit: float | None = None

    def __post_init__(self) -> None:
        require_finite(self, "lipschitz")
        every = self.monitor_every
        allowed = "must be >= 1, or null for off"
        require(every is None or every >= 1, "lipschitz.monitor_every", every, allowed)
        caps = ("sigma_cap", "residual_scale_cap", "gain_cap")
        for name in (*caps, "update_limit", "bound_limit"):
            value = getattr(self, name)
            allowed = "must be > 0, or null for off"
            require(value is None or value > 0, f"lipschitz.{name}", value, allowed)
        strength = self.cap_strength
        require(0 < strength <= 1, "lipschitz.cap_strength", strength, "must be in (0, 1]")
        if self.cap_mode == "soft" and all(getattr(self, name) is None for name in caps):
            raise ConfigError("lipschitz.cap_mode='soft' has no effect without a cap")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines one run of `train.py`."""

    model: ModelConfig
    data: DataConfig
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig
    lipschitz: LipschitzConfig = field(default_factory=LipschitzConfig)
    run: RunConfig

    def __post_init__(self) -> None:
        low, peak = self.schedule.min_lr, self.optim.lr
        require(low <= peak, "schedule.min_lr", low, f"must not exceed optim.lr={peak}")
        warmup, epochs = self.schedule.warmup_epochs, self.train.epochs
        allowed = f"must be below train.epochs={epochs}"
        require(warmup < epochs, "schedule.warmup_epochs", warmup, allowed)


def config_identity(config: Config) -> dict[str, Any]:
    """The dotted settings that decide the weights of a run: all but place, speed and reporting."""
    sections = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(sections, dict)
    del sections["run"]
    for name in ("root", "download", "num_workers"):
        del sections["data"][name]
    # Only where it stands; the number of devices is compared on its own, with its own option.
    for name in ("eval_batch_size", "batch_size_per_device"):
        del sections["train"][name]
    for name in ("monitor_every", "bound_limit"):
        del sections["lipschitz"][name]
    return {f"{section}.{key}": v for section, keys in sections.items() for key, v in keys.items()}


def config_hash(config: Config) -> str:
    """Sixteen hexadecimal digits that name `config_identity`."""
    text = yaml.safe_dump(config_identity(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
