"""Decide whether a call may take a kernel, and say why not.

`LIPSFORMER_NATIVE=0` switches every kernel off, `LIPSFORMER_GPU_BLOCKS=0` those for blocks and
windows on a GPU. `LIPSFORMER_LOG=kernels` prints, once per operator and reason, which calls took
a kernel and which did not.
"""

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from lipsformer.kernels.build import compiled_library
from lipsformer.kernels.recording import current_recorder

ENABLED = os.environ.get("LIPSFORMER_NATIVE") != "0"
GPU_BLOCKS = os.environ.get("LIPSFORMER_GPU_BLOCKS") != "0"
LOG = "kernels" in os.environ.get("LIPSFORMER_LOG", "").split(",")

_FLOAT32 = (torch.float32,)
_FLOAT32_BFLOAT16 = (torch.float32, torch.bfloat16)
_HALF = (torch.bfloat16, torch.float16)
_PLAIN_CLASSES = {Tensor, nn.Parameter}
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class Needs(NamedTuple):
    """What the kernel of an operator needs.

    Attributes:
        backends: What must be available. ("csrc",) means our compiled kernels. ("onednn",) means
            PyTorch's oneDNN for float32 without autocast, and for bfloat16 if `casts` is true.
            ("csrc", "onednn") means oneDNN for float32 without autocast and our kernels otherwise.
            () means nothing, because the operator consists of PyTorch's operators.
        dtypes: Data types of the first tensor. Under autocast, an operator whose `casts` is true
            sees the type that autocast gives it.
        casts: Whether autocast changes the type of the operator's input.
        mixed: Whether the other tensors may have a type that differs from the first one's. For an
            operator whose `casts` is true, this holds only under autocast.
        contiguous: Whether all tensors must be contiguous.
        min_dims: Least number of dimensions of the first tensor.
        twice: Whether its gradients can be differentiated again, so that it may be used with
            gradients outside training too.
        device: "cpu" or "cuda". The kernels for CUDA are written in Triton and read tensors of all
            floating-point types beside the first one.
    """

    backends: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = _FLOAT32
    casts: bool = False
    mixed: bool = False
    contiguous: bool = False
    min_dims: int = 1
    twice: bool = False
    device: str = "cpu"


_POINTWISE = Needs(("csrc",), _FLOAT32_BFLOAT16, contiguous=True)
_POINTWISE_MIXED = _POINTWISE._replace(mixed=True)  # parameters are float32
NEEDS = {
    # asked by the layers
    "elu": _POINTWISE._replace(twice=True),
    "block": Needs(("csrc",), _FLOAT32_BFLOAT16, mixed=True, min_dims=4),
    "center_norm": Needs((), _FLOAT32_BFLOAT16, mixed=True),
    # These two do not call oneDNN. They ask for it because it excludes autocast, which would cast
    # the operators of their forward pass and not those of their backward pass.
    "cosine_normalize": Needs(("onednn",)),
    "attention": Needs(("onednn",)),
    "cosine_windows": Needs(("csrc",), _FLOAT32_BFLOAT16, mixed=True),
    "depthwise": Needs(("csrc", "onednn"), _FLOAT32_BFLOAT16, casts=True, mixed=True),
    "depthwise_gelu": Needs(("csrc",), _FLOAT32_BFLOAT16, casts=True, mixed=True),
    "fold_shift": Needs((), (*_FLOAT32_BFLOAT16, torch.float64)),
    "gelu_residual": Needs((), _FLOAT32_BFLOAT16, mixed=True),
    "kept_samples": Needs((), _FLOAT32_BFLOAT16, twice=True),
    "linear": Needs(("onednn",), _FLOAT32_BFLOAT16, casts=True, mixed=True, min_dims=3),
    "node_terms": Needs(("csrc",), contiguous=True, twice=True),
    "packed_linear": Needs(("onednn",), _FLOAT32_BFLOAT16, casts=True, mixed=True),
    "recording": Needs((), _FLOAT32_BFLOAT16),
    "residual": _POINTWISE,
    # asked by the layers on a GPU
    "block.gpu": Needs(dtypes=(torch.bfloat16,), casts=True, device="cuda"),
    "cosine_windows.gpu": Needs(dtypes=_HALF, device="cuda"),
    # asked inside the kernels, where PyTorch's operators are the other choice
    "center.csrc": _POINTWISE_MIXED,
    "depthwise.csrc": Needs(("csrc",), _FLOAT32_BFLOAT16, mixed=True),
    "gelu.csrc": _POINTWISE,
    "gelu_residual.csrc": _POINTWISE_MIXED,
    "product.csrc": Needs(("csrc",)),
    "scale_weight.csrc": Needs(("csrc",), mixed=True, contiguous=True),
    "sum_rows.csrc": _POINTWISE,
}
_said: set[tuple[str, str | None]] = set()


