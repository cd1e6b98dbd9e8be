"""Fixtures for what several test modules need: the real data and the reference tensors."""

from pathlib import Path

import pytest

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
