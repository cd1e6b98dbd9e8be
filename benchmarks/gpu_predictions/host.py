"""Find where a training step makes the host wait for the GPU, and where it leaves the compiler."""

from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lipsformer.engine.compilation import compile_regions

aten = torch.ops.aten
# Operators whose result, or its size, the host must know before it goes on.
READ_VALUES = {
    *{aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero},
    *{aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.bincount, aten.argwhere},
}
INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# These copy to the host. On the CPU, which takes the place of the GPU here, they run no operator.
COPIES = {"cpu", "numpy", "tolist"}


class HostReads:
    """Context manager that counts, by name, the calls for which a host waits for its GPU.

    It watches tensors of the CPU, real or fake, and calls of the backward pass too. Tensors that a
    program keeps on the host all the time count as well.

    Example:
        >>> with HostReads() as reads:
        ...     positive = bool((torch.ones(3) > 0).all())
        >>> dict(reads)
        {'_local_scalar_dense': 1}
    """

    def __enter__(self) -> Counter[str]:
        """Start to watch; return the counts, which grow."""
        self.found: Counter[str] = Counter()
        self._modes = (_Copies(self.found), _Values(self.found))
        for mode in self._modes:
            mode.__enter__()
        return self.found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop to watch."""
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, traceback)


class _Values(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        by_mask = packet in INDEX and any(
            isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1]
        )
        counts = packet is aten.repeat_interleave and len(args) == 1
        if packet in READ_VALUES or by_mask or counts:
            self.found[packet.__name__] += 1
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in COPIES and isinstance(args[0], Tensor):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def compiled_regions(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Trace a forward pass in training as a run compiles it.

    Args:
        model: A model on the meta device. It is of no use afterwards.
        images: Images on the meta device.

    Returns:
        The number of graphs that the compiler gets, and the number of breaks by reason.
    """
    torch.compiler.reset()
    counters.clear()
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compile_regions(model.train(), deterministic=False, backend=count)
    model(images)
    return {"graphs": graphs, "breaks": dict(counters["graph_break"])}