class _Inside(threading.local):
    """Whether this thread is within `inside_block`."""

    block = False


_inside = _Inside()


@contextmanager
def inside_block() -> Iterator[None]:
    """Within it, the kernels of a block's parts are usable wherever the type of the input fits.

    The block has already checked that every part may use its kernel, and `usable` does not check it
    again. So no module may be called here. Outside of a block, a call of `usable` takes about 5
    microseconds, as long as the kernel of a small map.
    """
    _inside.block = True
    try:
        yield
    finally:
        _inside.block = False


def usable(
    operator: str,
    x: Tensor,
    *others: Tensor,
    training: bool = False,
    unless: Callable[[], str | None] | None = None,
) -> bool:
    """Return whether the kernel of an operator may compute a call.

    The gradients of most kernels cannot be differentiated again, so with gradients they are used
    only in training mode. Evaluation with gradients and `torch.func` keep the plain operators,
    which can be differentiated twice. The compiler keeps them too, because it fuses them itself.

    Args:
        operator: A key of `NEEDS`.
        x: Input of the operator.
        *others: Weights and further inputs.
        training: Whether the layer is in training mode.
        unless: Called last; returns a reason of the caller against the kernel, or None.
    """
    needs = NEEDS[operator]
    if _inside.block:
        return x.dtype in needs.dtypes
    if needs.device == "cuda":
        if device_type(x) != "cuda":
            return False
        obstacle = _gpu_obstacle(needs, x, training)
    elif torch.compiler.is_compiling():  # which cannot trace what follows
        return False
    else:
        obstacle = _obstacle(needs, x, others, training)
    if obstacle is None and unless is not None:
        obstacle = unless()
    log(operator, obstacle)
    return obstacle is None


def log(operator: str, obstacle: str | None) -> None:
    """Print once whether a kernel is used, if `LIPSFORMER_LOG` asks for it."""
    if LOG and (operator, obstacle) not in _said:
        _said.add((operator, obstacle))
        taken = "kernel" if obstacle is None else f"plain operators, because {obstacle}"
        sys.stderr.write(f"lipsformer kernels: {operator}: {taken}\n")


