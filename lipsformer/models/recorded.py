"""The forward pass of a folded model as one list of calls."""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lipsformer import kernels

MAX_RECORDINGS = 32  # inputs of further shapes are computed by the modules
# Largest size in bytes of one channel of the images that a thread computes at once: 4 images of 224
# px in float32. With more, the maps leave the caches, and the C library asks for their memory anew.
MAX_BYTES_PER_THREAD = 4 * 224 * 224 * 4


class RecordedForward:
    """Forward pass of a model that records its calls, for every kind of input that comes twice.

    A recording holds for one shape, layout and type of a single input on the CPU, without
    gradients and with autocast as it was. All recordings are dropped when a parameter is written,
    a module is replaced or a hook is added. The second call after that records again. While a
    module has hooks, nothing is recorded. Other inputs are computed by the modules. Large batches
    of models of timm and of this library are divided into parts of nearly the same size, which are
    computed one after the other.

    Example:
        >>> import torch
        >>> from lipsformer.models.recorded import RecordedForward
        >>> model = torch.nn.Linear(3, 5).eval()
        >>> model.forward = RecordedForward(model).forward
        >>> with torch.no_grad():
        ...     first, second = model(torch.ones(2, 3)), model(torch.ones(2, 3))
        >>> torch.equal(first, second)
        True
    """

    def __init__(self, model: nn.Module) -> None:
        """Start without recordings.

        Args:
            model: The model, in evaluation mode; set its attribute `forward` to this object's
                method.
        """
        self.model = model
        self.recordings: _Recordings | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the recordings, which can be neither copied nor saved."""
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start again without recordings."""
        self.model = state["model"]
        self.recordings = None

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute what the modules compute.

        Args:
            x: The images. Calls with anything else, or with further arguments, are not recorded.
            *args: Further arguments of the model.
            **kwargs: Further arguments of the model.
        """
        single = type(x) is Tensor and not args and not kwargs
        if not single or not kernels.usable("recording", x, unless=_obstacle):
            return self._modules(x, *args, **kwargs)
        recordings = self.recordings  # another thread may replace them during this call
        if recordings is None or recordings.are_stale():
            recordings = self.recordings = _Recordings(self.model)
        if not recordings.possible:
            return self._modules(x)
        parts = _number_of_parts(x) if recordings.treats_images_alone and x.dim() == 4 else 1
        if parts == 1:
            return self._forward_at_once(recordings, x)
        results = [self._forward_at_once(recordings, part) for part in x.tensor_split(parts)]
        return tree_map(lambda *maps: torch.cat(maps), *results)

    def _modules(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)

    def _forward_at_once(self, recordings: "_Recordings", x: Tensor) -> Any:
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        kind = (x.shape, x.stride(), x.dtype, autocast)
        if kind in recordings.calls:
            calls = recordings.calls[kind]
            return self._modules(x) if calls is None else calls(x)
        if kind in recordings.seen:
            calls, result = self._record(x)
            if not recordings.are_stale():  # since this call began
                recordings.calls[kind] = calls
            return result
        if len(recordings.seen) < MAX_RECORDINGS:
            recordings.seen.add(kind)
        return self._modules(x)  # the first time, so that layers can prepare their weights

    def _record(self, x: Tensor) -> tuple[Callable[[Tensor], Any] | None, Any]:
        """Return the recorded calls, or None if there can be none, and the result."""
        try:
            with kernels.Recorder(x) as recorder:
                result = self._modules(x)
            return recorder.function(result), result
        except kernels.CannotRecordError as error:
            kernels.log("recording", str(error))
            return None, self._modules(x)


class _Recordings:
    """The recordings of a model, which hold as long as its parameters, modules and hooks stay.

    Attributes:
        calls: The function that repeats the calls, by kind of input; None if there can be none.
        seen: The kinds of inputs that have come.
        possible: Whether a recording has all that happens, and every change is noticed.
        treats_images_alone: Whether the results of the images do not depend on each other.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[Any, Callable[[Tensor], Any] | None] = {}
        self.seen: set[Any] = set()
        self.modules = list(model.modules())
        contents = [(m._modules, m._parameters, m._buffers) for m in self.modules]
        self.contents = [content for content in chain.from_iterable(contents) if content]
        inner = [module for module in self.modules if module is not model]
        self.hooks = [hooks for m in inner for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.tensors = [*model.parameters(), *model.buffers()]
        self.kept = [tensor.detach() for tensor in self.tensors]  # so that no address is used again
        # PyTorch does not count the writes to a tensor that was made in inference mode.
        self.counted = not any(tensor.is_inference() for tensor in self.tensors)
        self.possible = self.counted and not any(self.hooks)
        self.treats_images_alone = not any(map(_may_mix_images, self.modules))
        self.state = self._state()

    def are_stale(self) -> bool:
        """Return whether a module or parameter was replaced or written, or hooks came or went."""
        return self._state() != self.state

    def _state(self) -> tuple[Any, ...]:
        objects = chain.from_iterable(map(dict.values, self.contents))
        return (
            list(map(id, objects)),
            list(map(Tensor.data_ptr, self.tensors)),
            [tensor._version for tensor in self.tensors] if self.counted else [],
            [module.training for module in self.modules],
            any(self.hooks),
        )


def _may_mix_images(module: nn.Module) -> bool:
    """Return whether the result of an image may depend on the others.

    In evaluation mode it does not in modules of timm, torch and this library, except norms over the
    batch; other modules may compute anything.
    """
    known = type(module).__module__.partition(".")[0] in ("lipsformer", "timm", "torch")
    over_batch = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
    return module.training or over_batch or not known


def _number_of_parts(x: Tensor) -> int:
    """Return into how many parts a batch of images [B, C, H, W] is divided."""
    one = x.shape[2] * x.shape[3] * kernels.product_dtype(x).itemsize
    most = MAX_BYTES_PER_THREAD * torch.get_num_threads() // max(one, 1)
    return math.ceil(len(x) / max(most, 1)) or 1


def _obstacle() -> str | None:
    """Return why a call can neither be recorded nor take a recording, or None."""
    if torch.nn.modules.module._has_any_global_hook():
        return "a hook of all modules is registered"
    return None
