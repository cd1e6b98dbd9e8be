"""Make operators that PyTorch's compiler does not look into and that cost the host little."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema

FLEXIBLE = (torch.Tag.flexible_layout,)  # of an operator: the compiler need not copy views
_LIBRARY = Library("lipsformer", "FRAGMENT")  # the operators exist as long as this object


def operator(function: Callable[..., Any], schema: str | None = None) -> Any:
    """Return an operator of PyTorch, under the name of a function, that calls this function.

    `torch.library.custom_op` does the same and checks each call, which takes 8 to 16 us more. A
    training step makes several hundred such calls.

    Args:
        function: Changes none of its arguments, and returns new tensors that share no memory.
        schema: Types of the arguments and the results; None if its annotations give them.

    Example:
        >>> import torch
        >>> from torch import Tensor
        >>> @operator
        ... def twice(x: Tensor) -> Tensor:
        ...     return 2 * x
        >>> twice(torch.ones(2)), torch.ops.lipsformer.twice(torch.ones(2))
        (tensor([2., 2.]), tensor([2., 2.]))
    """
    name = function.__name__
    _LIBRARY.define(name + (schema or infer_schema(function, mutates_args=())), tags=FLEXIBLE)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.lipsformer, name).default
