"""Normalisations of node representations, and the names that models know them by."""

from torch import Tensor, nn
from torch_geometric.nn import PairNorm
from torch_geometric.utils import scatter

from lipsformer.layers.center_norm import CenterNorm

__all__ = ["NODE_NORMS", "NeighborNorm", "NodeNorm", "parse_norm"]

SCORE_NORM = "lipschitznorm"
NODE_NORMS = ("pairnorm", "layernorm", "neighbornorm", "centernorm")


class NeighborNorm(nn.Module):
    r"""PairNorm over each neighbourhood instead of the whole graph.

    .. math::
        x_i' = \frac{x_i - m_i}{\sqrt{\mathrm{mean}_{j \in N(i) \cup \{i\}} |x_j - m_i|_2^2
        + \epsilon}}, \quad m_i = \mathrm{mean}_{j \in N(i) \cup \{i\}}\, x_j

    A node without neighbours becomes zero.

    Shape:
        x: [V, C]; edge_index: [2, E]; the output has the shape of x.

    Reference:
        After Dasoulas et al. 2021, whose released NeighborNorm raises when called.
    """

    def __init__(self, eps: float = 1e-5) -> None:
        """Take ``eps``, added to the mean square."""
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Centre and scale every node by its neighbourhood."""
        source, target = edge_index
        degree = x.new_ones(len(x)).index_add(0, target, x.new_ones(len(target))).unsqueeze(-1)

        def neighborhood_mean(values: Tensor) -> Tensor:
            return (values + scatter(values[source], target, dim_size=len(x))) / degree

        # mean |x_j - m_i|^2 = mean |x_j|^2 - |m_i|^2; the graph's mean goes first, for precision
        x = x - x.mean(dim=0)
        mean = neighborhood_mean(x)
        spread = neighborhood_mean(x.square().sum(-1, keepdim=True))
        spread = spread - mean.square().sum(-1, keepdim=True)
        return (x - mean) * (spread.clamp_min(0) + self.eps).rsqrt()


class NodeNorm(nn.Module):
    """The normalisation of node representations called ``name``, or none.

    Shape:
        x: [V, C]; edge_index: [2, E]; the output has the shape of x.
    """

    def __init__(self, name: str, channels: int) -> None:
        """Create it.

        Args:
            name: 'none' or one of ``NODE_NORMS``; 'layernorm' runs per node.
            channels: Number of channels C.
        """
        super().__init__()
        self.norm: nn.Module = {
            "none": lambda: nn.Identity(),
            "pairnorm": lambda: PairNorm(),
            "layernorm": lambda: nn.LayerNorm(channels),
            "neighbornorm": lambda: NeighborNorm(),
            "centernorm": lambda: CenterNorm(channels),
        }[name]()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Normalise ``x``."""
        if isinstance(self.norm, NeighborNorm):
            return self.norm(x, edge_index)
        return self.norm(x)


def parse_norm(norm: str) -> tuple[str | None, str]:
    """Split a model's ``norm`` into that of the scores and that of the nodes.

    Args:
        norm: 'none', 'lipschitznorm', one of ``NODE_NORMS``, or 'lipschitznorm+' and one of them.

    Returns:
        ``score_norm`` for the convolutions and a name for ``NodeNorm``.

    Raises:
        ValueError: If ``norm`` is none of these.
    """
    score, plus, node = norm.partition("+")
    if score != SCORE_NORM:
        score, plus, node = "", "", norm
    elif not plus:
        node = "none"
    if node not in ("none", *NODE_NORMS):
        raise ValueError(
            f"norm={norm!r} is not known; choose none, {SCORE_NORM}, {', '.join(NODE_NORMS)}, "
            f"or a pair such as {SCORE_NORM}+pairnorm"
        )
    return score or None, node
