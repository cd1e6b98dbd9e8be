"""docs/theorems.md: every theorem has a number, a statement, a proof and what attacks it."""

import json
import re

from tests.conftest import ROOT
from tests.hunt.report import markdown
from tests.hunt.run import kinds

PAGE = (ROOT / "docs/theorems.md").read_text()
THEOREMS = re.findall(r"^### Theorem (\d+): [^\n]*\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)


def test_every_theorem_has_its_parts():
    assert [int(number) for number, _ in THEOREMS] == list(range(1, len(THEOREMS) + 1))
    for number, text in THEOREMS:
        parts = re.findall(r"^\*\*(Statement\.|Proof\.|Attacked by)\*\*", text, re.MULTILINE)
        assert parts == ["Statement.", "Proof.", "Attacked by"], number


def test_every_kind_of_the_hunt_attacks_a_theorem_and_every_attack_exists():
    attacks = set()
    for _, text in THEOREMS:
        line = re.findall(r"^\*\*Attacked by\*\*(.*)$", text, re.MULTILINE)[0]
        attacks |= set(re.findall(r"`([^`]+)`", line))
    files = {name for name in attacks if name.startswith("tests/")}
    assert all((ROOT / name).is_file() for name in files)
    assert attacks - files == set(kinds())


def test_the_tables_of_the_long_hunt_are_those_of_its_figures():
    figures = json.loads((ROOT / "benchmarks/results/hunt.json").read_text())
    assert markdown(figures) in (ROOT / "docs/hunt.md").read_text()
    assert all(row["faults"] == 0 for row in figures["kinds"].values())
