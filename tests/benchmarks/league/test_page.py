"""The tables of stability on the pages are those of the records."""

from statistics import mean

import pytest

from benchmarks.league.cell import ROOT
from benchmarks.league.plots import IN_SHORT
from benchmarks.league.results import read_results, select, summarize
from benchmarks.league.table import best_accuracy, page
from lipsformer.jsonl import read_jsonl

PAGE = (ROOT / "docs" / "stability.md").read_text()
LEAGUE = read_results(ROOT / "benchmarks" / "results" / "league")
EARLIER = ROOT / "benchmarks" / "results" / "stability"


def test_tables_on_the_page_come_from_the_records():
    tables = [part for part in page(LEAGUE).split("\n\n") if part.startswith("|")]
    assert len(tables) >= 3
    for table in tables:
        assert table in PAGE
    assert f"\nAll {len(LEAGUE):,} planned cells " in PAGE
    hours = sum(record["cpu_seconds"] for record in LEAGUE) / 3600
    assert f"with {hours:.1f} core-hours" in PAGE


def shown(seeds: list[dict]) -> str:
    """Return the mean accuracy of the seeds if all of them are stable."""
    stable = all(record["stable"] for record in seeds)
    return f"{mean(record['top1'] for record in seeds):.1f}" if stable else "not stable"


@pytest.mark.parametrize("body", IN_SHORT)
def test_the_short_table_of_the_results_comes_from_the_records(body):
    adamw = select(LEAGUE, data="cifar10", body=body, optimizer="adamw", warmup=0.0)
    wide = [record for record in select(adamw, blocks=6) if record["updates"] == 500]
    summary = summarize(wide)
    cells = [shown(select(wide, lr=0.025)), shown(select(adamw, blocks=96))]
    largest = summary.largest_stable_lr
    assert largest is not None
    best = best_accuracy(summary)
    row = f"| {body} | {largest / 1e-3:g} | {best} | {' | '.join(cells)} |"
    assert row in (ROOT / "docs" / "results.md").read_text()


def earlier(name: str, **wanted) -> list[dict]:
    return select(list(read_jsonl(EARLIER / name / "results.jsonl")), **wanted)


def cell(record: dict) -> str:
    return f"{record['top1']:.1f}{'' if record['stable'] else '*'}"


@pytest.mark.parametrize(
    ("name", "warmup", "rates"),
    [
        ("imagenette", 0, [0.003, 0.01, 0.03, 0.1]),
        ("warmup", 0, [0.001, 0.003, 0.01, 0.03, 0.1]),
        ("warmup", 5, [0.001, 0.003, 0.01, 0.03, 0.1]),
    ],
)
@pytest.mark.parametrize("form", ["lipsformer", "plain"])
def test_the_rates_of_the_earlier_grids_come_from_the_records(name, warmup, rates, form):
    records = earlier(name, parts=form, warmup=warmup)
    one_each = [select(records, lr=lr)[0] for lr in rates]
    largest = max(lr for lr, record in zip(rates, one_each, strict=True) if record["stable"])
    start = f"| {form} | {warmup} |" if name == "warmup" else f"| {form} |"
    assert f"{start} {' | '.join(map(cell, one_each))} | {largest:g} |" in PAGE


def test_the_depths_of_the_earlier_grids_come_from_the_records():
    for record in earlier("depth"):
        first, last = record["losses"][0], record["final_loss"]
        start = f"| {record['blocks']} | {record['parameters']:,} | {record['parts']} |"
        assert f"{start} {first:.2f} | {last:.2f} | {cell(record)} |" in PAGE
    for blocks in (12, 24, 48):
        pair = [earlier("depth16", blocks=blocks, parts=f)[0] for f in ("lipsformer", "plain")]
        assert f"| {blocks} | {' | '.join(map(cell, pair))} |" in PAGE
    (very_deep,) = earlier("depth192")
    ends = very_deep["losses"][0], very_deep["losses"][-1]
    assert "starts at {:.0f} and has {:.0f} after twelve updates".format(*ends) in PAGE
