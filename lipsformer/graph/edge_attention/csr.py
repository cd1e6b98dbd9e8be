"""The edges of a graph, sorted for the fused pass.

Shapes: E edges, S source nodes, T target nodes.
"""

import functools
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import detect_fake_mode
from torch_geometric.utils import add_self_loops, remove_self_loops

__all__ = [
    "Adjacency",
    "EdgeCSR",
    "SortedEdges",
    "add_one_self_loop",
    "listed_edges",
    "plain_edges",
    "silence_beta_notice",
]


class SortedEdges:
    """The edges of one batch, sorted once for all layers of a network.

    The models of `lipsformer.graph` build this object in every forward pass. Build it yourself to
    sort only once when several passes see the same graph. The edges are sorted when the first layer
    needs them. Do not change `edge_index` in place afterwards.

    Example:
        >>> import torch
        >>> from lipsformer.graph import LipschitzGATConv, SortedEdges
        >>> edges = SortedEdges(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_sources=3)
        >>> first, second = LipschitzGATConv(4, 2), LipschitzGATConv(2, 2)
        >>> second(first(torch.randn(3, 4), edges), edges).shape
        torch.Size([3, 2])
    """

    def __init__(
        self, edge_index: Tensor, num_sources: int, num_targets: int | None = None
    ) -> None:
        """Store the edges without sorting them.

        Args:
            edge_index: Sources and targets, [2, E]. Other forms, such as sparse adjacency matrices,
                are stored for layers that run message by message.
            num_sources: Number of source nodes.
            num_targets: Number of target nodes; None if sources and targets are the same nodes.
        """
        self.edge_index = edge_index
        self.num_sources = num_sources
        self.num_targets = num_sources if num_targets is None else num_targets
        self._normalized: dict[torch.dtype, Adjacency] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies sort anew: PyTorch can neither pickle nor copy the normalized adjacency."""
        return SortedEdges, (self.edge_index, self.num_sources, self.num_targets)

    @staticmethod
    def of(edge_index: "Tensor | SortedEdges", num_sources: int, num_targets: int) -> "SortedEdges":
        """Return `edge_index` itself if it is a `SortedEdges`, and a new object otherwise.

        Args:
            edge_index: [2, E], sources above targets; or edges that are sorted already.
            num_sources: Number of rows of the source features.
            num_targets: Number of rows of the target features.

        Raises:
            ValueError: If `edge_index` was sorted for other numbers of nodes.
        """
        if not isinstance(edge_index, SortedEdges):
            return SortedEdges(edge_index, num_sources, num_targets)
        own = edge_index.num_sources, edge_index.num_targets
        if own != (num_sources, num_targets):
            raise ValueError(
                f"the edges were sorted for {own[0]} sources and {own[1]} targets, but the inputs "
                f"have {num_sources} and {num_targets} rows"
            )
        return edge_index

    @cached_property
    def csr(self) -> "EdgeCSR":
        """The edges as given."""
        self._check_range()
        return self._build(self.edge_index)

    @cached_property
    def csr_with_self_loops(self) -> "EdgeCSR":
        """The edges with exactly one self loop per node, as PyG's `GATConv` adds them."""
        self._check_range()
        num_loops = min(self.num_sources, self.num_targets)
        edge_index, _ = add_one_self_loop(self.edge_index, num_nodes=num_loops)
        return self._build(edge_index)

    def normalized(self, dtype: torch.dtype) -> "Adjacency":
        """Return the normalized adjacency of a graph convolution, and keep it for other layers.

        An edge from j to i has the weight (d_i d_j)^(-1/2), where d_i is the number of edges that
        end in i. Every node has exactly one self loop, as in PyG's `GCNConv`.
        """
        if dtype not in self._normalized:
            csr = self.csr_with_self_loops
            root = csr.ptr.diff().to(dtype).rsqrt()
            weight = root.index_select(0, csr.row) * root.index_select(0, csr.col)
            self._normalized[dtype] = Adjacency(csr.adjacency(weight), csr.transposed(weight))
        return self._normalized[dtype]

    def _build(self, edge_index: Tensor) -> "EdgeCSR":
        source, target = edge_index
        return EdgeCSR.build(source, target, self.num_sources, self.num_targets)

    def _check_range(self) -> None:
        limits = (self.num_sources, self.num_targets)
        edges = listed_edges(self)
        for name, index, limit in zip(("source", "target"), edges, limits, strict=True):
            if len(index) and not 0 <= index.min() <= index.max() < limit:
                raise IndexError(
                    f"edge_index holds {name}s {int(index.min())}..{int(index.max())}, but there "
                    f"are {limit} {name} nodes: indices must lie in 0..{limit - 1}"
                )


