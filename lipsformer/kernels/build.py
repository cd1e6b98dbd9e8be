"""Compile the kernels in ``csrc`` at their first use and keep the library in the user's cache."""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import stat
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

    ``CXX`` names the compiler, with arguments if need be. A compilation that failed is not tried
    again until the sources or the compiler change.

    Returns None where the system is not Linux, the processor has no AVX2 or there is no compiler.
    """
    target = _TARGETS.get(torch.backends.cpu.get_cpu_capability())
    if sys.platform != "linux" or target is None:
        return None
    try:
        compiler = _compiler()
        if compiler is None:
            return None
        compile_only = [*compiler, *_FLAGS, *target]
        sources = sorted(_SOURCES.iterdir())
        digest = hashlib.sha256(repr(compile_only).encode())
        for path in sources:
            digest.update(path.read_bytes())
        folder = _own_folder()
        library = folder / f"kernels-{digest.hexdigest()[:16]}.so"
        units = [path for path in sources if path.suffix == ".cpp"]
        if library.exists():
            try:
                return _load(library)
            except OSError as error:
                _logger.warning("%s is compiled once more: %s", library, error)
                library.unlink(missing_ok=True)
        _compile(compiler, compile_only, units, library)
        return _load(library)
    except (OSError, RuntimeError, ValueError) as error:  # or no home folder, or a bad CXX
        reason = str(error).partition("\n")[0]
        _logger.warning("no CPU kernels, PyTorch's operators take their place: %s", reason)
        return None


def _compiler() -> list[str] | None:
    """Return the command of the compiler; None if there is none and ``CXX`` asks for none."""
    wanted = shlex.split(os.environ.get("CXX") or "")
    program, *arguments = wanted or ["g++"]
    found = shutil.which(program)
    if found is None and wanted:
        raise OSError(f"there is no compiler {program!r}, which CXX names")
    return None if found is None else [found, *arguments]


def _own_folder() -> Path:
    """Return the folder of the compiled libraries, into which only this user may write."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lipsformer"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; set XDG_CACHE_HOME")
    if _others_may_write(folder):
        folder.chmod(0o755)
    return folder


def _others_may_write(path: Path) -> bool:
    return bool(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _load(library: Path) -> ctypes.CDLL:
    if library.stat().st_uid != os.getuid() or _others_may_write(library):
        raise PermissionError("another user made it or could have changed it")
    return ctypes.CDLL(str(library))


def _compile(compiler: list[str], command: list[str], units: list[Path], library: Path) -> None:
    """Compile the units into a library, and remember a failure in a file beside it."""
    failure = library.with_suffix(".failed")
    if failure.exists():
        raise OSError(f"{failure.read_text()} (remembered; remove {failure} to try again)")
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        _logger.info("compiling the CPU kernels into %s, once", library)
        objects = [f"{scratch}/{unit.stem}.o" for unit in units]
        builds = [
            subprocess.Popen([*command, "-c", str(unit), "-o", out], stderr=subprocess.PIPE)
            for unit, out in zip(units, objects, strict=True)
        ]
        # All are waited for: none may write into a folder that is gone.
        said = [build.communicate()[1].decode(errors="replace") for build in builds]
        codes = [build.returncode for build in builds]
        errors = [text for text, code in zip(said, codes, strict=True) if code != 0]
        built = f"{scratch}/kernels.so"
        if not errors:
            linked = subprocess.run(
                [*compiler, "-shared", *objects, "-o", built],
                capture_output=True,
                text=True,
                check=False,
            )
            errors = [linked.stderr] if linked.returncode != 0 else []
        if errors:
            lines = [line for line in errors[0].splitlines() if "error" in line] or [errors[0]]
            reason = f"{command[0]} failed: {lines[0].strip() or 'it said nothing'}"
            if min(codes) >= 0:  # not killed for memory or by the user
                failure.write_text(reason)
            raise OSError(reason)
        os.chmod(built, 0o755)
        os.replace(built, library)  # atomic: processes may start together
