"""Linear layers with fixed weights, which are copied once into the layout of a fast product."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer.kernels.bindings import run
from lipsformer.kernels.dispatch import usable

# oneDNN reaches 70 % of what a processor with AVX2 only can compute, csrc/product.cpp 80 %.
_OWN = torch.backends.cpu.get_cpu_capability() == "AVX2"
_PANEL = 16  # outputs that lie side by side in the layout of csrc/product.cpp


class PackedWeight(NamedTuple):
    """A copy of a weight.

    Attributes:
        data: [C_out / 16, C_in, 16], with zeros behind the last output, or oneDNN's own layout.
        outputs: C_out.
    """

    data: Tensor
    outputs: int


def pack_weight(weight: Tensor) -> PackedWeight:
    """Return a copy of a weight ([C_out, C_in]) for ``packed_linear``.

    It is for our own product if that is the fastest: in float32 on a processor with AVX2 and
    without AVX-512. Otherwise it is for oneDNN.
    """
    outputs, inputs = weight.shape
    if _OWN and usable("product.csrc", weight):
        panels = F.pad(weight, (0, 0, 0, -outputs % _PANEL)).view(-1, _PANEL, inputs)
        return PackedWeight(panels.transpose(1, 2).contiguous(), outputs)
    return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight, None), outputs)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, act_after: bool) -> Tensor:
    """Apply a linear layer, and GELU behind it in the same pass if asked.

    Args:
        x: [..., C_in].
        weight: The copied weight, in the type of ``x``.
        bias: [C_out] in the type of ``x``, or None.
        act_after: Apply GELU to the output.
    """
    data, outputs = weight
    if data.is_mkldnn:
        act, approximate = ("gelu", "none") if act_after else ("none", "")
        return torch.ops.mkldnn._linear_pointwise(x, data, bias, act, [], approximate)
    x = x.contiguous()
    *places, inputs = x.shape
    y = x.new_empty(*places, outputs)
    run("packed_linear_float32", x, data, bias, y, math.prod(places), inputs, outputs, act_after)
    return y