def add_one_self_loop(
    edge_index: Tensor, edge_attr: Any = None, *, num_nodes: int, fill_value: Any = None
) -> tuple[Tensor, Any]:
    """Replace the self loops of a graph by exactly one per node, as PyG's `GATConv` does.

    Tensors without values (`FakeTensorMode`) do not say how many self loops there are. These are
    then kept, so that the number of edges is an upper bound.

    Args:
        edge_index: [2, E] or a sparse adjacency matrix.
        edge_attr: Edge features or None.
        num_nodes: Number of nodes.
        fill_value: How PyG's `add_self_loops` makes the features of the self loops; None for ones.

    Returns:
        The edges in the form in which they were given, with the self loops after the others in a
        [2, E], and the features of all edges, or None without features.

    Example:
        >>> import torch
        >>> from lipsformer.graph.edge_attention.csr import add_one_self_loop
        >>> edge_index = torch.tensor([[0, 0, 1], [0, 0, 0]])  # node 0 has two self loops
        >>> add_one_self_loop(edge_index, num_nodes=2)[0].tolist()
        [[1, 0, 1], [0, 0, 1]]
    """
    if torch.compiler.is_compiling() or detect_fake_mode(edge_index) is None:
        edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
    return add_self_loops(edge_index, edge_attr, fill_value=fill_value, num_nodes=num_nodes)


def plain_edges(edge_index: Tensor | SortedEdges) -> Tensor:
    """Return the `edge_index` that a `SortedEdges` was built from, or the argument itself.

    Args:
        edge_index: Sources and targets, [2, E], or a `SortedEdges`.

    Example:
        >>> import torch
        >>> from lipsformer.graph import SortedEdges
        >>> from lipsformer.graph.edge_attention.csr import plain_edges
        >>> pair = torch.tensor([[0, 1], [1, 0]])
        >>> plain_edges(SortedEdges(pair, num_sources=2)) is pair, plain_edges(pair) is pair
        (True, True)
    """
    return edge_index.edge_index if isinstance(edge_index, SortedEdges) else edge_index


def listed_edges(edge_index: Tensor | SortedEdges) -> Tensor:
    """Return the edges of a graph as they were given, which must be a list of them.

    Args:
        edge_index: Sources and targets, [2, E], or a `SortedEdges`.

    Raises:
        ValueError: If the edges were given as a sparse adjacency matrix.

    Example:
        >>> import torch
        >>> from lipsformer.graph.edge_attention.csr import listed_edges
        >>> pair = torch.tensor([[0, 1], [1, 0]])
        >>> listed_edges(pair) is pair
        True
    """
    edges = plain_edges(edge_index)
    if edges.layout is not torch.strided:
        raise ValueError(
            f"edge_index is a sparse adjacency matrix ({edges.layout}) where only sources and "
            "targets, [2, E], will do: use torch_geometric.utils.to_edge_index(adj_t)[0].flip(0)"
        )
    return edges


