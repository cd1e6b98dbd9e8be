"""The whole block on the CPU in training: one function with its own backward pass.

It computes what the functions of the single layers compute. Hundreds of calls per step of Python
and of PyTorch's differentiation are saved, which count where maps are small.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipsformer.kernels.depthwise import convolve, depthwise_gradients
from lipsformer.kernels.dispatch import refuse_second_derivatives
from lipsformer.kernels.linear import linear, linear_backward, scales_output
from lipsformer.kernels.pointwise import (
    add_gelu,
    add_gelu_backward,
    center_affine,
    center_affine_backward,
)
from lipsformer.kernels.windows import Options, windows_backward, windows_forward


class BlockTensors(NamedTuple):
    """The parameters of a block, with a drop path factor per sample, or None, for each branch."""

    depthwise_1: Tensor
    depthwise_1_bias: Tensor
    pointwise: Tensor
    pointwise_bias: Tensor
    scale_1: Tensor
    mask_1: Tensor | None
    depthwise_2: Tensor
    depthwise_2_bias: Tensor
    scale_2: Tensor
    mask_2: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor
    proj: Tensor
    proj_bias: Tensor
    scale_3: Tensor
    mask_3: Tensor | None
    gain_1: Tensor | None
    shift_1: Tensor | None
    fc1: Tensor
    fc1_bias: Tensor
    fc2: Tensor
    fc2_bias: Tensor
    scale_4: Tensor
    mask_4: Tensor | None
    gain_2: Tensor
    shift_2: Tensor


def block(
    x: Tensor,
    tensors: BlockTensors,
    windows: Sequence[tuple[int, int]],
    tau: Tensor,
    nu: Sequence[float],
    eps: Sequence[float],
    bias: Tensor | None,
    lepe: Tensor | None,
) -> Tensor:
    """Apply a block of two convolution branches, attention and MLP.

    Args:
        x: [B, H, W, C] in float32, or in bfloat16 under autocast.
        tensors: The parameters, in float32 and without masks.
        windows: The arguments of the attention from here on are those of ``cosine_windows``.
        tau: [P, heads].
        nu: One number per partition.
        eps: One number per partition.
        bias: [1, heads, h * w, h * w] or None.
        lepe: [P, 10, C / P] or None.
    """
    options = list(zip(windows, nu, eps, strict=True))
    bias = None if bias is None else bias.contiguous()
    return _Block.apply(x.contiguous(), options, bias, tau, lepe, *tensors)


class _Block(torch.autograd.Function):
    """The letters follow the block: z stands before a GELU, x1 to x3 on the stream."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        options: Options,
        bias: Tensor | None,
        tau: Tensor,
        lepe: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        t = BlockTensors(*tensors)
        factor = x.shape[-1] / (x.shape[-1] - 1)
        z1 = convolve(x, t.depthwise_1, t.depthwise_1_bias)
        z2, pointwise = linear(z1, t.pointwise, t.pointwise_bias, True, None)
        x1 = add_gelu(x, z2, t.scale_1)
        z3 = convolve(x1, t.depthwise_2, t.depthwise_2_bias)
        x2 = add_gelu(x1, z3, t.scale_2)
        qkv, qkv_weight = linear(x2, t.qkv, t.qkv_bias, False, None)
        qkv = qkv.unflatten(-1, (3, len(options), -1))
        heads_out = windows_forward(qkv, bias, tau, lepe, options)
        x3, *kept_3 = _add_linear(x2, heads_out, t.proj, t.proj_bias, False, t.scale_3)
        norm_1 = None, None, None
        if t.gain_1 is not None and t.shift_1 is not None:
            norm_1 = center_affine(x3, t.gain_1, t.shift_1, factor)
            x3 = norm_1[0]
        z4, fc1 = linear(x3, t.fc1, t.fc1_bias, False, None)
        sum_4, *kept_4 = _add_linear(x3, z4, t.fc2, t.fc2_bias, True, t.scale_4)
        norm_2 = center_affine(sum_4, t.gain_2, t.shift_2, factor)
        ctx.options, ctx.factor = options, factor
        ctx.save_for_backward(
            *(x, z1, z2, x1, z3, x2, qkv, heads_out, x3, z4),
            *(pointwise, qkv_weight, fc1, *kept_3, *kept_4, *norm_1[1:], *norm_2),
            *(bias, tau, lepe, *tensors),
        )
        return norm_2[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        saved = ctx.saved_tensors  # may be read only once under checkpointing
        x, z1, z2, x1, z3, x2, qkv, heads_out, x3, z4 = saved[:10]
        pointwise, qkv_weight, fc1 = saved[10:13]
        kept_3, kept_4 = saved[13:15], saved[15:17]
        lost_1, sum_3, y, lost_2, sum_4 = saved[17:22]
        bias, tau, lepe = saved[22:25]
        t = BlockTensors(*saved[25:])
        factor = ctx.factor

        # from the end to the beginning; grad is the gradient on the stream
        grad = grad_outputs[0].to(x.dtype).contiguous()
        grad, *norm_2 = center_affine_backward(grad, y, t.gain_2, t.shift_2, lost_2, sum_4, factor)
        grad_z, *fc2 = _add_linear_backward(grad, z4, t.fc2, t.fc2_bias, True, t.scale_4, *kept_4)
        grad_branch, *fc1 = linear_backward(grad_z, x3, t.fc1, t.fc1_bias, False, None, fc1)
        grad += grad_branch
        norm_1: list[Any] = [None, None]
        if t.gain_1 is not None and t.shift_1 is not None:
            grad, *norm_1 = center_affine_backward(
                grad, x3, t.gain_1, t.shift_1, lost_1, sum_3, factor
            )
        grad_heads, *proj = _add_linear_backward(
            grad, heads_out, t.proj, t.proj_bias, False, t.scale_3, *kept_3
        )
        grad_qkv, *attention = windows_backward(grad_heads, qkv, bias, tau, lepe, ctx.options)
        grad_branch, *to_qkv = linear_backward(
            grad_qkv.flatten(3), x2, t.qkv, t.qkv_bias, False, None, qkv_weight
        )
        grad += grad_branch
        grad_z, scale_2 = add_gelu_backward(grad, z3, t.scale_2, None)
        depthwise_2 = depthwise_gradients(x1, t.depthwise_2, grad_z)
        grad += convolve(grad_z, t.depthwise_2, None, flip=True)
        grad_z, scale_1 = add_gelu_backward(grad, z2, t.scale_1, None)
        grad_z, *pointwise = linear_backward(
            grad_z, z1, t.pointwise, t.pointwise_bias, True, None, pointwise
        )
        depthwise_1 = depthwise_gradients(x, t.depthwise_1, grad_z)
        grad += convolve(grad_z, t.depthwise_1, None, flip=True)
        parameters = (
            *(*depthwise_1, *pointwise[:2], scale_1, None),
            *(*depthwise_2, scale_2, None),
            *(*to_qkv[:2], *proj, None, *norm_1),
            *(*fc1[:2], *fc2, None, *norm_2),
        )
        return grad, None, *attention, *parameters


def _add_linear(
    x: Tensor, z: Tensor, weight: Tensor, bias: Tensor, act_before: bool, scale: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return x + scale * (GELU(z) W^T + b), and the output and the weight that are kept."""
    if scales_output(z):
        output, kept = linear(z, weight, bias, act_before, None)
        return (output * scale).add_(x), output, kept
    output, kept = linear(z, weight, bias, act_before, scale)
    return output.add_(x), None, kept


def _add_linear_backward(
    grad: Tensor,
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    act_before: bool,
    scale: Tensor,
    output: Tensor | None,
    kept: Tensor | None,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of ``_add_linear`` with respect to ``z``, weight, bias and scale."""
    if output is None:
        return linear_backward(grad, z, weight, bias, act_before, scale, kept)
    grads = linear_backward(grad * scale, z, weight, bias, act_before, None, kept)
    return *grads[:3], (grad * output).sum_to_size(scale.shape)
