"""Proved Lipschitz bounds: inputs, bounds, how bounds compose, and which rule a class has.

A bound rule computes the bound of one class of modules. The rule of a composite module composes the
bounds of its children in the order in which its `forward` calls them. Import everything from
`lipsformer.analysis.bounds`, which loads the rules. The proofs are in docs/lipschitz.md.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from lipsformer.analysis.bounds.tampering import CALL, methods_of, overridden, tampering
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

    def __post_init__(self) -> None:
        if math.isnan(self.radius):  # 0 * inf, or weights that are not finite
            object.__setattr__(self, "radius", math.inf)

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
            residual branches, for comparison. It is inf if an attention is not covered by its
            paper's theorem.
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
    """What is registered for a class.

    Attributes:
        cls: The class.
        bound: Its bound rule.
        layout: Its layout if it contains attention.
        methods: Methods that the rule relies on.

    Example:
        >>> from lipsformer.analysis.bounds import registration_of
        >>> registration_of(nn.Linear).cls.__name__
        'Linear'
    """

    cls: type[nn.Module]
    bound: BoundRule
    layout: LayoutRule | None
    methods: frozenset[str]


_REGISTERED: dict[type[nn.Module], Registration] = {}


class UnknownModuleError(TypeError):
    """The model contains a module that no proved bound covers."""


def bound_rule(
    *classes: type[nn.Module],
    layout: LayoutRule | None = None,
    methods: Collection[str] | None = None,
) -> Callable[[BoundRule], BoundRule]:
    """Register a function as the bound rule of one or more classes.

    Args:
        *classes: The classes. Subclasses that override none of `methods` are included.
        layout: Where the tokens lie, for a class that contains attention. `attention_maps` needs
            it.
        methods: Names of the methods that the rule relies on. None stands for all methods of the
            class that may take part in its forward pass.

    Returns:
        A decorator for a function of (module, domain, scale) that returns a `Bound`.
    """

    def register(function: BoundRule) -> BoundRule:
        for cls in classes:
            names = methods_of(cls) if methods is None else frozenset(methods)
            _REGISTERED[cls] = Registration(cls, function, layout, names | CALL)
        return function

    return register


def registration_of(cls: type[nn.Module]) -> Registration | None:
    """Return what is registered for a class or for its nearest registered base class.

    Returns None if there is none, or if the class overrides a method that the rule relies on.
    """
    for base in cls.__mro__:
        if base in _REGISTERED:
            registered = _REGISTERED[base]
            return None if overridden(cls, base, registered.methods) else registered
    return None


def unchanged(module: nn.Module, *classes: type[nn.Module]) -> None:
    """Check that a part computes what one of the given classes computes.

    A rule that reads the weights of a part, or leaves a part out, calls this instead of asking for
    the bound of the part.

    Args:
        module: The part.
        *classes: The classes. A subclass that overrides no method of the forward pass is accepted.

    Raises:
        UnknownModuleError: If the part has another class, or is overridden, hooked or replaced.
    """
    cls = type(module)
    names = " or ".join(known.__name__ for known in classes)
    bases = [base for base in cls.__mro__ if base in classes]
    if not bases:
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {_name(cls)} in the place of {names}"
        )
    methods = methods_of(bases[0]) | CALL
    changed = overridden(cls, bases[0], methods)
    reason = f"it overrides {changed!r}" if changed else tampering(module, methods)
    if reason is not None:
        raise UnknownModuleError(f"no Lipschitz bound is known for {_name(cls)}: {reason}")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def lipschitz_bound(module: nn.Module, domain: Domain, scale: Tensor | None = None) -> Bound:
    """Return the proved Lipschitz bound of a module on a domain, in evaluation mode.

    Args:
        module: Layer, block, stage or model.
        domain: The inputs.
        scale: Factor per output channel that multiplies the output, [C]; None for none.

    Raises:
        UnknownModuleError: If the class of the module or of a part has no rule, or if a rule does
            not cover the module because a method is overridden, a hook is registered or a part was
            replaced. A subclass that overrides a method of its forward pass needs its own rule.
        ValueError: If the model refuses inputs of this size.

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
        raise UnknownModuleError(f"no Lipschitz bound is known for {_name(cls)}: {_unknown(cls)}")
    reason = tampering(module, registered.methods)
    if reason is not None:
        raise UnknownModuleError(f"no Lipschitz bound is known for {_name(cls)}: {reason}")
    return replace(registered.bound(module, domain, scale), kind=cls.__name__, input=domain)


def _unknown(cls: type[nn.Module]) -> str:
    advice = "prove one and register it with lipsformer.analysis.bounds.bound_rule"
    if cls.__module__.startswith("lipsformer.graph."):
        advice = (
            "import lipsformer.analysis.bounds.graph, which registers the rules of graph layers"
        )
    for base in cls.__mro__:
        if base in _REGISTERED:
            name = overridden(cls, base, _REGISTERED[base].methods)
            return f"it overrides {name!r}, on which the rule of {base.__name__} relies; {advice}"
    return advice


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
    output = replace(domain, size=domain.size if size is None else size, radius=radius)
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
    """Return the decimal logarithm: -inf for 0, inf for inf, and inf for nan, which is no bound."""
    if math.isnan(value):
        return math.inf
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
