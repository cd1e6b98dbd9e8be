"""Compile the kernels in ``csrc`` at their first use and keep the library in the user's cache."""

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

_SOURCES = Path(__file__).parent / "csrc"
_TARGETS = {
    "AVX512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "AVX2": ["-march=x86-64-v3"],
}
# The linker gets no -fopenmp: OpenMP's symbols come from the runtime that torch has loaded, so that
# there is one pool of threads. -ffast-math is left out because it assumes that there are no NaNs.
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


@cache
def compiled_library() -> ctypes.CDLL | None:
    """Compile the kernels or find them in the cache.

    Returns None where the system is not Linux, the processor has no AVX2 or there is no compiler.
    """
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    target = _TARGETS.get(torch.backends.cpu.get_cpu_capability())
    if sys.platform != "linux" or compiler is None or target is None:
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
                os.replace(built, library)  # atomic: processes may start together
        return ctypes.CDLL(str(library))
    except (
        OSError,
        RuntimeError,
        subprocess.CalledProcessError,
    ) as error:  # or no home folder
        _logger.warning("no CPU kernels, PyTorch's operators take their place: %s", error)
        return None
