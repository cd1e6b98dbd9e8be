"""Compile a model region by region, so that the first step takes seconds instead of minutes."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from lipsformer import kernels
from lipsformer._sharding import resharded

logger = logging.getLogger(__name__)

BLOCKS = "blocks"  # timm's name for the blocks of a model or of a stage
# All regions share the compiler's cache of `nn.Module.__call__`. It needs an entry for every kind
# of block, size of the images and mode, and torch's own limit of 8 would end compilation silently.
MOST_KINDS = 256


def compiles(setting: bool | None, device: torch.device, *, sharded: bool = False) -> bool:
    """Return whether a run compiles its model.

    Args:
        setting: `train.compile`; None compiles on CUDA if Triton, which the compiler needs there,
            is installed, and the model is not sharded.
        device: Device of the run.
        sharded: Whether FSDP2 shards the model. Its hooks have not been tried with regions.

    Example:
        >>> compiles(None, torch.device("cpu")), compiles(True, torch.device("cpu"))
        (False, True)
    """
    if setting is not None:
        return setting
    return device.type == "cuda" and not sharded and find_spec("triton") is not None


def regions(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are compiled one by one: every block, and what lies between blocks.

    Equal blocks share their kernels. A model without blocks is one region.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> [type(region).__name__ for region in regions(model)]
        ['PatchEmbed', 'Block', 'Block', 'LayerNorm', 'Linear']
    """
    if not _has_blocks(model):
        return [model] if next(model.parameters(), None) is not None else []
    found: list[nn.Module] = []
    for name, child in model.named_children():
        found += child.children() if name == BLOCKS else regions(child)
    return found


def compile_regions(model: nn.Module, *, deterministic: bool, **options: Any) -> None:
    """Compile the regions of a model in place; the names of its parameters stay.

    Args:
        model: Each region is compiled when it first runs.
        deterministic: Choose kernels without measuring, so that equal runs take equal kernels.
        **options: See `torch.compile`.
    """
    torch._dynamo.config.recompile_limit = MOST_KINDS  # pyright: ignore[reportAttributeAccessIssue]
    if deterministic:
        from torch._inductor import config  # the compiler, which few runs on CPUs need

        config.deterministic = True
    for region in (found := regions(model)):
        # Sizes differ between stages. As variables of the kernels they would make them slower.
        region.compile(dynamic=False, **options)
    logger.info("compiling %d regions; train.compile=false switches it off", len(found))


def try_kernels(
    model: nn.Module, accelerator: Accelerator, sizes: Sequence[int], samples: int
) -> None:
    """Run a model in training without the compiler, so that kernels are tried where they first run.

    Compiled code takes a Triton kernel only if its verdict is known. Buffers and random numbers
    stay as they are. Nothing runs if the kernels are off, the precision is float32, or the model
    has no attention that has such a kernel.

    Args:
        model: The model, on its device.
        accelerator: Gives the precision.
        sizes: Sizes of the images in pixels.
        samples: Largest number of images of a pass.
    """
    if (
        kernels.gpu_switched_off() is not None
        or accelerator.mixed_precision == "no"
        or not any(hasattr(module, "arrangement") for module in model.modules())
    ):
        return
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = accelerator.device
    devices = [device] if device.type == "cuda" else []
    batch = min(samples, kernels.TRIAL_SAMPLES)
    with (
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng(devices),
        accelerator.autocast(),
        resharded(model),
    ):
        for size in sizes:
            model.train()(torch.randn(batch, 3, size, size, device=device))
    for buffer, value in buffers:
        buffer.copy_(value)


def _has_blocks(model: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == BLOCKS for name, _ in model.named_modules())