def active_transform() -> str | None:
    """Return which transform differentiates or maps the operators, or None.

    Fused kernels, PyTorch's attention among them, have no rule for such a transform.
    """
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    return None


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a product with `x` is computed.

    Autocast may change it. Like PyTorch's own, it leaves float64 as it is.
    """
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def is_observed() -> bool:
    """Return whether something that cannot see our kernels records or replaces the operators."""
    depth = torch._C._len_torch_dispatch_stack()
    recorded = depth > 0 and (depth > 1 or current_recorder() is None)
    return recorded or torch._C._is_tracing()


def refuse_second_derivatives(*grads: Tensor) -> None:
    """Raise a `RuntimeError` in a backward pass whose result is to be differentiated again.

    Also raise for a batch of gradients. `once_differentiable` is not enough: it stays silent if the
    incoming gradient is a constant.

    Args:
        *grads: The incoming gradients.
    """
    if torch.is_grad_enabled() or any(is_batch(grad) for grad in grads):
        raise RuntimeError(
            "this kernel has no second derivatives and takes one gradient at a time: call "
            "model.eval() before you take gradients with create_graph, is_grads_batched or "
            "vectorize"
        )


def is_batch(grad: Tensor) -> bool:
    """Return whether autograd hands over a batch of gradients, which no kernel takes."""
    if torch.compiler.is_compiling():  # which traces single gradients, and not these questions
        return False
    return is_batchedtensor(grad) or is_legacy_batchedtensor(grad)


def device_type(x: Tensor) -> str:
    """Return the type of device that chooses the kernel.

    Tests and benchmarks patch this function to take the GPU path on a CPU.
    """
    return x.device.type


def gpu_switched_off() -> str | None:
    """Return what switches the kernels for blocks and windows on a GPU off, or None."""
    if not ENABLED:
        return "LIPSFORMER_NATIVE=0 switches the kernels off"
    return None if GPU_BLOCKS else "LIPSFORMER_GPU_BLOCKS=0 switches them off"


def _gpu_obstacle(needs: Needs, x: Tensor, training: bool) -> str | None:
    """Return why a Triton kernel may not be used; the compiler traces this."""
    if (switch := gpu_switched_off()) is not None:
        return switch
    if not _HAS_TRITON:
        return "Triton is not installed"
    if torch.is_grad_enabled() and not training:
        return "gradients outside training may be differentiated twice"
    dtype = product_dtype(x) if needs.casts else x.dtype
    if dtype not in needs.dtypes:
        return f"the input is {dtype}"
    if x.numel() == 0:
        return "the input is empty"
    return None if torch.compiler.is_compiling() else active_transform()


def _obstacle(needs: Needs, x: Tensor, others: tuple[Tensor, ...], training: bool) -> str | None:
    if not ENABLED:
        return "LIPSFORMER_NATIVE=0 switches the kernels off"
    if torch.is_grad_enabled() and not (training or needs.twice):
        return "gradients outside training may be differentiated twice"
    if device_type(x) != "cpu":
        return f"the input is on {device_type(x)}"
    if not {type(tensor) for tensor in (x, *others)} <= _PLAIN_CLASSES:
        return "a tensor is of a subclass, which may not know oneDNN's operators"
    if not torch._C._is_tracing() and x.numel() == 0:  # a tracer warns about such a choice
        return "the input is empty"
    if x.ndim < needs.min_dims:
        return f"the input has {x.ndim} dimensions"
    autocast = torch.is_autocast_enabled("cpu")
    dtype = product_dtype(x) if needs.casts else x.dtype
    if dtype not in needs.dtypes:
        return f"the input is {dtype}"
    may_differ = needs.mixed and (autocast or not needs.casts)
    if not may_differ:
        for other in others:
            if other.dtype != dtype:
                return f"the input is {dtype} and a parameter is {other.dtype}"
    if (transform := active_transform()) is not None:
        return transform
    if is_observed():
        return "something records the operators or replaces the tensors"
    if needs.contiguous and not all(tensor.is_contiguous() for tensor in (x, *others)):
        return "a tensor is not contiguous"
    if "onednn" in needs.backends and torch.backends.mkldnn.is_available():
        if not autocast and dtype == torch.float32:
            return None
        if needs.backends == ("onednn",):
            return _onednn_bfloat16_obstacle() if needs.casts else "autocast is on"
    if "csrc" in needs.backends:
        return _csrc_obstacle(x, others)
    return "oneDNN is not available" if needs.backends else None


def _onednn_bfloat16_obstacle() -> str | None:
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return "oneDNN computes no bfloat16 on this processor"


def _csrc_obstacle(x: Tensor, others: tuple[Tensor, ...]) -> str | None:
    """Return why the compiled kernels, which read memory themselves, may not be used."""
    for tensor in (x, *others):
        if not torch._C._has_storage(tensor):
            return "a tensor has no storage"
        if tensor.is_neg():
            return "a tensor is a view with the opposite sign of what lies in memory"
    return None if compiled_library() is not None else "the kernels could not be compiled"
