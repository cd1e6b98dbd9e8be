"""What users do to a module after it was built: override, hook, parametrize, share, swap."""

import inspect
import types
from collections.abc import Callable
from typing import Any, cast

from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipsformer.graph.dropout import Dropout

SETUP = ("reset", "init", "extra_repr", "set_", "no_", "group", "load", "prune", "_load", "_init")
PASSIVE = (nn.Identity, nn.Dropout, Dropout, DropPath, nn.GELU, nn.ReLU)

# Changes after which the sizes inside a module may no longer fit: any error refuses a bound.
BREAKING = ("attribute", "replace", "exchange")


class Times(nn.Module):
    """Multiply by a number; no rule knows this class."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def times(value: Any, factor: float) -> Any:
    """Multiply every floating-point tensor of a result."""
    if isinstance(value, Tensor):
        return value * factor if value.is_floating_point() else value
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(times(part, factor) for part in value)
    return value


def apply(module: nn.Module, change: dict[str, Any] | None) -> bool:
    """Change a module in place; return False if nothing in it can be changed this way."""
    return change is None or bool(CHANGES[change["what"]](module, change))


def _pick(options: list[Any], index: int) -> Any:
    return options[index % len(options)]


def _at(module: nn.Module, change: dict[str, Any]) -> nn.Module:
    return _pick(list(module.modules()), change["at"])


def methods(cls: type) -> list[str]:
    """Return the methods below `nn.Module` that a forward pass may use."""
    names = {
        name
        for base in cls.__mro__[: cls.__mro__.index(nn.Module)]
        for name, member in vars(base).items()
        if inspect.isfunction(member) and not name.startswith(("__", *SETUP))
    }
    return [*sorted(names), "__call__"]


def _method(module: nn.Module, change: dict[str, Any]) -> bool:
    target = _at(module, change)
    cls = type(target)
    name = _pick(methods(cls), change["which"])

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        return times(getattr(cls, name)(self, *args, **kwargs), change["factor"])

    target.__class__ = type("Changed" + cls.__name__, (cls,), {name: override})
    return True


def _forward_attribute(module: nn.Module, change: dict[str, Any]) -> bool:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return times(type(self).forward(self, *args, **kwargs), change["factor"])

    target = _at(module, change)
    target.forward = types.MethodType(forward, target)
    return True


def _hook(module: nn.Module, change: dict[str, Any]) -> bool:
    _at(module, change).register_forward_hook(lambda _, args, out: times(out, change["factor"]))
    return True


def _pre_hook(module: nn.Module, change: dict[str, Any]) -> bool:
    _at(module, change).register_forward_pre_hook(lambda _, args: times(args, change["factor"]))
    return True


def _parametrization(module: nn.Module, change: dict[str, Any]) -> bool:
    owners = [(m, n) for m in module.modules() for n, _ in m.named_parameters(recurse=False)]
    if not owners:
        return False
    owner, name = _pick(owners, change["at"])
    parametrize.register_parametrization(owner, name, Times(change["factor"]))
    return True


def _children(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if child is not None
    ]


def _tie(module: nn.Module, change: dict[str, Any]) -> bool:
    """Let one module stand in two places."""

    def signature(child: nn.Module) -> tuple[Any, ...]:
        return type(child), tuple(tuple(p.shape) for p in child.parameters()), str(child)

    children = _children(module)
    pairs = [
        (parent, name, other)
        for index, (_, _, other) in enumerate(children)
        for parent, name, child in children[index + 1 :]
        if child is not other and signature(child) == signature(other)
    ]
    if not pairs:
        return False
    parent, name, other = _pick(pairs, change["at"])
    parent._modules[name] = other
    return True


def _swap(module: nn.Module, change: dict[str, Any]) -> bool:
    """Put an unknown module in the place of one that most rules look through."""
    places = [(parent, name) for parent, name, child in _children(module) if type(child) in PASSIVE]
    if not places:
        return False
    parent, name = _pick(places, change["at"])
    parent._modules[name] = Times(change["factor"])
    return True


def _float_attribute(module: nn.Module, change: dict[str, Any]) -> bool:
    places = [
        (child, name)
        for child in module.modules()
        for name, value in vars(child).items()
        if isinstance(value, float) and not name.startswith("_")
    ]
    if not places:
        return False
    child, name = _pick(places, change["at"])
    setattr(child, name, abs(change["factor"]) * getattr(child, name))
    return True


def _attribute(module: nn.Module, change: dict[str, Any]) -> bool:
    """Change a switch, a number or a size that was given at construction."""
    places = [
        (child, name, value)
        for child in module.modules()
        for name, value in vars(child).items()
        if not name.startswith("_") and name != "training" and isinstance(value, (int, tuple))
    ]
    if not places:
        return False
    child, name, value = _pick(places, change["at"])
    step = _pick([1, -1, 2], change["which"])
    if isinstance(value, bool):
        setattr(child, name, not value)
    elif isinstance(value, int):
        setattr(child, name, value + step)
    elif value and all(isinstance(part, int) for part in value):
        setattr(child, name, (value[0] + step, *value[1:]))
    else:
        return False
    return True


def _replace(module: nn.Module, change: dict[str, Any]) -> bool:
    """Put a known module in the place of another, or apply the other twice."""
    places = [place for place in _children(module) if not isinstance(place[2], nn.Conv2d)]
    if not places:
        return False
    parent, name, child = _pick(places, change["at"])
    others = [nn.Identity(), nn.GELU(), nn.Dropout(0.5), nn.Sequential(child, child)]
    parent._modules[name] = _pick(others, change["which"])
    return True


def _exchange(module: nn.Module, change: dict[str, Any]) -> bool:
    """Let two modules change places."""
    children = _children(module)
    if len(children) < 2:
        return False
    first, second = _pick(children, change["at"]), _pick(children, change["which"])
    first[0]._modules[first[1]], second[0]._modules[second[1]] = second[2], first[2]
    return first[2] is not second[2]


def _buffer(module: nn.Module, change: dict[str, Any]) -> bool:
    """Multiply a buffer, such as the length of the values."""
    places = [
        (child, name)
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]
    if not places:
        return False
    child, name = _pick(places, change["at"])
    child._buffers[name] = change["factor"] * cast(Tensor, child._buffers[name])
    return True


CHANGES: dict[str, Callable[[nn.Module, dict[str, Any]], bool]] = {
    "tie": _tie,
    "method": _method,
    "forward_attribute": _forward_attribute,
    "hook": _hook,
    "pre_hook": _pre_hook,
    "parametrization": _parametrization,
    "swap": _swap,
    "float_attribute": _float_attribute,
    "attribute": _attribute,
    "replace": _replace,
    "exchange": _exchange,
    "buffer": _buffer,
}
