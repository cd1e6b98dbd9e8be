"""The layers' own CPU kernels, compiled from ``csrc`` at their first use."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_SOURCES = Path(__file__).parent / "csrc"
_TARGETS = {
    "AVX512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "AVX2": ["-march=x86-64-v3"],
}
# OpenMP's symbols come from the runtime that torch has loaded: one pool of threads, hence no
# -fopenmp for the linker. NaNs stay NaNs: nothing of -ffast-math that would assume there are none.
_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
]

_logger = logging.getLogger(__name__)


def native(*tensors: Tensor) -> bool:
    """Whether the kernels may be used for these tensors, float32 on the CPU and contiguous.

    Not where something looks at the operators: a tracer, a counter, a tensor subclass, vmap (whose
    tensors have no storage), forward-mode differentiation. ``LIPSFORMER_NATIVE=0`` switches them
    off.
    """
    return (
        not torch.jit.is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
        and all(type(x) in (Tensor, nn.Parameter) and torch._C._has_storage(x) for x in tensors)
        and _library() is not None
    )


def name_of(x: Tensor) -> str:
    """How the name of a kernel for the type of ``x`` ends: "float32" or "bfloat16"."""
    return str(x.dtype).removeprefix("torch.")


def run(kernel: str, *args: Tensor | int | float | None) -> None:
    """Call a kernel: tensors as pointers, integers as int64_t, numbers as float, threads last."""
    library = _library()
    assert library is not None
    getattr(library, kernel)(*map(_argument, args), ctypes.c_int64(torch.get_num_threads()))


def _argument(
    value: Tensor | int | float | None,
) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return ctypes.c_void_p() if value is None else ctypes.c_float(value)


@cache
def _library() -> ctypes.CDLL | None:
    """Compile the kernels or find them compiled; None without a compiler for this processor."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    target = _TARGETS.get(torch.backends.cpu.get_cpu_capability())
    wanted = sys.platform == "linux" and os.environ.get("LIPSFORMER_NATIVE") != "0"
    if not wanted or compiler is None or target is None:
        return None
    sources = sorted(_SOURCES.iterdir())
    units = [str(path) for path in sources if path.suffix == ".cpp"]
    compile_only = [compiler, *_FLAGS, *target]
    digest = hashlib.sha256(repr(compile_only).encode())
    for path in sources:
        digest.update(path.read_bytes())
    try:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = cache_home / "lipsformer"
        library = folder / f"kernels-{digest.hexdigest()[:16]}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _logger.info("compiling the CPU kernels into %s, once", library)
                objects = [f"{scratch}/{Path(unit).stem}.o" for unit in units]
                builds = [
                    subprocess.Popen([*compile_only, "-c", unit, "-o", out], stderr=subprocess.PIPE)
                    for unit, out in zip(units, objects, strict=True)
                ]
                for build in builds:
                    _, errors = build.communicate()
                    if build.returncode != 0:
                        raise OSError(errors.decode())
                built = f"{scratch}/kernels.so"
                subprocess.run([compiler, "-shared", *objects, "-o", built], check=True)
                os.replace(built, library)  # whole or not at all, for processes that start together
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # or no home folder
        _logger.warning("no CPU kernels, PyTorch's operators take their place: %s", error)
        return None
