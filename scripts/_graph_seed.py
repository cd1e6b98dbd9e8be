"""One seed of a graph run: its checks, batches and training, and the summary over seeds."""

import datetime
import json
import statistics
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch_geometric
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from tqdm import tqdm

from data.clusters import ClusterBatches, metis_clusters
from data.errors import DataError
from data.graphs import TreeBatches, TreeNeighborsMatch, graph_root, load_graph
from lipsformer._checks import require
from lipsformer._errors import ConfigError, first_line
from lipsformer._machine import commit, cpu_name
from lipsformer._ranks import on_first_rank, rank_and_count
from lipsformer.engine.lock import FolderLock
from lipsformer.graph import create_model
from lipsformer.graph.batches import SPLITS
from lipsformer.graph.config import GraphConfig, GraphDataConfig, GraphRunConfig
from lipsformer.graph.models.stack import GraphNet
from lipsformer.graph.training import fit
from lipsformer.jsonl import read_jsonl

_MEANS = ("test_acc", "last_test_acc", "val_acc", "highest_train_acc")


class GraphRunData(NamedTuple):
    """What a graph run trains and is evaluated on.

    Attributes:
        train: Training batches of this process; see `fit`.
        evaluation: Evaluation batches.
        num_features: Number of features.
        num_classes: Number of classes.
    """

    train: Iterable[Data]
    evaluation: Iterable[Data]
    num_features: int
    num_classes: int


def load_batches(config: GraphConfig) -> GraphRunData:
    """Read or draw the graphs of a config, and divide them among the steps and processes.

    Raises:
        DataError: See `load_graph` and `metis_clusters`.
        ConfigError: If several processes cannot share the batches.
    """
    own = config.data
    rank, num_ranks = rank_and_count()
    if num_ranks > 1:
        shared = own.name != "trees" and own.loader in ("cluster", "partition")
        allowed = "several processes need cluster or partition, and a graph that is not trees"
        require(shared, "data.loader", own.loader, allowed)
    if own.name == "trees":
        trees = TreeNeighborsMatch(own.tree_depth, own.num_trees, own.tree_seed)
        train = TreeBatches(trees, trees.num_train, own.batch_size, shuffle=True)
        evaluation = TreeBatches(trees, len(trees), own.batch_size)
        return GraphRunData(train, evaluation, trees[0].num_features, trees.num_leaves)
    if num_ranks > 1:  # one process downloads, and its errors are those of all
        on_first_rank(lambda: _read(own) and None)
    data = _read(own)
    train: Iterable[Data] = [data]
    if own.loader == "neighbor":
        if not (find_spec("pyg_lib") or find_spec("torch_sparse")):
            raise DataError(
                "data.loader=neighbor needs pyg-lib (https://github.com/pyg-team/pyg-lib); install "
                "it, or use data.loader=cluster or data.loader=partition"
            )
        train = NeighborLoader(
            data,
            list(own.num_neighbors),
            input_nodes=data.train_mask,
            batch_size=own.batch_size,
            shuffle=True,
            transform=_only_seed_nodes,
        )
    elif own.loader != "full":
        hops = config.model.num_layers + 1 if own.halo_hops is None else own.halo_hops
        edge_index: Any = data.edge_index
        metis = partial(metis_clusters, edge_index, len(data.y), own.num_parts)
        train = ClusterBatches(
            data,
            own.num_parts,
            parts_per_step=own.parts_per_step,
            clusters=on_first_rank(metis) if own.loader == "cluster" else None,
            halo_hops=hops,
            rank=rank,
            num_ranks=num_ranks,
            draw_seed=lambda: on_first_rank(lambda: int(torch.randint(2**62, ()))),
        )
    return GraphRunData(train, [data], data.num_features, int(data.y.max()) + 1)


def _read(config: GraphDataConfig) -> Data:
    data = load_graph(
        config.name,
        graph_root(config.root),
        split=config.split,
        split_seed=config.split_seed,
        normalize_features=config.normalize_features,
        undirected=config.undirected,
        missing_rate=config.missing_rate,
        missing_seed=config.missing_seed,
        download=config.download,
    )
    for split in SPLITS:
        if not data[f"{split}_mask"].any():
            raise DataError(
                f"the {split} split of {config.name} is empty with data.split={config.split} and "
                f"data.split_seed={config.split_seed}; choose another split, or "
                "data.split_seed=null for the public one, because every split needs a node"
            )
    return data


