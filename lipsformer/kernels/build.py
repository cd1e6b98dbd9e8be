"""Find the compiled kernels: in the wheel, in the user's cache, or by compiling `csrc` once.

    python -m lipsformer.kernels.build FOLDER

The command compiles the libraries for all processors of this architecture into FOLDER; `make wheel`
puts them into the wheel.
"""

import ctypes
import hashlib
import logging
import os
import platform
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
_CPUINFO = Path("/proc/cpuinfo")
_PREBUILT = Path(__file__).parent / "prebuilt"
# The features of x86-64-v3 and of x86-64-v4, names that GCC 9 and 10 do not know.
_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"]
_WIDE = [*_AVX2, *_AVX512, "-mprefer-vector-width=512"]
_TARGETS = {
    "x86_64": {
        "AVX512_BF16": [*_WIDE, "-mavx512bf16"],
        "AVX512": _WIDE,
        "AVX2": _AVX2,
    },
    "aarch64": {"NEON": ["-march=armv8-a"]},
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
# What compilers say if they were killed, or memory or disk space was missing: the next try may
# succeed.
_PASSING = (
    *("Killed", "signal terminated", "terminated with signal", "due to signal"),
    *("out of memory", "exhausted", "No space left"),
)
_DIGEST_BYTES = hashlib.sha256().digest_size

_logger = logging.getLogger(__name__)


@cache
def compiled_library() -> ctypes.CDLL | None:
    """Find the kernels for this processor in the wheel or in the cache, or compile them.

    `CXX` names the compiler, with arguments if need be. A compilation that failed is not tried
    again until the sources or the compiler change, unless memory or disk space was missing or the
    compiler was killed.

    Returns None where the system is not Linux, the processor is neither an x86-64 with AVX2 nor an
    aarch64, or there is neither a library nor a compiler.
    """
    if sys.platform != "linux":
        return None
    machine = platform.machine()
    target = _TARGETS.get(machine, {}).get(_extension(machine))
    if target is None:
        return None
    prebuilt = _PREBUILT / _file_name([*_FLAGS, *target])
    try:
        if prebuilt.exists():
            try:
                return _load(prebuilt, as_safe_as=Path(__file__))
            except OSError as error:
                _logger.warning("%s is not used, the kernels are compiled: %s", prebuilt, error)
        compiler = _compiler()
        if compiler is None:
            return None
        command = [*compiler, *_FLAGS, *target]
        folder = _own_folder()
        library = folder / _file_name(command)
        if library.exists():
            try:
                return _load(library, as_safe_as=folder)
            except OSError as error:
                _logger.warning("%s is compiled once more: %s", library, error)
                library.unlink(missing_ok=True)
        return _compile_and_load(compiler, command, library)
    except (OSError, RuntimeError, ValueError) as error:  # or no home folder, or a bad CXX
        reason = str(error).partition("\n")[0]
        _logger.warning("no CPU kernels, PyTorch's operators take their place: %s", reason)
        return None


def _extension(machine: str) -> str:
    """Return the extension of this processor's instructions, of which the kernels use the most."""
    if machine == "aarch64":
        return "NEON"  # which every aarch64 has, whatever PyTorch calls it
    extension = torch.backends.cpu.get_cpu_capability()
    if extension == "AVX512" and "avx512_bf16" in _CPUINFO.read_text().split():
        return "AVX512_BF16"
    return extension


def _file_name(command: list[str]) -> str:
    """Return the name of the library that a command makes of the sources as they are."""
    digest = hashlib.sha256(repr(command).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return f"csrc-{digest.hexdigest()[:16]}.so"


def _compiler() -> list[str] | None:
    """Return the command of the compiler; None if there is none and `CXX` asks for none."""
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


def _others_may_write(path: Path) -> int:
    return path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _load(library: Path, as_safe_as: Path) -> ctypes.CDLL:
    """Load a library that only those could change who could change `as_safe_as` too.

    Raises:
        OSError: If others could, or if the library is damaged.
    """
    same_owner = library.stat().st_uid == as_safe_as.stat().st_uid
    if not same_owner or _others_may_write(library) & ~_others_may_write(as_safe_as):
        raise PermissionError("another user made it or could have changed it")
    content = library.read_bytes()
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        raise OSError("it is damaged")  # loading it might kill the process
    return ctypes.CDLL(str(library))


class _BuildError(OSError):
    """A compilation that would fail again."""


def _compile_and_load(compiler: list[str], command: list[str], library: Path) -> ctypes.CDLL:
    """Compile the sources into a library, and remember a failure in a file beside it."""
    failure = library.with_suffix(".failed")
    if failure.exists():
        raise OSError(f"{failure.read_text()} (remembered; remove {failure} to try again)")
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            _logger.info("compiling the CPU kernels into %s, once", library)
            built = Path(scratch, library.name)
            _compile(compiler, command, built)
            try:
                loaded = _load(built, as_safe_as=library.parent)
            except OSError as error:
                raise _BuildError(f"what {command[0]} made cannot be loaded: {error}") from error
            os.replace(built, library)  # atomic: processes may start together
            return loaded
    except _BuildError as error:
        failure.write_text(str(error))
        raise


def _compile(compiler: list[str], command: list[str], built: Path) -> None:
    """Compile and link the sources, and append a digest by which damage is noticed."""
    units = sorted(_SOURCES.glob("*.cpp"))
    objects = [str(built.with_name(f"{unit.stem}.o")) for unit in units]
    builds = [
        subprocess.Popen(
            [*command, "-c", str(unit), "-o", out], stderr=subprocess.PIPE, env=_in_english()
        )
        for unit, out in zip(units, objects, strict=True)
    ]
    # All are waited for: none may write into a folder that is gone.
    said = [build.communicate()[1].decode(errors="replace") for build in builds]
    codes = [build.returncode for build in builds]
    failed = [(code, text) for code, text in zip(codes, said, strict=True) if code != 0]
    if not failed:
        link = [*compiler, "-shared", *objects, "-o", str(built)]
        linked = subprocess.run(
            link, capture_output=True, text=True, check=False, env=_in_english()
        )
        failed = [(linked.returncode, linked.stderr)] if linked.returncode != 0 else []
    if failed:
        code, text = failed[0]
        lines = [line for line in text.splitlines() if "error" in line] or [text]
        reason = f"{command[0]} failed: {lines[0].strip() or 'it said nothing'}"
        passing = code < 0 or any(trouble in text for trouble in _PASSING)  # code < 0: killed
        raise OSError(reason) if passing else _BuildError(reason)
    content = built.read_bytes()
    built.write_bytes(content + hashlib.sha256(content).digest())
    built.chmod(0o755)


def _in_english() -> dict[str, str]:
    """Return the environment with messages in English, which are searched for words."""
    return {**os.environ, "LC_ALL": "C"}


def main(folder: Path) -> None:
    """Compile the libraries of this architecture into a folder; older ones in it are removed."""
    compiler = _compiler()
    if compiler is None:
        raise SystemExit("error: there is no g++, and CXX names no other compiler")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("csrc-*"):
        old.unlink()
    for target in _TARGETS.get(platform.machine(), {}).values():
        command = [*compiler, *_FLAGS, *target]
        _compile_and_load(compiler, command, folder / _file_name([*_FLAGS, *target]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
