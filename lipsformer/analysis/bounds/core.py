"""Proved Lipschitz bounds: inputs, bounds, how bounds compose, and which rule a class has.

A bound rule computes the bound of one class of modules. The rule of a composite module composes the
bounds of its children in the order in which its `forward` calls them. Import everything from
`lipsformer.analysis.bounds`, which loads the rules. The proofs are in docs/lipschitz.md.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from lipsformer.analysis.sigma import full_tensor
from lipsformer.layers import merge_heads


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The set of inputs on which a bound holds.

    Attributes:
        size: Size of the map in tokens or pixels: (H, W), (N,) for a sequence, or () for pooled
            features.
        radius: Largest 2-norm of a token (of a pixel over its channels). Only attention on raw
            values needs it, because its constant grows with the values.

    Example:
        >>> from lipsformer.analysis.bounds import Domain
        >>> Domain(size=(14, 14), radius=3.0).tokens
        196
    """

    size: tuple[int, ...]
    radius: float = math.inf

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return math.prod(self.size)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A proved upper bound of a Lipschitz constant: 2-norm, whole input, evaluation mode.

    Attributes:
        log10: Decimal logarithm of the bound.
        paper_log10: The same with the paper's Theorem 1 for attention and max|alpha| Lip(f) for
            residual branches, for comparison. It is never below `log10`.
        output: The domain of the outputs.
        input: The domain on which the bound holds.
        parts: Bounds of the children, by name.
        kind: Name of the module's class.

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> bound = lipschitz_bound(nn.GELU(), Domain(size=(49,)))
        >>> f"{bound.kind}: {bound.value:.3f}"
        'GELU: 1.129'
    """

    log10: float
    paper_log10: float
    output: Domain
    input: Domain
    parts: dict[str, "Bound"] = field(default_factory=dict)
    kind: str = ""

    @property
    def value(self) -> float:
        """The bound itself; inf if it exceeds the range of a float."""
        return 10.0**self.log10 if self.log10 < 308.0 else math.inf


class Layout(NamedTuple):
    """Where the tokens of an attention lie on the feature map.

    Attributes:
        window: (h, w), the window within which tokens attend.
        size: (H, W), the feature map.
        num_prefix_tokens: Number of class and register tokens before the tokens of the map.
        shift: Rows and columns by which the first window is shifted; the map is then cyclic.
        merge: Function of (x, window, size) that joins windows [B * num_windows, heads, h * w, d]
            to a map [B, H, W, heads * d]. The default is for windows of neighboring tokens.

    Example:
        >>> from lipsformer.analysis.bounds import Layout
        >>> Layout(window=(7, 7), size=(14, 14)).shift
        (0, 0)
    """

    window: tuple[int, int]
    size: tuple[int, int]
    num_prefix_tokens: int = 0
    shift: tuple[int, int] = (0, 0)
    merge: Callable[[Tensor, tuple[int, int], tuple[int, int]], Tensor] = merge_heads


# bound_rule(module, domain, scale) bounds diag(scale) o module, where `scale` holds one factor per
# output channel (the weights of a residual branch). `scale=None` bounds the module itself.
BoundRule = Callable[[Any, Domain, Tensor | None], Bound]

# layout(model, module, index, x): `index` counts the attention cores (ScaledCosineAttention or
# LipschitzNormAttention) inside `module` in the order of their calls; `x` is the module's input.
LayoutRule = Callable[[Any, Any, int, Tensor], Layout]


class Registration(NamedTuple):
    """What is registered for a class: its bound rule, and its layout if it contains attention."""

    bound: BoundRule
    layout: LayoutRule | None


_REGISTERED: dict[type[nn.Module], Registration] = {}


class UnknownModuleError(TypeError):
    """The model contains a module whose class has no proved bound."""


def bound_rule(
    *classes: type[nn.Module], layout: LayoutRule | None = None
) -> Callable[[BoundRule], BoundRule]:
    """Register a function as the bound rule of one or more classes.

    Args:
        *classes: The classes. A subclass is included if it overrides neither `forward` nor a
            method that `forward` calls.
        layout: Where the tokens lie, for a class that contains attention. `attention_maps` needs
            it.

    Returns:
        A decorator for a function of (module, domain, scale) that returns a `Bound`.
    """

    def register(function: BoundRule) -> BoundRule:
        for cls in classes:
            _REGISTERED[cls] = Registration(function, layout)
        return function

    return register


def registration_of(cls: type[nn.Module]) -> Registration | None:
    """Return what is registered for a class, or for the base class that computes what it does.

    A subclass computes what its base does if it inherits `forward` and every method that `forward`
    names.
    """
    for base in cls.__mro__:
        if base in _REGISTERED:
            names = ("forward", *inspect.unwrap(base.forward).__code__.co_names)
            if all(getattr(cls, name, None) is getattr(base, name, None) for name in names):
                return _REGISTERED[base]
    return None


def lipschitz_bound(module: nn.Module, domain: Domain, scale: Tensor | None = None) -> Bound:
    """Return the proved Lipschitz bound of a module on a domain, in evaluation mode.

    Args:
        module: Layer, block, stage or model.
        domain: The inputs.
        scale: Factor per output channel that multiplies the output, [C]; None for none.

    Raises:
        UnknownModuleError: If the class of the module or of a part has no rule. A subclass that
            overrides `forward`, or a method that `forward` calls, needs its own rule.

    Example:
        >>> import timm
        >>> from lipsformer.analysis.bounds import image_domain, lipschitz_bound
        >>> model = timm.create_model("lipsformer_swin_nano")
        >>> bound = lipschitz_bound(model, image_domain((32, 32), mean=[0.5] * 3, std=[0.5] * 3))
        >>> sorted(bound.parts)
        ['head', 'norm', 'patch_embed', 'stages']
    """
    cls = type(module)
    registered = registration_of(cls)
    if registered is None:
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {cls.__module__}.{cls.__qualname__}: prove one and "
            "register it with lipsformer.analysis.bounds.bound_rule"
        )
    return replace(registered.bound(module, domain, scale), kind=cls.__name__, input=domain)


def simple_bound(
    value: float, domain: Domain, *, size: tuple[int, ...] | None = None, radius: float
) -> Bound:
    """Return the bound of a layer without parts.

    Args:
        value: Bound of the Lipschitz constant.
        domain: The inputs.
        size: Size of the output map; None if it equals that of the input map.
        radius: Largest 2-norm of an output token.
    """
    output = Domain(size=domain.size if size is None else size, radius=radius)
    log10 = log10_of(value)
    return Bound(log10=log10, paper_log10=log10, output=output, input=domain)


def compose(first: Bound, second: Bound, name: str | None = None) -> Bound:
    """Return the bound of one map followed by another: the constants multiply.

    Args:
        first: Bound of the first map.
        second: Bound of the second map on `first.output`.
        name: Name under which `second` becomes a part of the result. None adds the parts of
            `second` instead.
    """
    return Bound(
        log10=log10_product((first.log10, second.log10)),
        paper_log10=log10_product((first.paper_log10, second.paper_log10)),
        output=second.output,
        input=first.input,
        parts={**first.parts, **({name: second} if name else second.parts)},
    )


def chain(
    layers: Iterable[tuple[str, nn.Module]], domain: Domain, scale: Tensor | None = None
) -> Bound:
    """Return the bound of modules that are applied one after the other.

    Args:
        layers: Names and modules, in order.
        domain: The inputs of the first module.
        scale: Factor per channel that multiplies the output of the last module.
    """
    layers = list(layers)
    bound = Bound(log10=0.0, paper_log10=0.0, output=domain, input=domain)
    for index, (name, module) in enumerate(layers):
        last = index == len(layers) - 1
        part = lipschitz_bound(module, bound.output, scale if last else None)
        bound = compose(bound, part, name)
    return bound if layers else scale_output(bound, scale)


def children_in_order(*names: str) -> BoundRule:
    """Return the rule of a module whose `forward` applies the named children one after the other.

    Args:
        *names: Attributes of the module, in the order of their calls.
    """

    def bound_of_children(module: nn.Module, domain: Domain, scale: Tensor | None) -> Bound:
        return chain([(name, getattr(module, name)) for name in names], domain, scale)

    return bound_of_children


def scale_output(bound: Bound, scale: Tensor | None) -> Bound:
    """Return the bound of a map whose output is multiplied by one factor per channel.

    Args:
        bound: Bound of the map.
        scale: The factors, [C]; None for none.
    """
    factor = max_abs(scale)
    return replace(
        bound,
        log10=log10_product((bound.log10, log10_of(factor))),
        paper_log10=log10_product((bound.paper_log10, log10_of(factor))),
        output=replace(bound.output, radius=factor * bound.output.radius),
    )


def log10_of(value: float) -> float:
    """Return the decimal logarithm: -inf for 0 and inf for inf."""
    return math.log10(value) if value > 0.0 else -math.inf


def log10_product(logs: Iterable[float]) -> float:
    """Return the logarithm of a product, which is 0 if any factor is 0, even if another is inf."""
    logs = list(logs)
    return -math.inf if -math.inf in logs else sum(logs)


def log10_one_plus(log10: float) -> float:
    """Return log10(1 + 10^log10) without overflow."""
    return max(log10, 0.0) + math.log10(1.0 + 10.0 ** -abs(log10))


def max_abs(scale: Tensor | None) -> float:
    """Return the largest absolute value, which is the 2-norm of diag(scale); 1 for None."""
    return 1.0 if scale is None else scale.detach().abs().max().item()


def image_domain(size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> Domain:
    """Return the domain of normalized images whose pixel values lie in [0, 1].

    Args:
        size: (H, W) in pixels.
        mean: Mean per channel that the normalization subtracts.
        std: Standard deviation per channel by which it divides.
    """
    longest = [max(m, 1.0 - m) / s for m, s in zip(mean, std, strict=True)]
    return Domain(size=size, radius=math.hypot(*longest))


class _BoundOf(nn.Module):
    """Compute a model's bound as a forward pass, so that `functional_call` can replace weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, domain: Domain) -> Bound:
        return lipschitz_bound(self.model, domain)


def gathered_bound(model: nn.Module, domain: Domain) -> Bound:
    """Return the proved bound of a model that FSDP2 may have sharded. Every rank must call it.

    Args:
        model: The model without the wrappers of DDP or the compiler.
        domain: The inputs.
    """
    weights = {f"model.{name}": full_tensor(weight) for name, weight in model.named_parameters()}
    return functional_call(_BoundOf(model), weights, (domain,))


def flatten_bound(bound: Bound, name: str = "") -> Iterator[tuple[str, Bound]]:
    """Yield (module name, bound) of a bound and of all its parts, parents before children."""
    yield name, bound
    for part_name, part in bound.parts.items():
        yield from flatten_bound(part, f"{name}.{part_name}" if name else part_name)
