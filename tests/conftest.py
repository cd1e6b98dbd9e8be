"""Fixtures for what several test modules need: the real data and the reference tensors."""

from pathlib import Path

import pytest

from lipsformer.kernels import dispatch
from lipsformer.kernels.build import compiled_library

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def oracles() -> Path:
    """The folder of reference tensors made by the released code."""
    path = ROOT.parent / "shared" / "oracles"
    if not path.is_dir():
        pytest.skip(f"no reference tensors at {path}")
    return path


@pytest.fixture(scope="session")
def datasets() -> Path:
    """The folder of unpacked real data sets."""
    path = ROOT / "datasets"
    if not path.is_dir():
        pytest.skip(f"no real data at {path}; see data/README in the shared folder")
    return path


@pytest.fixture(params=["kernels", "no compiler", "off"])
def path(request, monkeypatch) -> str:
    """How the layers compute: with all kernels, without the compiled ones, by the formulas only."""
    if request.param == "kernels" and not (dispatch.ENABLED and compiled_library() is not None):
        pytest.skip("no compiler for the CPU kernels, or LIPSFORMER_NATIVE=0")
    if request.param == "no compiler":
        monkeypatch.setattr(dispatch, "compiled_library", lambda: None)
    if request.param == "off":
        monkeypatch.setattr(dispatch, "ENABLED", False)
    return request.param


@pytest.fixture
def compiled_kernels() -> None:
    """Skip the test where the compiled kernels cannot run."""
    if not dispatch.ENABLED or compiled_library() is None:
        pytest.skip("no compiler for the CPU kernels, or LIPSFORMER_NATIVE=0")
