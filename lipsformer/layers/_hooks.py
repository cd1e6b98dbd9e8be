"""Hooks of a module, which nothing calls if a kernel computes the module."""

from typing import Any


def has_hooks(module: Any) -> bool:
    """Return whether a module has hooks of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
