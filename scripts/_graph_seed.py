"""One seed of a graph run: its batches, its training, and the summary over seeds."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, RandomNodeLoader
from tqdm import tqdm

from data.graphs import TreeBatches, TreeNeighborsMatch, graph_root, load_graph
from lipsformer.graph import create_model
from lipsformer.graph.config import GraphConfig, GraphDataConfig
from lipsformer.graph.training import fit


def load_batches(config: GraphDataConfig) -> tuple[Iterable[Data], Iterable[Data], int, int]:
    """Return training batches, evaluation batches, the number of features and that of classes."""
    if config.name == "trees":
        trees = TreeNeighborsMatch(config.tree_depth, config.num_trees, config.tree_seed)
        batches = TreeBatches(trees, trees.num_train, config.batch_size, shuffle=True)
        evaluation = TreeBatches(trees, len(trees), config.batch_size)
        return batches, evaluation, trees[0].num_features, trees.num_leaves
    data = load_graph(
        config.name,
        graph_root(config.root),
        split=config.split,
        normalize_features=config.normalize_features,
        undirected=config.undirected,
        missing_rate=config.missing_rate,
        missing_seed=config.missing_seed,
        download=config.download,
    )
    batches: Iterable[Data] = [data]
    if config.loader == "neighbor":
        batches = NeighborLoader(
            data,
            list(config.num_neighbors),
            input_nodes=data.train_mask,
            batch_size=config.batch_size,
            shuffle=True,
            transform=_only_seed_nodes,
        )
    elif config.loader == "partition":
        batches = RandomNodeLoader(data, config.num_parts, shuffle=True)
    return batches, [data], data.num_features, int(data.y.max()) + 1


def _only_seed_nodes(batch: Data) -> Data:
    """Remove all sampled neighbors from the training mask."""
    batch.train_mask[batch.batch_size :] = False
    return batch


def train_seed(
    config: GraphConfig, seed: int, folder: Path | None = None, progress: bool = False
) -> dict[str, Any]:
    """Train one seed of a config and return its outcome; see `fit`."""
    train_batches, eval_batches, num_features, num_classes = load_batches(config.data)

    def build_model() -> torch.nn.Module:
        model = config.model
        return create_model(
            model.name,
            num_features,
            model.hidden_channels,
            num_classes,
            model.num_layers,
            **model.kwargs,
        )

    writer = None
    if config.run.tensorboard and folder is not None:
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency

        writer = SummaryWriter(str(folder / f"tensorboard-seed{seed}"))
    with tqdm(total=config.train.epochs, desc=f"seed {seed}", disable=not progress) as bar:

        def on_epoch(record: dict[str, Any]) -> None:
            bar.update(record["epoch"] + 1 - bar.n)
            bar.set_postfix(loss=f"{record['loss']:.3f}", val=f"{record['val_acc']:.3f}")
            if writer is not None:
                for name, value in record.items():
                    if isinstance(value, float):
                        writer.add_scalar(name, value, record["epoch"])

        result = fit(
            build_model,  # pyright: ignore[reportArgumentType]
            train_batches,
            eval_batches,
            config.train,
            seed,
            device=config.run.device,
            folder=folder,
            checkpoint_every=config.run.checkpoint_every,
            on_epoch=on_epoch,
        )
    if writer is not None:
        writer.close()
    return result


def summarize(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean and sample standard deviation over seeds, in percent."""
    summary: dict[str, Any] = {
        "seeds": len(results),
        "diverged": sum(result["diverged"] for result in results),
    }
    for key in ("test_acc", "last_test_acc", "val_acc", "highest_train_acc"):
        values = [100 * result[key] for result in results]
        summary[key] = round(statistics.mean(values), 2)
        summary[f"{key}_std"] = round(statistics.stdev(values), 2) if len(values) > 1 else None
    summary["seconds"] = round(sum(result["seconds"] for result in results), 1)
    return summary
