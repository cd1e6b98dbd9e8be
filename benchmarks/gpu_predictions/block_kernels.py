"""Compile the Triton kernels of a block for GPUs that are absent, as a training step launches them.

A block runs on the CPU, and in place of every launch the kernel is compiled in the variant that the
launch takes. So nothing is computed, and the results have no values.
"""

# pyright: reportAttributeAccessIssue=false

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.runtime.jit import JITFunction

from benchmarks.gpu_predictions import cubins
from lipsformer.models._fused import gpu_block


@contextmanager
def compiled_instead_of_launched(
    architecture: int, names: Collection[str] = ()
) -> Iterator[list[tuple[str, Any]]]:
    """Collect the name and the machine code of every Triton kernel that would be launched.

    Args:
        architecture: Compute capability times 10, such as 90 for an H100.
        names: Compile these kernels only; all if empty.
    """
    found: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if not names or self.__name__ in names:
            found.append((self.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    driver = SimpleNamespace(
        get_current_target=lambda: cubins.target(architecture),
        get_current_device=lambda: architecture,  # kernels are kept by device
        get_current_stream=lambda device: 0,
    )
    with (
        patch.object(triton.runtime.driver, "_active", driver),
        patch.object(JITFunction, "run", compile_only),
    ):
        yield found


def resources(
    block: Any, size: int, architecture: int, names: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return what the kernels of a training step of a block use.

    Args:
        block: A block that `gpu_block` takes.
        size: Height and width of its map.
        architecture: Compute capability times 10, such as 90 for an H100.
        names: Compile these kernels only; all if empty.

    Returns:
        For each different kernel its name and what `cubins.resources` returns.
    """
    channels = block.mlp.branch.fc1.weight.shape[1]
    x = torch.zeros(1, size, size, channels, requires_grad=True)
    with compiled_instead_of_launched(architecture, names) as found:
        with torch.autocast("cpu", torch.bfloat16):
            out = gpu_block(block.train(), x)
        out.backward(torch.zeros_like(out))
    different = {id(compiled): (name, compiled) for name, compiled in found}
    return [
        {"kernel": name, **cubins.resources(compiled, architecture)}
        for name, compiled in different.values()
    ]
