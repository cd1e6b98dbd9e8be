"""Define the configs of graph runs and sweeps, which `read_config` reads from YAML files."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from lipsformer._checks import require, require_each, require_effect
from lipsformer._renamed import renamed

__all__ = [
    "GraphConfig",
    "GraphDataConfig",
    "GraphModelConfig",
    "GraphRunConfig",
    "GraphSweepConfig",
    "GraphTrainConfig",
]


@dataclass(frozen=True, kw_only=True)
class GraphModelConfig:
    """Choose the network.

    Args:
        name: Name of the network, such as `deep_gat`; docs/graph.md lists all.
        hidden_channels: Width of the layers, or of each head in models with heads; at least 1.
        num_layers: Number of layers, at least 1.
        kwargs: Keyword arguments of the model's class.

    Example:
        >>> GraphModelConfig(name="deep_gat", num_layers=5, kwargs={"heads": 8}).hidden_channels
        64
    """

    name: str
    hidden_channels: int = 64
    num_layers: int = 2
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = ("hidden_channels", "num_layers")
        require_each(self, "model", counts, lambda value: value >= 1, "must be >= 1")


@dataclass(frozen=True, kw_only=True)
class GraphDataConfig:
    """Choose the graph and how training divides it. Evaluation always sees the whole graph.

    Args:
        name: Name of the graph, such as `cora`, or `trees` for Tree-NeighborsMatch; docs/graph.md
            lists all.
        root: Folder that holds the folder `graphs`; null for the environment variable
            LIPSFORMER_DATA, or `datasets` if that is not set.
        download: Whether to download a graph that is missing.
        split: Number of the split, from 0, for data sets that have several.
        split_seed: Seed of a random split with 20 training nodes per class, 500 validation nodes
            and 1,000 test nodes, at least 0 and below 2^63; null for the split that comes with the
            data.
        normalize_features: Whether to divide the features of every node by their sum.
        undirected: Whether to add the reverse of every edge.
        missing_rate: Share of the nodes outside the training set whose features are set to zero,
            in [0, 1].
        missing_seed: Seed that draws these nodes, at least 0 and below 2^63.
        loader: `full` trains on the whole graph, `neighbor` on sampled neighborhoods, `cluster`
            on METIS clusters, and `partition` on random parts that are drawn in every epoch.
        batch_size: Number of seed nodes of `neighbor`, or of trees, in a batch; at least 1.
        num_neighbors: Number of neighbors that `neighbor` samples in each layer.
        num_parts: Number of parts of `cluster` and `partition`, at least 1.
        parts_per_step: Number of parts that a step joins, with the edges between them; at least 1.
        halo_hops: With several processes, number of hops of neighbors within the step that each
            one adds to its parts, at least 0; null for the number of layers and one more.
        tree_depth: Depth of the trees, from 1 to 15.
        num_trees: Number of trees, at least 10, so that no split is empty.
        tree_seed: Seed that draws the trees, at least 0 and below 2^63.

    Example:
        >>> GraphDataConfig(name="cora", missing_rate=1.0).loader
        'full'
    """

    name: str
    root: str | None = None
    download: bool = False
    split: int = 0
    split_seed: int | None = None
    normalize_features: bool = True
    undirected: bool = False
    missing_rate: float = 0.0
    missing_seed: int = 0
    loader: Literal["full", "neighbor", "cluster", "partition"] = "full"
    batch_size: int = 256
    num_neighbors: tuple[int, ...] = (10, 10)
    num_parts: int = 8
    parts_per_step: int = 1
    halo_hops: int | None = None
    tree_depth: int = 3
    num_trees: int = 8000
    tree_seed: int = 0

    def __post_init__(self) -> None:
        rate = self.missing_rate
        require(0 <= rate <= 1, "data.missing_rate", rate, "must be in [0, 1]")
        counts = ("batch_size", "num_parts", "parts_per_step")
        require_each(self, "data", counts, lambda value: value >= 1, "must be >= 1")
        depth, allowed = self.tree_depth, "must be in 1..15, as deeper trees need over 64 GB each"
        require(1 <= depth <= 15, "data.tree_depth", depth, allowed)
        allowed = "must be >= 10, so that no split is empty"
        require(self.num_trees >= 10, "data.num_trees", self.num_trees, allowed)
        hops = self.halo_hops
        require(hops is None or hops >= 0, "data.halo_hops", hops, "must be >= 0, or null")
        require(self.split >= 0, "data.split", self.split, "must be >= 0")
        seeds, allowed = ("missing_seed", "tree_seed"), "must be >= 0 and below 2^63"
        require_each(self, "data", seeds, lambda value: 0 <= value < 2**63, allowed)
        seed = self.split_seed
        allowed = "must be >= 0 and below 2^63, or null"
        require(seed is None or 0 <= seed < 2**63, "data.split_seed", seed, allowed)
        require_effect(self, "data", "split", seed is None, "data.split_seed=null")
        of_graphs = ("root", "download", "split", "split_seed", "normalize_features", "undirected")
        for name in (*of_graphs, "missing_rate", "loader"):
            works = self.name != "trees"
            require_effect(self, "data", name, works, "a data.name other than trees")
        for name in ("tree_depth", "num_trees", "tree_seed"):
            require_effect(self, "data", name, self.name == "trees", "data.name=trees")
        require_effect(self, "data", "missing_seed", rate > 0, "data.missing_rate above 0")
        parts = ("cluster", "partition")
        for name, loaders in (
            ("num_neighbors", ("neighbor",)),
            ("num_parts", parts),
            ("parts_per_step", parts),
            ("halo_hops", parts),
        ):
            needs = f"data.loader={' or '.join(loaders)}"
            require_effect(self, "data", name, self.loader in loaders, needs)
        batched = self.loader == "neighbor" or self.name == "trees"
        needs = "data.loader=neighbor or data.name=trees"
        require_effect(self, "data", "batch_size", batched, needs)


@dataclass(frozen=True, kw_only=True)
class GraphTrainConfig:
    """Set up the training with Adam, which runs once per seed.

    Args:
        lr: Learning rate, above 0.
        weight_decay: Weight decay, at least 0.
        layer_weight_decay: Weight decay of the layers between the encoder and the head, at least 0;
            null for `weight_decay`.
        epochs: Largest number of epochs, at least 1.
        patience: Number of epochs without a better value of `stop_on` after which training stops,
            at least 1.
        stop_on: What must get better on the validation nodes: the `accuracy`, the `loss`, or
            `either` of the two.
        plateau_patience: Number of epochs in a row, at least 1, whose validation loss may fail to
            get better by 0.01 %. One more halves the learning rate. Null keeps it constant.
        clip_grad: Largest 2-norm of the gradient, above 0; null for no limit.
        seeds: Seeds, each at least 0 and below 2^32. Every seed is one training.
        profile_every: Number of epochs between two records of the gradient norms and the similarity
            of all layers, which are plotted at the end; 0 for none.

    Example:
        >>> GraphTrainConfig(seeds=(0, 1, 2)).lr
        0.005
    """

    lr: float = 0.005
    weight_decay: float = 5e-4
    layer_weight_decay: float | None = None
    epochs: int = 1000
    patience: int = 100
    stop_on: Literal["either", "accuracy", "loss"] = "either"
    plateau_patience: int | None = None
    clip_grad: float | None = None
    seeds: tuple[int, ...] = (0,)
    profile_every: int = 0

    def __post_init__(self) -> None:
        require(0 < self.lr < float("inf"), "train.lr", self.lr, "must be > 0 and finite")
        decay, in_layers = self.weight_decay, self.layer_weight_decay
        require(0 <= decay < float("inf"), "train.weight_decay", decay, "must be >= 0, finite")
        allowed = "must be >= 0 and finite, or null"
        known = in_layers is None or 0 <= in_layers < float("inf")
        require(known, "train.layer_weight_decay", in_layers, allowed)
        counts = ("epochs", "patience")
        require_each(self, "train", counts, lambda value: value >= 1, "must be >= 1")
        patience, clip = self.plateau_patience, self.clip_grad
        allowed = "must be >= 1, or null"
        require(patience is None or patience >= 1, "train.plateau_patience", patience, allowed)
        require(clip is None or clip > 0, "train.clip_grad", clip, "must be > 0, or null")
        _check_seeds("train.seeds", self.seeds)
        every = self.profile_every
        require(every >= 0, "train.profile_every", every, "must be >= 0")


@dataclass(frozen=True, kw_only=True)
class GraphRunConfig:
    """Choose the output folder and the device.

    A run continues in a folder that holds results of the same config. It keeps finished seeds, and
    continues an unfinished seed from its last checkpoint.

    Args:
        output_dir: Folder to write to.
        device: Device to train on, such as `cpu` or `cuda`.
        checkpoint_every: Number of epochs between two checkpoints, at least 1.
        tensorboard: Whether to write TensorBoard logs.

    Example:
        >>> GraphRunConfig(output_dir="outputs/graph/cora").device
        'cpu'
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
    """Define one graph run.

    Example:
        >>> config = GraphConfig(
        ...     model=GraphModelConfig(name="gcn"),
        ...     data=GraphDataConfig(name="cora"),
        ...     run=GraphRunConfig(output_dir="outputs/graph/cora"),
        ... )
        >>> config.train.epochs
        1000
    """

    model: GraphModelConfig
    data: GraphDataConfig
    train: GraphTrainConfig = field(default_factory=GraphTrainConfig)
    run: GraphRunConfig


