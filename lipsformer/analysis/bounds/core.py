"""Proved Lipschitz bounds: which rule a class has, and when a rule applies.

A bound rule computes the bound of one class of modules. The rule of a composite module composes the
bounds of its children in the order in which its `forward` calls them. Import everything from
`lipsformer.analysis.bounds`, which loads the rules. The proofs are in docs/theorems.md.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import unwrap
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from lipsformer._sharding import full_tensor
from lipsformer.analysis.bounds.composition import (
    Bound,
    Domain,
    carried,
    compose,
    scale_output,
)
from lipsformer.analysis.bounds.tampering import CALL, methods_of, overridden, tampering
from lipsformer.layers import merge_heads


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
        >>> from torch import nn
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

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import bound_rule, image_domain, lipschitz_bound
        >>> from lipsformer.analysis.bounds import max_abs, simple_bound
        >>> class Half(torch.nn.Module):
        ...     def forward(self, x):
        ...         return 0.5 * x
        >>> @bound_rule(Half)
        ... def _(module, domain, scale):
        ...     factor = 0.5 * max_abs(scale)
        ...     return simple_bound(factor, domain, radius=factor * domain.radius)
        >>> domain = image_domain((2, 3), mean=(0.5,), std=(0.25,))
        >>> f"{10 ** lipschitz_bound(Half(), domain).log10:.3f}"
        '0.500'
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

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.bounds import registration_of
        >>> class Doubled(nn.Linear):
        ...     def forward(self, x):
        ...         return 2.0 * super().forward(x)
        >>> print(registration_of(Doubled))  # the rule of Linear does not cover this `forward`
        None
    """
    for base in cls.__mro__:
        if base in _REGISTERED:
            registered = _REGISTERED[base]
            return None if overridden(cls, base, registered.methods) else registered
    return None


