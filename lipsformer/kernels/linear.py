"""Linear layers on the library with the fastest products.

For float32 that is MKL, PyTorch's choice, on Intel's processors. On others MKL uses no more than
AVX2; our own product (product.py) is the fastest where it was measured, and oneDNN uses the full
width of AVX-512 elsewhere. oneDNN also computes bfloat16.

The backward pass also needs the derivative of GELU, sums of rows and scaled weights
(csrc/linear.cpp). bfloat16 is read and written between the products; the parameters and their
gradients are float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer.kernels.bindings import name_of, run
from lipsformer.kernels.dispatch import (
    is_observed,
    product_dtype,
    refuse_second_derivatives,
    usable,
)
from lipsformer.kernels.product import (
    AVX512,
    INTEL,
    USE_OWN,
    own_linear,
    own_transposed_product,
)

_LARGEST_REUSED = 32 << 20  # bytes; the C library returns any larger tensor to the system
_BLOCK = 8 << 20  # bytes that stay in the cache between two operators
# With more tokens per input channel, another library computes the gradient of a weight faster.
_MAX_TOKENS_PER_CHANNEL = 512
_MKL = torch.backends.mkl.is_available() and (INTEL or not AVX512)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act_before: bool = False,
    output_scale: Tensor | None = None,
) -> Tensor:
    """Return output_scale * (GELU(x) W^T + b), with GELU and the scale at almost no cost.

    Args:
        x: [B, ..., C_in], at least three dimensions; autocast casts it.
        weight: W, [C_out, C_in].
        bias: b, [C_out].
        act_before: Apply GELU to `x` first. The backward pass computes it again.
        output_scale: [C_out], multiplied into the weight, or into the output where that has fewer
            numbers. In bfloat16 always into the weight, in the pass that rounds it.
    """
    x = x.to(product_dtype(x))
    if output_scale is not None and scales_output(x):
        return fused_linear(x, weight, bias, act_before) * output_scale
    if torch.is_grad_enabled():
        return _FusedLinear.apply(x, weight, bias, act_before, output_scale)
    return fused_linear_forward(x, weight, bias, act_before, output_scale)[0]


def scales_output(x: Tensor) -> bool:
    """Return whether a layer with the input `x` ([..., C_in]) scales its output, not its weight.

    The output is the smaller of the two if there are fewer tokens than input channels. bfloat16
    always scales the weight, which it has to round anyway.
    """
    return x.dtype == torch.float32 and x.numel() < x.shape[-1] ** 2


class _FusedLinear(torch.autograd.Function):
    """Keep the input before GELU only.

    The gradient of the scale follows from the gradient of the scaled weight, so the output is not
    kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, act: bool, scale: Tensor | None
    ) -> Tensor:
        y, rounded = fused_linear_forward(x, weight, bias, act, scale)
        ctx.save_for_backward(x, weight, bias, scale, rounded)
        ctx.act_before = act
        return torch.ops.aten._unsafe_view(y, y.shape)  # autograd lets no view be changed in place

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, scale, rounded = ctx.saved_tensors
        need_x, need_weight, _, _, need_scale = ctx.needs_input_grad
        grad, need_weight = grad_outputs[0].contiguous(), need_weight or need_scale
        grad_x, grad_weight, grad_bias, grad_scale = fused_linear_backward(
            grad, x, weight, bias, ctx.act_before, scale, rounded, need_x, need_weight
        )
        return grad_x, grad_weight, grad_bias, None, grad_scale


def fused_linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, act_before: bool, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return scale * (GELU(x) W^T + b), and in bfloat16 the rounded weight, else None."""
    scaled, offset = _scale_rows(weight, bias, scale, x.dtype)
    y = _gelu_product(x, scaled, offset) if act_before else _product(x, scaled, offset)
    return y, scaled if x.dtype == torch.bfloat16 else None  # a rounded copy takes little memory


def fused_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act_before: bool,
    scale: Tensor | None,
    rounded: Tensor | None,
    need_x: bool = True,
    need_weight: bool = True,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of `fused_linear` with respect to `x`, weight, bias and scale.

    The bias gradient is summed separately, because convolution_backward computes it slowly. The
    input gradient is computed first, so that one pass yields both GELU(x), needed for the weight
    gradient, and GELU'(x).

    Args:
        grad: Gradient of the result, contiguous.
        x: The input.
        weight: W.
        bias: b.
        act_before: As in `fused_linear`.
        scale: As in `fused_linear`.
        rounded: The rounded weight that `fused_linear_forward` returned, or None.
        need_x: Compute the gradient of `x`; otherwise it is None.
        need_weight: Compute the gradients of the weight and the scale; otherwise they are None.
    """
    if rounded is None or torch.is_grad_enabled():  # the rounded weight has no graph
        scaled, _ = _scale_rows(weight, None, scale, x.dtype)
    else:
        scaled = rounded
    grad_x = grad_scaled = grad_weight = grad_scale = None
    grad_bias = None if bias is None else sum_rows(grad)
    if act_before and need_x:
        grad_x, grad_scaled = _gelu_product_backward(grad, x, scaled, need_weight)
    else:
        grad_x = _product(grad, scaled.T) if need_x else None
        x = F.gelu(x) if act_before else x
        grad_scaled = _weight_gradient(grad, x) if need_weight else None
    if grad_scaled is not None:
        grad_weight, grad_scale = _scale_rows_backward(grad_scaled, weight, scale)
    if grad_scale is not None and bias is not None and grad_bias is not None:
        grad_scale += grad_bias * bias
    if scale is not None:
        grad_bias = None if grad_bias is None else grad_bias * scale
    return grad_x, grad_weight, grad_bias, grad_scale


