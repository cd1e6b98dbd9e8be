"""The tables of the pages on speed are those of the committed records."""

import json
import re
from collections import Counter
from decimal import ROUND_HALF_UP, Decimal

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
    scaling,
    step_parts,
    versions,
)
from scripts import graph_sweep
from tests.conftest import ROOT

# How the names of records begin, the page that shows their tables, and what makes these.
PAGES = {
    "data_share": ("data.md", data_share.table),
    "deployment": ("deployment.md", deployment.table),
    "int8": ("deployment.md", deployment.table),
    "first_call": ("measurements.md", first_call.table),
    "infer": ("measurements.md", models.table),
    "models": ("measurements.md", models.table),
    "roofline": ("measurements.md", roofline.table),
    "scaling": ("measurements.md", scaling.table),
    "step_parts": ("measurements.md", step_parts.table),
    "versions": ("measurements.md", versions.table),
    "graph/epoch_seconds": ("measurements.md", graph_epoch_seconds.table),
    "graph/layers": ("measurements.md", graph_layers.table),
    "graph/training": ("graph.md", graph_training.table),
}
# Further runs, of which a page states a few figures in place of a table.
WITHOUT_TABLE = {
    *("data_share_cifar10_again", "models_bf16_xeon_again"),
    *("models_bf16_xeon_block", "models_nano_xeon_block", "models_bf16_xeon_dropped"),
    *("models_batch1_xeon_dropped", "models_batch1_xeon_dropped_again"),
    "models_batch8_xeon_dropped",
}
RESULTS = ROOT / "benchmarks/results"
RECORDS = [
    pytest.param(path, *shown, id=path.stem)
    for start, shown in PAGES.items()
    for path in sorted(RESULTS.glob(f"{start}_*.json"))
    if path.stem not in WITHOUT_TABLE
]


CERTIFIED = json.loads((ROOT / "benchmarks/results/certified_contractive.json").read_text())


@pytest.mark.parametrize("graph", graph_published.PUBLISHED)
def test_the_page_on_graphs_shows_our_accuracies_beside_the_published_ones(graph):
    assert graph_published.table(graph) in (ROOT / "docs/graph_results.md").read_text()


@pytest.mark.parametrize("table", graph_tables.TABLES.values())
def test_the_page_on_graphs_shows_the_tables_of_the_sweeps(table):
    text = table()
    pages = ("docs/graph.md", "docs/graph_results.md")
    assert any(text in (ROOT / page).read_text() for page in pages)


@pytest.mark.parametrize("name", [name for name in CERTIFIED if name.startswith("cifar10")])
def test_the_page_on_certified_models_has_the_rows_of_their_record(name):
    record = CERTIFIED[name]
    page = (ROOT / "docs/certified.md").read_text()
    for kind in {"real", "executed_float64", "executed_float32"} & set(record):
        shares = (Decimal(str(share)) for share in (record["clean"], *record[kind].values()))
        cells = (str(share.quantize(Decimal("0.1"), ROUND_HALF_UP)) for share in shares)
        assert f"| {' | '.join(cells)} |" in page


