"""The tables of the pages on speed are those of the committed records."""

import json

import pytest

from benchmarks import (
    bars,
    data_share,
    deployment,
    first_call,
    graph_epoch_seconds,
    graph_layers,
    graph_published,
    graph_tables,
    graph_training,
    models,
    roofline,
    step_parts,
    versions,
)
from tests.conftest import ROOT

PAGES = {
    "data_share_cifar10.json": ("data.md", data_share.table),
    "data_share_cifar10_before.json": ("data.md", data_share.table),
    "data_share_demo.json": ("data.md", data_share.table),
    "data_share_imagenette.json": ("data.md", data_share.table),
    "deployment_epyc.json": ("deployment.md", deployment.table),
    "deployment_xeon.json": ("deployment.md", deployment.table),
    "deployment_compiled_xeon.json": ("deployment.md", deployment.table),
    "int8_digits.json": ("deployment.md", deployment.table),
    "int8_cifar10.json": ("deployment.md", deployment.table),
    "infer_batch_epyc.json": ("measurements.md", models.table),
    "first_call_xeon.json": ("measurements.md", first_call.table),
    "models_avx2_xeon.json": ("measurements.md", models.table),
    "models_bf16_xeon.json": ("measurements.md", models.table),
    "models_batch1_epyc.json": ("measurements.md", models.table),
    "models_batch1_epyc_again.json": ("measurements.md", models.table),
    "models_batch32_epyc.json": ("measurements.md", models.table),
    "models_batch_epyc.json": ("measurements.md", models.table),
    "models_bf16_epyc.json": ("measurements.md", models.table),
    "models_nano_epyc.json": ("measurements.md", models.table),
    "models_size_epyc.json": ("measurements.md", models.table),
    "models_batch_xeon.json": ("measurements.md", models.table),
    "models_block_xeon.json": ("measurements.md", models.table),
    "models_size_xeon.json": ("measurements.md", models.table),
    "models_nano_xeon.json": ("measurements.md", models.table),
    "models_windows5_epyc.json": ("measurements.md", models.table),
    "models_windows5_xeon.json": ("measurements.md", models.table),
    "roofline_swin_tiny_xeon.json": ("measurements.md", roofline.table),
    "roofline_tiny_xeon.json": ("measurements.md", roofline.table),
    "step_parts_nano_epyc.json": ("measurements.md", step_parts.table),
    "step_parts_swin_tiny_epyc.json": ("measurements.md", step_parts.table),
    "step_parts_tiny_batch1_epyc.json": ("measurements.md", step_parts.table),
    "graph/layers_pubmed_wide_xeon.json": ("measurements.md", graph_layers.table),
    "graph/epoch_seconds_epyc.json": ("measurements.md", graph_epoch_seconds.table),
    "graph/epoch_seconds_xeon.json": ("measurements.md", graph_epoch_seconds.table),
    "graph/training_arxiv_xeon.json": ("graph.md", graph_training.table),
    "graph/layers_gcn_medium_epyc.json": ("measurements.md", graph_layers.table),
    "graph/layers_gcn_molecules_epyc.json": ("measurements.md", graph_layers.table),
    "graph/layers_gcn_pubmed_epyc.json": ("measurements.md", graph_layers.table),
    "graph/layers_medium_xeon.json": ("measurements.md", graph_layers.table),
    "graph/layers_molecules_transformer_xeon.json": ("measurements.md", graph_layers.table),
    "graph/layers_molecules_xeon.json": ("measurements.md", graph_layers.table),
    "graph/layers_pubmed_float64_epyc.json": ("measurements.md", graph_layers.table),
    "graph/layers_pubmed_xeon.json": ("measurements.md", graph_layers.table),
    "versions_fallback_epyc.json": ("measurements.md", versions.table),
}


@pytest.mark.parametrize("graph", graph_published.PUBLISHED)
def test_the_page_on_graphs_shows_our_accuracies_beside_the_published_ones(graph):
    assert graph_published.table(graph) in (ROOT / "docs/graph_results.md").read_text()


@pytest.mark.parametrize("table", graph_tables.TABLES.values())
def test_the_page_on_graphs_shows_the_tables_of_the_sweeps(table):
    pages = ("docs/graph.md", "docs/graph_results.md")
    assert any(table() in (ROOT / page).read_text() for page in pages)


def test_a_goal_that_was_just_missed_does_not_look_met():
    slow = bars.Ratio("training", "a", 1.1499, 0.7, "slow.json")
    large = bars.Ratio("training", "a", 1.17, 0.8501, "large.json")
    speed = ("training", "`a`", "1.15", "1.149", "**missed**", "`slow.json`")
    memory = ("memory of training", "`a`", "at most 0.85", "0.851", "**missed**", "`large.json`")
    assert bars.speed_row(1.15, [large, slow]) == speed
    assert bars.memory_row(0.85, [slow, large]) == memory


def test_the_pages_on_speed_show_the_goals():
    assert bars.summary() in (ROOT / "docs/performance.md").read_text()
    assert bars.table() in (ROOT / "docs/measurements.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_the_table_of_its_record(name):
    page, table = PAGES[name]
    record = json.loads((ROOT / "benchmarks/results" / name).read_text())
    assert table(record).strip() in (ROOT / "docs" / page).read_text()
