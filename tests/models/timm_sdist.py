"""timm's own tests: only its source distribution holds them.

    python -m tests.models.timm_sdist

downloads the one of the installed version into `.cache/` and prints the folder of the tests.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import timm

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "timm-tests"


def sdist_folder() -> Path:
    """The folder of timm's tests, downloaded at the first call.

    Raises:
        subprocess.CalledProcessError: If pip cannot download the source distribution.
    """
    name = f"timm-{timm.__version__}"
    folder = CACHE / name / "tests"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        requirement = f"timm=={timm.__version__}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "timm", "--dest", scratch, requirement]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
        with tarfile.open(Path(scratch) / f"{name}.tar.gz") as archive:
            archive.extractall(scratch, filter="data")
        (Path(scratch) / name).rename(CACHE / name)
    return folder


if __name__ == "__main__":
    print(sdist_folder())  # noqa: T201
