"""The report of a run: its figures against loops, its page against what browsers need."""

import errno
import hashlib
import html.parser
import json
import logging
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml

import scripts.reporting
from data import Normalize, build_eval_dataset
from lipsformer._configfile import read_config
from lipsformer.config import Config
from lipsformer.engine.run_folder import RunFolder
from scripts.report import main
from scripts.reporting.figures import STYLE, confusion_figure, monitor_curves
from scripts.reporting.pages import _cell
from scripts.reporting.runs import read_runs
from scripts.reporting.theme import SERIES
from scripts.reporting.validation import readable
from scripts.reporting.write import try_report, write_report
from tests.browser import Browser
from tests.full_disk import full_disk
from tests.runs import DIGITS, write_config

SETTINGS: dict[str, Any] = {
    **DIGITS,
    "model": {
        "name": "lipsformer_nano",
        "kwargs": {
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "split_sizes": [2, None],
        },
    },
    "train": {**DIGITS["train"], "epochs": 1, "batch_size_per_device": None},
    "run": {**DIGITS["run"], "report": True},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that training has left, with its report."""
    from tests.launch import launch

    folder = tmp_path_factory.mktemp("report")
    config = write_config(folder, SETTINGS, folder / "out")
    assert launch(["--config", str(config)], folder / "log") == [0], (folder / "log.0").read_text()
    assert f"report      {folder}/out/report.html" in (folder / "log.0").read_text()
    return folder / "out"


class Page(html.parser.HTMLParser):
    """Tables by their caption, and every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._rows: list[list[str]] = []
        self._into: str | None = None
        self._caption = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        if tag in ("td", "th", "caption"):
            self._into = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.tables[self._caption] = self._rows
        elif tag == self._into:
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into == "caption":
            self._caption += data
        elif self._into is not None:
            self._rows[-1][-1] += data


def read_page(folder: Path) -> tuple[str, Page]:
    text = (folder / "report.html").read_text()
    return text, Page(text)


def best_file(run: Path) -> str:
    best = json.loads((run / "summary.json").read_text())["best"]
    return {"raw": "model.safetensors", "ema": "ema.safetensors"}[best["weights"]]


def predictions(run: Path) -> list[tuple[int, torch.Tensor]]:
    """Label and probabilities of every validation image: the best weights, one image at a time."""
    from safetensors.torch import load_file

    folder = max((run / "checkpoints").iterdir())
    model = timm.create_model(f"local-dir:{folder}", pretrained=False)
    model.load_state_dict(load_file(folder / best_file(run)))
    config = read_config(Config, run / "config.yaml")
    found = []
    with torch.no_grad():
        for image, label in build_eval_dataset(config.data, classes=None):
            pixels = image.permute(2, 0, 1)[None]
            logits = model.eval()(Normalize(config.data.mean, config.data.std)(pixels))[0]
            found.append((label, logits.double().softmax(0)))
    return found


def test_mistakes_are_those_of_a_loop_over_the_images(run: Path) -> None:
    found = predictions(run)
    counts = Counter((label, int(p.argmax())) for label, p in found)
    sizes = Counter(label for label, _ in found)
    right = sum(count for (label, guess), count in counts.items() if label == guess)
    text, page = read_page(run)
    assert f"{100 * right / 360:.2f} % of 360 validation images are classified rightly" in text
    assert f"{best_file(run)}</code>" in text

    errors = sorted((-n, cell) for cell, n in counts.items() if cell[0] != cell[1])
    expected = [
        [str(label), str(guess), str(-n), f"{100 * -n / sizes[label]:.1f} %"]
        for n, (label, guess) in errors[:12]
    ]
    assert len(expected) == 12
    assert page.tables["Most confused pairs"][1:] == expected

    matrix = re.search(
        r'<svg role="img" aria-label="Confusion matrix of 10 classes.*?</svg>', text, re.S
    )
    assert matrix is not None
    written = [int(t) for t in re.findall(r">(\d+)</text>", matrix[0])]
    axes = [*range(10), *range(10)]
    assert Counter(written) == Counter([*counts.values(), *axes])

    worst = sorted(
        (float(p[label].log()), label, int(p.argmax()), float(p.max()), float(p[label]))
        for label, p in found
        if p.argmax() != label
    )[:12]
    captions = re.findall(
        r'class="wrong">(\d) taken for (\d)</span>\s*<small>([\d.]+) % sure, ([\d.]+) % for', text
    )
    assert [(int(a), int(b)) for a, b, *_ in captions] == [(a, b) for _, a, b, *_ in worst]
    for (*_, sure, rest), (*_, p, q) in zip(captions, worst, strict=True):
        assert float(sure) == pytest.approx(100 * p, abs=0.051)
        assert float(rest) == pytest.approx(100 * q, abs=0.051)


def write_certificate(run: Path, sets: dict[str, Any], weights: str) -> None:
    """Write a certificate of a file of weights beside it."""
    file = max((run / "checkpoints").iterdir()) / weights
    named = {"file": weights, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    file.with_name("certificate.json").write_text(json.dumps({"weights": named, "sets": sets}))


def test_a_certificate_beside_the_weights_has_a_section(run: Path, tmp_path: Path) -> None:
    assert 'id="certificates"' not in read_page(run)[0]
    copied = shutil.copytree(run, tmp_path / "run")
    radii = [0.001 * (i + 1) for i in range(360)]
    premises = {"logits": [[1.0, 0.0]] * 360, "labels": [0] * 180 + [1] * 180}
    sets = {"data": {"executed": radii, "premises": premises}}
    (other,) = {"model.safetensors", "ema.safetensors"} - {best_file(run)}
    write_certificate(copied, sets, other)  # whose shares are not those of the best weights
    write_report([copied], copied / "report.html", images=5)
    assert 'id="certificates"' not in read_page(copied)[0]
    write_certificate(copied, sets, best_file(run))
    write_report([copied], copied / "report.html", images=5)
    text, _ = read_page(copied)
    assert 'id="certificates"' in text
    assert "Half of all images have at least 0.0005." in text  # 180 right ones, and 180 zeros
    assert "Around this picture that is proved up to" in text


def test_each_run_keeps_its_own_picture_in_markdown(run: Path, tmp_path: Path) -> None:
    runs = [shutil.copytree(run, tmp_path / name) for name in ("a", "b")]
    premises = {"logits": [[1.0, 0.0]], "labels": [0]}
    for folder in runs:
        write_certificate(
            folder, {"data": {"executed": [0.0], "premises": premises}}, best_file(run)
        )
    write_report(runs, tmp_path / "ab.html", markdown=tmp_path / "md", images=5)
    links = re.findall(
        r"changes the class.*\]\((.+)\)", (tmp_path / "md" / "report.md").read_text()
    )
    assert len(set(links)) == 2 and all((tmp_path / "md" / link).exists() for link in links)


def test_a_damaged_certificate_is_named_in_the_report(run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(run, tmp_path / "run")
    beside = max((copied / "checkpoints").iterdir()) / "certificate.json"
    beside.write_text('{"sets": {')
    write_report([copied], copied / "report.html", images=5)
    text, _ = read_page(copied)
    assert f"{beside} cannot be read as JSON: " in text and "; restore the file" in text


def test_figures_of_training_are_those_of_the_records(run: Path) -> None:
    text, _ = read_page(run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (ema,) = (r for r in records if r["kind"] == "ema")
    training = [r for r in records if r["kind"] == "train"]
    seconds = 0.0
    for record in training:
        if "seconds_per_update" in record:
            before = max(
                [
                    r["update"]
                    for r in training
                    if "images_per_s" in r and r["update"] < record["update"]
                ],
                default=0,
            )
            seconds += record["seconds_per_update"] * (record["update"] - before)
    tiles = dict(re.findall(r"<div>([\w ]+)</div>\s*<b>(\S+) <small>", text))
    best = max(r["top1"] for r in records if r["kind"] in ("raw", "ema"))
    assert tiles["best accuracy"] == f"{best:.2f}"
    assert tiles["validation loss"] == f"{ema['loss']:.4g}"
    assert tiles["training time"] == f"0:00:{round(seconds):02}"
    assert f"training {training[-1]['loss']:.4g};" in text
    labels = dict.fromkeys(re.findall(r'aria-label="(Line chart of [^"]*)"', text))
    chart = next(label for label in labels if label.startswith("Line chart of cross entropy"))
    for kind in ("train", "raw", "ema"):
        last = [r for r in records if r["kind"] == kind][-1]["loss"]
        assert f"out ends at {last:.4g}." in chart


@pytest.mark.parametrize(
    ("top1", "kind", "update"),
    [
        ([(70.0, 60.0), (50.0, 65.0)], "raw", 4),
        ([(70.0, 60.0), (50.0, 75.0)], "ema", 8),
        ([(70.0, 70.0), (60.0, 60.0)], "ema", 4),
        ([(60.0, 70.0), (70.0, 65.0)], "ema", 4),
        ([(70.0, 60.0), (65.0, 70.0)], "raw", 4),
    ],
)
def test_the_report_shows_the_kind_of_weights_that_the_run_calls_best(
    run: Path, tmp_path: Path, top1: list[tuple[float, float]], kind: str, update: int
) -> None:
    for file in ("config.yaml", "environment.json"):
        shutil.copy(run / file, tmp_path)
    images = {"epoch": 1, "loss": 1.0, "top5": 100.0, "images": 7}
    records = [
        {"kind": name, "update": 4 * number, "top1": value, **images}
        for number, both in enumerate(top1, start=1)
        for name, value in zip(("raw", "ema"), both, strict=True)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (log,) = read_runs([tmp_path])
    assert log.best is not None
    assert (log.best["kind"], log.best["update"]) == (kind, update)
    shown = [both[("raw", "ema").index(kind)] for both in top1]
    assert [record["top1"] for record in log.evaluations] == shown


def test_page_needs_nothing_else_and_says_what_its_pictures_show(run: Path) -> None:
    text, page = read_page(run)
    assert len(text.encode()) < 5 * 2**20
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object", "embed")
        for name in ("src", "href", "xlink:href", "data", "poster", "srcset"):
            target = attributes.get(name)
            assert target is None or target.startswith(("#", "data:")), (tag, target)
        if tag == "img":
            assert attributes["alt"]
        if tag == "svg":
            assert attributes["role"] == "img" and attributes["aria-label"]
    assert not re.search(r"@import|url\((?!#|'?#)", text)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = {a["href"] for tag, a in page.tags if tag == "a"}
    assert used and used <= {f"#{name}" for name in ids}
    assert "" not in page.tables  # every table has a caption
    # two attention modules, of 8 x 8 and 4 x 4 tokens, over four images
    maps = page.tables["Sample images and what is attended to, early layers first"]
    assert [name.split()[0] for name in maps[0]] == [
        "image",
        "stages.0.blocks.0",
        "stages.1.blocks.0",
    ]
    assert len(maps) == 5


def test_markdown_tells_the_same(run: Path, tmp_path: Path) -> None:
    write_report([run], tmp_path / "report.html", markdown=tmp_path / "md")
    text = (tmp_path / "md" / "report.md").read_text()
    links = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    files = {f"images/{path.name}" for path in (tmp_path / "md" / "images").iterdir()}
    assert {link for _, link in links} == files
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
    _, page = read_page(run)
    for row in [*page.tables["Most confused pairs"], *page.tables["train"]]:
        assert row in rows


def test_without_weights_or_data_the_reason_stands_there(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("update-*"))
    assert main([str(bare)]) == 0
    assert f"Left out: {bare}" in read_page(bare)[0]
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    settings = yaml.safe_load((moved / "config.yaml").read_text())
    settings["data"] |= {"source": "folder", "name": "photos", "root": str(tmp_path)}
    (moved / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main([str(moved)]) == 0
    assert f"Left out: no data folder {tmp_path}/photos/val" in read_page(moved)[0]
    assert main([str(run), "--images", "0", "--out", str(tmp_path / "no.html")]) == 0
    assert "Left out: the report was made with --images 0" in (tmp_path / "no.html").read_text()


def test_runs_side_by_side_show_what_differs(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "<b>$x$|y"
    shutil.copytree(run, other)
    settings = yaml.safe_load((other / "config.yaml").read_text())
    settings["optim"]["lr"] = 0.07
    (other / "config.yaml").write_text(yaml.safe_dump(settings))
    out, folder = tmp_path / "both.html", tmp_path / "md"
    arguments = [str(run), str(other), "--images", "0", "--out", str(out)]
    assert main([*arguments, "--markdown", str(folder)]) == 0
    text = out.read_text()
    assert "<b>$x" not in text
    tables = Page(text).tables
    assert tables["Settings that differ"] == [["", "out", "<b>$x$|y"], ["optim.lr", "0.01", "0.07"]]
    assert [row[0] for row in tables["Outcome"]][:3] == ["", "state", "completed updates"]
    assert "out ends at" in text and "&lt;b&gt;$x$|y ends at" in text
    assert "| lr | 0.01 | 0.07 |" in (folder / "report.md").read_text()
    assert "&lt;b>$x$\\|y" in (folder / "report.md").read_text()


def test_monitor_records_become_curves(run: Path, tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    shutil.copytree(run, watched, ignore=shutil.ignore_patterns("update-*"))
    names = ["patch_embed.proj", "stages.0.blocks.0.qkv", "stages.1.blocks.0.mlp.fc1", "head.fc"]
    with (watched / "metrics.jsonl").open("a") as file:
        for update, factor in ((1, 1.0), (5, 1.3), (9, 1.7)):
            record = {f"sigma/{name}": factor * (i + 1) for i, name in enumerate(names)}
            record |= {f"update_ratio/{name}": 0.01 * factor for name in names}
            record |= {f"grad_norm/{name}": 1.0 for name in reversed(names)}  # by depth
            record["residual_scale/stages.0.blocks.0.attn"] = 0.125 * factor
            evaluation = {"kind": "raw", "bound_log10": 20 + factor}
            for more in ({"kind": "monitor", **record}, evaluation):
                file.write(json.dumps({"update": update, "epoch": 0, **more}) + "\n")
    drawings = {drawing.name: drawing for drawing in monitor_curves(read_runs([watched]))}
    assert "watched ends at 6.8." in drawings["sigma_over_time"].text
    assert "6.8 in head.fc." in drawings["sigma_by_layer"].text
    assert "watched ends at 21.7." in drawings["lipschitz_bound"].text
    assert "0.2125 in stages.0.blocks.0.attn" in drawings["residual_scale_by_layer"].text
    assert "watched ends at 0.017." in drawings["update_ratio_over_time"].text
    first, last = drawings["sigma_by_layer"].figure.axes[0].lines
    assert list(first.get_ydata()) == [4, 3, 2, 1]
    assert list(last.get_ydata()) == pytest.approx([6.8, 5.1, 3.4, 1.7])
    (bound,) = drawings["lipschitz_bound"].figure.axes[0].lines
    drawn = {"lines.linewidth": bound.get_linewidth(), "lines.markersize": bound.get_markersize()}
    assert drawn == {key: STYLE[key] for key in drawn}
    # next to a run that was not watched it keeps its color and its name
    both = {drawing.name: drawing for drawing in monitor_curves(read_runs([run, watched]))}
    (axes,) = both["sigma_over_time"].figure.axes
    assert [line.get_color() for line in axes.lines] == [SERIES[1]]
    (legend,) = both["sigma_over_time"].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["watched"]


def test_confusion_figure_has_classes_in_rows_and_shares_as_opacity(run: Path) -> None:
    counts = np.array([[6, 0, 2], [1, 3, 0], [0, 0, 5]])
    figure = confusion_figure(read_runs([run])[0], counts, ["a", "b", "c"]).figure
    (axes,) = figure.axes
    written = {(t.get_position()[1], t.get_position()[0]): int(t.get_text()) for t in axes.texts}
    assert written == {cell: n for cell, n in np.ndenumerate(counts) if n}
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("class", "predicted class")
    opacity = axes.images[0].get_array()[..., 3]
    worst = 2 / 8  # the largest share of a class that is taken for one other
    expected = [[6 / 8, 0, 1], [(1 / 4 / worst) ** 0.5, 3 / 4, 0], [0, 0, 1]]
    np.testing.assert_allclose(opacity, 0.75 * np.array(expected), atol=1e-6)

    counts = np.diag(np.full(201, 7))  # three classes to a cell
    counts[4, 2], counts[5, 3], counts[200, 0] = 3, 2, 1
    drawing = confusion_figure(read_runs([run])[0], counts, [f"{i}" for i in range(201)])
    assert drawing.title == "Confusion matrix, 3 classes to a cell"
    opacity = drawing.figure.axes[0].images[0].get_array()[..., 3]
    red, blue = np.zeros((67, 67)), np.ones(67)
    red[1, 0], red[66, 0] = 1, (1 / 22 / (3 / 26)) ** 0.5
    blue[1], blue[66] = 21 / 26, 21 / 22
    np.testing.assert_allclose(opacity, 0.75 * (red + np.diag(blue)), atol=1e-6)


def test_names_are_no_markup_in_a_table_of_markdown() -> None:
    assert _cell("<img src=x>") == "&lt;img src=x>"  # which Markdown shows as it was
    assert _cell("a|b\nc") == "a\\|b c"


def test_wordnet_numbers_are_shown_as_words() -> None:
    assert readable(["n01440764", "n02012849", "n03126707"]) == [
        "tench",
        "crane (n02012849)",
        "crane (n03126707)",
    ]
    assert readable(["n01440764", "cat"]) == ["n01440764", "cat"]


def test_a_folder_whose_name_is_not_utf_8_is_shown_with_its_bytes(run: Path, tmp_path: Path):
    names = readable([os.fsdecode(b"caf\xe9"), "café"])
    assert names == ["caf\\udce9", "café"]
    drawing = confusion_figure(read_runs([run])[0], np.eye(2, dtype=int), names)
    drawing.figure.savefig(tmp_path / "names.svg")


def test_a_full_disk_ends_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with full_disk(10_000):
        code = main([str(run), "--out", str(tmp_path / "out.html"), "--images", "0"])
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert "the report cannot be written: [Errno 27] File too large" in error


def test_a_folder_that_cannot_be_made_is_named_with_its_reason(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main([str(run), "--out", str(tmp_path / "new" / "out.html")]) == 2
    assert "new/out.html' cannot be written: Read-only file system\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere has no config.yaml: name the folder of a run"),
        (["partial"], "partial has no environment.json: name the folder of a run"),
        (["RUN"] * 7, "7 runs; a report shows at most 6"),
        (["RUN", "--images", "-1"], "--images -1 must be at least 0"),
        (["broken"], "broken/metrics.jsonl is no JSON: repair it"),
        (["killed"], "killed/metrics.jsonl has no record yet: train for a few updates first"),
        (["RUN", "--markdown", "FILE"], "report.md' cannot be written: Not a directory"),
        (["RUN", "--out", "FILE/out.html"], "FILE/out.html' cannot be written: Not a directory"),
    ],
)
def test_mistakes_end_in_one_line_and_write_nothing(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    for name, text in (("broken", '{"kind": "train", \n'), ("killed", '{"kind": ')):
        (tmp_path / name).mkdir()
        for file in ("config.yaml", "environment.json"):
            shutil.copy(run / file, tmp_path / name)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "partial").mkdir()
    for file in ("config.yaml", "metrics.jsonl"):
        shutil.copy(run / file, tmp_path / "partial")
    places = {
        "RUN": str(run),
        "nowhere": str(tmp_path / "nowhere"),
        "broken": str(tmp_path / "broken"),
        "killed": str(tmp_path / "killed"),
        "partial": str(tmp_path / "partial"),
        "FILE": str(tmp_path / "FILE"),
        "FILE/out.html": str(tmp_path / "FILE" / "out.html"),
    }
    (tmp_path / "FILE").touch()
    began = lambda *arguments: pytest.fail("the work began")  # noqa: E731
    monkeypatch.setattr("scripts.reporting.pages.make_report", began)
    out = tmp_path / "out.html"
    assert main(["--out", str(out), *(places.get(a, a) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not out.exists()


def test_without_matplotlib_a_run_ends_well(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lipsformer.engine.plots import plot_run

    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("update-*"))
    with (bare / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "monitor", "update": 1, "epoch": 0, "sigma/a": 1.0}) + "\n")
    monkeypatch.setattr(scripts, "reporting", scripts.reporting)  # the run imports another
    for name in [n for n in sys.modules if n.startswith(("matplotlib", "scripts.reporting"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with caplog.at_level(logging.WARNING, "lipsformer"):
        try_report(bare)
        plot_run(RunFolder(bare))
    assert "no report: a report needs matplotlib: pip install" in caplog.text
    assert "no curves: matplotlib is missing" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_browser_shows_it_without_complaint(run: Path, tmp_path: Path, width: int) -> None:
    page = (run / "report.html").as_uri()
    backgrounds = set()
    with Browser() as browser:
        for dark in (False, True):
            browser.open(page, width=width, dark=dark)
            assert browser.console() == []
            asked = [url for url in browser.requests() if not url.startswith("data:")]
            assert asked == [page]
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
            assert browser.evaluate(broken) == 0
            small = (
                "[...document.querySelectorAll('svg text, td, th, p, figcaption')]"
                ".filter(e => e.getBoundingClientRect().height < 9).length"
            )
            assert browser.evaluate(small) == 0
            backgrounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