@dataclass(frozen=True, kw_only=True)
class GraphSweepConfig:
    """Define a grid of graph runs.

    Args:
        config: Config file of the run that all others vary, relative to the file of the sweep.
        overrides: `key=value` settings of all runs.
        cases: Name of each case -> its `key=value` settings, separated by blanks.
        grid: Entries `key=value,value,...`; every case runs with every combination.
        seeds: Seeds of every run, each at least 0 and below 2^32.
        output_dir: Folder of the runs, the table and the plot.
        results: JSONL file of the finished runs; null for `results.jsonl` in `output_dir`.
        num_workers: Number of parallel processes with one thread each, at least 1.
        x: Key of the grid on the x axis of the plot; null for no plot.
        log_x: Whether the x axis is logarithmic.

    Example:
        >>> sweep = GraphSweepConfig(
        ...     config="cora_gat.yaml", grid=("model.num_layers=2,5",), output_dir="outputs/depth"
        ... )
        >>> sweep.num_workers
        1
    """

    config: str
    overrides: tuple[str, ...] = ()
    cases: dict[str, str] = field(default_factory=dict)
    grid: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    output_dir: str
    results: str | None = None
    num_workers: int = 1
    x: str | None = None
    log_x: bool = False

    def __post_init__(self) -> None:
        require(self.num_workers >= 1, "num_workers", self.num_workers, "must be >= 1")
        _check_seeds("seeds", self.seeds)
        for entry in self.grid:
            key, separator, values = entry.partition("=")
            allowed = "must be key=value,value,..."
            require(bool(separator and key and values), "grid", entry, allowed)
            listed = [value.strip() for value in values.split(",")]
            require(len(set(listed)) == len(listed), "grid", entry, "each value only once")
        cases = [setting for text in self.cases.values() for setting in text.split()]
        for setting in (*self.overrides, *cases, *self.grid):
            allowed = "all runs of a sweep have its own seeds, which the key seeds names"
            key, _, value = setting.partition("=")
            require(key != "train.seeds", key, value, allowed)
        keys = [entry.partition("=")[0] for entry in self.grid]
        require(len(set(keys)) == len(keys), "grid", self.grid, "each key only once")
        both = sorted(set(keys) & {setting.partition("=")[0] for setting in cases})
        require(not both, "grid", self.grid, f"a case sets {', '.join(both)} already")
        allowed = f"must be a key of grid: {', '.join(keys)}"
        require(self.x is None or self.x in keys, "x", self.x, allowed)
        for entry in self.grid:
            key, _, values = entry.partition("=")
            fits = key != self.x or all(map(_is_number, values.split(",")))
            require(fits, "x", self.x, f"its values must be numbers, not {values}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _check_seeds(path: str, seeds: tuple[int, ...]) -> None:
    require(len(seeds) > 0, path, seeds, "name at least one")
    require(len(set(seeds)) == len(seeds), path, seeds, "each only once")
    fits = all(0 <= seed < 2**32 for seed in seeds)  # PyG seeds NumPy too, which takes no others
    require(fits, path, seeds, "must be >= 0 and below 2^32")


__getattr__ = renamed(__name__)
