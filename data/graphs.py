"""Load citation, Wikipedia, WebKB and actor graphs and ogbn-arxiv, and draw Tree-NeighborsMatch.

`generated-arxiv` is a drawn graph of ogbn-arxiv's size, to measure time and memory without data.

A graph is one PyG `Data` with `x`, `edge_index`, `y` and the masks of its three splits. Trees are
many such graphs, in which only the root has a label.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.datasets import Actor, Planetoid, WebKB, WikipediaNetwork
from torch_geometric.utils import index_to_mask, to_undirected

from data.errors import DataError, first_line
from data.generated_graphs import generated_arxiv
from data.root import data_root


class _Source(NamedTuple):
    """Where a data set lies below the root of the graphs, and which class of PyG reads it.

    Attributes:
        place: File or folder that must be there.
        kind: The class.
        folder: Folder that the class takes as its root.
        name: What the class calls the data set, if it reads several.
    """

    place: str
    kind: type[InMemoryDataset]
    folder: str = ""
    name: str | None = None


_SOURCES = {
    "cora": _Source("Cora/raw", Planetoid, name="Cora"),
    "citeseer": _Source("CiteSeer/raw", Planetoid, name="CiteSeer"),
    "pubmed": _Source("PubMed/raw", Planetoid, name="PubMed"),
    "pubmed-partial": _Source("PubMed-partial/PubMed/raw", Planetoid, "PubMed-partial", "PubMed"),
    "chameleon": _Source("chameleon/geom_gcn/raw", WikipediaNetwork, name="chameleon"),
    "squirrel": _Source("squirrel/geom_gcn/raw", WikipediaNetwork, name="squirrel"),
    "texas": _Source("texas/raw", WebKB, name="texas"),
    "cornell": _Source("cornell/raw", WebKB, name="cornell"),
    "wisconsin": _Source("wisconsin/raw", WebKB, name="wisconsin"),
    "actor": _Source("actor/raw", Actor, "actor"),
}
_ARXIV = "ogbn-arxiv"  # which OGB reads

_GENERATED: dict[str, Callable[[], Data]] = {"generated-arxiv": generated_arxiv}


def graph_root(root: str | None) -> Path:
    """Return the folder `graphs` below the folder of all data sets (`data.root.data_root`)."""
    return data_root(root) / "graphs"


def load_graph(
    name: str,
    root: str | Path,
    *,
    split: int = 0,
    split_seed: int | None = None,
    normalize_features: bool = True,
    undirected: bool = False,
    missing_rate: float = 0.0,
    missing_seed: int = 0,
    download: bool = False,
) -> Data:
    """Read one graph with its split.

    Args:
        name: One of the names in `_SOURCES` and `_GENERATED`, or `ogbn-arxiv`; `pubmed-partial` has
            features for few nodes only.
        root: Folder that holds the graphs in the layout of PyG and OGB.
        split: Number of the split; 0 if there is only one.
        split_seed: Seed of a split that `random_split` draws in place of the graph's own ones.
        normalize_features: Whether to divide the features of every node by their sum.
        undirected: Whether to add the reverse of every edge.
        missing_rate: Share, in [0, 1], of the nodes outside the training set that lose their
            features.
        missing_seed: Seed that draws these nodes.
        download: Whether to download a graph that is missing.

    Raises:
        DataError: If the name or the split is unknown, the graph is missing, incomplete or cannot
            be downloaded, a package is missing, or the features are not finite.
    """
    data: Any = _GENERATED[name]() if name in _GENERATED else _read(name, Path(root), download)
    _check(data, name)
    masks = {key: data[key] for key in ("train_mask", "val_mask", "test_mask")}
    if split_seed is not None:
        masks = random_split(data.y, split_seed)
    for key, mask in masks.items():
        num_splits = mask.size(1) if mask.dim() == 2 else 1
        if split >= num_splits:
            raise DataError(
                f"data.split={split} is not possible: {name} has {num_splits} splits, from 0"
            )
        data[key] = mask[:, split] if mask.dim() == 2 else mask
    if undirected:
        data.edge_index = to_undirected(data.edge_index, num_nodes=data.num_nodes)
    if normalize_features:
        data.x = data.x / data.x.sum(dim=1, keepdim=True).clamp_min(1.0)
    data.x = data.x.masked_fill(
        missing_nodes(data.train_mask, missing_rate, missing_seed)[:, None], 0
    )
    return data


def _read(name: str, root: Path, download: bool) -> Any:
    if name not in (*_SOURCES, _ARXIV):
        names = ", ".join(["trees", *_SOURCES, _ARXIV, *_GENERATED])
        raise DataError(f"data.name={name!r} is not known; choose {names}")
    # OGB asks on the terminal whether to delete and update a folder without this file.
    place = "ogbn_arxiv/RELEASE_v1.txt" if name == _ARXIV else _SOURCES[name].place
    if not download and not (root / place).exists():
        raise DataError(
            f"{name} is not in {root / place}; set data.download=true or change data.root"
        )
    try:
        return _read_arxiv(root, download) if name == _ARXIV else _read_pyg(name, root, download)
    except ImportError as error:
        raise DataError(f"{name} cannot be read: {error}; pip install '.[graph]'") from error
    except Exception as error:  # of PyG or OGB, of the network, or of a damaged file
        reason = first_line(error)
        if download:
            raise DataError(
                f"data.download=true: {name} cannot be fetched into {root}: {reason}; copy the "
                "files of PyG or OGB there"
            ) from error
        raise DataError(
            f"{name} in {root / place} is incomplete or damaged: {reason}; set data.download=true "
            "to fetch what is missing, or change data.root"
        ) from error


def _read_pyg(name: str, root: Path, download: bool) -> Any:
    _, kind, folder, own_name = _SOURCES[name]
    of_several = () if own_name is None else (own_name,)
    return _reader(kind, download)(str(root / folder), *of_several)[0]


def _reader(kind: Any, may_download: bool) -> Any:
    """Return a data set class of PyG or OGB, which raises an error where it must not download."""
    if may_download:
        return kind

    def download(self: Any) -> None:
        raise FileNotFoundError("some of its raw files are missing")

    return type(kind.__name__, (kind,), {"download": download})


def _read_arxiv(root: Path, download: bool) -> Any:
    from ogb.nodeproppred import PygNodePropPredDataset  # slow to import, and only needed here

    # OGB 1.3.6 reads its own file with torch.load, which knows no class of PyG by default.
    with torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage]):
        dataset = _reader(PygNodePropPredDataset, download)(_ARXIV, str(root))
    data = dataset[0]
    data.y = data.y.flatten()
    nodes = dataset.get_idx_split()
    for key, part in (("train", "train"), ("val", "valid"), ("test", "test")):
        data[f"{key}_mask"] = index_to_mask(nodes[part], data.num_nodes)
    return data


def random_split(y: Tensor, seed: int) -> dict[str, Tensor]:
    """Draw 20 training nodes of each class, then 500 validation and 1,000 test nodes of the others.

    The same seed gives the split of tunedGNN's option `--rand_split_class` (Luo et al. 2024).

    Args:
        y: Classes, [V].
        seed: Seed of the draw.

    Returns:
        `train_mask`, `val_mask` and `test_mask`, [V] each.
    """
    generator = torch.Generator().manual_seed(seed)
    train, others = [], []
    for label in y.unique():
        nodes = (y.flatten() == label).nonzero().flatten()
        nodes = nodes[torch.randperm(len(nodes), generator=generator)]
        train.append(nodes[:20])
        others.append(nodes[20:])
    rest = torch.cat(others)
    rest = rest[torch.randperm(len(rest), generator=generator)]
    parts = {"train": torch.cat(train), "val": rest[:500], "test": rest[500:1500]}
    return {f"{part}_mask": index_to_mask(nodes, len(y)) for part, nodes in parts.items()}


def missing_nodes(train_mask: Tensor, rate: float, seed: int) -> Tensor:
    """Draw the nodes that lose their features.

    Args:
        train_mask: The training nodes, which keep theirs, [V].
        rate: Share of the other nodes, in [0, 1].
        seed: Seed of the draw.

    Returns:
        [V], True for a node that loses its features.
    """
    candidates = (~train_mask).nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(candidates), generator=generator)
    return index_to_mask(candidates[order[: round(rate * len(candidates))]], len(train_mask))


class TreeNeighborsMatch:
    """Draw binary trees in which the root must name the value of the leaf that has its key.

    A tree of depth r has 2^r leaves. Their keys are 0 ... 2^r - 1 in order, and their values are a
    random permutation of the same numbers. The root holds one key, and its label is the value of
    the leaf with that key. Every edge leads from child to parent, so r + 1 layers carry all leaves
    to the root and squeeze them into one vector.

    The features are [one-hot key, one-hot value], with one extra column each for "none". 80 % of
    the trees are for training, and 10 % each for validation and test.

    Example:
        >>> trees = TreeNeighborsMatch(depth=2, num_trees=10)
        >>> len(trees), trees[0].num_nodes, trees[0].num_features
        (10, 7, 10)

    Reference:
        Alon and Yahav 2021, "On the Bottleneck of Graph Neural Networks".
    """

    def __init__(self, depth: int, num_trees: int, seed: int = 0) -> None:
        """Draw the trees.

        Args:
            depth: Depth r >= 1.
            num_trees: Number of trees.
            seed: Seed that draws keys and values.
        """
        self.num_leaves = 2**depth
        generator = torch.Generator().manual_seed(seed)
        self.keys = torch.randint(self.num_leaves, (num_trees,), generator=generator)
        shuffled = torch.rand(num_trees, self.num_leaves, generator=generator)
        self.values = shuffled.argsort(dim=1)
        children = torch.arange(1, 2 * self.num_leaves - 1)  # node 0 is the root, leaves come last
        self.edge_index = torch.stack([children, (children - 1) // 2])
        self._edges_by_size: dict[int, Tensor] = {}
        self._place = (torch.arange(num_trees, dtype=torch.double) + 0.5) / num_trees
        self.num_train = int((self._place < 0.8).sum())

    def __len__(self) -> int:
        """Return the number of trees."""
        return len(self.keys)

    def __getitem__(self, index: int) -> Data:
        """Build tree `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"tree {index} does not exist; there are {len(self)} trees")
        return self.batch(torch.tensor([index]))

    def batch(self, index: Tensor) -> Data:
        """Build the trees `index`, [B], as one graph; batches of equal size share `edge_index`."""
        none = self.num_leaves
        num_nodes = 2 * none - 1
        keys = torch.full((len(index), num_nodes), none)
        values = keys.clone()
        keys[:, -none:] = torch.arange(none)
        values[:, -none:] = self.values[index]
        keys[:, 0] = self.keys[index]
        y = torch.full_like(keys, -1)
        y[:, 0] = self.values[index, self.keys[index]]
        root = torch.zeros(num_nodes, dtype=torch.bool)
        root[0] = True
        place = self._place[index, None]
        features = F.one_hot(torch.stack([keys, values], dim=-1), none + 1)
        return Data(
            x=features.float().view(keys.numel(), -1),
            edge_index=self._edges(len(index)),
            y=y.flatten(),
            train_mask=(root & (place < 0.8)).flatten(),
            val_mask=(root & (0.8 <= place) & (place < 0.9)).flatten(),
            test_mask=(root & (place >= 0.9)).flatten(),
        )

    def _edges(self, num_trees: int) -> Tensor:
        if num_trees not in self._edges_by_size:
            offset = torch.arange(num_trees)[:, None] * (2 * self.num_leaves - 1)
            edges = [(row + offset).flatten() for row in self.edge_index]
            self._edges_by_size[num_trees] = torch.stack(edges)
        return self._edges_by_size[num_trees]


class TreeBatches:
    """Iterate over batches of the first `num_trees` trees, in order or in a new random order.

    Example:
        >>> trees = TreeNeighborsMatch(depth=2, num_trees=10)
        >>> [batch.num_nodes for batch in TreeBatches(trees, num_trees=8, batch_size=5)]
        [35, 21]
    """

    def __init__(
        self, trees: TreeNeighborsMatch, num_trees: int, batch_size: int, shuffle: bool = False
    ) -> None:
        """Store the trees and the number of trees per batch."""
        self.trees = trees
        self.num_trees = num_trees
        self.batch_size = batch_size
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[Data]:
        """Yield one batch after the other."""
        order = torch.randperm(self.num_trees) if self.shuffle else torch.arange(self.num_trees)
        return map(self.trees.batch, order.split(self.batch_size))


def _check(data: Any, name: str) -> None:
    bad = (~torch.isfinite(data.x)).any(dim=1).nonzero().flatten()
    if len(bad):
        raise DataError(f"{name}: the features of {len(bad)} nodes are not finite, first {bad[0]}")
    edges, num_nodes = data.edge_index, len(data.x)
    if ((edges < 0) | (edges >= num_nodes)).any():
        raise DataError(f"{name}: an edge names a node outside 0 ... {num_nodes - 1}")
