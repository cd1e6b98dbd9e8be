"""A whole block in one call of the kernels: which modules may be joined, and their tensors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lipsformer import kernels
from lipsformer._hooks import has_own_forward, would_run_hooks
from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    ScaledCosineAttention,
    WeightedResidual,
)
from lipsformer.layers._residual_kernels import draw
from lipsformer.layers._trial import gpu_kernel_passes
from lipsformer.layers._window_kernels import (
    cpu_arguments,
    cpu_obstacle,
    gpu_arguments,
    gpu_obstacle,
)
from lipsformer.layers.windows import Arrangement

Module = TypeVar("Module", bound=nn.Module)
# The classes that the kernels compute, by their place in a block. `computed_at` adds the classes of
# the files that import this one.
_PLACES: dict[str, tuple[type, ...]] = {
    "conv1": (WeightedResidual,),
    "conv2": (WeightedResidual,),
    "attn": (WeightedResidual,),
    "mlp": (WeightedResidual,),
    "depthwise": (DepthwiseConv2d,),
    "pointwise": (Linear,),
    "qkv": (Linear,),
    "attention": (ScaledCosineAttention, nn.ModuleList),
    "lepe": (nn.ModuleList,),
    "0": (ScaledCosineAttention, DepthwiseConv2d),  # of the first partition of stripes
    "1": (ScaledCosineAttention, DepthwiseConv2d),
    "proj": (Linear,),
    "proj_drop": (nn.Dropout,),
    "norm1": (CenterNorm, nn.Identity),
    "fc1": (Linear,),
    "fc2": (Linear,),
    "drop": (nn.Dropout,),
    "norm2": (CenterNorm,),
}
# What the kernels compute. A user may set another function on a class.
_FORWARDS = {cls: cls.forward for classes in _PLACES.values() for cls in classes}


def computed_at(*places: str) -> Callable[[type[Module]], type[Module]]:
    """Say that the kernels compute a class at some places of a block; see `in_one_call`.

    This holds for the class itself and not for its subclasses, which may compute something else.

    Args:
        *places: Names in a block, such as "mlp.branch"; "" is the block itself.
    """

    def add(cls: type[Module]) -> type[Module]:
        for place in places:
            _PLACES[place] = (*_PLACES.get(place, ()), cls)
        _FORWARDS[cls] = cls.forward
        return cls

    return add


def in_one_call(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Compute a block's training step in one call where that is usable, and on a GPU is faster.

    Args:
        forward: The block and its input x ([B, H, W, C]) to its output.
    """

    @functools.wraps(forward)
    def fastest(block: Any, x: Tensor) -> Tensor:
        if usable_on_gpu(block, x) and _gpu_block_passes(block, x, forward):
            return gpu_block(block, x)
        if (arrangement := cpu_arrangement(block, x)) is not None:
            return cpu_block(block, x, arrangement)
        return forward(block, x)

    return fastest


def _gpu_block_passes(block: Any, x: Tensor, forward: Callable[[Any, Tensor], Tensor]) -> bool:
    """Return whether the GPU's kernels are right and faster for blocks of this class."""
    attn = block.attn.branch
    side = getattr(attn, "window_size", None) or getattr(attn, "split_size", None)
    heads = getattr(attn, "num_heads", None) or attn.heads_per_partition
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

    return gpu_kernel_passes(
        name,
        block,
        x,
        kernel=lambda twin, y: gpu_block(drop_alternately(twin), y),
        plain=lambda twin, y: forward(drop_alternately(twin), y),
    )


def _alternate_mask(residual: Any, x: Tensor) -> Tensor | None:
    """Return a mask as of drop path that drops every second sample."""
    if residual.drop_path == 0.0:
        return None
    mask = torch.arange(len(x), device=x.device).remainder(2) / (1.0 - residual.drop_path)
    return mask.to(residual.residual_scale.dtype).view(-1, *[1] * (x.ndim - 1))


