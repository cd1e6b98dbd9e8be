"""A whole block in one call of the kernels: which modules may be joined, and their tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer import kernels
from lipsformer.layers import CenterNorm, DepthwiseConv2d, Linear, WeightedResidual
from lipsformer.layers.cosine_attention import gpu_arguments, gpu_obstacle


def on_gpu(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Let the kernels for a GPU compute a block's forward pass where they are usable and proven.

    Args:
        forward: The block and its input x ([B, H, W, C]) to its output.
    """

    @functools.wraps(forward)
    def either(block: Any, x: Tensor) -> Tensor:
        if usable(block, x) and _proven(block, x, forward):
            return fused_block(block, x)
        return forward(block, x)

    return either


def _proven(block: Any, x: Tensor, forward: Callable[[Any, Tensor], Tensor]) -> bool:
    attn = block.attn.branch
    side = getattr(attn, "window_size", None) or getattr(attn, "split_size", None)
    heads = getattr(attn, "num_heads", None) or attn.heads_per_branch
    hidden = block.mlp.branch.fc1.weight.shape[0]
    drops = any(residual.drop_path > 0.0 for residual in residuals(block))
    name = (
        f"block, {type(attn).__name__} {side}, {heads} heads, {hidden} hidden channels, "
        f"drop path {drops}"
    )

    def drop_alternately(twin: Any) -> Any:  # the same samples on both ways, and no random numbers
        for residual in residuals(twin):
            residual.draw_mask = functools.partial(_alternate_mask, residual)
        return twin

    return kernels.is_proven(
        name,
        block,
        x,
        kernel=lambda twin, y: fused_block(drop_alternately(twin), y),
        plain=lambda twin, y: forward(drop_alternately(twin), y),
    )


def _alternate_mask(residual: Any, x: Tensor) -> Tensor | None:
    """Return a mask as of drop path that drops every second sample."""
    if residual.drop_path == 0.0:
        return None
    mask = torch.arange(len(x), device=x.device).remainder(2) / (1.0 - residual.drop_path)
    return mask.to(residual.residual_scale.dtype).view(-1, *[1] * (x.ndim - 1))


def usable(block: Any, x: Tensor) -> bool:
    """Return whether the kernels may compute a block on the map ``x`` ([B, H, W, C])."""
    if isinstance(x, torch.fx.Proxy):  # FX cannot trace the choice of a kernel
        return False
    obstacle = lambda: _obstacle(block, x)  # noqa: E731
    return kernels.usable("block.gpu", x, training=block.training, unless=obstacle)


def fused_block(block: Any, x: Tensor) -> Tensor:
    """Apply a block to ``x`` ([B, H, W, C])."""
    conv1, conv2, attn, mlp = (r.branch for r in residuals(block))
    scales = [r.residual_scale for r in residuals(block)]
    masks = [r.draw_mask(x) for r in residuals(block)]
    masks = [None if mask is None else mask.flatten() for mask in masks]
    normed = isinstance(block.norm1, CenterNorm)
    tensors = kernels.BlockTensors(
        *(conv1.depthwise.weight, conv1.depthwise.bias),
        *(conv1.pointwise.weight, conv1.pointwise.bias, scales[0], masks[0]),
        *(conv2.depthwise.weight, conv2.depthwise.bias, scales[1], masks[1]),
        *(attn.qkv.weight, attn.qkv.bias, attn.proj.weight, attn.proj.bias, scales[2], masks[2]),
        *((block.norm1.weight, block.norm1.bias) if normed else (None, None)),
        *(mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias, scales[3], masks[3]),
        *(block.norm2.weight, block.norm2.bias),
    )
    return kernels.gpu_block(x, tensors, gpu_arguments(*attn.arrangement(x.shape[1], x.shape[2])))


def residuals(block: Any) -> tuple[Any, ...]:
    """Return the four weighted residuals of a block in order."""
    return block.conv1, block.conv2, block.attn, block.mlp


def _obstacle(block: Any, x: Tensor) -> str | None:
    """Return why one call would not compute what the modules of a block compute."""
    attn = block.attn.branch
    if not hasattr(attn, "arrangement"):
        return f"the attention is {type(attn).__name__}"
    obstacle = gpu_obstacle(*attn.arrangement(x.shape[1], x.shape[2]))
    if obstacle is not None:
        return obstacle
    if getattr(attn, "attn_factor", 1.0) != 1.0:
        return "the attention's output has a factor"
    known = (WeightedResidual, CenterNorm, DepthwiseConv2d, Linear, nn.Identity, nn.Dropout)
    for module in block.modules():
        if isinstance(module, nn.Dropout) and module.p > 0.0:
            return "there is dropout"
        replaced = isinstance(module, known) and type(module) not in known
        if replaced or module.__dict__.get("forward") is not None:
            return f"a module is {type(module).__name__}"
        if module is not block and (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            return "a module has hooks, which the kernels would not call"
    if not torch.compiler.is_compiling() and torch.nn.modules.module._has_any_global_hook():
        return "a module has hooks, which the kernels would not call"
    return None
