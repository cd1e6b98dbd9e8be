"""Tables that people wrote by hand show the figures of the committed records."""

import json
import re
import statistics
from collections import defaultdict
from decimal import Decimal

import pytest

from benchmarks import bars, graph_published
from benchmarks.study.plan import Study
from benchmarks.study.table import last_evaluation
from lipsformer._configfile import read_config
from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks/results"


def record(name):
    return json.loads((RESULTS / name).read_text())


def rows_from(page, text):
    """The cells of the first table from a text on a page on, without its header."""
    content = (ROOT / page).read_text()
    lines = re.search(r"(^\|.*\n)+", content[content.index(text) :], re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def shows(cell, value):
    """Whether a cell is the value, rounded to the digits that the cell has."""
    figure = Decimal(re.match(r"[-+.\de]+", cell)[0])
    unit = Decimal(1).scaleb(figure.as_tuple().exponent)
    return abs(Decimal(repr(float(value))) - figure) <= unit / 2


def accuracies(study, row):
    """The accuracy of the last epoch's weights, for each seed of a row."""
    lines = read_config(Study, ROOT / f"benchmarks/studies/{study}.yaml").lines()
    return [last_evaluation(line)["top1"] for line in lines if line["row"] == row]


def test_a_cell_shows_a_value_up_to_its_rounding():
    assert shows("82.5 %", 82.549) and not shows("82.5 %", 82.56)
    assert shows("9.5e-13", 9.46e-13) and not shows("9.5e-13", 9.4e-13)


@pytest.mark.parametrize(
    ("training", "runs"),
    [
        ("LipsFormer, 200 epochs in two processes", ["200_epochs: lipsformer, batch 256"]),
        (
            "LipsFormer, 100 epochs, lr 4e-3 / 2e-3",
            ["100_epochs: lipsformer, warmup 0, lr 4e-3", "100_epochs: lipsformer, warmup 0"],
        ),
        (
            "timm's Swin, 100 epochs, with 10 epochs of warmup, lr 4e-3 / 2e-3",
            [
                "100_epochs: swin, 10 epochs of warmup, lr 4e-3",
                "100_epochs: swin, 10 epochs of warmup",
            ],
        ),
        ("timm's Swin, 100 epochs", ["100_epochs: swin, warmup 0"]),
        (
            "timm's ViT, 100 epochs, with 10 epochs of warmup / without",
            ["100_epochs: vit, 10 epochs of warmup", "100_epochs: vit, warmup 0"],
        ),
        ("LipsFormer, 40 epochs", ["40_epochs: rand-m5"]),
        ("timm's Swin, 40 epochs", ["40_epochs_swin: warmup 0"]),
    ],
)
def test_the_readme_has_the_accuracies_of_single_runs_on_cifar10(training, runs):
    cells = {row[1]: row[2] for row in rows_from("README.md", "## Results")}
    shown = cells[training].removesuffix(" %").split(" / ")
    found = [accuracies(f"cifar10_{study}", row) for study, row in (r.split(": ") for r in runs)]
    assert all(shows(cell, only) for cell, (only,) in zip(shown, found, strict=True))


@pytest.mark.parametrize(
    ("training", "study", "row", "further"),
    [
        (
            "LipsFormer, 10 epochs, three seeds",
            "cifar10_10_epochs",
            "light augmentation, alpha 1",
            "lipsformer, warmup 0",
        ),
        (
            "timm's Swin, 10 epochs, three seeds",
            "cifar10_counterparts",
            "swin, muon, warmup 0",
            "swin, warmup 0",
        ),
    ],
)
def test_the_readme_has_the_mean_of_three_seeds_on_cifar10(training, study, row, further):
    cells = {row[1]: row[2] for row in rows_from("README.md", "## Results")}
    seeds = accuracies(study, row) + accuracies("cifar10_10_epochs_seeds", further)
    mean, deviation = cells[training].removesuffix(" %").split(" ± ")
    assert len(seeds) == 3
    assert shows(mean, statistics.mean(seeds)) and shows(deviation, statistics.stdev(seeds))


def test_the_readme_has_the_accuracies_on_imagenette_and_the_digits():
    cells = {(row[0], row[1]): row[2] for row in rows_from("README.md", "## Results")}
    for training, row in (
        ("LipsFormer, 20 epochs", "20 epochs"),
        ("LipsFormer, 20 epochs, wider, RandAugment", "20 epochs, rand-m7, width 48"),
    ):
        (accuracy,) = accuracies("imagenette_128_val", row)
        assert shows(cells["Imagenette, 128 px", training], accuracy)
    demo = record("int8_digits.json")["accuracy"][0]
    assert shows(cells["digits, 32 px", "`lipsformer_nano`, 20 epochs"], demo["top1"])


def test_the_readme_has_the_speed_ratios_of_the_records():
    names = {
        "training": "training, {}, 224 px, {}",
        "inference after `optimize_for_inference`": "folded over eager, {}, 224 px, {}",
    }
    found = defaultdict(list)
    memory = defaultdict(list)
    for ratio in bars.ratios():
        found[ratio.what, ratio.model].append(ratio.speed)
        memory[ratio.what, ratio.model].append(ratio.memory)
    for what, *cells in rows_from("README.md", "## Speed"):
        kind, precision, batch = what.partition(" (")[0].rsplit(", ", 2)
        values = found
        if kind == "peak memory of training":
            kind, values = "training", memory
        for model, cell in zip(bars.TINY, cells, strict=True):
            ratios = values[names[kind].format(precision, batch), model]
            low, high = cell.split(" to ")
            assert shows(low, min(ratios)) and shows(high, max(ratios)), what


def speeds_by_processor():
    """The ratios of the tiny models: what was measured and processor -> model -> speeds."""
    found = defaultdict(lambda: defaultdict(list))
    for ratio in bars.ratios():
        if ratio.model in bars.TINY:
            (key,) = (key for key in bars.PROCESSORS if f"_{key}" in ratio.record)
            found[ratio.what, bars.PROCESSORS[key]][ratio.model].append(ratio.speed)
    return found


def test_the_page_on_speed_has_the_ratios_of_training_by_processor():
    found = speeds_by_processor()
    for what, model, *cells in rows_from("docs/performance.md", "### Training"):
        precision, batch = what.split(", ")
        key = f"training, {precision}, 224 px, {batch}"
        for cell, processor in zip(cells, bars.PROCESSORS.values(), strict=True):
            speeds = found[key, processor][model.strip("`")]
            low, _, high = cell.partition(" to ")
            if cell == "no bf16":
                assert not speeds
            else:
                assert shows(low, min(speeds)) and shows(high or low, max(speeds)), what


def test_the_page_on_speed_lists_every_ratio_below_one():
    lowest = {
        key: tuple(min(speeds[model]) for model in bars.TINY)
        for key, speeds in speeds_by_processor().items()
        if any(round(min(own), 2) < 1 for own in speeds.values())
    }
    rows = rows_from("docs/performance.md", "### Where we lose")
    assert {(what, processor) for what, processor, *_ in rows} == lowest.keys()
    for what, processor, *cells in rows:
        assert all(map(shows, cells, lowest[what, processor])), (what, processor)


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("models_batch1_xeon_dropped", 1),
        ("models_batch1_xeon_dropped_again", 1),
        ("models_batch8_xeon_dropped", 8),
        ("models_bf16_xeon_dropped", 1),
        ("models_bf16_xeon_dropped", 8),
        ("models_bf16_xeon_block", 8),
    ],
)
def test_the_page_has_the_ratios_of_short_runs_on_the_xeon(name, batch):
    own = record(f"{name}.json")
    (setting,) = [s for s in own["settings"] if s["batch_size"] == batch]
    rows = rows_from("docs/measurements.md", "Training only, with one call per block.")
    start = f"{own['options']['precision']}, batch {batch}, {own['options']['rounds']} rounds"
    (cells,) = [row[1:] for row in rows if row[0].startswith(start) and f"`{name}.json`" in row[0]]
    for model, cell in zip(bars.TINY, cells, strict=True):
        assert shows(cell, setting["models"][model]["train"]["eager"]["speed_ratio"])


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        (
            "| images/s per core |",
            [
                ("images_per_s_per_core", "train_timm"),
                ("images_per_s_per_core", "train_ours"),
                ("times_timm", "train_ours"),
                ("images_per_s_per_core", "eval_timm"),
                ("images_per_s_per_core", "eval_ours_exact"),
                ("times_timm", "eval_ours_exact"),
                ("images_per_s_per_core", "eval_ours_fast"),
                ("times_timm", "eval_ours_fast"),
            ],
        ),
        (
            "| share of the time in training |",
            [
                ("share_percent", "decode, crop and resize"),
                ("share_percent", "RandAugment"),
                ("share_percent", "collate"),
            ],
        ),
        (
            "| time per image in ms |",
            [
                ("decoders_ms_per_image", "Pillow"),
                ("decoders_ms_per_image", "torchvision"),
                ("decoders_ms_per_image", "OpenCV"),
                ("decoders_ms_per_image", "simplejpeg"),
                ("crops_ms_per_image", "Pillow, timm"),
                ("crops_ms_per_image", "torchvision decode_jpeg, v2"),
                ("crops_ms_per_image", "ours"),
            ],
        ),
    ],
)
def test_the_page_on_data_has_the_figures_of_the_loader(text, figures):
    rows = rows_from("docs/data.md", text)
    assert len(rows) >= len(figures)
    sets = record("loader.json")["sets"].values()
    for (kind, name), (_, *cells) in zip(figures, rows, strict=False):
        assert all(shows(c, own[kind][name]) for c, own in zip(cells, sets, strict=True)), name


