"""The plan, the cells, the results, the tables and the command of the league."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.league import __main__ as command
from benchmarks.league import plan, pool
from benchmarks.league.bodies import BODIES
from benchmarks.league.cell import Cell, run_cell
from benchmarks.league.images import Images, cache_images, load_images
from benchmarks.league.plan import grid, next_cell, rates, stages, very_deep_cells
from benchmarks.league.results import append_result, mean_loss, read_results, summarize
from benchmarks.league.table import best_accuracy, page, very_deep_table

BOTH = ("cifar10", "imagenette")
ROWS = len(BODIES) + 3 * 3


def fake(cell: Cell) -> dict:
    """Return results that depend only on the cell; plain fails at high rates."""
    fails = cell.body == "plain" and cell.lr > 1e-3
    final = None if fails else 1.0 + 0.01 * list(BODIES).index(cell.body)
    signals = [{"update": u, "entropy": [0.9, 0.8], "sec": [0.5, 0.6]} for u in (0, 1, 10)]
    return {
        **asdict(cell),
        "num_classes": 10,
        "final_loss": final,
        "stable": not fails,
        "top1": 10.0 if fails else 30.0 + cell.seed,
        "signals": signals,
        "cpu_seconds": 1.0,
    }


def tiny_images() -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (160, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.arange(160) % 4
    return Images(images[:96], labels[:96], images[96:], labels[96:])


def test_rates_are_six_over_three_decades():
    assert rates("adamw") == [1e-4, 4e-4, 1.6e-3, 6.3e-3, 2.5e-2, 1e-1]
    assert rates("lion") == pytest.approx([lr / 10 for lr in rates("adamw")])


def test_the_plan_has_every_cell_once_and_the_first_seed_first():
    order, records = [], []
    while (cell := next_cell(records, set(), BOTH)) is not None:
        stage = next(stage for stage in stages(records, BOTH) if cell in stage)
        order += stage
        records += [fake(cell) for cell in stage]
    assert len(order) == len(set(order))
    order, very_deep = order[:-36], order[-36:]
    assert [c.blocks for c in very_deep] == ([12] * 6 + [192] * 6) * 3
    assert [c.seed for c in very_deep] == [0] * 12 + [1] * 12 + [2] * 12
    first = order[: 6 * ROWS]
    assert all(c.seed == 0 and c.warmup == 0.0 and c.data == "cifar10" for c in first)
    assert {(c.body, c.optimizer, c.lr) for c in first} >= {(b, "adamw", 0.1) for b in BODIES}
    ordinary = [c for c in order if c.data == "cifar10" and c.blocks == 6]
    assert len(ordinary) == 6 * ROWS * 2 * 3
    deep = [c for c in order if c.blocks != 6]
    assert sorted(c.blocks for c in deep) == sorted([12, 48, 96] * len(BODIES))
    assert all(c.lr <= 1e-3 for c in deep if c.body == "plain")
    other = {c.body for c in order if c.data == "imagenette"}
    assert other == {*list(BODIES)[:7]}  # `plain` is one of the first, but has not the least loss
    assert order.index(deep[-1]) < order.index(next(c for c in order if c.seed == 1))


def test_a_cell_that_runs_is_not_given_out_again():
    cell = next_cell([], set(), BOTH)
    assert next_cell([], {cell}, BOTH) == next(stages([], BOTH))[1]
    assert next_cell([], set(), BOTH, only=["nViT"]).body == "nViT"


def test_a_cell_is_repeatable_and_tells_all():
    cell = Cell(data="cifar10", body="plain", optimizer="lion", lr=1e-3, warmup=0.5, seed=1)
    cell = Cell(**{**asdict(cell), "updates": 4, "blocks": 2})
    records = [run_cell(cell, tiny_images()) for _ in range(2)]
    for record in records:
        del record["seconds"], record["cpu_seconds"]
    assert records[0] == records[1]
    record = records[0]
    assert record["updates_made"] == 4 and record["train_images"] == 96
    assert [s["update"] for s in record["signals"]] == [0, 1, 2, 4]
    assert all(len(s["entropy"]) == len(s["sec"]) == 2 for s in record["signals"])
    assert record["weight_decay"] == 0.5 and record["commit"]
    json.dumps(record, allow_nan=False)


def test_a_loss_that_is_not_finite_ends_a_cell():
    cell = Cell(data="cifar10", body="sigmaReparam", optimizer="adamw", lr=1e30, warmup=0.0, seed=0)
    record = run_cell(Cell(**{**asdict(cell), "updates": 9, "blocks": 2}), tiny_images())
    assert record["updates_made"] < 9 and not record["stable"]
    assert record["final_loss"] is None and record["top1"] == 25.0
    json.dumps(record, allow_nan=False)


def test_every_tenth_training_image_is_held_out(tmp_path):
    for index in range(40):
        folder = tmp_path / "cifar10" / "train" / "ba"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture = np.full((32, 32, 3), index, dtype=np.uint8)
        Image.fromarray(picture).save(folder / f"{index:03}.png")
    path = cache_images("cifar10", tmp_path, tmp_path / "runs")
    images = load_images(path)
    # a: the odd ones, 20 of them; b: the even ones
    assert images.held_out[:, 0, 0, 0].tolist() == [1, 21, 0, 20]
    assert images.held_out_labels.tolist() == [0, 0, 1, 1]
    assert len(images.train) == 36 and images.num_classes == 2
    assert cache_images("cifar10", tmp_path / "gone", tmp_path / "runs") == path
    with pytest.raises(FileNotFoundError, match="LIPSFORMER_DATA"):
        cache_images("imagenette", tmp_path, tmp_path / "runs")


def test_summary_of_a_row():
    def cell(lr: float, seed: int, final: float | None, top1: float) -> dict:
        stable = final is not None and final < 2.0
        about = {"body": "plain", "seed": seed, "num_classes": 10, "lr": lr}
        return {**about, "final_loss": final, "stable": stable, "top1": top1}

    records = [cell(1e-3, 0, 1.0, 40.0), cell(1e-3, 1, 1.2, 50.0), cell(1e-1, 0, None, 10.0)]
    records += [cell(1e-1, 1, 1.4, 30.0), cell(1e-2, 0, 9.0, 12.0), cell(1e-2, 1, 1.8, 20.0)]
    guess = math.log(10)
    losses = [1.1, (guess + 1.8) / 2, (guess + 1.4) / 2]
    summary = summarize(records)
    assert summary.largest_stable_lr == 1e-3 and summary.seeds == 2
    assert summary.mean_loss == mean_loss(records) == pytest.approx(sum(losses) / 3)
    assert summary.sensitivity == pytest.approx(sum(losses) / 3 - 1.1)
    assert (summary.best_top1, summary.best_lr) == (45.0, 1e-3)
    assert summary.spread == pytest.approx(math.sqrt(50.0))
    assert best_accuracy(summary) == "45.0 ± 7.1"
    assert best_accuracy(summarize([r for r in records if r["seed"] == 0])) == "40.0"
    assert summary.final_loss == pytest.approx(1.1)


def test_a_line_that_was_cut_off_is_removed(tmp_path):
    for cell in grid("cifar10", [("plain", "adamw")], 0.0, 0):
        append_result(tmp_path, fake(cell))
    path = tmp_path / "cifar10.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert len(read_results(tmp_path)) == 5
    append_result(tmp_path, json.loads(whole.splitlines()[-1]))
    assert path.read_text() == whole


def test_the_command_continues(tmp_path, monkeypatch):
    given = []

    def work(cell, pictures):
        if len(given) == 20:
            raise KeyboardInterrupt
        given.append(cell)
        return fake(cell)

    monkeypatch.setattr(plan, "SEEDS", (0,))
    monkeypatch.setattr(pool, "work", work)
    monkeypatch.setattr(pool, "cache_images", lambda name, root, runs: runs)
    monkeypatch.setattr(pool, "ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))
    results = tmp_path / "results"
    options = ["--runs", str(tmp_path), "--results", str(results), "--data", "cifar10"]
    options += ["--only", "plain", "lipsformer"]
    with pytest.raises(KeyboardInterrupt):
        command.main(options)
    assert len(read_results(results)) == 20
    given.clear()
    monkeypatch.setattr(pool, "work", lambda cell, pictures: given.append(cell) or fake(cell))
    assert command.main(options) == 0
    records = read_results(results)
    assert len(records) == 2 * 4 * 6 * 2 + 6 and len(given) == len(records) - 20


@pytest.mark.parametrize(
    ("content", "workers", "said"),
    [
        ("", "0", "--workers=0 is not possible"),
        ('{"row"\n', "1", "line 1 of .*cifar10.jsonl is no"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, capsys, content, workers, said):
    (tmp_path / "cifar10.jsonl").write_text(content)
    assert command.main(["--results", str(tmp_path), "--workers", workers, "--table"]) == 2
    assert re.match(rf"error: {said}[^\n]*\n$", capsys.readouterr().err)


def test_imagenette_alone_needs_the_cells_that_choose_its_bodies(tmp_path, capsys):
    options = ["--runs", str(tmp_path), "--results", str(tmp_path), "--data", "imagenette"]
    assert command.main(options) == 2
    assert re.match(
        r"error: --data='imagenette' is not possible: its bodies [^\n]*\n$", capsys.readouterr().err
    )


@pytest.mark.slow
def test_the_command_prints_and_draws(tmp_path, capsys):
    for warmup in (0.0, 0.1):
        for cell in grid("cifar10", [("plain", "adamw"), ("lipsformer", "lion")], warmup, 0):
            append_result(tmp_path, fake(cell))
    plots = tmp_path / "plots"
    assert command.main(["--results", str(tmp_path), "--table", "--plot", str(plots)]) == 0
    told = capsys.readouterr().out
    assert "| plain | adamw |" in told and "10.0*" in told and "Not run: " in told
    for name in ("cifar10", "signals"):
        assert (plots / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_very_deep_cell_that_was_not_finite_has_a_dash():
    cells = [cell for cell in very_deep_cells() if cell.blocks == 192 and cell.lr == 1e-3]
    losses = {0: [2.5, 2.25], 1: [2.5, None], 2: [3.5, 2.75]}
    text = very_deep_table([{**fake(cell), "losses": losses[cell.seed]} for cell in cells])
    assert text.count("| 2.833 ± 0.577 | - |") == 2  # both forms; (2.5 + 2.5 + 3.5) / 3


def test_ranks_and_rows_of_the_page():
    records = [fake(c) for c in next(stages([], BOTH))]
    text = page(records)
    first = next(line for line in text.splitlines() if line.startswith("| lipsformer | adamw"))
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells == [
        "lipsformer",
        "adamw",
        "1.000",
        "0.1",
        "100",
        "1",
        "0.000",
        "1",
        "30.0",
        "0.0001",
        "1",
        "1.000",
        "1",
    ]
    row = next(line for line in text.splitlines() if line.startswith("| plain | adamw"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[3:6] == ["0.0004", "0.4", str(ROWS - 2)]  # three rows share the last place
    deep = Cell(
        data="cifar10", body="nViT", optimizer="adamw", lr=1.6e-3, warmup=0.0, seed=0, blocks=48
    )
    loss = f"{1 + 0.01 * list(BODIES).index('nViT'):.3f}"
    row = f"| nViT | 0.0016 | - | - | 30.0 | {loss} | - | - |"
    assert row in page([*records, fake(deep)])
