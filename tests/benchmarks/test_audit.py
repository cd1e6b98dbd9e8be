"""The audit's hunter tells sound claims from unsound ones, and its page shows its results."""

import json

import pytest
import torch
from torch import nn

from benchmarks.audit import CODES, ROUNDING, Subject, audit, tables
from tests.conftest import ROOT

RESULTS = json.loads((ROOT / "benchmarks/results/audit.json").read_text())


def ratio(entry: dict) -> float:
    return entry["found"] / entry["largest_claim"]


def linear(claim) -> Subject:
    module = nn.Linear(7, 5)
    return Subject("linear", module, (7,), lambda: claim(module.weight.detach()))


def test_a_sound_claim_is_reached_and_not_exceeded():
    row = audit(lambda: linear(lambda weight: torch.linalg.matrix_norm(weight, 2).item()))
    assert ratio(row["initial"]) == pytest.approx(1.0, abs=1e-9)
    assert ratio(row["moved"]) == pytest.approx(1.0, abs=1e-9)
    slope = audit(lambda: Subject("GELU", nn.GELU(), (13,), lambda: 1.1289045))
    assert 0.999 < ratio(slope["initial"]) <= 1.0


def test_unsound_claims_are_exceeded():
    """By a slope of GELU that is too small, and by a norm from below."""
    gelu = audit(lambda: Subject("GELU", nn.GELU(), (13,), lambda: 1.12))
    assert 1.0075 < ratio(gelu["initial"]) < 1.0080
    below = audit(lambda: linear(lambda weight: weight.norm(dim=0).max().item()))
    assert ratio(below["initial"]) > 1.2


def test_a_claim_that_forgets_to_follow_the_weights_is_exceeded_once_they_move():
    norms: list[float] = []

    def forgetful(weight) -> float:
        norms.append(torch.linalg.matrix_norm(weight, 2).item())
        return max(norms[:3])  # of the three initializations

    row = audit(lambda: linear(forgetful))
    assert ratio(row["initial"]) <= 1.0 + 1e-9
    assert ratio(row["moved"]) > 1.5


@pytest.mark.parametrize("name", tables(RESULTS))
def test_the_table_of_the_page_is_that_of_the_results(name):
    assert tables(RESULTS)[name] in (ROOT / "docs/audit.md").read_text()


def test_the_results_say_which_codes_hold():
    assert list(RESULTS) == list(CODES)
    worst = {
        code: max(ratio(row[when]) for row in record["rows"] for when in ("initial", "moved"))
        for code, record in RESULTS.items()
    }
    assert {code for code, value in worst.items() if value > 1.0 + ROUNDING} == {
        "certvit",
        "liresnet",
    }
