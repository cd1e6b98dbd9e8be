"""Normalizations of node representations, and the names by which models choose them."""

import torch
from torch import Tensor, nn
from torch_geometric.nn import PairNorm
from torch_geometric.utils import scatter

from lipsformer.graph.edge_attention.csr import SortedEdges, listed_edges
from lipsformer.layers.center_norm import CenterNorm

__all__ = [
    "NODE_NORMS",
    "NeighborNorm",
    "NodeNorm",
    "check_score_norm",
    "parse_norm",
]

SCORE_NORM = "lipschitznorm"
NODE_NORMS = ("pairnorm", "layernorm", "neighbornorm", "centernorm")


class NeighborNorm(nn.Module):
    r"""Apply PairNorm to each neighborhood instead of the whole graph.

    .. math::
        x_i' = \frac{x_i - m_i}{\sqrt{\mathrm{mean}_{j \in N(i) \cup \{i\}} |x_j - m_i|_2^2
        + \epsilon}}, \quad m_i = \mathrm{mean}_{j \in N(i) \cup \{i\}}\, x_j

    N(i) are the other nodes with an edge to i, so self loops change nothing. A node without
    neighbors becomes zero.

    Shape:
        x: [V, C]. edge_index: [2, E] or a `SortedEdges`. The output has the shape of x.

    Example:
        >>> import torch
        >>> from lipsformer.graph import NeighborNorm
        >>> x, edge_index = torch.tensor([[0.0], [2.0]]), torch.tensor([[0, 1], [1, 0]])
        >>> NeighborNorm(eps=0.0)(x, edge_index).flatten()
        tensor([-1.,  1.])

    Reference:
        After Dasoulas et al. 2021, whose released NeighborNorm raises an error when called.
    """

    def __init__(self, eps: float = 1e-5) -> None:
        """Store `eps`, which is added to the mean square."""
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Tensor:
        """Center and scale every node by its neighborhood."""
        source, target = listed_edges(edge_index)
        exact = x.to(torch.promote_types(x.dtype, torch.float))  # bfloat16 counts up to 256 only
        no_loop = (source != target).to(exact.dtype)[:, None]  # the node itself counts once already
        degree = exact.new_ones(x.size(0), 1).index_add(0, target, no_loop)
        # Differences of neighbors are precise far from the origin too.
        difference = exact[target] - exact[source]
        centered = scatter(difference, target, dim_size=x.size(0)) / degree  # x_i - m_i
        of_neighbors = (centered[target] - difference).square().sum(-1, keepdim=True)
        total = centered.square().sum(-1, keepdim=True)
        total = total + scatter(no_loop * of_neighbors, target, dim_size=x.size(0))
        return (centered * (total / degree + self.eps).rsqrt()).to(x.dtype)


class NodeNorm(nn.Module):
    """Apply the normalization of node representations called `name`, or none.

    'pairnorm' takes the mean over all nodes. Those of a batch of graphs are then one graph, so the
    result for a graph depends on the others.

    Shape:
        x: [V, C]. edge_index: [2, E] or a `SortedEdges`. The output has the shape of x.

    Example:
        >>> import torch
        >>> from lipsformer.graph.norm import NodeNorm
        >>> x, edge_index = torch.ones(2, 3), torch.tensor([[0, 1], [1, 0]])
        >>> NodeNorm("centernorm", 3)(x, edge_index)[0].tolist()
        [0.0, 0.0, 0.0]
    """

    def __init__(self, name: str, channels: int) -> None:
        """Create the normalization.

        Args:
            name: 'none' or one of `NODE_NORMS`; 'layernorm' runs per node.
            channels: Number of channels C.

        Raises:
            ValueError: If `name` is none of these.
        """
        super().__init__()
        if name not in ("none", *NODE_NORMS):
            raise ValueError(f"name={name!r} is not known; choose none or {', '.join(NODE_NORMS)}")
        self.norm: nn.Module = {
            "none": nn.Identity,
            "pairnorm": PairNorm,
            "layernorm": lambda: nn.LayerNorm(channels),
            "neighbornorm": NeighborNorm,
            "centernorm": lambda: CenterNorm(channels),
        }[name]()

    def forward(self, x: Tensor, edge_index: Tensor | SortedEdges) -> Tensor:
        """Normalize `x`."""
        if isinstance(self.norm, NeighborNorm):
            return self.norm(x, edge_index)
        return self.norm(x)


def parse_norm(norm: str) -> tuple[str | None, str]:
    """Split the `norm` of a model into that of the scores and that of the nodes.

    Args:
        norm: 'none', 'lipschitznorm', one of `NODE_NORMS`, or 'lipschitznorm+' and one of them.

    Returns:
        `score_norm` for the convolutions and a name for `NodeNorm`.

    Raises:
        ValueError: If `norm` is none of these.

    Example:
        >>> from lipsformer.graph.norm import parse_norm
        >>> parse_norm("lipschitznorm+pairnorm"), parse_norm("layernorm")
        (('lipschitznorm', 'pairnorm'), (None, 'layernorm'))
    """
    nodes = ("none", *NODE_NORMS)
    parts: dict[object, tuple[str | None, str]] = {SCORE_NORM: (SCORE_NORM, "none")}
    parts |= {node: (None, node) for node in nodes}
    parts |= {f"{SCORE_NORM}+{node}": (SCORE_NORM, node) for node in nodes}
    if norm not in parts:
        raise ValueError(
            f"norm={norm!r} is not known; choose none, {SCORE_NORM}, {', '.join(NODE_NORMS)}, "
            f"or a pair such as {SCORE_NORM}+pairnorm"
        )
    return parts[norm]


def check_score_norm(score_norm: str | None, released_code: bool) -> None:
    """Check that `score_norm` is known and that `released_code` has an effect.

    Args:
        score_norm: 'lipschitznorm', or None for no normalization of the scores.
        released_code: Whether the convolution normalizes as the authors' released code does.

    Raises:
        ValueError: If `score_norm` is another name, or if `released_code` is set without it.

    Example:
        >>> from lipsformer.graph.norm import check_score_norm
        >>> check_score_norm("lipschitznorm", released_code=True)
        >>> check_score_norm(None, released_code=True)
        Traceback (most recent call last):
        ValueError: released_code=True has no effect without score_norm='lipschitznorm'
    """
    if score_norm not in (None, SCORE_NORM):
        raise ValueError(f"score_norm={score_norm!r} is not known; choose {SCORE_NORM!r} or None")
    if released_code and score_norm is None:
        raise ValueError(f"released_code=True has no effect without score_norm={SCORE_NORM!r}")
