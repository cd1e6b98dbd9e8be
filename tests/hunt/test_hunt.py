"""The short hunt of the default suite: the same structures every time."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lipsformer.analysis.bounds import core, simple_bound
from tests.hunt.attack import top_singular
from tests.hunt.cases import KINDS
from tests.hunt.judge import FAULTS, class_name, judge
from tests.hunt.report import markdown, summary
from tests.hunt.run import hunt, kinds

STRUCTURES = 14  # of every kind


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory, request):
    """Return a function from a kind to its verdicts, which one process judges for all."""
    parallel = hasattr(request.config, "workerinput")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if parallel else folder  # of one session, shared by its processes

    def judged(name: str) -> list:
        file = folder / f"hunt {name}.json"
        if not file.exists():
            whole_model = KINDS[name].build.__module__.endswith("models")
            effort = {"input_steps": 1, "weight_steps": 0 if whole_model else 1}
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(list(hunt(name, STRUCTURES, **effort))))
            part.replace(file)
        return json.loads(file.read_text())

    return judged


@pytest.mark.parametrize("name", kinds())
def test_no_structure_exceeds_its_bound(name, verdicts):
    faults = [verdict for verdict in verdicts(name) if verdict["outcome"] in FAULTS]
    assert not faults, faults[0]
    unusable = [verdict for verdict in verdicts(name) if verdict["outcome"] == "unusable"]
    assert 2 * len(unusable) < STRUCTURES, unusable[0]


def test_the_hunt_is_large_reaches_exact_bounds_and_covers_every_rule(verdicts):
    # From the last kind to the first, because another process may be judging the first ones.
    tried = {name: verdicts(name) for name in reversed(kinds())}
    everything = [verdict for of_kind in tried.values() for verdict in of_kind]
    print(markdown(summary(everything)))  # noqa: T201
    assert sum(verdict["outcome"] != "unusable" for verdict in everything) >= 1000
    for name, of_kind in tried.items():
        ratios = [v["ratio"] for v in of_kind if v.get("exact") and v["outcome"] == "holds"]
        assert not ratios or max(ratios) >= 0.999, name
    held = [verdict for verdict in everything if verdict["outcome"] == "holds"]
    hunted = {name for verdict in held for name in verdict["classes"]}
    # other tests register classes of their own, some in modules such as lipsformer_maxvit
    packages = ("lipsformer", "timm", "torch", "torch_geometric")
    rules = {
        class_name(cls)
        for cls in core._REGISTERED
        if cls.__module__.partition(".")[0] in packages
        and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls  # of no example
    }
    assert rules <= hunted


def counterexamples():
    found = json.loads(Path(__file__).with_name("counterexamples.json").read_text())
    return [pytest.param(example, id=example["what"]) for example in found]


@pytest.mark.parametrize("example", counterexamples())
def test_a_known_counterexample_holds_or_is_refused(example):
    verdict = judge(example["case"], input_steps=10, weight_steps=2)
    assert verdict["outcome"] in ("holds", "refused"), verdict


def test_a_rule_that_is_too_small_is_found(monkeypatch):
    def wrong(module, domain, scale):
        return simple_bound(0.9 * module.weight.abs().max().item(), domain, radius=1e9)

    registered = core._REGISTERED[nn.Linear]._replace(bound=wrong)
    monkeypatch.setitem(core._REGISTERED, nn.Linear, registered)
    assert any(verdict["outcome"] == "exceeded" for verdict in hunt("nn.Linear", 20))


def test_exact_constant_of_a_matrix():
    weight = torch.randn(3, 5, dtype=torch.float64)
    sigma, left, right = top_singular(lambda x: x @ weight.T, torch.zeros(2, 5).double())
    torch.testing.assert_close(sigma[0], torch.linalg.svdvals(weight)[0])
    torch.testing.assert_close((weight @ right[0]).abs(), (sigma[0] * left[0]).abs())