def require_unchanged(module: nn.Module, *classes: type[nn.Module]) -> None:
    """Check that a part computes what one of the given classes computes.

    A rule that reads the weights of a part, or leaves a part out, calls this instead of asking for
    the bound of the part.

    Args:
        module: The part.
        *classes: The classes. A subclass that overrides no method of the forward pass is accepted.

    Raises:
        UnknownModuleError: If the part has another class, if its class overrides a method of the
            forward pass, or if a hook or a replaced method changes what a call computes.

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.bounds import require_unchanged
        >>> require_unchanged(nn.ReLU(), nn.ReLU, nn.Identity)
        >>> require_unchanged(nn.Softmax(dim=-1), nn.ReLU, nn.Identity)
        Traceback (most recent call last):
        UnknownModuleError: no Lipschitz bound is known for ...Softmax in the place of ReLU or ...
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

    The bound is inf if any parameter, buffer or other tensor of the module, or what a
    parametrization makes of one, is NaN or infinite, biases included.

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
    domain = domain.around(module)
    bound = registered.bound(module, domain, scale)
    if not all(tensor.isfinite().all() for tensor in _tensors(module)):
        bound = replace(bound, log10=math.inf, paper_log10=math.inf, last=None)
    ball = carried(bound.value, domain.ball, 0.0, 1)
    output = replace(bound.output, ball=ball, centers=domain.centers)
    return replace(bound, kind=cls.__name__, input=domain, output=output)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))
        if parametrize.is_parametrized(part):
            yield from (getattr(part, name) for name in cast(nn.ModuleDict, part.parametrizations))


def _unknown(cls: type[nn.Module]) -> str:
    advice = "prove one and register it with lipsformer.analysis.bounds.bound_rule"
    rules = "lipsformer.analysis.bounds.graph"
    if cls.__module__.startswith("lipsformer.graph.") and rules not in sys.modules:
        advice = f"import {rules}, which registers the rules of graph layers"
    for base in cls.__mro__:
        if base in _REGISTERED:
            name = overridden(cls, base, _REGISTERED[base].methods)
            return f"it overrides {name!r}, on which the rule of {base.__name__} relies; {advice}"
    return advice


def checked_domain(
    module: nn.Module,
    domain: Domain,
    channels: int | None,
    *,
    first: bool = False,
    on_map: bool = False,
) -> Domain:
    """Return the inputs of a module that needs a number of channels in a certain place.

    A layer on other inputs would repeat them (one channel), or take the channels for tokens.

    Args:
        module: The module.
        domain: Its inputs.
        channels: Number of channels that it needs; None for any.
        first: Whether it needs them before the map, as convolutions of PyTorch do.
        on_map: Whether it needs a map of two axes.

    Raises:
        UnknownModuleError: If the inputs are known to have other channels or another layout, or are
            no map where one is needed.
    """
    if on_map and len(domain.size) != 2:
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {_name(type(module))} on inputs of size "
            f"{domain.size}: it needs a map (H, W)"
        )
    misplaced = len(domain.size) > 0 and domain.channels_first is (not first)
    if misplaced or (channels and domain.channels not in (None, channels)):
        place = "first" if domain.channels_first else "last"
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {_name(type(module))} with {channels} channels "
            f"{'first' if first else 'last'} after a map with {domain.channels} channels {place}"
        )
    return replace(domain, channels=channels or domain.channels, channels_first=first)


def _anywhere(domain: Domain) -> Domain:
    return replace(domain, channels_first=None)


def chain(
    layers: Iterable[tuple[str, nn.Module]],
    domain: Domain,
    scale: Tensor | None = None,
    *,
    moves_channels: bool = True,
) -> Bound:
    """Return the bound of modules that are applied one after the other.

    Args:
        layers: Names and modules, in order. Without any, the map is the identity.
        domain: The inputs of the first module.
        scale: Factor per channel that multiplies the output of the last module, [C]; None for none.
        moves_channels: True if the caller moves the channels, before, between or after the
            modules, to the place where they are needed. If it is False, a module that needs the
            channels in another place is refused.

    Raises:
        UnknownModuleError: If a module has no bound, as for `lipschitz_bound`.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain, chain
        >>> double, triple = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> double.weight.data, triple.weight.data = 2.0 * torch.eye(2), 3.0 * torch.eye(2)
        >>> bound = chain([("double", double), ("triple", triple)], Domain(size=()))
        >>> f"{bound.value:.3f}: {', '.join(bound.parts)}"
        '6.000: double, triple'
    """
    layers = list(layers)
    bound = Bound(log10=0.0, paper_log10=0.0, output=domain, input=domain)
    for index, (name, module) in enumerate(layers):
        last = index == len(layers) - 1
        inner = _anywhere(bound.output) if moves_channels else bound.output
        bound = compose(bound, lipschitz_bound(module, inner, scale if last else None), name)
    if moves_channels:
        bound = replace(bound, output=_anywhere(bound.output))
    return bound if layers else scale_output(bound, scale)


def children_in_order(*names: str) -> BoundRule:
    """Return the rule of a module whose `forward` applies the named children one after the other.

    The module may move the channels between its children.

    Args:
        *names: Attributes of the module, in the order of their calls.

    Returns:
        The rule of a class `cls`, to be registered with `bound_rule(cls)(rule)`.

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.bounds import Domain, children_in_order
        >>> rule = children_in_order("act", "drop")
        >>> module = nn.ModuleDict({"drop": nn.Dropout(), "act": nn.ReLU()})
        >>> bound = rule(module, Domain(size=(7,)), None)
        >>> f"{bound.value:.3f}: {', '.join(bound.parts)}"
        '1.000: act, drop'
    """

    def bound_of_children(module: nn.Module, domain: Domain, scale: Tensor | None) -> Bound:
        return chain([(name, getattr(module, name)) for name in names], domain, scale)

    return bound_of_children


class _BoundOf(nn.Module):
    """Compute a model's bound as a forward pass, so that `functional_call` can replace weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, domain: Domain) -> Bound:
        return lipschitz_bound(self.model, domain)


def gathered_bound(model: nn.Module, domain: Domain) -> Bound:
    """Return the proved bound of a model in training. Every rank must call it.

    FSDP2 may have sharded the model, and Accelerate may have put autocast around its `forward`.

    Args:
        model: The model without the wrappers of DDP or the compiler.
        domain: The inputs.

    Raises:
        UnknownModuleError: If a part of the model has no bound, as for `lipschitz_bound`.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain, gathered_bound
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data = 2.0 * torch.eye(2)
        >>> f"{gathered_bound(model, Domain(size=())).value:.3f}"
        '2.000'
    """
    weights = {f"model.{name}": full_tensor(weight) for name, weight in model.named_parameters()}
    with _without_autocast(model):
        return functional_call(_BoundOf(model), weights, (domain,))


@contextmanager
def _without_autocast(model: nn.Module) -> Iterator[None]:
    """Take away what Accelerate puts around `forward`, and nothing else."""
    wrapped: Any = vars(model).get("forward")
    if "_original_forward" not in vars(model) or unwrap(wrapped) is not unwrap(type(model).forward):
        yield
        return
    del model.forward
    try:
        yield
    finally:
        model.forward = wrapped
