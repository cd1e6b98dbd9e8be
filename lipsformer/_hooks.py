"""What a call of a module runs beside or instead of the forward function of its class.

A kernel that computes the module runs none of it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def has_hooks(module: Any) -> bool:
    """Return whether a module has hooks of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def has_own_forward(module: Any) -> bool:
    """Return whether a forward function was set on a module itself."""
    return module.__dict__.get("forward") is not None


def would_run_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether calls of some modules run hooks: their own, or those of all modules.

    The compiler cannot ask for hooks of all modules.
    """
    if not torch.compiler.is_compiling() and torch.nn.modules.module._has_any_global_hook():
        return True
    return any(has_hooks(module) for module in modules)
