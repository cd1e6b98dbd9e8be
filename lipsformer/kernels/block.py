"""The whole block on the CPU in training: one function with its own backward pass.

It computes what the functions of the single layers compute. Hundreds of calls per step of Python
and of PyTorch's differentiation are saved, which count where maps are small.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipsformer.kernels.depthwise import convolve, depthwise_gradients
from lipsformer.kernels.dispatch import inside_block, refuse_second_derivatives
from lipsformer.kernels.linear import fused_linear_backward, fused_linear_forward, scales_output
from lipsformer.kernels.pointwise import (
    center_affine_backward,
    center_affine_forward,
    gelu_residual_backward,
    gelu_residual_forward,
    residual_backward,
    residual_forward,
)
from lipsformer.kernels.windows import Partition, cosine_windows_backward, cosine_windows_forward


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
    kept: Sequence[Tensor | None],
    partitions: Sequence[Partition],
    tau: Tensor,
    bias: Tensor | None,
    lepe: Sequence[Tensor],
) -> Tensor:
    """Apply a block of two convolution branches, attention and MLP.

    Args:
        x: [B, H, W, C] in float32, or in bfloat16 under autocast.
        tensors: The parameters in float32. Each mask is [K, 1, 1, 1].
        kept: The indices, [K] and increasing, of the samples that enter each of the four branches;
            None for all. A branch that no sample enters is not computed.
        partitions: The arguments of the attention from here on are those of `cosine_windows`.
        tau: [P, heads].
        bias: [1, heads, h * w, h * w] or None.
        lepe: The kernels and then the biases, in float32 and contiguous; empty without them.
    """
    bias = None if bias is None else bias.contiguous()
    return _Block.apply(x.contiguous(), kept, partitions, bias, tau, *tensors, *lepe)


class _Block(torch.autograd.Function):
    """A block of four branches. z1 to z4 are what its GELUs are applied to.

    x1 to x4 are the stream after each branch, and in_1 to in_4 are the samples of the stream that
    enter a branch.
    """

    @staticmethod
    @inside_block()
    def forward(
        ctx: Any,
        x: Tensor,
        kept: Sequence[Tensor | None],
        partitions: Sequence[Partition],
        bias: Tensor | None,
        tau: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        t, lepe = _named(tensors)
        in_1 = z1 = z2 = in_2 = z3 = in_3 = qkv = heads_out = in_4 = z4 = None
        pointwise = qkv_weight = unscaled_3 = proj = fc1 = unscaled_4 = fc2 = None
        x1 = x
        if _enters(kept[0]):
            in_1 = _select(x, kept[0])
            z1 = convolve(in_1, t.depthwise_1, t.depthwise_1_bias)
            z2, pointwise = fused_linear_forward(z1, t.pointwise, t.pointwise_bias, True, None)
            x1 = gelu_residual_forward(x, z2, _times(t.scale_1, t.mask_1), kept[0])
        x2 = x1
        if _enters(kept[1]):
            in_2 = _select(x1, kept[1])
            z3 = convolve(in_2, t.depthwise_2, t.depthwise_2_bias)
            x2 = gelu_residual_forward(x1, z3, _times(t.scale_2, t.mask_2), kept[1])
        x3 = x2
        if _enters(kept[2]):
            in_3 = _select(x2, kept[2])
            qkv, qkv_weight = fused_linear_forward(in_3, t.qkv, t.qkv_bias, False, None)
            qkv = qkv.unflatten(-1, (3, len(partitions), -1))
            heads_out = cosine_windows_forward(qkv, bias, tau, lepe, partitions)
            branch, unscaled_3, proj = _scaled_linear(
                heads_out, t.proj, t.proj_bias, False, t.scale_3
            )
            x3 = _add(x2, branch, t.mask_3, kept[2])
        saved_norm_1 = None, None, None
        if t.gain_1 is not None and t.shift_1 is not None:
            x3, saved_norm_1 = center_affine_forward(x3, t.gain_1, t.shift_1)
        x4 = x3
        if _enters(kept[3]):
            in_4 = _select(x3, kept[3])
            z4, fc1 = fused_linear_forward(in_4, t.fc1, t.fc1_bias, False, None)
            branch, unscaled_4, fc2 = _scaled_linear(z4, t.fc2, t.fc2_bias, True, t.scale_4)
            x4 = _add(x3, branch, t.mask_4, kept[3])
        out, saved_norm_2 = center_affine_forward(x4, t.gain_2, t.shift_2)
        ctx.kept, ctx.partitions = kept, partitions
        maps = (in_1, z1, z2, in_2, z3, in_3, qkv, heads_out, in_4, z4)
        rounded = (pointwise, qkv_weight, unscaled_3, proj, fc1, unscaled_4, fc2)
        norms = (*saved_norm_1, *saved_norm_2)
        ctx.save_for_backward(*maps, *rounded, *norms, bias, tau, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(*grad_outputs)
        # Under checkpointing this computes the forward passes of modules again, and only once.
        saved = ctx.saved_tensors
        return _Block._backward(ctx, saved, grad_outputs[0].contiguous())

    @staticmethod
    @inside_block()
    def _backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        in_1, z1, z2, in_2, z3, in_3, qkv, heads_out, in_4, z4, *saved = saved
        pointwise, qkv_weight, unscaled_3, proj, fc1, unscaled_4, fc2, *saved = saved
        normed_1, lost_1, sum_1, normed_2, lost_2, sum_2, *inputs = saved
        bias, tau, *tensors = inputs
        t, lepe = _named(tensors)
        kept = ctx.kept

        # from the end to the beginning; grad is the gradient on the stream
        saved_norm_2 = normed_2, lost_2, sum_2
        grad, *norm_2 = center_affine_backward(grad, t.gain_2, t.shift_2, saved_norm_2)
        grads_fc1 = grads_fc2 = grads_proj = (None, None, None)
        if _enters(kept[3]):
            grad_branch = _mask(grad, t.mask_4, kept[3])
            grad_z, *grads_fc2 = _scaled_backward(
                grad_branch, z4, t.fc2, t.fc2_bias, True, t.scale_4, unscaled_4, fc2
            )
            grad_branch, *grads_fc1 = fused_linear_backward(
                grad_z, in_4, t.fc1, t.fc1_bias, False, None, fc1
            )
            grad = _add(grad, grad_branch, None, kept[3])
        norm_1: Sequence[Tensor | None] = (None, None)
        if t.gain_1 is not None and t.shift_1 is not None:
            saved_norm_1 = normed_1, lost_1, sum_1
            grad, *norm_1 = center_affine_backward(grad, t.gain_1, t.shift_1, saved_norm_1)
        grads_qkv = (None, None, None)
        grads_attention, grads_lepe = (None, None), [None] * len(lepe)
        if _enters(kept[2]):
            grad_branch = _mask(grad, t.mask_3, kept[2])
            grad_branch, *grads_proj = _scaled_backward(
                grad_branch, heads_out, t.proj, t.proj_bias, False, t.scale_3, unscaled_3, proj
            )
            grad_branch, *grads_attention, grads_lepe = cosine_windows_backward(
                grad_branch, qkv, bias, tau, lepe, ctx.partitions
            )
            grad_branch, *grads_qkv = fused_linear_backward(
                grad_branch.flatten(3), in_3, t.qkv, t.qkv_bias, False, None, qkv_weight
            )
            grad = _add(grad, grad_branch, None, kept[2])
        grads_depthwise_2, grad_scale_2 = (None, None), None
        if _enters(kept[1]):
            grad_z, grad_scale_2 = _gelu_backward(grad, z3, t.scale_2, t.mask_2, kept[1])
            grads_depthwise_2 = depthwise_gradients(in_2, t.depthwise_2, grad_z)
            grad = _add(grad, convolve(grad_z, t.depthwise_2, None, flip=True), None, kept[1])
        grads_depthwise_1, grads_pointwise, grad_scale_1 = (None, None), (None, None), None
        if _enters(kept[0]):
            grad_z, grad_scale_1 = _gelu_backward(grad, z2, t.scale_1, t.mask_1, kept[0])
            grad_z, *grads_pointwise = fused_linear_backward(
                grad_z, z1, t.pointwise, t.pointwise_bias, True, None, pointwise
            )
            grads_depthwise_1 = depthwise_gradients(in_1, t.depthwise_1, grad_z)
            grad = _add(grad, convolve(grad_z, t.depthwise_1, None, flip=True), None, kept[0])
        first = (*grads_depthwise_1, *grads_pointwise[:2], grad_scale_1, None)
        second = (*grads_depthwise_2, grad_scale_2, None)
        third = (*grads_qkv[:2], *grads_proj, None, *norm_1)
        fourth = (*grads_fc1[:2], *grads_fc2, None, *norm_2)
        gradients = [*grads_attention, *first, *second, *third, *fourth, *grads_lepe]
        for index, needed in enumerate(ctx.needs_input_grad[3:]):
            if needed and gradients[index] is None:  # no sample entered the parameter's branch
                gradients[index] = torch.zeros_like(inputs[index])
        return grad, None, None, *gradients


def _named(tensors: Sequence[Tensor]) -> tuple[BlockTensors, Sequence[Tensor]]:
    """Return the parameters of a block by name, and those of LePE, which follow them."""
    count = len(BlockTensors._fields)
    return BlockTensors(*tensors[:count]), tensors[count:]


def _enters(kept: Tensor | None) -> bool:
    """Return whether any sample enters the branch."""
    return kept is None or len(kept) > 0


def _select(x: Tensor, kept: Tensor | None) -> Tensor:
    return x if kept is None else x.index_select(0, kept)


def _times(scale: Tensor, mask: Tensor | None) -> Tensor:
    return scale if mask is None else scale * mask


def _add(x: Tensor, branch: Tensor, mask: Tensor | None, kept: Tensor | None) -> Tensor:
    """Return x + mask * branch, which may overwrite the branch."""
    if mask is None and kept is None:
        return branch.add_(x)
    return residual_forward(x, branch, mask, kept)


def _mask(grad: Tensor, mask: Tensor | None, kept: Tensor | None) -> Tensor:
    """Return the gradient of the branch of `_add`."""
    return grad if mask is None else residual_backward(grad, mask, kept)


def _gelu_backward(
    grad: Tensor, z: Tensor, scale: Tensor, mask: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a sum with GELU(z) with respect to `z` and scale."""
    grad_z, grad_scale = gelu_residual_backward(grad, z, _times(scale, mask), kept)
    return grad_z, _times(grad_scale, mask).sum_to_size(scale.shape)


def _scaled_linear(
    z: Tensor, weight: Tensor, bias: Tensor, act_before: bool, scale: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return scale * (GELU(z) W^T + b), and what the backward pass needs, each of it or None.

    These are the output before the scale, and the rounded weight.
    """
    if scales_output(z):
        output, rounded = fused_linear_forward(z, weight, bias, act_before, None)
        return output * scale, output, rounded
    output, rounded = fused_linear_forward(z, weight, bias, act_before, scale)
    return output, None, rounded


def _scaled_backward(
    grad: Tensor,
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    act_before: bool,
    scale: Tensor,
    output: Tensor | None,
    rounded: Tensor | None,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of `_scaled_linear` with respect to `z`, weight, bias and scale."""
    if output is None:
        return fused_linear_backward(grad, z, weight, bias, act_before, scale, rounded)
    grads = fused_linear_backward(grad * scale, z, weight, bias, act_before, None, rounded)
    return *grads[:3], (grad * output).sum_to_size(scale.shape)
