"""Hooks of modules, which nothing calls if a kernel computes the modules."""

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


def would_run_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether calls of some modules run hooks: their own, or those of all modules.

    The compiler cannot ask for hooks of all modules.
    """
    if not torch.compiler.is_compiling() and torch.nn.modules.module._has_any_global_hook():
        return True
    return any(has_hooks(module) for module in modules)
