"""A name of an earlier checkout raises one sentence with the new one, and the new one is there."""

import importlib
import re
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


# What stands before a module in the CHANGELOG's table.
PLACES = {
    **dict.fromkeys(("analysis", "config", "engine", "graph", "layers", "models"), "lipsformer."),
    **dict.fromkeys(("checkpoint", "run_folder"), "lipsformer.engine."),
}


def old_names() -> list[tuple[str, str]]:
    """The functions and classes in the first column of the CHANGELOG's table, with their module.

    A name without a module is of the module that stands before it in its cell. Methods, arguments
    and names of several words are left out.
    """
    table = (ROOT / "CHANGELOG.md").read_text().partition("| old name | new name |")[2]
    found = []
    for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        module = ""
        for code in re.findall(r"`([^`]*)`", re.sub("; names of .*", "", row)):
            path, _, name = code.partition("(")[0].rpartition(".")
            if re.search(r"[A-Z* ]", path) or not re.fullmatch(r"[A-Za-z]\w*", name):
                break
            module = path or module
            if f"lipsformer.{module}.{name}" not in MODULES and module.partition(".")[0] in PLACES:
                found.append((PLACES[module.partition(".")[0]] + module, name))
    return found


@pytest.mark.parametrize(("module", "name"), old_names())
def test_a_name_of_the_changelog_is_there_or_names_its_successor(module: str, name: str) -> None:
    new = "is there"
    try:
        getattr(importlib.import_module(module), name)
    except ImportError as error:
        new = str(error)
    assert new == "is there" or "has a new name" in new


@pytest.mark.parametrize("folder", ["configs", "docs", "notebooks", "benchmarks", "scripts"])
def test_no_page_and_no_config_uses_an_old_name(folder: str) -> None:
    kinds = {".md", ".yaml", ".ipynb", ".py"}
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in kinds]
    assert files
    for file in files:
        text = file.read_text()
        assert [name for name in (*MODULES, *NAMES) if re.search(rf"{name}\b(?!\.)", text)] == []


@pytest.mark.slow
def test_an_old_command_names_its_successor() -> None:
    command = [sys.executable, "-m", "scripts.convert_checkpoint", "x.pth", "OUT"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "scripts.convert_checkpoint has a new name: scripts.import_weights" in run.stderr
