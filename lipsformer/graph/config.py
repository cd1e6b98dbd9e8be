"""The schema of graph runs and sweeps; read with ``lipsformer._configfile.read_config``."""

from dataclasses import dataclass, field
from typing import Any, Literal

from lipsformer._configfile import require

__all__ = ["DataConfig", "GraphConfig", "ModelConfig", "RunConfig", "SweepConfig", "TrainConfig"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network; `kwargs` are the keyword arguments of its class."""

    name: str
    hidden_channels: int = 64
    num_layers: int = 2
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("hidden_channels", "num_layers"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name}", value, "must be >= 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which graph, and in which pieces it is trained.

    `root` defaults to the environment variable LIPSFORMER_DATA, else `datasets`, with the graphs in
    its folder `graphs`. `split` is the number of the split where a data set has several.
    `missing_rate` is the share of the nodes outside the training set whose features are set to
    zero, drawn from `missing_seed`. `loader` trains on the whole graph at once, on sampled
    neighbourhoods or on the parts of a random partition; evaluation always sees the whole graph.
    `tree_depth`, `num_trees` and `tree_seed` belong to `name: trees`, where `batch_size` counts
    trees.
    """

    name: str
    root: str | None = None
    download: bool = False
    split: int = 0
    normalize_features: bool = True
    undirected: bool = False
    missing_rate: float = 0.0
    missing_seed: int = 0
    loader: Literal["full", "neighbor", "partition"] = "full"
    batch_size: int = 256
    num_neighbors: tuple[int, ...] = (10, 10)
    num_parts: int = 8
    tree_depth: int = 3
    num_trees: int = 8000
    tree_seed: int = 0

    def __post_init__(self) -> None:
        rate = self.missing_rate
        require(0 <= rate <= 1, "data.missing_rate", rate, "must be in [0, 1]")
        for name in ("batch_size", "num_parts", "tree_depth", "num_trees"):
            value = getattr(self, name)
            require(value >= 1, f"data.{name}", value, "must be >= 1")
        require(self.split >= 0, "data.split", self.split, "must be >= 0")
        for name in ("missing_seed", "tree_seed"):
            require(getattr(self, name) >= 0, f"data.{name}", getattr(self, name), "must be >= 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Adam, once per seed.

    Training stops after `patience` epochs without a better validation accuracy or loss.
    `plateau_patience` halves the learning rate after so many epochs without a better validation
    loss; null keeps it. `clip_grad` bounds the 2-norm of the gradient. Every `profile_every` epochs
    the gradient norms and the similarity of all layers are recorded, and plotted at the end; 0 for
    never.
    """

    lr: float = 0.005
    weight_decay: float = 5e-4
    epochs: int = 1000
    patience: int = 100
    plateau_patience: int | None = None
    clip_grad: float | None = None
    seeds: tuple[int, ...] = (0,)
    profile_every: int = 0

    def __post_init__(self) -> None:
        require(0 < self.lr < float("inf"), "train.lr", self.lr, "must be > 0 and finite")
        decay = self.weight_decay
        require(0 <= decay < float("inf"), "train.weight_decay", decay, "must be >= 0, finite")
        for name in ("epochs", "patience"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name}", value, "must be >= 1")
        patience, clip = self.plateau_patience, self.clip_grad
        allowed = "must be >= 1, or null"
        require(patience is None or patience >= 1, "train.plateau_patience", patience, allowed)
        require(clip is None or clip > 0, "train.clip_grad", clip, "must be > 0, or null")
        seeds = self.seeds
        require(len(seeds) > 0, "train.seeds", seeds, "name at least one")
        require(len(set(seeds)) == len(seeds), "train.seeds", seeds, "each only once")
        every = self.profile_every
        require(every >= 0, "train.profile_every", every, "must be >= 0")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes and on what it runs.

    A folder with results of the same config is continued: finished seeds are kept, an unfinished
    one goes on from its last checkpoint.
    """

    output_dir: str
    device: str = "cpu"
    checkpoint_every: int = 100
    tensorboard: bool = False

    def __post_init__(self) -> None:
        require(bool(self.output_dir), "run.output_dir", self.output_dir, "name a folder")
        every = self.checkpoint_every
        require(every >= 1, "run.checkpoint_every", every, "must be >= 1")


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Everything that defines one graph run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A grid of graph runs.

    Args:
        config: the run that all others vary, relative to the sweep's file.
        overrides: `key=value` settings for all runs.
        cases: named rows, each a text of `key=value` overrides separated by blanks.
        grid: `key=value,value,...`; every case runs with every combination.
        seeds: each run's seeds.
        output_dir: where results, table and plot go.
        num_workers: parallel processes, one thread each.
        x: grid key on the plot's x axis; null for no plot.
        log_x: logarithmic x axis.
    """

    config: str
    overrides: tuple[str, ...] = ()
    cases: dict[str, str] = field(default_factory=dict)
    grid: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    output_dir: str
    num_workers: int = 1
    x: str | None = None
    log_x: bool = False

    def __post_init__(self) -> None:
        require(self.num_workers >= 1, "num_workers", self.num_workers, "must be >= 1")
        require(len(self.seeds) > 0, "seeds", self.seeds, "name at least one")
        for entry in self.grid:
            key, separator, values = entry.partition("=")
            allowed = "must be key=value,value,..."
            require(bool(separator and key and values), "grid", entry, allowed)
        keys = [entry.partition("=")[0] for entry in self.grid]
        allowed = f"must be a key of grid: {', '.join(keys)}"
        require(self.x is None or self.x in keys, "x", self.x, allowed)
