"""The kernels for aarch64, cross compiled and run under QEMU, against float64 on this machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lipsformer.kernels import bindings, build

FOLDER = Path(__file__).parent
COMPILER = "aarch64-linux-gnu-g++"
FILES = (
    *("kernels/test_windows.py", "kernels/test_pointwise.py", "kernels/test_bfloat16.py"),
    *("kernels/test_elu.py", "kernels/test_node_terms.py", "kernels/test_product.py"),
    *("layers/test_conv.py", "layers/test_linear.py"),
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kernel_passes_its_tests_on_an_emulated_aarch64(tmp_path):
    for program in (COMPILER, "qemu-aarch64"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    command = [COMPILER, *build._FLAGS, *build._TARGETS["aarch64"]["NEON"]]
    build._compile([COMPILER], command, tmp_path / "csrc.so")
    driver = [COMPILER, "-std=c++17", str(FOLDER / "emulated.cpp"), "-o", str(tmp_path / "driver")]
    subprocess.run([*driver, "-Wl,--no-as-needed", "-lgomp"], check=True)
    files = [str(FOLDER.parent / file) for file in FILES]  # a test of them may take minutes
    tests = ["pytest", "-q", "--timeout=0", "-p", "tests.kernels.emulated", *files]
    run = subprocess.run(
        [sys.executable, "-m", *tests],
        cwd=FOLDER.parents[1],
        env={**os.environ, "EMULATED": str(tmp_path), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert set((tmp_path / "called").read_text().split()) == set(bindings.SIGNATURES)
