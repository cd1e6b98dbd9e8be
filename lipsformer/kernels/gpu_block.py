"""The whole block on a GPU in training: one function with its own backward pass.

Between two products or convolutions there is one kernel in each direction. It adds the bias of the
one before, so that the bias needs no pass of its own in either direction, and where the block
forks it adds the gradients of both paths. What is kept are the inputs of products and
convolutions and what stands before a GELU; GELU itself is computed again.

The residual stream has the type of the products. Every kernel computes in float32 and rounds what
it writes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer.kernels import gpu_pointwise as ops
from lipsformer.kernels.dispatch import refuse_second_derivatives
from lipsformer.kernels.gpu_arguments import BlockTensors, WindowArguments
from lipsformer.kernels.gpu_depthwise import depthwise, depthwise_sums
from lipsformer.kernels.gpu_windows import window_gradients


def gpu_block(x: Tensor, tensors: BlockTensors, attention: WindowArguments) -> Tensor:
    """Apply a block of two convolution branches, attention and MLP.

    Args:
        x: [B, H, W, C].
        tensors: The parameters.
        attention: The attention between its projections.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    x = x.to(dtype).contiguous()
    return _Block.apply(x, attention.without_tensors(), *tensors, *attention.tensors())


class _Block(torch.autograd.Function):
    """The letters follow the block: z stands before a GELU, x1 to x3 on the stream."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        attention: WindowArguments,
        *tensors: Tensor,
    ) -> Tensor:
        t = BlockTensors(*tensors[: len(BlockTensors._fields)])
        arguments, dtype = attention.with_tensors(tensors[len(t) :]), x.dtype
        pointwise, qkv_weight, fc1 = t.pointwise.to(dtype), t.qkv.to(dtype), t.fc1.to(dtype)
        proj = (t.proj * t.scale_3[:, None]).to(dtype)
        fc2 = (t.fc2 * t.scale_4[:, None]).to(dtype)

        z1 = depthwise(x, t.depthwise_1, None, False)
        z2 = F.linear(ops.gelu(None, z1, t.depthwise_1_bias, None, None), pointwise)
        x1 = ops.gelu(x, z2, t.pointwise_bias, t.scale_1, t.mask_1)
        z3 = depthwise(x1, t.depthwise_2, None, False)
        x2 = ops.gelu(x1, z3, t.depthwise_2_bias, t.scale_2, t.mask_2)
        qkv = F.linear(x2, qkv_weight, t.qkv_bias.to(dtype))
        qkv = qkv.unflatten(-1, (3, len(attention.windows) // 2, -1))
        heads_out = torch.ops.lipsformer.cosine_windows(qkv, *arguments)
        branch = F.linear(heads_out, proj)
        if t.gain_1 is None or t.shift_1 is None:
            x3, centered_1 = ops.residual(x2, branch, t.proj_bias, t.scale_3, t.mask_3), None
        else:
            x3, centered_1 = ops.center(
                x2, branch, t.proj_bias, t.scale_3, t.mask_3, t.gain_1, t.shift_1
            )
        z4 = F.linear(x3, fc1)
        branch = F.linear(ops.gelu(None, z4, t.fc1_bias, None, None), fc2)
        y, centered_2 = ops.center(x3, branch, t.fc2_bias, t.scale_4, t.mask_4, t.gain_2, t.shift_2)
        ctx.attention = attention
        ctx.save_for_backward(
            *(x, z1, z2, x1, z3, x2, qkv, heads_out, centered_1, x3, z4, centered_2),
            *(pointwise, qkv_weight, proj, fc1, fc2),
            *tensors,
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        x, z1, z2, x1, z3, x2, qkv, heads_out, centered_1, x3, z4, centered_2 = ctx.saved_tensors[
            :12
        ]
        pointwise, qkv_weight, proj, fc1, fc2 = ctx.saved_tensors[12:17]
        tensors = ctx.saved_tensors[17:]
        t = BlockTensors(*tensors[: len(BlockTensors._fields)])
        attention: WindowArguments = ctx.attention.with_tensors(tensors[len(t) :])
        grads: dict[str, Tensor | None] = dict.fromkeys(BlockTensors._fields)
        grad = grad_outputs[0].to(x.dtype).contiguous()

        grad_x, grad_branch, sums = ops.center_backward(grad, None, centered_2, t.gain_2, t.mask_4)
        grad_branch = grad_x if t.mask_4 is None else grad_branch
        sum_bias, grads["gain_2"], grads["shift_2"] = sums.sum(0).chunk(3)
        act, grad_z, sums = ops.gelu_backward(grad_branch @ fc2, None, z4, t.fc1_bias, None, None)
        grads["fc2"], grads["fc2_bias"], grads["scale_4"] = _unscale(
            _weight_gradient(grad_branch, act), sum_bias, t.fc2, t.fc2_bias, t.scale_4
        )
        grads["fc1_bias"], grads["fc1"] = sums.sum(0), _weight_gradient(grad_z, x3)

        grad_x, grad_branch, sums = ops.center_backward(
            grad_x, grad_z @ fc1, centered_1, t.gain_1, t.mask_3
        )
        grad_branch = grad_x if t.mask_3 is None else grad_branch
        sum_bias = sums.sum(0)
        if t.gain_1 is not None:
            sum_bias, grads["gain_1"], grads["shift_1"] = sum_bias.chunk(3)
        grads["proj"], grads["proj_bias"], grads["scale_3"] = _unscale(
            _weight_gradient(grad_branch, heads_out), sum_bias, t.proj, t.proj_bias, t.scale_3
        )
        grad_qkv, grads_attention = window_gradients(grad_branch @ proj, qkv, attention)
        grad_qkv = grad_qkv.flatten(3)
        grads["qkv"], grads["qkv_bias"] = _weight_gradient(grad_qkv, x2), _row_sum(grad_qkv)

        grad_x, grad_z, sums = ops.gelu_backward(
            grad_x, grad_qkv @ qkv_weight, z3, t.depthwise_2_bias, t.scale_2, t.mask_2
        )
        grads["depthwise_2_bias"], grads["scale_2"] = sums.sum(0).chunk(2)
        grads["depthwise_2"] = depthwise_sums(x1, grad_z).sum(0)
        grad_x = depthwise(grad_z, t.depthwise_2, grad_x, True)
        _, grad_z, sums = ops.gelu_backward(grad_x, None, z2, t.pointwise_bias, t.scale_1, t.mask_1)
        grads["pointwise_bias"], grads["scale_1"] = sums.sum(0).chunk(2)
        act, grad_z1, sums = ops.gelu_backward(
            grad_z @ pointwise, None, z1, t.depthwise_1_bias, None, None
        )
        grads["pointwise"] = _weight_gradient(grad_z, act)
        grads["depthwise_1_bias"] = sums.sum(0)
        grads["depthwise_1"] = depthwise_sums(x, grad_z1).sum(0)
        grad_x = depthwise(grad_z1, t.depthwise_1, grad_x, True)
        parameters = [
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(grads.values(), t, strict=True)
        ]
        return grad_x, None, *parameters, *grads_attention


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the sum over the tokens of grad x^T ([C_out, C_in])."""
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


def _row_sum(grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).sum(0)


def _unscale(
    grad: Tensor, sum_bias: Tensor, weight: Tensor, bias: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a weight, a bias and a scale from those of the scaled layer."""
    grad_scale = (grad * weight).sum(1) + sum_bias * bias
    return grad * scale[:, None], sum_bias * scale, grad_scale