def test_the_pages_have_the_accuracy_and_the_bound_under_a_cap():
    for page in ("docs/lipschitz.md", "docs/results.md"):
        rows = rows_from(page, "`benchmarks/results/caps_cifar10.json`")
        for (_, top1, *rest), run in zip(
            rows, record("caps_cifar10.json")["runs"].values(), strict=True
        ):
            assert shows(top1, run["top1"])
            assert shows(rest[-1].removeprefix("10^"), run["bound_log10"])
            if len(rest) > 1:
                assert shows(rest[0], run["largest_sigma_of_23_matrices"])
                assert shows(rest[1], run["largest_sigma_of_8_depthwise_convolutions"])


def test_the_pages_have_the_certified_shares_of_the_digits():
    own = record("certified_digits.json")
    rows = rows_from("docs/certified.md", "`benchmarks/results/certified_digits.json`")
    for (_, accuracy, *cells), kind in zip(
        rows, ("certified", "certified_real", "pgd"), strict=True
    ):
        assert shows(accuracy, own["top1"])
        assert all(shows(c, at[kind]) for c, at in zip(cells, own["robustness"], strict=True))
    summary = rows_from("docs/results.md", "`benchmarks/results/certified_digits.json`")
    first = own["robustness"][0]
    values = (own["top1"], first["certified"], first["pgd"])
    assert all(shows(cell, value) for (_, cell), value in zip(summary, values, strict=True))

    pixels = record("certified_contractive.json")["digits_pixels"]
    rows = rows_from("docs/certified.md", "The checker accepts the certificate.")
    for (_, accuracy, *cells), kind in zip(rows, ("executed", "real", "pgd"), strict=True):
        assert shows(accuracy, pixels["clean"])
        assert all(shows(c, v) for c, v in zip(cells, pixels[kind].values(), strict=True))


