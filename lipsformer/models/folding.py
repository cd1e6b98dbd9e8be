"""How affine layers are folded into their neighbors, and which function folds which module.

A model's own file registers how its modules are folded, with `register_fold`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lipsformer._hooks import has_hooks, has_own_forward
from lipsformer.layers import CenterNorm

Fold = TypeVar("Fold", bound=Callable[[Any], None])
FOLDS: dict[type[nn.Module], Callable[[Any], None]] = {}


def register_fold(*kinds: type[nn.Module]) -> Callable[[Fold], Fold]:
    """Register a function that folds modules of the given classes, in place.

    Args:
        *kinds: Classes. A subclass may compute something else and is folded only if it is named.
    """

    def register(fold: Fold) -> Fold:
        FOLDS.update(dict.fromkeys(kinds, fold))
        return fold

    return register


def require_plain(*modules: nn.Module) -> None:
    """Raise unless modules compute what their classes say, from parameters of their own.

    Args:
        *modules: What a fold changes or removes.

    Raises:
        TypeError: If a module is not of a class of PyTorch, timm or this library, is parametrized,
            or has hooks or a forward function of its own.
    """
    for module in modules:
        obstacle = fold_obstacle(module)
        if obstacle is not None:
            raise TypeError(f"{type(module).__name__} {obstacle}")


def require_kind(module: nn.Module, *kinds: type[nn.Module]) -> None:
    """Raise unless a module is of one of some classes and computes what its class says.

    Args:
        module: What a fold changes, removes or passes over.
        *kinds: The classes.

    Raises:
        TypeError: If it is of another class, also of a subclass, or `require_plain` refuses it.
    """
    require_plain(module)
    if type(module) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"it has a {type(module).__name__} where the fold knows only {names}")


def require_ending(branch: nn.Module, dropout: nn.Module) -> None:
    """Raise unless a branch still ends in its last linear layer, which a fold changes.

    Args:
        branch: The branch, whose class says that it ends in this layer.
        dropout: What follows the layer.

    Raises:
        TypeError: If the branch has hooks or a forward function of its own, or if something else
            than a dropout follows.
    """
    obstacle = _own_obstacle(branch)
    if obstacle is not None:
        raise TypeError(f"{type(branch).__name__} {obstacle}")
    require_kind(dropout, nn.Dropout, nn.Identity)


def require_single_use(model: nn.Module, obstacle: str) -> None:
    """Raise if a module with parameters has two names, since both uses would change together.

    Args:
        model: The model.
        obstacle: What cannot be done with such a module, for the message.

    Raises:
        TypeError: If there is one.
    """
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first = names.setdefault(module, name)
        if first != name and any(True for _ in module.parameters()):
            raise TypeError(
                f"{first} and {name} are one module, which {obstacle}: put a copy in one place"
            )


def fold_obstacle(module: nn.Module) -> str | None:
    """Return why a module may compute something else than its class says, or None."""
    package = type(module).__module__.partition(".")[0]
    if package not in ("torch", "timm", "lipsformer"):
        return "is unknown to the fold: put a plain layer in its place, for example by merging LoRA"
    if is_parametrized(module):
        return "is parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
    return _own_obstacle(module)


def _own_obstacle(module: nn.Module) -> str | None:
    """Return what a module computes beside or instead of what its class says, or None."""
    if has_own_forward(module):
        return "has a forward function of its own"
    if has_hooks(module):
        return "has hooks, which would be lost: remove them, or register them on the folded model"
    return None


def fold_norm_before(norm: CenterNorm, linear: nn.Linear) -> None:
    """Change `linear` so that it also computes the `norm` that stood before it."""
    require_kind(norm, CenterNorm)
    _require_affine(linear)
    weight = linear.weight.double()
    shift = weight @ norm.bias.double().expand(norm.dim)
    centered = weight * full_gain(norm)
    centered -= centered.mean(1, keepdim=True)
    bias = shift if linear.bias is None else linear.bias.double() + shift
    _assign(linear, centered, bias)


def fold_norm_behind(layer: nn.Linear | nn.Conv2d, norm: CenterNorm) -> None:
    """Change `layer` so that it also computes the `norm` that followed it."""
    require_kind(norm, CenterNorm)
    _require_affine(layer)
    weight, gain = layer.weight.double(), full_gain(norm)
    bias = weight.new_zeros(norm.dim) if layer.bias is None else layer.bias.double()
    weight = (weight - weight.mean(0, keepdim=True)).movedim(0, -1) * gain
    _assign(layer, weight.movedim(-1, 0), (bias - bias.mean()) * gain + norm.bias.double())


def scale_output(linear: nn.Linear, scale: Tensor) -> None:
    """Change `linear` so that it also multiplies its output by `scale` ([C_out])."""
    _require_affine(linear)
    scale = scale.double()
    bias = None if linear.bias is None else linear.bias.double() * scale
    _assign(linear, linear.weight.double() * scale[:, None], bias)


def full_gain(norm: CenterNorm) -> Tensor:
    """Return gamma d / (d - 1), which multiplies the centered channels."""
    return norm.weight.double() * (norm.dim / (norm.dim - 1))


def _require_affine(layer: nn.Module) -> None:
    """Raise unless a layer is a linear layer or a convolution, adapters and hooks excluded."""
    require_plain(layer)
    if not isinstance(layer, (nn.Linear, nn.Conv2d)):
        raise TypeError(
            f"it has a {type(layer).__name__} where the fold knows only linear layers and "
            "convolutions"
        )


def _assign(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor | None) -> None:
    dtype = layer.weight.dtype
    layer.weight = nn.Parameter(weight.to(dtype))  # a new one: the old one may be tied
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(dtype))
