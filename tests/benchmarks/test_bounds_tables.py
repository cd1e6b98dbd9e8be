"""The tables of bounds on the pages are those of the committed results."""

import json

import pytest
import torch
from torch import nn

from benchmarks.bounds import MODELS, NETWORKS, SEEDS, tables
from benchmarks.local_certificates import attacked_distances, table
from tests.conftest import ROOT

RESULTS = json.loads((ROOT / "benchmarks/results/bounds.json").read_text())
PAGES = {
    "graphs": "docs/graph.md",
    "heads": "docs/theorems.md",
    "layers": "docs/theorems.md",
}


@pytest.mark.parametrize("name", tables(RESULTS))
def test_the_table_of_a_page_is_that_of_the_results(name):
    page = (ROOT / PAGES.get(name, "docs/lipschitz.md")).read_text()
    assert tables(RESULTS)[name] in page


def test_the_results_cover_every_model_and_seed():
    assert list(RESULTS["models"]) == list(MODELS)
    assert RESULTS["seeds"] == list(SEEDS)
    for graph in RESULTS["graphs"].values():
        assert list(graph["bounds"]) == list(NETWORKS)


def test_the_table_of_local_certificates_is_that_of_the_results():
    results = sorted((ROOT / "benchmarks/results/local_certificates").glob("*.json"))
    records = [json.loads(path.read_text()) for path in results]
    assert table(records) in (ROOT / "docs/local_certificates.md").read_text()
    assert all(row["local"] < row["attacked"] for record in records for row in record["rows"])


def test_attacked_distances_are_one_step_above_those_of_a_linear_map():
    torch.manual_seed(0)
    linear, images = nn.Linear(12, 2).requires_grad_(False), torch.randn(7, 3, 2, 2)
    logits, (first, second) = linear(images.flatten(1)), linear.weight
    exact = (logits[:, 0] - logits[:, 1]).abs().double() / (first - second).norm()
    found = attacked_distances(nn.Sequential(nn.Flatten(), linear), images, logits.argmax(1))
    assert (found >= exact).all() and (found <= 1.01 * 2**0.25 * exact).all()
