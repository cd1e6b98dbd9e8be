"""The kernels' own tests with every compiler that is installed here."""

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


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("limit", [{}, {"ATEN_CPU_CAPABILITY": "avx2"}], ids=["", "avx2"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_kernels_pass_their_tests_with_a_compiler(compiler, limit, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, FILES)]
    run = subprocess.run(
        command,
        cwd=FOLDER.parents[1],
        env={
            **os.environ,
            "CXX": f"{compiler} -DUNUSED",
            "XDG_CACHE_HOME": str(tmp_path),
            **limit,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert [path.suffix for path in (tmp_path / "lipsformer").iterdir()] == [".so"]
