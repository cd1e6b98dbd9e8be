"""Proved Lipschitz bounds: what they speak about, how they compose, which rule a module has.

A rule per module type states the bound of that type; composite modules compose the bounds of their
children as their own forward does. Importing ``lipsformer.analysis.bounds`` loads every rule.
Proofs: docs/lipschitz.md.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from lipsformer.analysis.sigma import whole


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The inputs that a bound speaks about.

    Attributes:
        size: Extent of the map in tokens or pixels, (H, W), or (N,) for a sequence; () for pooled
            features.
        radius: Largest 2-norm of a token (of a pixel over its channels). Only attention with raw
            values needs it: its constant grows with the values.
    """

    size: tuple[int, ...]
    radius: float = math.inf

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return math.prod(self.size)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A proved upper bound of the 2-norm Lipschitz constant over one whole input, evaluation mode.

    Attributes:
        log10: Decimal logarithm of the bound.
        paper_log10: The same with the paper's Theorem 1 for attention and max|alpha| Lip(f) for
            residual branches, for comparison; never below ``log10``.
        output: The domain of the outputs.
        input: The domain the bound holds on.
        parts: Bounds of the children, by their name.
        kind: Name of the module's type.
    """

    log10: float
    paper_log10: float
    output: Domain
    input: Domain
    parts: dict[str, "Bound"] = field(default_factory=dict)
    kind: str = ""

    @property
    def value(self) -> float:
        """The bound itself; inf beyond the range of a float."""
        return 10.0**self.log10 if self.log10 < 308.0 else math.inf


# A rule bounds diag(scale) o module, with `scale` one factor per channel of the output (the weight
# of a residual branch), or the module alone for None.
Rule = Callable[[Any, Domain, Tensor | None], Bound]

_RULES: dict[str, Rule] = {}


class UnknownModuleError(TypeError):
    """A module without a proved bound occurs in the model."""


def _dotted_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def rule(*types: type[nn.Module] | str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of module types.

    Args:
        *types: Classes, or dotted names of classes, for packages that need not be imported here.
    """

    def register(function: Rule) -> Rule:
        for cls in types:
            _RULES[cls if isinstance(cls, str) else _dotted_name(cls)] = function
        return function

    return register


def lipschitz_bound(module: nn.Module, domain: Domain, scale: Tensor | None = None) -> Bound:
    """Return the proved bound of a module on a domain, in evaluation mode.

    Args:
        module: Layer, block, stage or model whose type has a rule.
        domain: The inputs.
        scale: Factor per output channel that follows the module, [C]; None for none.

    Raises:
        UnknownModuleError: If a module has no rule; a subclass that overrides ``forward`` needs its
            own.
    """
    for cls in type(module).__mro__:
        if _dotted_name(cls) in _RULES and type(module).forward is cls.forward:
            found = _RULES[_dotted_name(cls)](module, domain, scale)
            return replace(found, kind=type(module).__name__, input=domain)
    raise UnknownModuleError(
        f"no Lipschitz bound is known for {_dotted_name(type(module))}: register a proved one with "
        "lipsformer.analysis.bounds.rule"
    )


def simple_bound(
    value: float, domain: Domain, *, size: tuple[int, ...] | None = None, radius: float
) -> Bound:
    """Return the bound of a layer that has no parts.

    Args:
        value: The Lipschitz constant's bound.
        domain: The inputs.
        size: Extent of the outputs, that of the inputs if None.
        radius: Largest 2-norm of a token of the outputs.
    """
    output = Domain(size=domain.size if size is None else size, radius=radius)
    log10 = log10_of(value)
    return Bound(log10=log10, paper_log10=log10, output=output, input=domain)


def log10_of(value: float) -> float:
    """Return the decimal logarithm, -inf for 0 and inf for inf."""
    return math.log10(value) if value > 0.0 else -math.inf


def chain(
    layers: Iterable[tuple[str, nn.Module]], domain: Domain, scale: Tensor | None = None
) -> Bound:
    """Compose modules that are applied one after the other: constants multiply.

    Args:
        layers: Names and modules in order.
        domain: The inputs of the first.
        scale: Factor per channel that follows the last.
    """
    layers = list(layers)
    parts: dict[str, Bound] = {}
    output = domain
    for index, (name, module) in enumerate(layers):
        last = index == len(layers) - 1
        parts[name] = lipschitz_bound(module, output, scale if last else None)
        output = parts[name].output
    return Bound(
        log10=log10_product(part.log10 for part in parts.values()),
        paper_log10=log10_product(part.paper_log10 for part in parts.values()),
        output=output,
        input=domain,
        parts=parts,
    )


def log10_product(logs: Iterable[float]) -> float:
    """Return the logarithm of a product; a constant map (-inf) stays one beside an unbounded."""
    logs = list(logs)
    return -math.inf if -math.inf in logs else sum(logs)


def log10_one_plus(log10: float) -> float:
    """Return log10(1 + 10^log10) without overflow."""
    return max(log10, 0.0) + math.log10(1.0 + 10.0 ** -abs(log10))


def largest(scale: Tensor | None) -> float:
    """Return the 2-norm of diag(scale), 1 for None."""
    return 1.0 if scale is None else scale.detach().abs().max().item()


def image_domain(size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> Domain:
    """Return the domain of normalised images with pixel values in [0, 1].

    Args:
        size: (H, W) in pixels.
        mean: Mean per channel that the normalisation subtracts.
        std: Standard deviation per channel that it divides by.
    """
    longest = [max(m, 1.0 - m) / s for m, s in zip(mean, std, strict=True)]
    return Domain(size=size, radius=math.hypot(*longest))


class _BoundOf(nn.Module):
    """A model's bound as a forward pass, which can be called with other tensors as weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, domain: Domain) -> Bound:
        return lipschitz_bound(self.model, domain)


def gathered_bound(model: nn.Module, domain: Domain) -> Bound:
    """Return the proved bound of a model that FSDP2 may have sharded; every rank must call it.

    Args:
        model: The model inside the wrappers.
        domain: The inputs.
    """
    weights = {f"model.{name}": whole(weight) for name, weight in model.named_parameters()}
    return functional_call(_BoundOf(model), weights, (domain,))


def flatten_bound(bound: Bound, name: str = "") -> Iterator[tuple[str, Bound]]:
    """Yield (module name, bound) of a bound and all its parts, parents first."""
    yield name, bound
    for part_name, part in bound.parts.items():
        yield from flatten_bound(part, f"{name}.{part_name}" if name else part_name)
