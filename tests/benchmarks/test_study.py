"""The queue of runs continues what was stopped, and the pages have the tables of its results."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.study import Study, table
from lipsformer._configfile import read_config
from lipsformer.jsonl import read_jsonl
from tests.conftest import ROOT
from tests.runs import DIGITS, write_config

RESULTS = sorted((ROOT / "benchmarks/results/studies").glob("*.jsonl"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_table_of_a_study_stands_on_its_page(path):
    study = read_config(Study, ROOT / f"benchmarks/studies/{path.stem}.yaml")
    assert ROOT / study.results == path
    assert table(study) in (ROOT / "docs/results.md").read_text()


def line(row: str, seed: int, *accuracies: float) -> dict:
    evaluations = [
        {"kind": kind, "epoch": epoch, "top1": top1 + (kind == "ema")}
        for epoch, top1 in enumerate(accuracies, start=1)
        for kind in ("raw", "ema")
    ]
    cost = {"parameters": 2_110_000, "gmacs": 0.0341, "pflop": 0.1023, "images_per_s": 117.0}
    return {"row": row, "seed": seed, "exit_code": 0, "evaluations": evaluations} | cost


def test_the_table_has_the_last_epoch_its_deviation_and_what_was_not_run(tmp_path):
    results = tmp_path / "results.jsonl"
    lines = [line("a", 0, 90.0, 71.0), line("a", 1, 10.0, 74.0)]
    lines = [{**entry, "wall_seconds": 1800.0} for entry in lines]
    results.write_text("".join(f"{json.dumps(entry)}\n" for entry in lines))
    rows = {"a": "optim.lr=1e-3", "b": ""}
    study = Study(title="", config="", results=str(results), rows=rows, seeds=(0, 1))
    *_, row, _, missing = table(study).splitlines()
    cells = "| a | `optim.lr=1e-3` | 72.50 ± 2.12 | 2 | 2.11 | 34.1 | 0.102 | 117 | 1.00 |"
    assert row == cells  # the standard deviation of 71 and 74 is 3 / sqrt(2)
    assert missing == "Not run: b seed 0, b seed 1."


@pytest.mark.slow
def test_a_queue_that_is_stopped_goes_on_where_it_was(tmp_path):
    config = write_config(tmp_path, DIGITS, Path("out"))
    results = {}
    for name in ("whole", "stopped"):
        study = {"title": "t", "config": str(config), "rows": {"a": "", "b": "optim.lr=3e-3"}}
        study["results"] = str(tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.yaml").write_text(json.dumps(study))
        command = [sys.executable, "-m", "benchmarks.study", str(tmp_path / f"{name}.yaml")]
        command += ["--runs", str(tmp_path / "runs")]
        if name == "stopped":
            queue = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
            while not list(tmp_path.glob("runs/stopped/a-seed0/checkpoints/update-*")):
                time.sleep(0.1)
            os.killpg(queue.pid, signal.SIGTERM)
            queue.wait()
            assert not list(read_jsonl(Path(study["results"])))
        subprocess.run(command, cwd=ROOT, check=True)
        results[name] = {entry["row"]: entry for entry in read_jsonl(Path(study["results"]))}
    assert list(results["stopped"]) == ["a", "b"]
    for row, entry in results["whole"].items():
        assert results["stopped"][row]["evaluations"] == entry["evaluations"]
    assert results["stopped"]["a"]["starts"] == 2
