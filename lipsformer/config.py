"""The schema of an image run: frozen dataclasses, read from YAML and `key=value` overrides.

The docstrings of the sections are what `lipsformer train --help` prints.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from lipsformer._configfile import ConfigError, numbers_in, require, require_finite
from lipsformer._machine import cores
from lipsformer._renamed import renamed
from lipsformer.recipe import (
    MOST_PIXELS,
    AugmentConfig,
    LossConfig,
    OptimConfig,
    ScheduleConfig,
)

# Keyword arguments of models that count or measure something.
SIZES = ("embed_dim", "depth", "depths", "num_heads", "patch_size", "window_size", "mlp_ratio")
MOST_BLOCKS = 1000  # of a stage; each is built before its memory is known
MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which timm model to train.

    `kwargs` are keyword arguments of the model's entry function. With `convert: true`,
    `lipsformer.convert` turns timm's ViT, DeiT or Swin into its Lipschitz form, with the arguments
    `convert_kwargs`. `checkpoint` names the weights from which training starts; without it the
    weights are drawn from `train.seed`.

    Example:
        >>> ModelConfig(name="lipsformer_nano", kwargs={"drop_path_rate": 0.1}).checkpoint is None
        True
    """

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    convert: bool = False
    convert_kwargs: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.name), "model.name", self.name, "must name a timm model")
        for key, why in {
            "num_classes": "it follows from the data",
            "pretrained": "set model.checkpoint",
            "checkpoint_path": "set model.checkpoint",
            "img_size": "set data.img_size",
            "in_chans": "images have three channels",
            "device": "it is that of the process",
            "dtype": "set train.precision",
            "out_indices": "a classifier returns no features",
            **dict.fromkeys(("scriptable", "exportable", "no_jit", "cache_dir"), "no effect here"),
        }.items():
            if key in self.kwargs:
                raise ConfigError(f"model.kwargs.{key} must not be set: {why}")
        for key, value in self.kwargs.items():
            if value is None:
                raise ConfigError(f"model.kwargs.{key} is null, which timm ignores: remove it")
        if self.convert_kwargs and not self.convert:
            raise ConfigError(
                f"model.convert_kwargs={self.convert_kwargs} has no effect without "
                "model.convert=true: remove it or set that"
            )
        require_finite(self, "model")
        for key, value in self.kwargs.items():
            for number in numbers_in(value):
                path = f"model.kwargs.{key}"
                if key in SIZES:  # timm takes the wrong values of these in silence, or for ever
                    require(number > 0, path, value, "must be > 0")
                if key in ("depth", "depths"):
                    require(number <= MOST_BLOCKS, path, value, f"must be <= {MOST_BLOCKS}")
                if key.endswith("_rate"):
                    require(0 <= number < 1, path, value, "must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images to use, and how to prepare them.

    `root` is the folder of all data sets, which the embedded digits do not need. It defaults to the
    environment variable LIPSFORMER_DATA, and to `datasets` if that is not set. `name` is a folder
    below `root`; the sources `folder`, `shards` (written by `scripts.make_shards`) and `parquet`
    (Hugging Face's format, which may use other names of splits) read it. With `holdout` above 0,
    this share of the training images of each class is left out of training and evaluated in place
    of `val_split`, so that settings can be chosen without the test images. `train_share` below 1
    trains on this share of the remaining images of each class; an epoch repeats them until it has
    the length of all. An image that cannot be read stops the
    run, unless the file `skip_list` names it. That file holds one path per line, relative to the
    data folder, or for parquet one split/number per line, as `lipsformer check-data` writes them.
    `num_workers` is the number of processes that load images, for each training process; the
    default is 4, or the number of cores if there are fewer. 0 loads them in the training process.
    `crop_pct` is the share of each side that the center crop of evaluation keeps. `mean` and `std`
    belong to the RGB channels, for values in [0, 1]. Pillow resizes evaluation images, bit for bit
    as timm does. With `exact_eval: false` torch resizes them, which is faster and changes few
    values, by at most 2 of 255 levels.

    Example:
        >>> DataConfig(source="folder", name="imagenette-160", img_size=160).train_split
        'train'
    """

    source: Literal["digits", "folder", "shards", "parquet", "cifar10", "cifar100", "fashion_mnist"]
    root: str | None = None
    name: str | None = None
    train_split: str = "train"
    val_split: str = "val"
    holdout: float = 0.0
    train_share: float = 1.0
    img_size: int = 224
    num_workers: int = field(default_factory=lambda: min(4, cores()))
    download: bool = False
    skip_list: str | None = None
    in_memory: bool = False
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    crop_pct: float = 0.875
    exact_eval: bool = True
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        require_finite(self, "data")
        size, workers = self.img_size, self.num_workers
        allowed = f"must be >= 1 pixel and <= {MOST_PIXELS}"
        require(1 <= size <= MOST_PIXELS, "data.img_size", size, allowed)
        allowed = f"must be >= 0 and <= {MOST_WORKERS}"
        require(0 <= workers <= MOST_WORKERS, "data.num_workers", workers, allowed)
        require(0 <= self.holdout < 1, "data.holdout", self.holdout, "must be in [0, 1)")
        share = self.train_share
        require(1e-4 <= share <= 1, "data.train_share", share, "must be in [0.0001, 1]")
        require(0 < self.crop_pct <= 1, "data.crop_pct", self.crop_pct, "must be in (0, 1]")
        fits = all(0 <= value <= 1 for value in self.mean)
        require(fits, "data.mean", self.mean, "all must be in [0, 1], as the values of the images")
        require(
            all(0 < value <= 1 for value in self.std), "data.std", self.std, "must be in (0, 1]"
        )
        for name, sources in (
            ("root", ("folder", "shards", "parquet", "cifar10", "cifar100", "fashion_mnist")),
            ("name", ("folder", "shards", "parquet")),
            ("skip_list", ("folder", "parquet")),
            ("in_memory", ("folder",)),
            ("download", ("cifar10", "cifar100", "fashion_mnist")),
        ):
            value = getattr(self, name)
            if self.source not in sources and value not in (None, False):
                raise ConfigError(
                    f"data.{name}={value!r} has no effect with data.source={self.source!r}: "
                    f"remove it or use data.source={' or '.join(sources)}"
                )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, with which batches and in which precision.

    `global_batch_size` is the number of images of one optimizer update, over all devices. Each
    device processes its share at once, or in micro-batches of `batch_size_per_device` images whose
    gradients are accumulated. An update whose gradient is not finite is skipped. The run stops
    after more than `max_nonfinite_updates` updates in a row whose loss or gradient is not finite.

    With `compile: null` the model is compiled on GPUs, unless FSDP2 shards it, and not on CPUs.

    `deterministic` forbids operators whose result depends on the order of threads, so that equal
    runs give equal weights on a GPU. On a CPU they do so without it, and it added 5.5 % to the time
    of an update (docs/resume.md); on a GPU its cost was not measured.

    Example:
        >>> TrainConfig(epochs=100, global_batch_size=1024, batch_size_per_device=64).precision
        'bf16'
    """

    epochs: int
    global_batch_size: int
    batch_size_per_device: int | None = None
    eval_batch_size: int = 256
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    ema_decay: float | None = None
    ema_warmup: bool = False
    compile: bool | None = None
    grad_checkpointing: bool = False
    drop_last: bool = True
    seed: int = 0
    deterministic: bool = False
    max_nonfinite_updates: int = 3

    def __post_init__(self) -> None:
        for name in ("epochs", "global_batch_size", "eval_batch_size"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name}", value, "must be >= 1")
        for name in ("seed", "max_nonfinite_updates"):
            value = getattr(self, name)
            require(0 <= value < 2**63, f"train.{name}", value, "must be >= 0 and below 2^63")
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
    """Where a run writes its files, when it saves, and what it continues.

    `resume: auto` continues the run in `output_dir` if that folder holds one. `none` requires a
    folder without a run. A path starts there from that checkpoint, which must have the same config;
    the same command continues the run later. `keep` is the number of newest checkpoints that are
    kept; the best checkpoint is always kept. The first `dense_updates` updates are logged one by
    one, and later ones as means over `log_every` updates. The weights are evaluated after every
    `eval_every_epochs` epochs and after the last one. With `report`, a finished run writes
    report.html.

    Example:
        >>> RunConfig(output_dir="outputs/demo", trackers=("tensorboard",)).resume
        'auto'
    """

    output_dir: str
    resume: str = "auto"
    allow_world_size_change: bool = False
    log_every: int = 50
    dense_updates: int = 100
    eval_every_epochs: int = 1
    save_every_epochs: int = 1
    save_every_updates: int | None = None
    keep: int = 2
    trackers: tuple[str, ...] = ()
    report: bool = True

    def __post_init__(self) -> None:
        require(bool(self.output_dir), "run.output_dir", self.output_dir, "must name a folder")
        require(bool(self.resume), "run.resume", self.resume, "must be auto, none or a path")
        for name in ("log_every", "eval_every_epochs", "save_every_epochs", "keep"):
            value = getattr(self, name)
            require(value >= 1, f"run.{name}", value, "must be >= 1")
        dense, updates = self.dense_updates, self.save_every_updates
        require(dense >= 0, "run.dense_updates", dense, "must be >= 0")
        allowed = "must be >= 1, or null for off"
        require(updates is None or updates >= 1, "run.save_every_updates", updates, allowed)


@dataclass(frozen=True, kw_only=True)
class LipschitzConfig:
    """How to monitor and limit Lipschitz constants in training. Null switches a part off.

    The monitor records singular values, residual scales, attention, gradients and the proved bound
    every `monitor_every` updates. `sigma_cap` is the largest spectral norm of a linear layer or
    convolution. `residual_scale_cap` is the largest absolute scale of a residual branch, and
    `gain_cap` the largest absolute gain of CenterNorm. With `cap_mode: project` these caps hold
    after every update. With `soft`, every update removes the share `cap_strength` of what exceeds
    a cap, and the end of an epoch removes the rest. `orthogonal` keeps every matrix but the
    classifier orthogonal, queries, keys and values each on their own. Their norms are at most 1 if
    no update brings one to 2 or more; at a learning rate that does, the weights grow until the run
    stops. `update_limit` is the largest norm of a
    weight's update, as a share of the weight's norm. The proved bound of the model is computed at
    every evaluation, and the run stops if it exceeds `bound_limit`.

    Example:
        >>> LipschitzConfig(sigma_cap=2.0, cap_mode="soft", cap_strength=0.2).update_limit is None
        True
    """

    monitor_every: int | None = None
    sigma_cap: float | None = None
    residual_scale_cap: float | None = None
    gain_cap: float | None = None
    cap_mode: Literal["project", "soft"] = "project"
    cap_strength: float = 0.1
    orthogonal: bool = False
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
            most = math.inf if name == "bound_limit" else 1e15  # far below float32's range
            limit = f" and at most {most:g}" if math.isfinite(most) else ""
            allowed = f"must be > 0{limit}, or null for off"
            require(value is None or 0 < value <= most, f"lipschitz.{name}", value, allowed)
        if self.orthogonal and self.sigma_cap is not None:
            raise ConfigError(
                f"lipschitz.sigma_cap={self.sigma_cap} has no effect with lipschitz.orthogonal=true"
            )
        strength = self.cap_strength
        require(0 < strength <= 1, "lipschitz.cap_strength", strength, "must be in (0, 1]")
        if self.cap_mode == "soft" and all(getattr(self, name) is None for name in caps):
            raise ConfigError(
                "lipschitz.cap_mode='soft' has no effect without a cap: "
                f"set lipschitz.{' or lipschitz.'.join(caps)}"
            )
        if self.cap_mode != "soft" and strength != LipschitzConfig.cap_strength:
            raise ConfigError(
                f"lipschitz.cap_strength={strength} has no effect with lipschitz.cap_mode="
                f"{self.cap_mode!r}: remove it or set lipschitz.cap_mode=soft"
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one run of `train.py`.

    Example:
        >>> config = Config(
        ...     model=ModelConfig(name="lipsformer_nano"),
        ...     data=DataConfig(source="digits"),
        ...     optim=OptimConfig(lr=1e-3),
        ...     train=TrainConfig(epochs=3, global_batch_size=64),
        ...     run=RunConfig(output_dir="outputs/digits"),
        ... )
        >>> config.schedule.warmup_epochs
        0.0
    """

    model: ModelConfig
    data: DataConfig
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
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


__getattr__ = renamed(__name__)