def test_the_page_on_graphs_has_the_gradients_at_depth():
    names = {
        "GCN without residual": "GCN, no residual",
        "residual GCN, weight norm c = 4/L": "residual GCN, weight norm",
        "residual GAT, weight norm c = 4/L": "residual GAT, weight norm",
    }
    shallow, deep = record("graph/gradients_64.json"), record("graph/gradients_256.json")
    rows = rows_from("docs/graph.md", "`benchmarks/results/graph/`.")
    assert len(rows) == len(shallow)
    for network, *cells in rows:
        key = names.get(network, network)
        for pair, own in ((cells[:2], shallow[key]), (cells[2:], deep[key])):
            values = own["gradient_distance_from_mean"]
            for cell, value in zip(pair, (values[0], values[-1]), strict=True):
                assert cell == value if cell == "not finite" else shows(cell, value)


def test_the_results_have_the_accuracies_of_the_page_on_graphs():
    tables = {graph: graph_published.table(graph) for graph in ("cora", "citeseer")}
    for graph, network, seeds, ours, published in rows_from("docs/results.md", "## Graphs"):
        name, _, missing = network.rpartition(", ")
        share = {"none": "0 %", "all outside the training set": "100 %"}[missing]
        (line,) = [
            line
            for line in tables[graph.lower()].splitlines()
            if line.startswith(f"| {name}, {share} |")
        ]
        _, found, best, _, expected, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        assert (seeds, ours, published) == (found, best, expected)


def test_the_page_on_bounds_has_the_certified_models():
    own = record("certified_contractive.json")
    digits, body, attention = rows_from("docs/lipschitz.md", "too much.\n\n```bash")
    pixels = own["digits_pixels"]
    assert shows(digits[2], pixels["clean"])
    assert shows(digits[3], pixels["real"]["own pixels 36/255"])
    for cells, name in ((body, "cifar10_body"), (attention, "cifar10")):
        assert shows(cells[2], own[name]["clean"])
        assert shows(cells[3], own[name]["real"]["36/255"])