def committed(study):
    """The lines of a study's results, with their `key=value` settings as a dictionary."""
    text = (ROOT / "benchmarks/results/graph" / f"{study}.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line, dict(text.split("=") for text in line["overrides"])) for line in lines]


def rows_of(table):
    """The cells of the first table of a text, the header first and without the line below it."""
    lines = table[table.index("|") :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


@pytest.mark.parametrize("study", ["depth_gat", "depth_transformer"])
def test_every_row_of_a_table_by_depth_has_one_number_of_seeds(study):
    cells = [line["cell"] for line, _ in committed(study)]
    counts = Counter((cell["model.num_layers"], cell["case"]) for cell in cells)
    header, *rows = rows_of(graph_tables._by_depth_and_norm(study))
    shown = {}
    for row in rows:
        values = dict(zip(header, row, strict=True))
        shown |= {(row[0], norm): int(values["seeds"]) for norm in header[4:] if values[norm]}
    assert shown == counts


@pytest.mark.parametrize("study", ["depth_residual_plateau", "table_residual_datasets"])
def test_the_tables_of_residual_networks_show_the_settings_of_their_runs(study):
    table = {
        "depth_residual_plateau": graph_tables.residual_depth_plateau,
        "table_residual_datasets": graph_tables.residual_datasets,
    }[study]
    header, *rows = rows_of(table())
    found = Counter()
    for row in rows:
        own = dict(zip(header, row, strict=True))
        rate, halved, _ = own["lr"].partition(", halved on plateaus")
        graph = own.get("graph", "cora")
        names = (graph, own["network"].replace(" ", "_").lower(), own["layers"], own["c"])
        found[(*names, rate, bool(halved), own["epochs"])] += int(own["seeds"])
    expected = Counter()
    for _, settings in committed(study):
        bound = settings.get("model.kwargs.bound")
        c = "none" if bound is None else f"{float(bound):.3g}"
        names = (settings.get("data.name", "cora"), settings["model.name"])
        schedule = (settings["train.lr"], "train.plateau_patience" in settings)
        key = (*names, settings["model.num_layers"], c, *schedule, settings["train.epochs"])
        expected[key] += 1
    assert found == expected


def test_the_page_on_graphs_has_the_core_hours_of_all_committed_runs():
    folder = ROOT / "benchmarks/results/graph"
    paths = [path for path in folder.glob("*.jsonl") if not path.stem.startswith("epochs_")]
    runs = [line for path in paths for line, _ in committed(path.stem)]
    earlier = [s for row in json.loads((folder / "runs.json").read_text()) for s in row["seconds"]]
    hours, before = sum(run["seconds"] for run in runs) / 3600, sum(earlier) / 3600
    page = (ROOT / "docs/graph_results.md").read_text()
    assert f"| all studies | {len(runs)} | {hours:.1f} |" in page
    assert f"| together | {len(runs) + len(earlier)} | {hours + before:.1f} |" in page
    assert f"took {hours:.1f} core-hours, and the earlier runs" in page
    assert f"narrower networks {before:.1f} (" in page


@pytest.mark.parametrize("study", ["ablation_cora", "depth_gcn2", "table_trees"])
def test_the_studies_lack_what_the_sweep_lists_as_not_run(study, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = ROOT / "configs/graph" / f"{study}.yaml"
    text = graph_sweep.sweep(path, [], progress=False, only=[], train=False)
    listed = re.findall("^- (.*): seeds (.*)$", text.partition("Not run:")[2], re.MULTILINE)
    (row,) = [row for row in rows_of(graph_tables.studies()) if row[0] == f"`{study}`"]
    assert int(row[3]) == sum(len(seeds.split(", ")) for _, seeds in listed)
    header, *lines = rows_of(text)
    run = {", ".join(line[: header.index("best-validation test")]) for line in lines}
    assert row[4].split("; ") == [name for name, _ in listed if name not in run]


def test_a_goal_that_was_just_missed_does_not_look_met():
    slow = bars.Ratio("training", "a", 1.1499, 0.7, "2026-11-24", "slow.json")
    large = bars.Ratio("training", "a", 1.17, 0.8501, "2026-11-24", "large.json")
    speed = ("training", "`a`", "1.15", "1.149", "**missed**", "`slow.json`")
    memory = ("memory of training", "`a`", "at most 0.85", "0.851", "**missed**", "`large.json`")
    assert bars.speed_row(1.15, [large, slow]) == speed
    assert bars.memory_row(0.85, [slow, large]) == memory


def record_of_a_day(date, speed):
    own = {"train": {"eager": {"speed_ratio": speed, "memory_ratio": 1.0}}}
    setting = {"img_size": 224, "batch_size": 8, "models": {"lipsformer_tiny": own}}
    return {"machine": {"date": date}, "options": {"precision": "fp32"}, "settings": [setting]}


def test_of_each_processor_the_last_day_of_a_measurement_counts(tmp_path, monkeypatch):
    days = {"a_milan": ("2026-11-23", 0.7), "b_milan": ("2026-11-24", 1.3)}
    days |= {"c_milan": ("2026-11-24", 1.2), "a_xeon": ("2026-11-22", 1.1)}
    for name, (date, speed) in days.items():
        record = json.dumps(record_of_a_day(date, speed))
        (tmp_path / f"models_{name}.json").write_text(record)
    monkeypatch.setattr(bars, "RESULTS", tmp_path)
    assert sorted(ratio.speed for ratio in bars.ratios()) == [1.1, 1.2, 1.3]


def test_the_page_on_gpus_shows_the_first_steps_on_one():
    page = (ROOT / "docs" / "gpu.md").read_text()
    record = json.loads((ROOT / "benchmarks" / "results" / "gpu_first_h100.json").read_text())
    for step in record["steps"]:
        figures = f"{step['ms']:.1f} | {step['device_ms']:.1f} | {step['peak_gb']:.2f} |"
        assert f"| `{step['model']}`, {step['mode']} | {figures}" in page
    times = {(row["kernel"], row["shape"][1]): row["ms"] for row in record["depthwise"]["rows"]}
    convolution, gradient = (
        [f"{times[kernel, side]:.2f}" for side in (56, 14)]
        for kernel in ("convolution", "gradient of the taps")
    )
    assert (
        f"take {convolution[0]} ms for a map of [128, 56, 56, 96] and {convolution[1]} ms" in page
    )
    assert f"the gradients {gradient[0]} and {gradient[1]} ms" in page


def test_the_pages_on_speed_show_the_goals():
    assert bars.summary() in (ROOT / "docs/performance.md").read_text()
    assert bars.unfolded() in (ROOT / "docs/performance.md").read_text()
    assert bars.table() in (ROOT / "docs/measurements.md").read_text()


@pytest.mark.parametrize(("path", "page", "table"), RECORDS)
def test_a_page_shows_the_table_of_its_record(path, page, table):
    record = json.loads(path.read_text())
    assert table(record).strip() in (ROOT / "docs" / page).read_text()
