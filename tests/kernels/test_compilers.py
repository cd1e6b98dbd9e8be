"""The kernels' own tests with every compiler that is installed here, and with sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# These choose their compiler themselves or call no kernel of the CPU.
OTHERS = {f"test_{name}.py" for name in ("aarch64", "build", "compilers", "gpu_block", "verdict")}
FILES = (
    *sorted(path for path in FOLDER.glob("test_*.py") if path.name not in OTHERS),
    *(FOLDER.parent / "layers" / name for name in ("test_conv.py", "test_linear.py")),
)
COMPILERS = (
    *("g++", "g++-9", "g++-10", "g++-11", "g++-12", "g++-13", "g++-14"),
    *("clang++-14", "clang++-16", "clang++-19"),
)


def run_the_tests(compiler, cache, variables):
    """Run the kernels' tests in a process whose kernels a compiler builds into a new cache."""
    options = ["-q", "-s", "-p", "no:cacheprovider"]  # -s, or a sanitizer's report would be lost
    command = [sys.executable, "-m", "pytest", *options, *map(str, FILES)]
    run = subprocess.run(
        command,
        cwd=FOLDER.parents[1],
        env={**os.environ, "CXX": compiler, "XDG_CACHE_HOME": str(cache), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert [path.suffix for path in (cache / "lipsformer").iterdir()] == [".so"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("limit", [{}, {"ATEN_CPU_CAPABILITY": "avx2"}], ids=["", "avx2"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_kernels_pass_their_tests_with_a_compiler(compiler, limit, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    run_the_tests(f"{compiler} -DUNUSED", tmp_path, limit)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("limit", [{}, {"ATEN_CPU_CAPABILITY": "avx2"}], ids=["", "avx2"])
def test_the_kernels_stay_within_their_memory(limit, tmp_path):
    """GCC's sanitizers end the process at a wrong address and at undefined behavior."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    libraries = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    sanitized = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    variables = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", **limit}
    run_the_tests(f"env -u LD_PRELOAD g++ {sanitized}", tmp_path, variables)