@dataclass(frozen=True, eq=False)
class EdgeCSR:
    """Edges sorted by target, and the permutation that sorts them by source; all indices int32.

    Attributes:
        num_sources: Number of source nodes S.
        num_targets: Number of target nodes T.
        ptr: The edges of target i are `ptr[i]:ptr[i + 1]`, [T + 1].
        col: Source of each edge, [E].
        row: Target of each edge, ascending, [E].
        ptr_t: Like `ptr`, for the edges sorted by source, [S + 1].
        row_t: Target of each edge, edges sorted by source, [E].
        perm: Position by target of each edge sorted by source, [E].
        original: For copies of a graph, h * (edges of the graph) + (position of the edge in it) of
            each edge, where h is the number of the copy, [E].

    Example:
        >>> import torch
        >>> from lipsformer.graph.edge_attention.csr import EdgeCSR
        >>> source, target = torch.tensor([2, 0, 1]), torch.tensor([1, 0, 1])
        >>> csr = EdgeCSR.build(source, target, num_sources=3, num_targets=2)
        >>> csr.ptr.tolist(), csr.col.tolist()  # target 0 has the source 0, target 1 has 2 and 1
        ([0, 1, 3], [0, 2, 1])
    """

    num_sources: int
    num_targets: int
    ptr: Tensor
    col: Tensor
    row: Tensor
    ptr_t: Tensor
    row_t: Tensor
    perm: Tensor
    original: Tensor | None = None
    _copies: dict[int, "EdgeCSR"] = field(default_factory=dict)

    @property
    def num_edges(self) -> int:
        """Number of edges E."""
        return len(self.col)

    @staticmethod
    @torch.inference_mode(False)  # autograd could not save the indices in a later training
    def build(source: Tensor, target: Tensor, num_sources: int, num_targets: int) -> "EdgeCSR":
        """Sort edges given as two [E] int64 tensors; edges of one target keep their order."""
        row, order = target.sort(stable=True)
        source = source[order]
        col, perm = source.sort(stable=True)
        to_ptr: Any = torch._convert_indices_from_coo_to_csr
        return EdgeCSR(
            num_sources,
            num_targets,
            ptr=to_ptr(row, num_targets, out_int32=True),
            col=source.int(),
            row=row.int(),
            ptr_t=to_ptr(col, num_sources, out_int32=True),
            row_t=row[perm].int(),
            perm=perm.int(),
        )

    def adjacency(self, values: Tensor) -> Tensor:
        """Return the sparse [T, S] matrix that holds one value per edge."""
        silence_beta_notice()
        size = (self.num_targets, self.num_sources)
        return torch.sparse_csr_tensor(self.ptr, self.col, values, size, check_invariants=False)

    def transposed(self, values: Tensor) -> Tensor:
        """Return the transpose of `adjacency(values)`, sparse and [S, T]."""
        silence_beta_notice()
        size = (self.num_sources, self.num_targets)
        values = values.index_select(0, self.perm)
        return torch.sparse_csr_tensor(self.ptr_t, self.row_t, values, size, check_invariants=False)

    def copies(self, count: int) -> "EdgeCSR":
        """Return `count` disjoint copies of the graph as one graph, and keep it for reuse.

        With one copy per head, one pass over the copies computes all heads. Copy h of node i is
        node i * count + h, so the rows of a contiguous [nodes, count, channels] are its nodes.
        """
        if count == 1:
            return self
        if count not in self._copies:
            ptr, row, first, copy = self._spread(self.ptr, count)
            ptr_t, col_t, first_t, copy_t = self._spread(self.ptr_t, count)
            place = torch.arange(len(row), dtype=torch.int32, device=row.device)
            # index_select takes int32 indices as they are, which brackets first convert
            edge = place + first.index_select(0, row)
            edge_t = place + first_t.index_select(0, col_t)
            row_t = self.row_t.index_select(0, edge_t) * count + copy_t
            self._copies[count] = EdgeCSR(
                count * self.num_sources,
                count * self.num_targets,
                ptr=ptr,
                col=self.col.index_select(0, edge) * count + copy,
                row=row,
                ptr_t=ptr_t,
                row_t=row_t,
                perm=self.perm.index_select(0, edge_t) - first.index_select(0, row_t),
                original=edge + copy * self.num_edges,
            )
        return self._copies[count]

    @staticmethod
    def _spread(ptr: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return where the edges of `count` copies of a graph are, copies sorted by node.

        Returns:
            The `ptr` of the copies. For each edge of the copies: its node, what to add to its
            position to get the edge of the original graph, and the number of its copy.
        """
        degree = ptr.diff().repeat_interleave(count)
        new = F.pad(degree.cumsum(0, dtype=torch.int32), (1, 0))
        node = torch.repeat_interleave(degree)
        copy = torch.arange(count, dtype=torch.int32, device=ptr.device).repeat(len(ptr) - 1)
        return (
            new,
            node,
            ptr[:-1].repeat_interleave(count) - new[:-1],
            copy.index_select(0, node),
        )


@dataclass(frozen=True, eq=False)
class Adjacency:
    """A constant sparse matrix that multiplies node representations: `adjacency @ x`.

    PyTorch's own backward pass of such a product transposes the matrix at every call.

    Attributes:
        matrix: [T, S] in CSR.
        transpose: [S, T] in CSR.

    Example:
        >>> import torch
        >>> from lipsformer.graph import SortedEdges
        >>> edges = SortedEdges(torch.tensor([[0, 1], [1, 0]]), num_sources=2)
        >>> adjacency = edges.normalized(torch.float)  # with the self loops, every entry is 1/2
        >>> mean = adjacency @ torch.tensor([[1.0], [3.0]])
        >>> [round(value, 4) for value in mean.flatten().tolist()]
        [2.0, 2.0]
    """

    matrix: Tensor
    transpose: Tensor

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return the product with a dense [S, C], [T, C]; it has derivatives of every order."""
        return cast(Tensor, _SparseProduct.apply(x, self))


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Adjacency) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.adjacency = adjacency
        return adjacency.matrix @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Adjacency(ctx.adjacency.transpose, ctx.adjacency.matrix) @ grad, None


@functools.cache
def silence_beta_notice() -> None:
    """Let PyTorch warn, silently, that CSR tensors are in beta; it warns once per process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)
