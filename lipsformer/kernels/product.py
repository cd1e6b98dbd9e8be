"""Our own product of matrices in float32, for the processors on which it is the fastest.

These have AVX2 and no AVX-512, or are AMD's with AVX-512 (Zen 4 and 5), where MKL uses no more than
AVX2. With products of the tiny models on two cores of an EPYC of the third generation,
csrc/product.cpp reaches 75 to 85 % of what they can compute, oneDNN and MKL 65 to 75 %. On the
fifth generation it is as fast as oneDNN's product in the forward pass, and in the layers with few
tokens twice as fast in the gradients of the weights. On Intel's processors MKL is kept where the
weight is not packed; nothing has been measured on one with AVX2 only.
"""

import math
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer.kernels.bindings import run
from lipsformer.kernels.dispatch import usable

_PROC = Path("/proc/cpuinfo")
_CPU = _PROC.read_text() if _PROC.exists() else ""
INTEL = "GenuineIntel" in _CPU
AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
_AVX2_ONLY = torch.backends.cpu.get_cpu_capability() == "AVX2"
_AMD_AVX512 = AVX512 and "AuthenticAMD" in _CPU
USE_OWN_PACKED = _AVX2_ONLY or _AMD_AVX512  # for folded models, whose weights are packed
USE_OWN = USE_OWN_PACKED and not INTEL  # for weights that are not packed
_PANEL = 32 if AVX512 else 16  # outputs side by side in the layout of csrc/product.cpp


class _Layout(IntEnum):
    """How the second matrix lies in memory."""

    PLAIN = 0  # [C_in, C_out]
    TRANSPOSED = 1  # [C_out, C_in]
    PANELS = 2  # [C_out / _PANEL, C_in, _PANEL], with zeros after the last output


class _Act(IntEnum):
    """What GELU is applied to."""

    NOTHING = 0
    OUTPUT = 1
    INPUT = 2


class PackedWeight(NamedTuple):
    """A copy of a weight.

    Attributes:
        data: In panels, or in oneDNN's own layout.
        outputs: C_out.
        inputs: C_in.
    """

    data: Tensor
    outputs: int
    inputs: int


def pack_weight(weight: Tensor) -> PackedWeight:
    """Return a copy of a weight ([C_out, C_in]) in the layout of the fastest product."""
    outputs, inputs = weight.shape
    if USE_OWN_PACKED and usable("product.csrc", weight):
        panels = F.pad(weight, (0, 0, 0, -outputs % _PANEL)).view(-1, _PANEL, inputs)
        return PackedWeight(panels.transpose(1, 2).contiguous(), outputs, inputs)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return PackedWeight(packed, outputs, inputs)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, act_after: bool) -> Tensor:
    """Apply a linear layer, and GELU after it in the same pass if asked.

    Args:
        x: [..., C_in].
        weight: The copied weight, in the type of `x`.
        bias: [C_out] in the type of `x`, or None.
        act_after: Apply GELU to the output.

    Raises:
        RuntimeError: If `x` has another number of channels than the weight.
    """
    data, outputs, inputs = weight
    if x.shape[-1] != inputs:
        raise RuntimeError(f"the linear layer takes {inputs} channels, got {x.shape[-1]}")
    if data.is_mkldnn:
        act, approximate = ("gelu", "none") if act_after else ("none", "")
        return torch.ops.mkldnn._linear_pointwise(x, data, bias, act, [], approximate)
    act = _Act.OUTPUT if act_after else _Act.NOTHING
    return _linear(x, data, outputs, _Layout.PANELS, bias, act)


def own_linear(x: Tensor, weight: Tensor, bias: Tensor | None, act_before: bool = False) -> Tensor:
    """Return x W^T + b, or GELU(x) W^T + b.

    Args:
        x: [..., C_in].
        weight: W, [C_out, C_in], also a transposed view.
        bias: b, [C_out], or None.
        act_before: Apply GELU to `x` first.
    """
    fits = bias is None or bias.shape == weight.shape[:1]
    if x.shape[-1] != weight.shape[1] or not fits:
        x = F.gelu(x) if act_before else x
        return F.linear(x, weight, bias)  # raises its own error, or broadcasts the bias
    act = _Act.INPUT if act_before else _Act.NOTHING
    if not weight.is_contiguous() and weight.T.is_contiguous():
        return _linear(x, weight, weight.shape[0], _Layout.PLAIN, bias, act)
    return _linear(x, weight.contiguous(), weight.shape[0], _Layout.TRANSPOSED, bias, act)


def _linear(
    x: Tensor,
    weight: Tensor,
    outputs: int,
    layout: _Layout,
    bias: Tensor | None,
    act: _Act,
) -> Tensor:
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    *places, inputs = x.shape
    y = x.new_empty(*places, outputs)
    sizes = math.prod(places), inputs, outputs
    run("product_float32", x, weight, bias, y, *sizes, False, layout, act)
    return y


def own_transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a^T b ([M, N]) for contiguous maps [..., M] and [..., N] of the same tokens."""
    y = a.new_empty(a.shape[-1], b.shape[-1])
    sizes = a.shape[-1], a.numel() // a.shape[-1], b.shape[-1]
    run("product_float32", a, b, None, y, *sizes, True, _Layout.PLAIN, _Act.NOTHING)
    return y
