"""The tables of bounds on the pages are those of the committed results."""

import json

import pytest

from benchmarks.bounds import MODELS, NETWORKS, SEEDS, tables
from tests.conftest import ROOT

RESULTS = json.loads((ROOT / "benchmarks/results/bounds.json").read_text())
PAGES = {"graphs": "docs/graph.md"}


@pytest.mark.parametrize("name", tables(RESULTS))
def test_the_table_of_a_page_is_that_of_the_results(name):
    page = (ROOT / PAGES.get(name, "docs/lipschitz.md")).read_text()
    assert tables(RESULTS)[name] in page


def test_the_results_cover_every_model_and_seed():
    assert list(RESULTS["models"]) == list(MODELS)
    assert RESULTS["seeds"] == list(SEEDS)
    for graph in RESULTS["graphs"].values():
        assert list(graph["bounds"]) == list(NETWORKS)
