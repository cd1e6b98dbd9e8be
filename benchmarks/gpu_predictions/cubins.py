"""Compile Triton kernels for GPUs that are absent, and read what their machine code uses."""

# pyright: reportAttributeAccessIssue=false

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch._inductor.utils import fresh_cache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Multiprocessor(NamedTuple):
    """Limits of a streaming multiprocessor, from the CUDA C++ Programming Guide."""

    gpu: str
    shared_bytes: int
    warps: int = 64
    programs: int = 32
    registers: int = 65536


ARCHITECTURES = {
    80: Multiprocessor("A100", 164 * 1024),
    90: Multiprocessor("H100", 228 * 1024),
    100: Multiprocessor("B200", 228 * 1024),
}
WARP = 32
REGISTER_UNIT = 256  # registers of a warp are allocated in multiples of this
RESERVED_SHARED_BYTES = 1024  # of each program, for the system


def target(architecture: int) -> GPUTarget:
    """Return Triton's name of a GPU, given its compute capability times 10."""
    return GPUTarget("cuda", architecture, WARP)


def occupancy(registers: int, shared_bytes: int, warps: int, architecture: int) -> float:
    """Return the share of a multiprocessor's warps that programs of a kernel can fill.

    Args:
        registers: Registers of a thread.
        shared_bytes: Shared memory of a program.
        warps: Warps of a program.
        architecture: A key of `ARCHITECTURES`.

    Example:
        >>> occupancy(registers=64, shared_bytes=0, warps=4, architecture=90)
        0.5
    """
    limits = ARCHITECTURES[architecture]
    of_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    programs = min(
        limits.programs,
        limits.warps // warps,
        limits.registers // of_warp // warps,
        limits.shared_bytes // (shared_bytes + RESERVED_SHARED_BYTES),
    )
    return programs * warps / limits.warps


def resources(compiled: Any, architecture: int) -> dict[str, Any]:
    """Read registers, spills, shared memory, occupancy and loads from a compiled kernel.

    Args:
        compiled: What `triton.compile` returned.
        architecture: A key of `ARCHITECTURES`.

    Returns:
        Registers per thread, bytes of spills and of shared memory, the share of a multiprocessor's
        warps that can be filled, and how many instructions load how many bits from global memory.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        code = _run(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    loads = Counter(_bits(modifiers) for modifiers in re.findall(r"\bLDG\.E([.\w]*)", code))
    return {
        "registers": used["REG"],
        "spilled_bytes": used["STACK"],
        "shared_bytes": shared,
        "occupancy": occupancy(used["REG"], shared, warps, architecture),
        "loads_by_bits": dict(sorted(loads.items(), reverse=True)),
    }


def generated(sources: Iterable[str], architectures: Iterable[int]) -> dict[str, Any]:
    """Compile the kernels that Inductor wrote, and return what they use on each GPU.

    Inductor wrote them for an H100. The block sizes of another GPU may differ.

    Args:
        sources: Python source of one kernel each.
        architectures: Keys of `ARCHITECTURES`.

    Returns:
        For each GPU: the number of kernels, the names and bytes of those that spill, the largest
        number of registers and of bytes of shared memory, the smallest occupancy, and the number
        of loads by bits over all kernels.
    """
    with fresh_cache(), patch.object(triton_helpers, "set_driver_to_gpu"):
        tuners = [PyCodeCache.load(source).triton_ for source in sources]
        return {
            ARCHITECTURES[architecture].gpu: _summary(
                {tuner.inductor_meta["kernel_name"]: _best(tuner, architecture) for tuner in tuners}
            )
            for architecture in architectures
        }


def _best(tuner: Any, architecture: int) -> dict[str, Any]:
    """Return the first of the configurations without spills, or the last one.

    On a GPU, Inductor measures all of them and takes the fastest.
    """
    found: dict[str, Any] = {}
    for config in tuner.configs:
        meta = tuner._create_compile_meta(config)
        source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
        options = tuner._create_compile_options(config, meta)
        compiled = triton.compile(source, target=target(architecture), options=options)
        found = resources(compiled, architecture)
        if not found["spilled_bytes"]:
            break
    return found


def _summary(kernels: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows = list(kernels.values())
    loads: Counter[int] = Counter()
    for row in rows:
        loads.update(row["loads_by_bits"])
    spilling = {name: row["spilled_bytes"] for name, row in kernels.items() if row["spilled_bytes"]}
    return {
        "kernels": len(rows),
        "spilling": spilling,
        "registers": max((row["registers"] for row in rows), default=0),
        "shared_bytes": max((row["shared_bytes"] for row in rows), default=0),
        "occupancy": min((row["occupancy"] for row in rows), default=1.0),
        "loads_by_bits": dict(sorted(loads.items(), reverse=True)),
    }


def _run(program: str, *arguments: str) -> str:
    return subprocess.run(
        [str(Path(program)), *arguments], capture_output=True, text=True, check=True
    ).stdout


def _bits(modifiers: str) -> int:
    """Return the width of a load: `LDG.E.128` loads 128 bits, `LDG.E.U8` 8 and `LDG.E` 32."""
    widths = re.findall(r"\.[US]?(8|16|64|128|256)\b", modifiers)
    return int(widths[0]) if widths else 32
