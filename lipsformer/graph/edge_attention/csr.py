"""Edges in compressed row order: what a fused pass over neighbourhoods reads.

Shapes: E edges, sorted by target and, transposed, by source.
"""

import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.utils import add_self_loops, remove_self_loops

__all__ = ["EdgeCSR", "edge_csr"]

with warnings.catch_warnings():  # the notice, once per process, that CSR tensors are in beta
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


@dataclass(frozen=True, eq=False)
class EdgeCSR:
    """A graph's edges by target, and their order by source; all indices int32.

    Attributes:
        num_sources: Number of source nodes S.
        num_targets: Number of target nodes T.
        ptr: The edges of target i are ``ptr[i]:ptr[i + 1]``, [T + 1].
        col: Source of each edge, [E].
        row: Target of each edge, ascending, [E].
        ptr_t: As ``ptr``, for the edges sorted by source, [S + 1].
        row_t: Target of each edge, edges sorted by source, [E].
        perm: Position by target of each edge sorted by source, [E].
    """

    num_sources: int
    num_targets: int
    ptr: Tensor
    col: Tensor
    row: Tensor
    ptr_t: Tensor
    row_t: Tensor
    perm: Tensor
    _copies: dict[int, "EdgeCSR"] = field(default_factory=dict)

    @property
    def num_edges(self) -> int:
        """Number of edges E."""
        return len(self.col)

    @staticmethod
    def build(source: Tensor, target: Tensor, num_sources: int, num_targets: int) -> "EdgeCSR":
        """Sort edges, both [E] int64; edges of one target keep their order."""
        row, order = target.sort(stable=True)
        source = source[order]
        col, perm = source.sort(stable=True)
        to_ptr = torch._convert_indices_from_coo_to_csr
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
        """Sparse matrix with a value per edge, [T, S]."""
        size = (self.num_targets, self.num_sources)
        return torch.sparse_csr_tensor(self.ptr, self.col, values, size, check_invariants=False)

    def copies(self, count: int) -> "EdgeCSR":
        """The graph ``count`` times side by side, as one: heads in one pass. Kept for reuse."""
        if count == 1:
            return self
        if count not in self._copies:

            def shift(index: Tensor, step: int) -> Tensor:
                steps = torch.arange(0, count * step, step, dtype=torch.int32, device=index.device)
                return (index + steps[:, None]).flatten()

            def shift_ptr(ptr: Tensor) -> Tensor:
                return torch.cat([ptr[:1], shift(ptr[1:], self.num_edges)])

            self._copies[count] = EdgeCSR(
                count * self.num_sources,
                count * self.num_targets,
                ptr=shift_ptr(self.ptr),
                col=shift(self.col, self.num_sources),
                row=shift(self.row, self.num_targets),
                ptr_t=shift_ptr(self.ptr_t),
                row_t=shift(self.row_t, self.num_targets),
                perm=shift(self.perm, self.num_edges),
            )
        return self._copies[count]


# per edge_index, as long as it lives: a copy of its content and the graphs sorted from it
_SORTED: MutableMapping[Tensor, tuple[Tensor, dict[Any, EdgeCSR]]] = WeakTensorKeyDictionary()


def edge_csr(
    edge_index: Tensor, num_sources: int, num_targets: int, num_self_loops: int | None = None
) -> EdgeCSR:
    """Sort the edges of a graph; remembered for as long as ``edge_index`` lives.

    The content of ``edge_index`` is compared with that sorted before, so that a change in place, by
    whatever means, is seen.

    Args:
        edge_index: Sources and targets, [2, E] int64.
        num_sources: Number of source nodes.
        num_targets: Number of target nodes.
        num_self_loops: Replace the self loops by those of this many first nodes; None leaves the
            edges as they are.

    Raises:
        IndexError: If an index is negative or not below its number of nodes.
    """
    content, graphs = _SORTED.setdefault(edge_index, (edge_index.new_empty(0), {}))
    if not torch.equal(content, edge_index):
        graphs = {}
        _SORTED[edge_index] = (edge_index.clone(), graphs)
    key = (num_sources, num_targets, num_self_loops)
    if key not in graphs:
        for name, index, limit in zip(
            ("source", "target"), edge_index, (num_sources, num_targets), strict=True
        ):
            if len(index) and not 0 <= index.min() <= index.max() < limit:
                raise IndexError(
                    f"edge_index holds {name}s {int(index.min())}..{int(index.max())}, but there "
                    f"are {limit} {name} nodes: indices must lie in 0..{limit - 1}"
                )
        edges = edge_index
        if num_self_loops is not None:
            edges, _ = add_self_loops(remove_self_loops(edges)[0], num_nodes=num_self_loops)
        graphs[key] = EdgeCSR.build(edges[0], edges[1], num_sources, num_targets)
    return graphs[key]