def _scale_rows(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias times the scale of their rows, in the type of the product."""
    if scale is None:
        return weight.to(dtype), None if bias is None else bias.to(dtype)
    bias = None if bias is None else (bias * scale).to(dtype)
    if scale.shape == weight.shape[:1] and usable("scale_weight.csrc", weight, scale):
        scaled = torch.empty_like(weight, dtype=dtype)
        run(f"scale_weight_{name_of(dtype)}", weight, scale, scaled, *weight.shape)
        return scaled, bias
    return (weight * scale[:, None]).to(dtype), bias


def _scale_rows_backward(
    grad: Tensor, weight: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the weight and the scale from that of the scaled weight."""
    if scale is None:
        return grad.to(weight.dtype), None
    if scale.shape == weight.shape[:1] and usable("scale_weight.csrc", weight, scale, grad):
        gradients = torch.empty_like(weight), torch.empty_like(scale)
        name = f"scale_weight_gradients_{name_of(grad.dtype)}"
        run(name, grad, weight, scale, *gradients, *weight.shape)
        return gradients
    grad = grad.to(weight.dtype)
    return grad * scale[:, None], (grad * weight).sum(1)


def _gelu_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _own_usable(x, weight, bias):
        return own_linear(x, weight, bias, act_before=True)
    blocks = _blocks(x)
    if len(blocks) == 1:
        return _product(F.gelu(x), weight, bias)
    rows = [_product(F.gelu(block), weight, bias) for block in blocks]
    return torch.cat(rows).view(*x.shape[:-1], len(weight))


def _gelu_product_backward(
    grad: Tensor, x: Tensor, weight: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of GELU(x) W^T with respect to x and, if needed, to W."""
    blocks = _blocks(x)
    if len(blocks) == 1:
        grad_x = _product(grad, weight.T)
        activated = gelu_backward_(grad_x, x)
        return grad_x, _weight_gradient(grad, activated) if need_weight else None
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)  # blocks are written to it
    # the sum over the blocks; bfloat16 would round it in every block
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
    rows = grad.reshape(-1, len(weight)).split(len(blocks[0]))
    for grad_block, block, target in zip(rows, blocks, _blocks(grad_x), strict=True):
        grad_z = _product(grad_block, weight.T)
        activated = gelu_backward_(grad_z, block)
        target.copy_(grad_z)
        if grad_weight is not None:
            grad_weight += _weight_gradient(grad_block, activated)
    return grad_x, grad_weight


def _blocks(x: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of a map ([..., C]) in blocks that fit into the cache.

    A new tensor of more than 32 MB costs one page fault for every 4 kB, which takes longer than a
    pass over it. A smaller map is one block.
    """
    if x.nbytes <= _LARGEST_REUSED:
        return (x,)
    rows = x.reshape(-1, x.shape[-1])
    return rows.split(_BLOCK // rows[0].nbytes)


def _as_map(x: Tensor) -> Tensor:
    return x.reshape(1, x.shape[0], -1, x.shape[-1]).permute(0, 3, 1, 2)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, by PyTorch's operator if the product is to be differentiated or counted."""
    if _own_usable(x, weight, bias):
        return own_linear(x, weight, bias)
    by_mkl = _MKL and x.dtype == torch.float32
    if by_mkl or torch.is_grad_enabled() or is_observed():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _own_usable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    others = (weight,) if bias is None else (weight, bias)
    return USE_OWN and usable("product.csrc", x, *others)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the sum over the tokens of grad x^T ([C_out, C_in])."""
    channels_out, channels_in = grad.shape[-1], x.shape[-1]
    fits = x.numel() < _MAX_TOKENS_PER_CHANNEL * channels_in**2
    if USE_OWN and fits and usable("product.csrc", grad, x):
        return own_transposed_product(grad.contiguous(), x.contiguous())
    few = x.numel() < channels_in**2  # then the convolution takes up to ten times as long
    if _MKL or few or x.dtype == torch.bfloat16:
        return grad.reshape(-1, channels_out).T @ x.reshape(-1, channels_in)
    weight = grad.new_empty(channels_out, channels_in, 1, 1)
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # of a 1x1 convolution
    _, grad_weight, _ = torch.ops.aten.convolution_backward(
        _as_map(grad), _as_map(x), weight, None, *settings, [False, True, False]
    )
    return grad_weight.reshape(channels_out, channels_in)


def gelu_backward_(grad: Tensor, z: Tensor) -> Tensor:
    """Multiply `grad` by the derivative of GELU at `z`, in place, and return GELU(z)."""
    refuse_second_derivatives(grad)
    if usable("gelu.csrc", grad, z):
        activated = torch.empty_like(z)
        run(f"gelu_gradient_{name_of(z.dtype)}", z, grad, activated, z.numel())
        return activated
    torch.ops.aten.gelu_backward.grad_input(grad, z, grad_input=grad)
    return F.gelu(z)


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of `x` ([..., C]) over all dimensions but the last; bfloat16 in float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if usable("sum_rows.csrc", x):
        total = x.new_empty(x.shape[-1], dtype=dtype)
        run(f"row_sum_{name_of(x.dtype)}", x, total, x.numel() // x.shape[-1], x.shape[-1])
        return total
    return x.reshape(-1, x.shape[-1]).sum(0, dtype=dtype)
