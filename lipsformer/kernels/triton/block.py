"""Triton: the whole block in training, one operator in each direction.

Between two products or convolutions there is one kernel in each direction. It adds the bias of the
one before, so that the bias needs no pass of its own in either direction, and where the block
forks it adds the gradients of both paths. What is kept are the inputs of products and
convolutions and what stands before a GELU; GELU itself is computed again.

The residual stream has the type of the products. Every kernel computes in float32 and rounds what
it writes.

The compiler does not look into the two operators. It would have nothing to fuse in them, and its
calls would cost the host more.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import register_fake

from lipsformer.kernels.block import BlockTensors
from lipsformer.kernels.dispatch import product_dtype, refuse_second_derivatives
from lipsformer.kernels.gpu_arguments import WINDOW_SCHEMA, WindowArguments
from lipsformer.kernels.gpu_operator import operator
from lipsformer.kernels.triton import pointwise as ops
from lipsformer.kernels.triton.depthwise import depthwise, depthwise_sums
from lipsformer.kernels.triton.parameters import (
    ALIGN,
    COLUMNS,
    add_programs,
    cast,
    parts,
    weight_gradients,
)
from lipsformer.kernels.triton.windows import (
    cosine_windows,
    learned,
    parameter_gradients,
    window_gradients,
)

KEPT = 13  # tensors for the backward pass, beside the parameters


def apply_block(x: Tensor, tensors: BlockTensors, attention: WindowArguments) -> Tensor:
    """Apply a block as `lipsformer.kernels.gpu_block` says."""
    x = x.to(product_dtype(x)).contiguous()
    return _Block.apply(x, attention.without_tensors(), *tensors, *attention.tensors())


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, attention: WindowArguments, *tensors: Tensor) -> Tensor:
        count = len(BlockTensors._fields)
        arguments = attention.with_tensors(tensors[count:])
        y, *kept = _forward(x, tensors[:count], *arguments)
        ctx.attention = attention
        ctx.save_for_backward(x, *kept, *tensors)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(*grad_outputs)
        saved = ctx.saved_tensors  # may be read only once under checkpointing
        kept, tensors = saved[:KEPT], saved[KEPT:]
        t = BlockTensors(*tensors[: len(BlockTensors._fields)])
        attention: WindowArguments = ctx.attention.with_tensors(tensors[len(t) :])
        grad_x, summed, flat, vectors, qkv_bias = _backward(
            grad_outputs[0], kept, list(t), *attention
        )
        columns = sum(tensor.numel() for tensor in learned(attention))
        norm_2, gelu_4, norm_1, gelu_3, kernel_2, gelu_2, gelu_1, kernel_1, windows = parts(
            summed, _shapes_of_sums(t, columns), COLUMNS
        )
        pointwise, qkv, proj, fc1, fc2 = parts(flat, [m.shape for m in _matrices(t)], ALIGN)
        _, gain_2, shift_2 = norm_2.chunk(3)
        _, gain_1, shift_1 = (None, None, None) if t.gain_1 is None else norm_1.chunk(3)
        proj_bias, scale_3, fc2_bias, scale_4 = vectors.unbind(0)
        depthwise_2_bias, scale_2 = gelu_3.chunk(2)
        pointwise_bias, scale_1 = gelu_2.chunk(2)
        first = (kernel_1, gelu_1, pointwise, pointwise_bias, scale_1, None)
        second = (kernel_2, depthwise_2_bias, scale_2, None)
        third = (qkv, qkv_bias, proj, proj_bias, scale_3, None, gain_1, shift_1)
        fourth = (fc1, gelu_4, fc2, fc2_bias, scale_4, None, gain_2, shift_2)
        grads = BlockTensors(*first, *second, *third, *fourth)
        parameters = [
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(grads, t, strict=True)
        ]
        return grad_x, None, *parameters, *parameter_gradients(windows, attention)


def _matrices(t: BlockTensors) -> tuple[Tensor, ...]:
    return t.pointwise, t.qkv, t.proj, t.fc1, t.fc2


def _shapes_of_cast(t: BlockTensors) -> list[Sequence[int]]:
    """Return the shapes of what `cast` writes: matrices, the bias of qkv and the taps."""
    taps = (49, len(t.depthwise_1))
    return [*(matrix.shape for matrix in _matrices(t)), t.qkv_bias.shape, taps, taps]


def _shapes_of_sums(t: BlockTensors, columns: int) -> list[Sequence[int]]:
    """Return the shapes of what `block_backward` sums over its programs, in its order."""
    channels, hidden = t.shift_2.numel(), t.fc1_bias.numel()
    return [
        (3 * channels,),  # norm_2: of scale * bias of fc2, the gain and the shift
        (hidden,),  # gelu_4: of the bias
        (channels if t.gain_1 is None else 3 * channels,),  # norm_1: the same after proj
        (2 * channels,),  # gelu_3: of the bias and the scale
        t.depthwise_2.shape,
        (2 * channels,),  # gelu_2
        (channels,),  # gelu_1
        t.depthwise_1.shape,
        (columns,),  # of what learns in the windows
    ]


def block_forward(x: Tensor, tensors: Sequence[Tensor | None], *attention: Any) -> list[Tensor]:
    """Return the output and what is kept; z stands before a GELU, x1 to x3 on the stream."""
    t: Any = BlockTensors(*tensors)  # pyright: ignore[reportArgumentType]
    kernels = (t.depthwise_1, t.depthwise_2)
    flat = cast([*_matrices(t), t.qkv_bias, *kernels, t.scale_3, t.scale_4], x.dtype)
    pointwise, qkv_weight, proj, fc1, fc2, qkv_bias, taps_1, taps_2 = parts(
        flat, _shapes_of_cast(t), ALIGN
    )
    partitions = len(WindowArguments(*attention).windows) // 2

    z1 = depthwise(x, taps_1, None, False)
    z2 = F.linear(ops.gelu(None, z1, t.depthwise_1_bias, None, None), pointwise)
    x1 = ops.gelu(x, z2, t.pointwise_bias, t.scale_1, t.mask_1)
    z3 = depthwise(x1, taps_2, None, False)
    x2 = ops.gelu(x1, z3, t.depthwise_2_bias, t.scale_2, t.mask_2)
    qkv = F.linear(x2, qkv_weight, qkv_bias).unflatten(-1, (3, partitions, -1))
    heads_out = cosine_windows(qkv, *attention)
    branch = F.linear(heads_out, proj)
    if t.gain_1 is None:
        x3 = ops.residual(x2, branch, t.proj_bias, t.scale_3, t.mask_3)
        centered_1 = x.new_empty(0)
    else:
        x3, centered_1 = ops.residual_center(
            x2, branch, t.proj_bias, t.scale_3, t.mask_3, t.gain_1, t.shift_1
        )
    z4 = F.linear(x3, fc1)
    branch = F.linear(ops.gelu(None, z4, t.fc1_bias, None, None), fc2)
    y, centered_2 = ops.residual_center(
        x3, branch, t.fc2_bias, t.scale_4, t.mask_4, t.gain_2, t.shift_2
    )
    return [y, z1, z2, x1, z3, x2, qkv, heads_out, centered_1, x3, z4, centered_2, flat]


def block_backward(
    grad: Tensor, kept: Sequence[Tensor], tensors: Sequence[Tensor | None], *attention: Any
) -> list[Tensor]:
    """Return the gradient of the input, and in flat tensors those of the parameters.

    It goes from the end of the block to the beginning. Each kernel also sums the gradients of its
    own parameters.
    """
    t: Any = BlockTensors(*tensors)  # pyright: ignore[reportArgumentType]
    x, z1, z2, x1, z3, x2, qkv, heads_out, centered_1, x3, z4, centered_2, flat = kept
    pointwise, qkv_weight, proj, fc1, fc2, _, taps_1, taps_2 = parts(
        flat, _shapes_of_cast(t), ALIGN
    )
    grad = grad.to(x.dtype).contiguous()

    grad_x, grad_branch, norm_2 = ops.residual_center_backward(
        grad, None, centered_2, t.gain_2, t.mask_4
    )
    grad_branch = grad_x if t.mask_4 is None else grad_branch
    act, grad_z, gelu_4 = ops.gelu_backward(grad_branch @ fc2, None, z4, t.fc1_bias, None, None)
    grad_fc2, grad_fc1 = _product(grad_branch, act), _product(grad_z, x3)

    grad_x, grad_branch, norm_1 = ops.residual_center_backward(
        grad_x, grad_z @ fc1, None if t.gain_1 is None else centered_1, t.gain_1, t.mask_3
    )
    grad_branch = grad_x if t.mask_3 is None else grad_branch
    grad_proj = _product(grad_branch, heads_out)
    grad_qkv, window_sums = window_gradients(grad_branch @ proj, qkv, *attention)
    grad_qkv = grad_qkv.flatten(3)
    grad_qkv_weight, grad_qkv_bias = _product(grad_qkv, x2), grad_qkv.flatten(0, 2).sum(0)

    grad_x, grad_z, gelu_3 = ops.gelu_backward(
        grad_x, grad_qkv @ qkv_weight, z3, t.depthwise_2_bias, t.scale_2, t.mask_2
    )
    kernel_2 = depthwise_sums(x1, grad_z)
    grad_x = depthwise(grad_z, taps_2, grad_x, True)
    _, grad_z, gelu_2 = ops.gelu_backward(grad_x, None, z2, t.pointwise_bias, t.scale_1, t.mask_1)
    act, grad_z1, gelu_1 = ops.gelu_backward(
        grad_z @ pointwise, None, z1, t.depthwise_1_bias, None, None
    )
    grad_pointwise = _product(grad_z, act)
    kernel_1 = depthwise_sums(x, grad_z1)
    grad_x = depthwise(grad_z1, taps_1, grad_x, True)

    sums = [norm_2, gelu_4, norm_1, gelu_3, kernel_2, gelu_2, gelu_1, kernel_1, window_sums]
    summed = add_programs(sums)
    norm_2, _, norm_1, *_ = parts(summed, [s.shape[1:] for s in sums], COLUMNS)
    bias_3, bias_4 = norm_1[: x.shape[-1]], norm_2[: x.shape[-1]]
    gradients = [grad_pointwise, grad_qkv_weight, grad_proj, grad_fc1, grad_fc2]
    flat_gradients, vectors = weight_gradients(
        [*gradients, t.proj, t.proj_bias, t.scale_3, bias_3, t.fc2, t.fc2_bias, t.scale_4, bias_4]
    )
    return [grad_x, summed, flat_gradients, vectors, grad_qkv_bias]


_forward = operator(block_forward, f"(Tensor x, Tensor?[] tensors, {WINDOW_SCHEMA}) -> Tensor[]")
_backward = operator(
    block_backward,
    f"(Tensor grad, Tensor[] kept, Tensor?[] tensors, {WINDOW_SCHEMA}) -> Tensor[]",
)
register_fake(_forward)(block_forward)  # what they consist of can do without values too
register_fake(_backward)(block_backward)


def _product(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a matrix: the sum over the tokens of grad x^T ([C_out, C_in])."""
    return grad.flatten(0, -2).T @ x.flatten(0, -2)