def usable_on_gpu(block: Any, x: Tensor) -> bool:
    """Return whether the GPU's kernels may compute a block on the map `x` ([B, H, W, C])."""
    if isinstance(x, torch.fx.Proxy):  # FX cannot trace the choice of a kernel
        return False
    return kernels.usable(
        "block.gpu", x, training=block.training, unless=lambda: _gpu_obstacle(block, x)
    )


def cpu_arrangement(block: Any, x: Tensor) -> Arrangement | None:
    """Return the windows of a block on `x` ([B, H, W, C]) if the CPU's function may compute it.

    Otherwise it is None.
    """
    if isinstance(x, torch.fx.Proxy) or not torch.is_grad_enabled():
        return None
    if not kernels.usable(
        "block", x, training=block.training, unless=lambda: _cpu_obstacle(block, x)
    ):
        return None
    arrangement = block.attn.branch.arrangement(x.shape[1], x.shape[2])
    obstacle = cpu_obstacle(x.shape[-1] // len(arrangement.attentions), arrangement)
    kernels.log("block", obstacle)
    return arrangement if obstacle is None else None


def cpu_block(block: Any, x: Tensor, arrangement: Arrangement) -> Tensor:
    """Apply a block to `x` ([B, H, W, C]) on the CPU."""
    attention = cpu_arguments(arrangement)
    masks, kept = zip(*[draw(residual, x) for residual in residuals(block)], strict=True)
    return kernels.block(x, _tensors(block, masks), kept, *attention)


def gpu_block(block: Any, x: Tensor) -> Tensor:
    """Apply a block to `x` ([B, H, W, C]) on a GPU."""
    masks = [r.draw_mask(x) for r in residuals(block)]
    tensors = _tensors(block, [None if mask is None else mask.flatten() for mask in masks])
    arrangement = block.attn.branch.arrangement(x.shape[1], x.shape[2])
    return kernels.gpu_block(x, tensors, gpu_arguments(arrangement))


def _tensors(block: Any, masks: Sequence[Tensor | None]) -> kernels.BlockTensors:
    conv1, conv2, attn, mlp = (r._modules["branch"]._modules for r in residuals(block))
    scales = [r._parameters["residual_scale"] for r in residuals(block)]
    norm1 = _parameters(block.norm1) if isinstance(block.norm1, CenterNorm) else (None, None)
    return kernels.BlockTensors(
        *_parameters(conv1["depthwise"]),
        *_parameters(conv1["pointwise"]),
        scales[0],
        masks[0],
        *_parameters(conv2["depthwise"]),
        scales[1],
        masks[1],
        *_parameters(attn["qkv"]),
        *_parameters(attn["proj"]),
        scales[2],
        masks[2],
        *norm1,
        *_parameters(mlp["fc1"]),
        *_parameters(mlp["fc2"]),
        scales[3],
        masks[3],
        *_parameters(block.norm2),
    )


# The next functions read the dictionaries of modules, which is many times faster than attributes.


def _parameters(module: Any) -> tuple[Tensor, Tensor]:
    return module._parameters["weight"], module._parameters["bias"]


def residuals(block: Any) -> tuple[Any, ...]:
    """Return the four weighted residuals of a block in order."""
    modules = block._modules
    return modules["conv1"], modules["conv2"], modules["attn"], modules["mlp"]


def _gpu_obstacle(block: Any, x: Tensor) -> str | None:
    """Return why the GPU's kernels would not compute what the modules of a block compute."""
    modules = _modules(block)
    obstacle = _module_obstacle(block, modules, x) or _memory_obstacle(block, modules, x)
    if obstacle is not None:
        return obstacle
    for residual in residuals(block)[:2]:
        if residual.branch.depthwise.weight.shape[-1] != kernels.GPU_DEPTHWISE_SIZE:
            return "a depthwise convolution has a size that no Triton kernel has"
    arrangement = block.attn.branch.arrangement(x.shape[1], x.shape[2])
    return gpu_obstacle(x.shape[-1] // len(arrangement.attentions), arrangement)


def _memory_obstacle(block: Any, modules: list[tuple[str, Any]], x: Tensor) -> str | None:
    """Return why the Triton kernels would read elsewhere in memory than in the parameters."""
    for _, module in modules:
        parameters = module._parameters
        for parameter in parameters.values():
            if parameter is not None and not parameter.is_contiguous():
                return "a parameter is not contiguous"
        if isinstance(module, Linear):
            bias = parameters["bias"]
            if bias is None or bias.shape != parameters["weight"].shape[:1]:
                return "a linear layer has no bias, or one of another shape"
    if any(residual.residual_scale.shape != x.shape[-1:] for residual in residuals(block)):
        return "a residual scale was replaced by one of another shape"
    return None


def _cpu_obstacle(block: Any, x: Tensor) -> str | None:
    """Return why the CPU's function would not compute what the modules of a block compute.

    `cpu_arrangement` checks afterwards whether the kernel can compute the windows of the block.
    """
    modules = _modules(block)
    obstacle = _module_obstacle(block, modules, x)
    if obstacle is not None:
        return obstacle
    if kernels.product_dtype(x) != x.dtype:
        return "autocast changes the type of the input"
    if not kernels.usable("linear", x, training=block.training):
        return "its linear layers have no kernel"
    for _, module in modules:
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if type(parameter) is not nn.Parameter or not parameter.requires_grad:
                return "a parameter is frozen or replaced"
            if parameter.dtype != torch.float32 or not parameter.is_contiguous():
                return "a parameter is not float32 or not contiguous"
            if parameter.is_neg():
                return "a parameter is a view with the opposite sign of what lies in memory"
    return None


def _modules(block: Any) -> list[tuple[str, Any]]:
    """Return a block and all modules in it with their places.

    The place of a residual's branch begins with that of the residual, as in "mlp.branch". All other
    places are names in the parent.
    """
    found, left = [], [("", block)]
    while left:
        place, module = left.pop()
        found.append((place, module))
        for name, child in module._modules.items():
            if child is not None:
                left.append((f"{place}.branch" if name == "branch" else name, child))
    return found


def _module_obstacle(block: Any, modules: list[tuple[str, Any]], x: Tensor) -> str | None:
    """Return why no single call would compute what a block and the modules in it compute."""
    if not all(type(residual) is WeightedResidual for residual in residuals(block)):
        return "a residual is folded or replaced"
    if not all("residual_scale" in residual._parameters for residual in residuals(block)):
        return "the parameters are not the modules' own, as in replicas of DataParallel"
    for place, module in modules:
        if isinstance(module, nn.Dropout) and module.p > 0.0:
            return "there is dropout"
        kind = type(module)
        if kind not in _PLACES.get(place, ()) or has_own_forward(module):
            return f"a module is {kind.__name__}"
        # The compiler cannot look a class up.
        if not torch.compiler.is_compiling() and kind.forward is not _FORWARDS[kind]:
            return f"the forward function of {kind.__name__} was replaced"
    if would_run_hooks([module for _, module in modules if module is not block]):
        return "a module has hooks, which the kernels would not call"
    conv1, conv2, attn, _ = (residual.branch for residual in residuals(block))
    if conv1.pointwise is None or conv2.pointwise is not None:
        return "a branch is replaced"
    if getattr(attn, "attn_factor", 1.0) != 1.0:
        return "the attention's output has a factor"
    # The kernels would read beyond tensors of other shapes. Products have shapes of their own.
    if attn.qkv.weight.shape[0] != 3 * x.shape[-1]:
        return "the projection to queries, keys and values was replaced by one of another shape"
    for norm in (block.norm1, block.norm2):
        if isinstance(norm, CenterNorm) and (obstacle := norm.obstacle()) is not None:
            return obstacle
    return conv1.depthwise.obstacle(x) or conv2.depthwise.obstacle(x)
