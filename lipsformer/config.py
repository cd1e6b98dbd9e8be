"""The schema of an image run: frozen dataclasses, read from YAML and `key=value` overrides.

The docstrings of the sections are what `lipsformer train --help` prints.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from lipsformer._checks import numbers_in, require, require_each, require_effect, require_finite
from lipsformer._errors import ConfigError
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
    """Choose the model and the weights from which its training starts.

    Args:
        name: Name of a model that timm knows, such as `lipsformer_tiny`. With `convert: true` it is
            the model before its conversion.
        kwargs: Keyword arguments of the model's entry function. Arguments that follow from the data
            or from other settings, such as `num_classes` and `img_size`, are refused.
        convert: Whether `lipsformer.convert` turns timm's ViT, DeiT or Swin into its Lipschitz
            form.
        convert_kwargs: Keyword arguments of `lipsformer.convert`.
        checkpoint: Run, checkpoint, folder in timm's format, or file of weights, from which
            training starts; null draws the weights from `train.seed`. The classifier keeps its
            random weights if its number of classes differs.

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
    """Choose the images and how they are prepared.

    The training images are those of `train_split`, less the share `holdout`. Of the images that
    remain, the share `train_share` is used. `holdout` makes it possible to choose settings without
    the test images. An image that cannot be read stops the run, unless `skip_list` names it.

    Args:
        source: Where the images come from: scikit-learn's handwritten `digits`, a `folder` with one
            folder of images per class, `shards` that `lipsformer make-shards` has written,
            `parquet` files in Hugging Face's format, or torchvision's `cifar10`, `cifar100` or
            `fashion_mnist`.
        root: Folder of all data sets, which the digits do not need; null for the environment
            variable LIPSFORMER_DATA, or `datasets` if that is not set.
        name: Folder below `root` that the sources `folder`, `shards` and `parquet` read; null for
            `root` itself.
        train_split: Name of the split to train on. For `folder` and `shards` it is the folder below
            `name`, and for `parquet` the beginning of the files' names or their folder. The other
            sources have the splits `train` and `val`.
        val_split: Name of the split to evaluate, unless `holdout` is above 0. The split `val` of
            torchvision's sets is the published test set.
        holdout: Share of the training images of each class that is left out of training and
            evaluated in place of `val_split`, in [0, 1); 0 for none.
        train_share: Share of the remaining training images of each class to train on, in
            [0.0001, 1]. An epoch repeats these images until it has the length of all.
        img_size: Height and width of the images in pixels, from 1 to 16384, and at most 1024 for
            the digits. `augment.img_sizes` replaces it in training, but not in evaluation.
        num_workers: Number of processes that load images, from 0 to 1024, for each training
            process; evaluation has as many of its own. 0 loads them in the training process. The
            default is 4, or the number of cores if there are fewer.
        download: Whether to download `cifar10`, `cifar100` or `fashion_mnist` if it is not in
            `root`.
        skip_list: File that names the images of a `folder` or of `parquet` files to leave out; null
            leaves none out. It holds one path per line, relative to the data folder, or for parquet
            one split/number per line, as `lipsformer check-data` writes them.
        in_memory: Whether the decoded images of a `folder` stay in memory, once in each process
            that loads them. Large JPEGs are then cropped at their full size, not at a reduced size,
            which gives other pixel values.
        interpolation: Filter that resizes the images in training and evaluation.
        crop_pct: Share of each side that the center crop of evaluation keeps, in (0, 1].
        exact_eval: Whether Pillow resizes evaluation images, bit for bit as timm does. If false,
            torch resizes them, which is faster and changes few values, by at most 2 of 255 levels.
        mean: Means of the RGB channels for values in [0, 1], which normalization subtracts; each in
            [0, 1].
        std: Standard deviations of the RGB channels for values in [0, 1], by which normalization
            divides; each in (0, 1].

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
            needs = f"data.source={' or '.join(sources)}"
            require_effect(self, "data", name, self.source in sources, needs)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Choose how long to train, with which batches and in which precision.

    Each device processes its share of `global_batch_size` at once, or in micro-batches of
    `batch_size_per_device` images whose gradients are accumulated. An update whose gradient is not
    finite is skipped.

    Args:
        epochs: Number of passes over the training images, at least 1, including the warmup.
        global_batch_size: Number of images of one optimizer update, over all devices; at least 1,
            and a multiple of the number of devices.
        batch_size_per_device: Number of images that a device processes at once. It must divide the
            device's share of the global batch; null for the whole share.
        eval_batch_size: Number of images that a device evaluates at once, at least 1.
        precision: Precision of training and evaluation; `bf16` and `fp16` are mixed with fp32.
            `fp16` needs a GPU and `max_nonfinite_updates` of at least 10.
        ema_decay: Decay per update of the moving average of the weights (EMA), in (0, 1); null for
            no average. The average is evaluated and saved in addition to the weights.
        ema_warmup: Whether the decay starts low and rises to `ema_decay`, as in timm.
        compile: Whether to compile the model; null compiles it on GPUs with Triton, unless FSDP2
            shards it, and not on CPUs.
        grad_checkpointing: Whether to compute activations again in the backward pass instead of
            keeping them, which saves memory and takes time. Models with running statistics, such as
            those of BatchNorm, are refused.
        drop_last: Whether to leave out the images of an epoch that do not fill its last update. If
            false, that update has fewer images.
        seed: Seed of the initial weights, of the order of the images, and of augmentation, drop
            path and dropout; at least 0 and below 2^63.
        deterministic: Whether to forbid operators whose result depends on the order of threads, so
            that equal runs give equal weights on a GPU. On a CPU they do so without it, and it
            added 5.5 % to the time of an update (docs/resume.md); on a GPU its cost was not
            measured.
        max_nonfinite_updates: Largest number of updates in a row whose loss or gradient is not
            finite; at least 0 and below 2^63. One more stops the run.

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
        counts = ("epochs", "global_batch_size", "eval_batch_size")
        require_each(self, "train", counts, lambda value: value >= 1, "must be >= 1")
        names, allowed = ("seed", "max_nonfinite_updates"), "must be >= 0 and below 2^63"
        require_each(self, "train", names, lambda value: 0 <= value < 2**63, allowed)
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
        require_effect(self, "train", "ema_warmup", decay is not None, "train.ema_decay")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Choose where a run writes its files, when it saves, and what it continues.

    A run also saves a checkpoint after an evaluation that is the best so far, at its end, and when
    a signal stops it.

    Args:
        output_dir: Folder to write to.
        resume: `auto` continues the run in `output_dir` if that folder holds one. `none` requires a
            folder without a run. A path starts a run in `output_dir` from that checkpoint, which
            must have the same config; the same command continues the run later.
        allow_world_size_change: Whether the run may continue with another number of processes or
            another `train.batch_size_per_device`. Mixup, CutMix, random erasing, drop path and
            dropout then draw other random numbers, and sums round differently.
        log_every: Number of updates between two records of training, at least 1. The end of an
            epoch is recorded too.
        dense_updates: Number of updates at the start of the run that are recorded one by one, at
            least 0. Later updates are recorded as means over `log_every` updates.
        eval_every_epochs: Number of epochs between two evaluations, at least 1. The last epoch is
            always evaluated.
        save_every_epochs: Number of epochs between two checkpoints, at least 1.
        save_every_updates: Number of updates between two additional checkpoints, at least 1; null
            for none.
        keep: Number of newest checkpoints that are kept, at least 1. The best checkpoint is always
            kept.
        trackers: Accelerate's names of the trackers that get the records, such as `tensorboard` or
            `wandb`; their packages must be installed. The file metrics.jsonl gets all records
            anyway.
        report: Whether a finished run writes report.html.

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
        counts = ("log_every", "eval_every_epochs", "save_every_epochs", "keep")
        require_each(self, "run", counts, lambda value: value >= 1, "must be >= 1")
        dense, updates = self.dense_updates, self.save_every_updates
        require(dense >= 0, "run.dense_updates", dense, "must be >= 0")
        allowed = "must be >= 1, or null for off"
        require(updates is None or updates >= 1, "run.save_every_updates", updates, allowed)


@dataclass(frozen=True, kw_only=True)
class LipschitzConfig:
    """Choose how to monitor and limit Lipschitz constants in training.

    All parts are off by default. If any part is on and every layer of the model has a rule, the
    proved bound of the model is computed at the end of every epoch, and recorded with the
    evaluation.

    Args:
        monitor_every: Number of updates between two records of singular values, residual scales,
            attention and gradients, at least 1; null is off. Every tenth record has the proved
            bound too, if the model has one.
        sigma_cap: Largest spectral norm of a linear layer or convolution, above 0 and at most 1e15;
            null is off.
        residual_scale_cap: Largest absolute scale of a residual branch, above 0 and at most 1e15;
            null is off.
        gain_cap: Largest absolute gain of CenterNorm, above 0 and at most 1e15; null is off.
        cap_mode: With `project`, `sigma_cap` holds after every update. With `soft`, every update
            removes the share `cap_strength` of what exceeds it, and the end of an epoch removes the
            rest. The other two caps hold after every update in both modes.
        cap_strength: Share of what exceeds `sigma_cap` that `soft` removes in every update, in
            (0, 1].
        orthogonal: Whether to keep every matrix but the classifier orthogonal, queries, keys and
            values each on their own. Their norms are at most 1 if no update brings one to 2 or
            more; at a learning rate that does, the weights grow until the run stops. `sigma_cap`
            must be null then.
        update_limit: Largest spectral norm of an update of a linear layer or convolution, as a
            share of the norm of its weight, above 0 and at most 1e15; null is off.
        bound_limit: Largest proved bound of the model, above 0; null is off. The run stops at the
            end of an epoch if the bound is larger, and a model without a bound is refused.

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
        limits = ("sigma_cap", "residual_scale_cap", "gain_cap", "update_limit")
        most = 1e15  # far below float32's range
        allowed = f"must be > 0 and at most {most:g}, or null for off"
        require_each(self, "lipschitz", limits, lambda v: v is None or 0 < v <= most, allowed)
        bound, strength = self.bound_limit, self.cap_strength
        allowed = "must be > 0, or null for off"
        require(bound is None or bound > 0, "lipschitz.bound_limit", bound, allowed)
        require(0 < strength <= 1, "lipschitz.cap_strength", strength, "must be in (0, 1]")
        alone = self.sigma_cap is None or not self.orthogonal
        allowed = "lipschitz.orthogonal=true sets the norms; set one of the two"
        require(alone, "lipschitz.sigma_cap", self.sigma_cap, allowed)
        for name, works, needs in (
            ("cap_mode", self.sigma_cap is not None, "lipschitz.sigma_cap"),
            ("cap_strength", self.cap_mode == "soft", "lipschitz.cap_mode=soft"),
        ):
            require_effect(self, "lipschitz", name, works, needs)


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