def _only_seed_nodes(batch: Data) -> Data:
    """Remove all sampled neighbors from the training mask."""
    batch.train_mask[batch.batch_size :] = False
    return batch


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other commands out of a folder; all processes of a run call this together.

    Raises:
        ConfigError: If another command is writing into the folder, or if it cannot be created.
    """
    lock = FolderLock(folder)
    try:
        on_first_rank(lock.acquire)
    except OSError as error:
        raise ConfigError(
            f"the output folder {folder} cannot be used: {error.strerror}; choose another one"
        ) from error
    try:
        yield
    finally:
        lock.release()  # does nothing in a process that is not the owner


def require_machine(run: GraphRunConfig) -> None:
    """Raise a `ConfigError` if this machine lacks the device or the package that a run needs."""
    known = ["cpu"]
    if count := torch.accelerator.device_count():
        accelerator = str(torch.accelerator.current_accelerator())
        known += [accelerator, *(f"{accelerator}:{index}" for index in range(count))]
    require(run.device in known, "run.device", run.device, f"this machine has {', '.join(known)}")
    can_log = not run.tensorboard or find_spec("tensorboard") is not None
    require(can_log, "run.tensorboard", run.tensorboard, "it needs pip install tensorboard")


def require_model(config: GraphConfig, data: GraphRunData) -> None:
    """Raise a `ConfigError` if the model of a config cannot be built.

    The model is built on the meta device, where tensors have no memory.
    """
    model = config.model
    try:
        with torch.device("meta"):
            build_model(config, data)
    except Exception as error:  # wrong arguments raise whatever the class and torch raise
        kwargs = f" with model.kwargs={model.kwargs}" if model.kwargs else ""
        raise ConfigError(
            f"model.name={model.name!r}{kwargs} cannot be built: {first_line(error)}"
        ) from error


def build_model(config: GraphConfig, data: GraphRunData) -> GraphNet:
    """Build the model of a config for its data."""
    model = config.model
    return create_model(
        model.name,
        data.num_features,
        model.hidden_channels,
        data.num_classes,
        model.num_layers,
        **model.kwargs,
    )


def train_seed(
    config: GraphConfig,
    data: GraphRunData,
    seed: int,
    folder: Path | None = None,
    *,
    device: str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train one seed of a config on its data and return its outcome and its environment.

    The outcome is that of `fit`, and the environment that of `seed_environment` at the start.

    Args:
        config: The config of the run.
        data: What `load_batches` returns for it.
        seed: The seed.
        folder: See `fit`.
        device: Device of this process; None for the config's.
        progress: Whether to show the progress on the terminal.
    """
    start = seed_environment()
    tensorboard = config.run.tensorboard and folder is not None and rank_and_count()[0] == 0
    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency
    writer = None
    with (
        tqdm(total=config.train.epochs, desc=f"seed {seed}", disable=not progress) as bar,
        ExitStack() as stack,
    ):

        def on_epoch(record: dict[str, Any]) -> None:
            nonlocal writer
            bar.update(record["epoch"] + 1 - bar.n)
            bar.set_postfix(loss=f"{record['loss']:.3f}", val=f"{record['val_acc']:.3f}")
            if not tensorboard:
                return
            if writer is None:  # only the first record tells from which epoch the run continues
                writer = stack.enter_context(
                    SummaryWriter(
                        str(folder / f"tensorboard-seed{seed}"), purge_step=record["epoch"]
                    )
                )
            for name, value in record.items():
                if isinstance(value, float):
                    writer.add_scalar(name, value, record["epoch"])

        outcome = fit(
            lambda: build_model(config, data),
            data.train,
            data.evaluation,
            config.train,
            seed,
            device=device or config.run.device,
            folder=folder,
            checkpoint_every=config.run.checkpoint_every,
            on_epoch=on_epoch,
        )
    return {**outcome, "environment": start}


def seed_environment() -> dict[str, Any]:
    """Return what a seed is trained with: commit, date, processor, threads, versions."""
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
    }


def read_results(log: Path, *keys: str) -> list[dict[str, Any]]:
    """Return the results of finished seeds that a file holds; a missing file holds none.

    Args:
        log: The file.
        *keys: What every result must have besides its seed and what `summarize` needs.

    Raises:
        ConfigError: If a line is no such result.
        ValueError: See `read_jsonl`.
    """
    results = list(read_jsonl(log))
    for result in results:
        present = result if isinstance(result, dict) else ()
        missing = {"seed", "diverged", "seconds", *_MEANS, *keys}.difference(present)
        if missing:
            raise ConfigError(
                f"{log} has the line {json.dumps(result):.60}, which is no result without "
                f"{', '.join(sorted(missing))}: remove the line to train that run again"
            )
    return results


def summarize(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean and sample standard deviation over seeds, in percent."""
    summary: dict[str, Any] = {
        "seeds": len(results),
        "diverged": sum(result["diverged"] for result in results),
    }
    for key in _MEANS:
        values = [100 * result[key] for result in results]
        summary[key] = round(statistics.mean(values), 2)
        summary[f"{key}_std"] = round(statistics.stdev(values), 2) if len(values) > 1 else None
    summary["seconds"] = round(sum(result["seconds"] for result in results), 1)
    return summary
