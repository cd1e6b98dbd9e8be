"""The compiled kernels' signatures: a wrong argument, type or order is a `TypeError`."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lipsformer.kernels.build import compiled_library
from lipsformer.kernels.recording import current_recorder


class _TensorOf:
    """Parameter type of ctypes: a CPU tensor of one data type, or None for a null pointer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def from_param(self, value: Tensor | None) -> ctypes.c_void_p:
        if value is None:
            return ctypes.c_void_p()
        if not isinstance(value, Tensor) or value.dtype is not self.dtype or not value.is_cpu:
            raise TypeError(f"expected a {self.dtype} tensor on the CPU, got {value!r}")
        return ctypes.c_void_p(value.data_ptr())


F32, INDEX = _TensorOf(torch.float32), _TensorOf(torch.int64)
INT, NUMBER = ctypes.c_int64, ctypes.c_float


def _signatures() -> dict[str, tuple[Any, ...]]:
    """Return the parameter types of every kernel without the last one, the number of threads."""
    signatures: dict[str, tuple[Any, ...]] = {}
    # x, source_weight, target_weight, source_term, target_term, squared_norm, nodes, heads,
    # channels
    signatures["node_terms_float32"] = (*[F32] * 6, *[INT] * 3)
    # x, source_weight, target_weight, grad, grad_source, grad_target, grad_square, grad_x,
    # grad_source_weight, grad_target_weight, nodes, heads, channels
    signatures["node_terms_gradients_float32"] = (*[F32] * 10, *[INT] * 3)
    # a, b, bias, y, rows, inputs, outputs, a_transposed, layout, act
    signatures["product_float32"] = (*[F32] * 4, *[INT] * 6)
    for dtype in (torch.float32, torch.bfloat16):
        name, value = name_of(dtype), _TensorOf(dtype)
        # x, y, size
        signatures[f"elu_{name}"] = (value, value, INT)
        # z, grad, activated, size
        signatures[f"gelu_gradient_{name}"] = (value, value, value, INT)
        # x, z, scale, scale_stride, index, y, samples, kept, tokens, channels
        residual = (value, value, F32, INT, INDEX, value, *[INT] * 4)
        signatures[f"residual_{name}"] = signatures[f"gelu_residual_{name}"] = residual
        # grad, scale, scale_stride, index, grad_z, kept, tokens, channels
        signatures[f"residual_gradient_{name}"] = (value, F32, INT, INDEX, value, *[INT] * 3)
        # grad, z, scale, scale_stride, index, grad_z, grad_scale, kept, tokens, channels
        gradients = (value, value, F32, INT, INDEX, value, F32, *[INT] * 3)
        signatures[f"gelu_residual_gradients_{name}"] = gradients
        # x, gain, shift, shift_stride, y, rows, channels
        signatures[f"center_{name}"] = (value, F32, F32, INT, value, INT, INT)
        signatures[f"center_map_{name}"] = (value, F32, value, INT, value, INT, INT)
        # grad, y, gain, bias, grad_x, grad_offset, grad_bias, rows, channels
        gradients = (value, value, F32, F32, value, F32, F32, INT, INT)
        signatures[f"center_gradients_{name}"] = gradients
        # x, total, rows, channels
        signatures[f"row_sum_{name}"] = (value, F32, INT, INT)
        # weight, scale, scaled, rows, columns
        signatures[f"scale_weight_{name}"] = (F32, F32, value, INT, INT)
        # grad, weight, scale, grad_weight, grad_scale, rows, columns
        signatures[f"scale_weight_gradients_{name}"] = (value, *[F32] * 4, INT, INT)
        # x, weight, bias, y, batch, height, width, channels, kernel, flip
        signatures[f"depthwise_{name}"] = (value, F32, F32, value, *[INT] * 6)
        # x, weight, bias, scale, y, batch, height, width, channels, kernel
        signatures[f"depthwise_gelu_{name}"] = (value, F32, F32, F32, value, *[INT] * 5)
        # x, grad, grad_weight, grad_bias, batch, height, width, channels, kernel
        signatures[f"depthwise_parameters_{name}"] = (value, value, F32, F32, *[INT] * 5)
        # nu, eps, part, parts, batch, height, width, heads, dim, h, w
        partition = (NUMBER, NUMBER, *[INT] * 9)
        # qkv, out, bias, tau, lepe, shift
        signatures[f"cosine_windows_forward_{name}"] = (value, value, *[F32] * 4, *partition)
        # qkv, grad, bias, tau, lepe, shift, grad_qkv, grad_bias, grad_tau, grad_lepe, grad_shift
        gradients = (value, value, *[F32] * 4, value, *[F32] * 4)
        signatures[f"cosine_windows_backward_{name}"] = (*gradients, *partition)
    return signatures


@cache
def name_of(dtype: torch.dtype) -> str:
    """Return how the name of a kernel for a data type ends: "float32" or "bfloat16"."""
    return str(dtype).removeprefix("torch.")


SIGNATURES = _signatures()


def _typed(kernel: str, types: Sequence[Any]) -> Any:
    """Return the function to which a pointer of the library points, with types of its arguments."""
    library = compiled_library()
    assert library is not None
    address: Any = ctypes.c_void_p.in_dll(library, kernel).value
    function = ctypes.CFUNCTYPE(None)(address)
    function.argtypes = (*types, INT)
    return function


@cache
def _function(kernel: str) -> Any:
    return _typed(kernel, SIGNATURES[kernel])


def run(kernel: str, *args: Tensor | int | float | None) -> None:
    """Call a compiled kernel with as many threads as PyTorch uses.

    Args:
        kernel: Name of the function, a key of `SIGNATURES`.
        *args: Tensors, integers and numbers in the order of its signature; None for no tensor.

    Raises:
        TypeError: If the number, the type or the order of the arguments is wrong.
    """
    if len(args) != len(SIGNATURES[kernel]):  # ctypes itself accepts surplus arguments
        raise TypeError(f"{kernel} takes {len(SIGNATURES[kernel])} arguments, got {len(args)}")
    try:
        _function(kernel)(*args, torch.get_num_threads())
    except ctypes.ArgumentError as error:
        raise TypeError(f"{kernel}: {error}") from None
    if (recorder := current_recorder()) is not None:
        types = [ctypes.c_void_p if isinstance(t, _TensorOf) else t for t in SIGNATURES[kernel]]
        recorder.kernel(_typed(kernel, types), args)
