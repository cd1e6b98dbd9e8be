"""Divide a large graph into clusters and join some of them for each training step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import remove_self_loops, subgraph, to_undirected

from data.errors import DataError


def metis_clusters(edge_index: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """Return the cluster of every node, [V], such that few edges join different clusters.

    METIS balances the sizes of the clusters and gives the same clusters in every call.

    Args:
        edge_index: The edges, [2, E]; their direction does not matter.
        num_nodes: Number of nodes V.
        num_parts: Number of clusters, at most V.

    Raises:
        DataError: If pymetis is not installed, or there are more clusters than nodes.

    Reference:
        Karypis and Kumar 1998, "A Fast and High Quality Multilevel Scheme for Partitioning
        Irregular Graphs".
    """
    try:
        import pymetis
    except ModuleNotFoundError:
        raise DataError(
            "data.loader=cluster needs pymetis: pip install 'lipsformer[clusters]', or use random "
            "parts with data.loader=partition"
        ) from None
    if num_parts > num_nodes:
        raise DataError(f"data.num_parts={num_parts} is more than the {num_nodes} nodes")
    source, target = remove_self_loops(to_undirected(edge_index, num_nodes=num_nodes))[0]
    target, order = target.sort(stable=True)
    starts = F.pad(torch.bincount(target, minlength=num_nodes).cumsum(0), (1, 0))
    adjacency = pymetis.CSRAdjacency(
        adj_starts=starts.int().numpy(), adjacent=source[order].int().numpy()
    )
    return torch.tensor(pymetis.part_graph(num_parts, adjacency).vertex_part)


class ClusterBatches:
    """Iterate over joined clusters of a graph, which are drawn anew in every epoch.

    A step sees the nodes of its clusters and all edges among them; edges to other clusters are
    dropped. With several processes, each one computes the outputs of its share of the clusters of
    a step. It also gets the nodes of the step that lie within `halo_hops` edges before its own
    nodes, whose outputs it does not use. `num_train` of a batch counts the training nodes of the
    whole step, and its `train_mask` holds those of the process only.

    Example:
        >>> data = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 2], [1, 3]]), y=torch.zeros(4))
        >>> data.train_mask = data.val_mask = data.test_mask = torch.ones(4, dtype=torch.bool)
        >>> batches = ClusterBatches(data, num_parts=2, clusters=torch.tensor([0, 0, 1, 1]))
        >>> [(batch.num_nodes, batch.num_edges) for batch in batches]
        [(2, 1), (2, 1)]

    Reference:
        Chiang et al. 2019, "Cluster-GCN".
    """

    def __init__(
        self,
        data: Data,
        num_parts: int,
        *,
        parts_per_step: int = 1,
        clusters: Tensor | None = None,
        halo_hops: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        draw_seed: Callable[[], int] = lambda: int(torch.randint(2**62, ())),
    ) -> None:
        """Sort nodes and edges by cluster.

        Args:
            data: The whole graph with `x`, `edge_index`, `y` and the masks of its splits.
            num_parts: Number of clusters.
            parts_per_step: Number of clusters that a step joins; the last step may have fewer.
            clusters: The cluster of every node, [V]; None draws random ones in every epoch.
            halo_hops: Number of hops of neighbors that a process adds to its own nodes.
            rank: Number of this process.
            num_ranks: Number of processes.
            draw_seed: Returns the seed of an epoch, the same one in all processes.
        """
        self.data: Any = data
        self.num_parts = num_parts
        self.parts_per_step = parts_per_step
        self.clusters = None if clusters is None else self._sorted(clusters)
        self.halo_hops = halo_hops
        self.rank = rank
        self.num_ranks = num_ranks
        self.draw_seed = draw_seed

    def __iter__(self) -> Iterator[Data]:
        """Yield this process's part of one step after the other."""
        generator = torch.Generator().manual_seed(self.draw_seed())
        clusters = self.clusters
        if clusters is None:
            order = torch.randperm(len(self.data.y), generator=generator)
            clusters = self._sorted(order % self.num_parts)
        order = torch.randperm(self.num_parts, generator=generator)
        for parts in order.split(self.parts_per_step):
            yield self._batch(clusters, parts.tolist())

    def _sorted(self, clusters: Tensor) -> "_Clusters":
        return _Clusters(self.data.edge_index, clusters, self.num_parts)

    def _batch(self, clusters: "_Clusters", parts: list[int]) -> Data:
        nodes, edge_index = clusters.join(parts)
        num_train = int(self.data.train_mask[nodes].sum())
        sizes = torch.tensor([len(clusters.nodes[part]) for part in parts])
        own = (torch.arange(len(parts)) % self.num_ranks == self.rank).repeat_interleave(sizes)
        if self.num_ranks > 1:
            needed = own.clone()
            for _ in range(self.halo_hops):
                needed[edge_index[0, needed[edge_index[1]]]] = True
            edge_index, _ = subgraph(needed, edge_index, relabel_nodes=True)
            nodes, own = nodes[needed], own[needed]
        return Data(
            x=self.data.x[nodes],
            edge_index=edge_index,
            y=self.data.y[nodes],
            train_mask=self.data.train_mask[nodes] & own,
            val_mask=self.data.val_mask[nodes] & own,
            test_mask=self.data.test_mask[nodes] & own,
            num_train=num_train,
        )


class _Clusters:
    """Nodes and edges sorted by cluster, so that a step only touches its own."""

    def __init__(self, edge_index: Tensor, clusters: Tensor, num_parts: int) -> None:
        self.nodes = clusters.argsort(stable=True).split(
            torch.bincount(clusters, minlength=num_parts).tolist()
        )
        of_edge = clusters[edge_index[1]]
        self.edges = edge_index[:, of_edge.argsort(stable=True)].split(
            torch.bincount(of_edge, minlength=num_parts).tolist(), dim=1
        )
        self.position = torch.full((len(clusters),), -1)

    def join(self, parts: list[int]) -> tuple[Tensor, Tensor]:
        """Return the nodes of the clusters, and the edges among them as positions in the nodes."""
        nodes = torch.cat([self.nodes[part] for part in parts])
        source, target = torch.cat([self.edges[part] for part in parts], dim=1)
        self.position[nodes] = torch.arange(len(nodes))
        source, target = self.position[source], self.position[target]
        self.position[nodes] = -1
        return nodes, torch.stack([source, target])[:, source >= 0]
