"""Graphs as training reads them: on the device, with edges that are sorted once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch_geometric.data import Data

from lipsformer.graph.edge_attention.csr import SortedEdges, silence_beta_notice
from lipsformer.graph.models.stack import GraphNet

SPLITS: tuple[str, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class NodeBatch:
    """One graph on the device on which it is used, with edges that are sorted only once.

    Attributes:
        x: Features, [V, F], dense or sparse CSR.
        edges: The edges.
        y: Labels, [V].
        masks: The nodes of each split, [V] each.
        num_train: Number of training nodes of the step over all processes.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lipsformer.graph.batches import SPLITS, NodeBatch
        >>> masks = {f"{split}_mask": torch.ones(2, dtype=torch.bool) for split in SPLITS}
        >>> edge_index, y = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1])
        >>> batch = NodeBatch.of(Data(x=torch.eye(2), edge_index=edge_index, y=y, **masks), "cpu")
        >>> batch.num_train, batch.edges.csr.num_edges
        (2, 2)
    """

    x: Tensor
    edges: SortedEdges
    y: Tensor
    masks: dict[str, Tensor]
    num_train: int

    @staticmethod
    def of(data: Any, device: str) -> "NodeBatch":
        """Move PyG's `Data` to a device.

        Its `num_train` is used if it has one, and the training nodes are counted otherwise.
        """
        data = data.to(device)
        masks = {split: data[f"{split}_mask"] for split in SPLITS}
        num_train = data.num_train if "num_train" in data else int(masks["train"].sum())
        edges = SortedEdges(data.edge_index, data.x.size(0))
        return NodeBatch(data.x, edges, data.y, masks, num_train)

    def compressed(self) -> "NodeBatch":
        """Store the features as a sparse CSR matrix where that makes the first linear map cheaper.

        Cora's features are 1.3 % dense. The product and its gradient are sums of the same terms in
        another order.
        """
        if self.x.device.type != "cpu" or self.x.count_nonzero() > 0.1 * self.x.numel():
            return self
        silence_beta_notice()
        return replace(self, x=self.x.to_sparse_csr())


Batches = Iterable[Data] | Iterable[NodeBatch]


def on_device(batches: Batches, device: str) -> Iterator[NodeBatch]:
    """Yield the batches on a device, with sorted edges.

    Args:
        batches: PyG's `Data`, each with x, edge_index, y and the masks `train_mask`, `val_mask` and
            `test_mask`; or batches that are prepared already, which are yielded as they are.
        device: The device.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lipsformer.graph.batches import SPLITS, on_device
        >>> masks = {f"{split}_mask": torch.ones(2, dtype=torch.bool) for split in SPLITS}
        >>> edge_index, y = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1])
        >>> graph = Data(x=torch.eye(2), edge_index=edge_index, y=y, **masks)
        >>> [batch.masks["train"].tolist() for batch in on_device([graph], "cpu")]
        [[True, True]]
    """
    for batch in batches:
        yield batch if isinstance(batch, NodeBatch) else NodeBatch.of(batch, device)


def prepare_batches(batches: Batches, model: GraphNet, device: str) -> Batches:
    """Move a list of graphs to the device and sort their edges, once for all epochs.

    Args:
        batches: A list of graphs. Any other iterable may yield new graphs in every epoch and is
            returned as it is.
        model: The model. If it takes sparse features, features of which at most 10 % are not zero
            are stored as a sparse matrix on a CPU.
        device: Device of the training.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lipsformer.graph import create_model
        >>> from lipsformer.graph.batches import SPLITS, prepare_batches
        >>> masks = {f"{split}_mask": torch.ones(20, dtype=torch.bool) for split in SPLITS}
        >>> ring = torch.stack([torch.arange(20), torch.arange(20).roll(1)])
        >>> graph = Data(x=torch.eye(20), edge_index=ring, y=torch.arange(20), **masks)
        >>> batches = prepare_batches([graph], create_model("gcn", 20, 8, 20, num_layers=2), "cpu")
        >>> batches[0].x.layout  # 5 % of the features are not zero
        torch.sparse_csr
    """
    if not isinstance(batches, list):
        return batches
    moved = list(on_device(batches, device))
    return [batch.compressed() for batch in moved] if model.takes_sparse_features else moved
