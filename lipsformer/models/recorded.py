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
    a module is replaced or a hook is added. The second call after that records again, but none
    records while a module has hooks. Other inputs are computed by the modules. Large batches of
    models of timm and of this library are divided into parts of nearly the same size, which are
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
        self.state: _State | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the recordings, which can be neither copied nor saved."""
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start again without recordings."""
        self.model = state["model"]
        self.state = None

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
        state = self.state  # another thread may replace it during this call
        if state is None or state.watched.has_changed():
            state = self.state = _State(self.model)
        if not state.watched.may_be_recorded():
            return self._modules(x)
        parts = _number_of_parts(x) if state.treats_images_alone and x.dim() == 4 else 1
        if parts == 1:
            return self._forward_at_once(state, x)
        results = [self._forward_at_once(state, part) for part in x.tensor_split(parts)]
        return tree_map(lambda *maps: torch.cat(maps), *results)

    def _modules(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)

    def _forward_at_once(self, state: "_State", x: Tensor) -> Any:
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        kind = (x.shape, x.stride(), x.dtype, autocast)
        if kind in state.recordings:
            recorded = state.recordings[kind]
            return self._modules(x) if recorded is None else recorded(x)
        if kind in state.seen:
            recorded, result = self._record(x)
            if not state.watched.has_changed():  # while it was recorded
                state.recordings[kind] = recorded
            return result
        if len(state.seen) < MAX_RECORDINGS:
            state.seen.add(kind)
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


class _State:
    """The recordings of a model whose parameters, modules and hooks stay as they are.

    Attributes:
        treats_images_alone: Whether the results of the images do not depend on each other. Modules
            of timm, torch and this library are so in evaluation mode, except norms over the batch;
            others may compute anything.
    """

    def __init__(self, model: nn.Module) -> None:
        self.watched = _Watched(model)
        self.treats_images_alone = not any(_may_mix_images(m) for m in model.modules())
        self.recordings: dict[Any, Callable[[Tensor], Any] | None] = {}
        self.seen: set[Any] = set()


def _may_mix_images(module: nn.Module) -> bool:
    known = type(module).__module__.partition(".")[0] in ("lipsformer", "timm", "torch")
    over_batch = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
    return module.training or over_batch or not known


class _Watched:
    """What a recording depends on beside the input."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        inner = [module for module in self.modules if module is not model]
        contents = [(m._modules, m._parameters, m._buffers) for m in self.modules]
        self.contents = [content for content in chain.from_iterable(contents) if content]
        self.hooks = [hooks for m in inner for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.tensors = [*model.parameters(), *model.buffers()]
        self.kept = [tensor.detach() for tensor in self.tensors]  # so that no address is used again
        # PyTorch does not count the writes to a tensor that was made in inference mode.
        self.counted = not any(tensor.is_inference() for tensor in self.tensors)
        self.state = self._state()

    def has_changed(self) -> bool:
        """Return whether a module or parameter was replaced or written, or hooks came or went."""
        return self._state() != self.state

    def may_be_recorded(self) -> bool:
        """Return whether all that happens is in a recording and every change is noticed."""
        *_, hooked = self.state
        return self.counted and not hooked

    def _state(self) -> tuple[Any, ...]:
        objects = chain.from_iterable(map(dict.values, self.contents))
        return (
            list(map(id, objects)),
            list(map(Tensor.data_ptr, self.tensors)),
            [tensor._version for tensor in self.tensors] if self.counted else [],
            [module.training for module in self.modules],
            any(self.hooks),
        )


def _number_of_parts(x: Tensor) -> int:
    """Return into how many parts a batch of images [B, C, H, W] is divided."""
    one = x.shape[2] * x.shape[3] * kernels.product_dtype(x).itemsize
    most = MAX_BYTES_PER_THREAD * torch.get_num_threads() // max(one, 1)
    return math.ceil(len(x) / max(most, 1)) or 1


def _obstacle() -> str | None:
    """Return why a call can neither be recorded nor take a recording, or None."""
    if torch.jit.is_tracing():
        return "something records the operators"
    if torch.nn.modules.module._has_any_global_hook():
        return "a hook of all modules is registered"
    return None
