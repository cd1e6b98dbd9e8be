"""Draw graphs of the size of real ones, to measure time and memory. Accuracies mean nothing."""

import torch
from torch_geometric.data import Data
from torch_geometric.utils import coalesce

# ogbn-arxiv's numbers of nodes, directed edges, features, classes and training, validation nodes
ARXIV_SIZE = (169_343, 1_166_243, 128, 40, 90_941, 29_799)
# A citation within the class of the cited node, and the exponent of the law of in-degrees.
_HOMOPHILY, _EXPONENT = 0.65, 2.5


def generated_arxiv(
    num_nodes: int = ARXIV_SIZE[0],
    num_edges: int = ARXIV_SIZE[1],
    num_features: int = ARXIV_SIZE[2],
    num_classes: int = ARXIV_SIZE[3],
    num_train: int = ARXIV_SIZE[4],
    num_val: int = ARXIV_SIZE[5],
    seed: int = 0,
) -> Data:
    r"""Draw a directed graph of ogbn-arxiv's size whose in-degrees follow a power law.

    .. math::
        P(\text{a citation cites node } i) \propto r_i^{-1 / (\gamma - 1)}, \quad \gamma = 2.5

    where the ranks r are a random order of the nodes. 65 % of the citations are drawn from the
    class of the cited node, and the others from all nodes. There are neither self loops nor
    duplicates. Features are normal around the center of the class.

    Args:
        num_nodes: Number of nodes.
        num_edges: Number of directed edges.
        num_features: Number of features.
        num_classes: Number of classes, which are equally likely.
        num_train: Number of training nodes.
        num_val: Number of validation nodes; all others are for the test.
        seed: Seed of everything.

    Example:
        >>> generated_arxiv(100, 300, 5, 3, num_train=50, num_val=20).num_edges
        300
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (num_nodes,), generator=generator)
    weights = torch.arange(1, num_nodes + 1, dtype=torch.double) ** (-1 / (_EXPONENT - 1))
    weights = weights[torch.randperm(num_nodes, generator=generator)].cumsum(0)
    by_class = y.argsort(stable=True)
    class_size = y.bincount(minlength=num_classes)
    class_start = class_size.cumsum(0) - class_size

    edge_index = torch.empty(2, 0, dtype=torch.long)
    while edge_index.size(1) < num_edges:  # draws again for the duplicates
        draws = torch.rand(4, num_edges, generator=generator, dtype=torch.double)
        target = torch.searchsorted(weights, draws[0] * weights[-1]).clamp_max(num_nodes - 1)
        near = class_start[y[target]] + (draws[1] * class_size[y[target]]).long()
        far = (draws[2] * num_nodes).long()
        source = torch.where(draws[3] < _HOMOPHILY, by_class[near], far)
        drawn = torch.stack([source, target])[:, source != target]
        edge_index = coalesce(torch.cat([edge_index, drawn], dim=1))
    keep = torch.randperm(edge_index.size(1), generator=generator)[:num_edges]

    centers = torch.randn(num_classes, num_features, generator=generator)
    noise = torch.randn(num_nodes, num_features, generator=generator)
    place = torch.randperm(num_nodes, generator=generator)
    return Data(
        x=centers[y] + noise,
        edge_index=edge_index[:, keep.sort().values],
        y=y,
        train_mask=place < num_train,
        val_mask=(num_train <= place) & (place < num_train + num_val),
        test_mask=place >= num_train + num_val,
    )
