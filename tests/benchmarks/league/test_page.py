"""The tables of the league on the page of its results are those of its records."""

from benchmarks.league.cell import ROOT
from benchmarks.league.results import read_results
from benchmarks.league.table import page


def test_tables_on_the_page_come_from_the_records():
    text = (ROOT / "docs" / "stability.md").read_text()
    records = read_results(ROOT / "benchmarks" / "results" / "league")
    tables = [part for part in page(records).split("\n\n") if part.startswith("|")]
    assert len(tables) >= 3
    for table in tables:
        assert table in text
    assert f"\n{len(records)} of the " in text
