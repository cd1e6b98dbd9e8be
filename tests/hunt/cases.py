"""A structure is plain data: a kind of module, its arguments, its weights, its inputs, one change.

The same data builds the same module again, so a line of a report is a counterexample that runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lipsformer.analysis.bounds import Domain
from lipsformer.analysis.bounds.graph import graph_domain

Case = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A module and the inputs that it is attacked with.

    Attributes:
        module: The module.
        shape: Shape of one sample, without the batch.
        size: Size of the bound's domain, in tokens or pixels.
        token_dim: Dimension of a batch along which the channels of a token lie.
        output_dim: The same of the outputs; the last one where they have fewer dimensions.
        exact: True if the bound claims to be the constant itself.
        edges: The edges [2, E] of a graph module, whose samples are feature matrices of its nodes.
        mixes_graphs: True if graphs in one call of the module are not independent of each other.
    """

    module: nn.Module
    shape: tuple[int, ...]
    size: tuple[int, ...]
    token_dim: int = -1
    output_dim: int = -1
    exact: bool = False
    edges: Tensor | None = None
    mixes_graphs: bool = False

    def run(self, module: nn.Module, x: Tensor, *, watched: bool = False) -> Tensor:
        """Call the module, or a copy of it, on a batch of samples.

        Args:
            module: The module.
            x: [R, ...].
            watched: Whether hooks read the tensors inside, which `vmap` would hide.
        """
        x = x.clone()  # some modules work in place
        if self.edges is None:
            return module(x)
        if self.mixes_graphs and watched:
            return torch.stack([module(nodes, self.edges) for nodes in x])
        if self.mixes_graphs:
            return torch.func.vmap(lambda nodes: module(nodes, self.edges))(x)
        offsets = x.shape[1] * torch.arange(len(x)).repeat_interleave(self.edges.shape[1])
        edges = self.edges.repeat(1, len(x)) + offsets  # copies of the graph side by side
        return module(x.flatten(0, 1), edges).unflatten(0, x.shape[:2])

    def domain(self, radius: float) -> Domain:
        """Return the inputs of the module as the bounds describe them."""
        if self.edges is None:
            return Domain(size=self.size, radius=radius)
        return graph_domain(self.edges, self.size[0], radius)


@dataclass(frozen=True)
class Kind:
    """A row of the table: how the arguments are drawn, and what they build."""

    name: str
    args: dict[str, st.SearchStrategy[Any]]
    build: Callable[..., Subject]


KINDS: dict[str, Kind] = {}


def kind(
    name: str, **args: st.SearchStrategy[Any]
) -> Callable[[Callable[..., Subject]], Callable[..., Subject]]:
    """Register a builder under a name, with a strategy for each of its arguments."""

    def register(build: Callable[..., Subject]) -> Callable[..., Subject]:
        KINDS[name] = Kind(name, args, build)
        return build

    return register


WEIGHTS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 999),
        "weight": st.sampled_from([1.0, 0.3, 0.01, 4.0, 0.0]),
        "bias": st.sampled_from([0.0, 0.3, 5.0, 100.0]),
        "gain": st.sampled_from([1.0, 0.1, 10.0, 0.0]),
        "table": st.sampled_from([0.0, 1.0, 10.0]),
        "tau": st.sampled_from([1.0, -3.0, 6.0]),
        "spot": st.one_of(
            st.none(), st.tuples(st.integers(0, 60), st.sampled_from([0.0, 1e4, 1e-4]))
        ),
    }
)

CHANGES = st.one_of(
    st.none(),
    st.none(),
    st.fixed_dictionaries(
        {
            "what": st.sampled_from(
                [
                    "tie",
                    "method",
                    "method",
                    "forward_attribute",
                    "hook",
                    "pre_hook",
                    "parametrization",
                    "swap",
                    "float_attribute",
                    "attribute",
                    "replace",
                    "exchange",
                    "buffer",
                ]
            ),
            "at": st.integers(0, 60),
            "which": st.integers(0, 30),
            "factor": st.sampled_from([3.0, 0.5, -40.0]),
        }
    ),
)


def cases(name: str) -> st.SearchStrategy[Case]:
    """Return the strategy of all structures of a kind."""
    return st.fixed_dictionaries(
        {
            "kind": st.just(name),
            "args": st.fixed_dictionaries(KINDS[name].args),
            "weights": WEIGHTS,
            "radius": st.sampled_from([None, 1.0, 0.1, 30.0]),
            "scale": st.sampled_from([None, None, None, 5.0, 0.1]),
            "double": st.booleans(),
            "training": st.booleans(),
            "change": CHANGES,
        }
    )


def build(case: Case) -> Subject:
    """Build the module that a structure describes, before weights and change."""
    return KINDS[case["kind"]].build(**case["args"])
