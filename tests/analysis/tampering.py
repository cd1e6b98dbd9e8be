"""Change what a module reads, behind the back of its constructor."""

from typing import TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def replaced(module: Module, **attributes: object) -> Module:
    """Return the module with attributes that were set after its construction."""
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
