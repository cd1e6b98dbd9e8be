"""Count the floating-point operations and the bytes of every operator that runs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class OperatorCounter(TorchDispatchMode):
    """Context manager that counts the operators that run inside it, backward passes included.

    Matrix products, convolutions and attention count two operations per multiply-add. Every other
    operator counts one operation per element that it writes. Every operator is assumed to read its
    inputs from memory and to write its results there, so caches and fusion by a compiler are not
    taken into account. `lipsformer.analysis.cost` counts multiply-adds of a forward pass by part,
    through fvcore, which sees neither bytes nor backward passes.

    Attributes:
        flops: Number of floating-point operations.
        bytes: Number of bytes read and written.
    """

    def __init__(self) -> None:
        """Start both counts at zero."""
        super().__init__()
        self.flops = 0
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _is_view(func) and "empty" not in func.__name__:
            written = _tensors(result)
            self.bytes += _size([*_tensors((args, kwargs)), *written])
            self.flops += _flops(func, args, kwargs, result, written)
        return result


def _is_view(func: Any) -> bool:
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(tensors: Iterable[Tensor]) -> int:
    # An expanded tensor has more elements than its storage.
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


def _flops(func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, written: list) -> int:
    packet = func._overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        # torch's own formula does not divide the channels by the groups.
        grad, weight, (of_input, of_weight, _) = args[0], args[2], args[-1]
        return 2 * grad.numel() * weight[0].numel() * (of_input + of_weight)
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result)
    return sum(t.numel() for t in written)
