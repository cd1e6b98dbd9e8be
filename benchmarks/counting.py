"""Count the floating-point operations and the bytes of every operator that runs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


class OperatorCounter(TorchDispatchMode):
    """Context manager that counts the operators that run inside it, backward passes included.

    Matrix products, convolutions and attention count two operations per multiply-add. Every other
    operator counts one operation per element that it writes. Every operator is assumed to read its
    inputs from memory and to write its results there, so caches and fusion by a compiler are not
    taken into account. `lipsformer.analysis.cost` counts multiply-adds of a forward pass by part,
    through fvcore, which sees neither bytes nor backward passes.

    Attributes:
        operators: Number of operators. Views and allocations do not count.
        products: Number of floating-point operations of products, convolutions and attention.
        flops: Number of all floating-point operations.
        bytes: Number of bytes read and written.
    """

    def __init__(self) -> None:
        """Start all counts at zero."""
        super().__init__()
        self.operators = 0
        self.products = 0
        self.flops = 0
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (
            func.namespace in ("aten", "lipsformer")
            and not _is_view(func)
            and "empty" not in func.__name__
        ):
            written = _tensors(result)
            self.operators += 1
            self.bytes += _size([*_tensors((args, kwargs)), *written])
            products = product_flops(func, args, kwargs, result)
            self.products += products or 0
            self.flops += sum(t.numel() for t in written) if products is None else products
        return result


def _is_view(func: Any) -> bool:
    if func._overloadpacket is torch.ops.aten._unsafe_view:  # its schema does not say so
        return True
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(tensors: Iterable[Tensor]) -> int:
    # An expanded tensor has more elements than its storage.
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


def product_flops(func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> int | None:
    """Return the operations of a product, a convolution or attention; None for other operators."""
    packet = func._overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        # torch's own formula does not divide the channels by the groups.
        grad, weight, (of_input, of_weight, _) = args[0], args[2], args[-1]
        return 2 * grad.numel() * weight[0].numel() * (of_input + of_weight)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # not in the registry
        return sdpa_flop_count(*(x.shape for x in args[:3]))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(*(x.shape for x in args[:4]))
    if func.namespace == "lipsformer":
        return _own_products(func.__name__.partition(".")[0], *args)
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result)
    return None


def _own_products(name: str, *args: Any) -> int | None:
    """Return the operations of our own operators for a GPU; None for those without products."""
    if name.startswith("depthwise"):
        return 2 * args[0].numel() * 49
    if not name.startswith("cosine_windows"):
        return None
    backward = "backward" in name
    qkv, _, _, _, lepe, _, windows, *_ = args[1:] if backward else args
    batch, height, width, _, _, channels = qkv.shape
    total = 0
    for h, w in zip(windows[::2], windows[1::2], strict=True):
        tokens = batch * -(-height // h) * -(-width // w) * h * w
        total += tokens * channels * h * w * (10 if backward else 4)
        total += tokens * channels * len(lepe[:1]) * 9 * (4 if backward else 2)
    return total
