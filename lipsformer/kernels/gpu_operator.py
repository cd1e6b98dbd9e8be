"""Make operators that PyTorch's compiler does not look into and that cost the host little."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema, register_fake

_LIBRARY = Library("lipsformer", "FRAGMENT")  # the operators exist as long as this object


def operator(function: Callable[..., Any]) -> Any:
    """Return an operator of PyTorch, under the name of a function, that calls this function.

    `torch.library.custom_op` does the same and checks each call, which takes 10 to 20 us more. A
    step of a small model on a fast GPU consists of several hundred calls.

    Args:
        function: Changes none of its arguments, and returns new tensors that share no memory. Its
            annotations give the schema.

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
    # The compiler need not copy views that are handed over.
    schema = name + infer_schema(function, mutates_args=())
    _LIBRARY.define(schema, tags=(torch.Tag.flexible_layout,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.lipsformer, name).default


def fake(own: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of the function that returns results of an operator without values.

    Example:
        >>> import torch
        >>> from torch import Tensor
        >>> @operator
        ... def thrice(x: Tensor) -> Tensor:
        ...     return 3 * x
        >>> @fake(thrice)
        ... def _(x: Tensor) -> Tensor:
        ...     return x.new_empty(x.shape)
    """
    return register_fake(own.name(), lib=_LIBRARY)
