"""What makes a call of a module differ from the methods that its bound rule was proved for."""

from inspect import getattr_static
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize

from lipsformer.layers.spectral import SpectralScale

# A call of a module runs these methods of `nn.Module` around `forward`.
CALL = frozenset(
    {"__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "__getattribute__"}
    | {"__getattr__", "train", "eval"}  # the last two may put other weights into the module
)
# Methods whose names begin like this build, describe or load a module. A forward pass runs none.
_SETUP = (
    *("reset_", "init", "_init", "extra_repr", "set_", "make_", "no_weight_decay", "group_matcher"),
    *("load", "_load", "get_classifier", "prune_", "forward_intermediates"),
)

# Tensors that would repeat the map along other axes if they had any.
_PER_CHANNEL = ("bias", "gamma", "residual_scale")

# Parametrizations that are functions of their tensor in evaluation mode.
_PARAMETRIZATIONS = (
    SpectralScale,
    parametrizations._Orthogonal,
    parametrizations._SpectralNorm,
    parametrizations._WeightNorm,
)


def methods_of(cls: type[nn.Module]) -> frozenset[str]:
    """Return the names of the methods below `nn.Module` that may take part in a forward pass."""
    return frozenset(
        name
        for base in cls.__mro__[: cls.__mro__.index(nn.Module)]
        for name, member in vars(base).items()
        if (callable(member) or isinstance(member, (property, staticmethod, classmethod)))
        and not isinstance(member, type)
        and not name.startswith(_SETUP)
        and name not in ("__init__", "__repr__", "__getstate__", "__setstate__", "__dir__")
    )


def overridden(cls: type, base: type, methods: frozenset[str]) -> str | None:
    """Return a method of the class `base` that its subclass `cls` overrides, or None.

    A class beside `base` may also come before `nn.Module` and override a method of that. A property
    or another descriptor counts too, because it may hide a weight and depend on the mode. The
    properties of PyTorch's parametrized classes do not: `tampering` examines what they compute.
    """
    for name in sorted(methods):
        if getattr_static(cls, name, None) is not getattr_static(base, name, None):
            return name
    for other in cls.__mro__:
        if other in base.__mro__ or other.__module__ == parametrize.__name__:
            continue
        for name, member in vars(other).items():
            plain = isinstance(member, (FunctionType, classmethod, staticmethod))
            if hasattr(type(member), "__get__") and not plain and not name.startswith("__"):
                return name
    return None


def tampering(module: nn.Module, methods: frozenset[str]) -> str | None:
    """Return what makes a call of this instance differ from the methods of its class, or None."""
    for name in methods:
        if name in vars(module) and not _is_own_method(module, name):
            return f"its method {name!r} was replaced on the instance"
    compiled = module._compiled_call_impl
    if compiled and getattr(compiled, "_torchdynamo_orig_callable", None) != module._call_impl:
        return "its compiled call was replaced"
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if any(not _is_sharding(hook) for hook in hooks):
        return "a forward hook or forward pre-hook may change its inputs or outputs"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "a global forward hook may change its inputs or outputs"
    return _untrusted_parametrization(module) or _unusual_tensor(module)


def _is_own_method(module: nn.Module, name: str) -> bool:
    """Return whether an attribute of the instance is what its class defines under this name.

    PyG leaves such a `propagate` behind where an explainer has looked at a layer.
    """
    method = vars(module)[name]
    if not isinstance(method, MethodType) or method.__self__ is not module:
        return False
    return method.__func__ is getattr_static(type(module), name)


def _unusual_tensor(module: nn.Module) -> str | None:
    """Return which tensor enters a call otherwise than the rules take it, or None."""
    for name, tensor in (
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
        *((name, value) for name, value in vars(module).items() if isinstance(value, Tensor)),
    ):
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_complex() or tensor.is_meta:
            return f"its {name!r} is no ordinary tensor of real numbers"
        if tensor.numel() == 0:
            return f"its {name!r} of shape {tuple(tensor.shape)} is empty"
    for name in _PER_CHANNEL:
        tensor = getattr(module, name, None)
        if isinstance(tensor, Tensor) and tensor.ndim != 1:
            return f"its {name!r} of shape {tuple(tensor.shape)} is not one number per channel"
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor) and len(bias) != len(getattr(module, "weight", bias)):
        return f"its bias of shape {tuple(bias.shape)} is not one number per channel"
    return None


def _untrusted_parametrization(module: nn.Module) -> str | None:
    """Return why reading a parametrized tensor may not give what a call uses, or None."""
    if not parametrize.is_parametrized(module):
        return None
    for name, steps in cast(nn.ModuleDict, module.parametrizations).items():
        parts = [steps, *cast(nn.ModuleList, steps)]
        for step in cast(nn.ModuleList, steps):
            if type(step) not in _PARAMETRIZATIONS or any(
                tampering(part, methods_of(type(part)) | CALL) for part in parts
            ):
                return (
                    f"the parametrization {type(step).__name__} of its {name!r} may return another "
                    "value at every call: use parametrize.remove_parametrizations first"
                )
    if any(part.training for part in module.modules()):
        return "a parametrization may differ between training and evaluation: call eval() first"
    return None


def _is_sharding(hook: Any) -> bool:
    """Return whether a hook is one of FSDP2's, which gather the weights and change no value.

    Other parts of `torch.distributed` wrap functions of the user into hooks of their own.
    """
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp.")
