"""A name of an earlier checkout raises one sentence with the new one, and the new one is there."""

import importlib
import subprocess
import sys

import pytest

from lipsformer._renamed import MODULES, NAMES
from tests.conftest import ROOT


@pytest.mark.parametrize(("old", "new"), MODULES.items())
def test_a_module_names_its_successor(old: str, new: str) -> None:
    with pytest.raises(ImportError, match=f"^{old} has a new name: {new}$"):
        importlib.import_module(old)
    importlib.import_module(new)


@pytest.mark.parametrize(("old", "new"), NAMES.items())
def test_a_name_names_its_successor(old: str, new: str) -> None:
    module, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match=f"{old} has a new name: "):
        getattr(importlib.import_module(module), name)
    place, _, successor = new.partition("(")[0].rpartition(".")
    assert hasattr(importlib.import_module(place or module), successor)
    assert not hasattr(importlib.import_module(module), "never_was_there")


@pytest.mark.slow
def test_an_old_command_names_its_successor() -> None:
    command = [sys.executable, "-m", "scripts.convert_checkpoint", "x.pth", "OUT"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "scripts.convert_checkpoint has a new name: scripts.import_weights" in run.stderr
