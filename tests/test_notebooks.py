"""The notebooks run from top to bottom; what their text claims, their own assertions check."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.documents import ROOT


def execute(name: str) -> None:
    """Runs a notebook where Jupyter would run it; its first error is raised here."""
    path = ROOT / "notebooks" / name
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, resources=place).execute()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fine_tuning_on_a_folder():
    execute("finetune_on_a_folder.ipynb")


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.timeout(1200)
def test_inside_a_deep_gat(datasets, monkeypatch):
    if not (datasets / "graphs" / "Cora" / "raw").is_dir():
        pytest.skip("Cora is not there; the notebook would download it")
    monkeypatch.setenv("LIPSFORMER_DATA", str(datasets))
    execute("inside_a_deep_gat.ipynb")
