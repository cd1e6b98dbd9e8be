"""The queue of runs continues what was stopped, and the pages have the tables of its results."""

import json
import os
import signal
import subprocess
import threading
import time

import pytest
import torch

import train
from benchmarks.study import Study, main, table
from lipsformer._configfile import read_config
from lipsformer.engine.lock import LOCK
from lipsformer.engine.run_folder import RunFolder
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
@pytest.mark.dist
def test_a_queue_that_is_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    config, results = write_config(tmp_path, DIGITS, tmp_path / "whole"), tmp_path / "results.jsonl"
    results.write_text(f"{json.dumps(line('b', 0, 90.0))}\n")
    study = {"title": "t", "config": str(config), "rows": {"a": "", "b": ""}}
    (tmp_path / "s.yaml").write_text(json.dumps({**study, "results": str(results)}))
    command = [str(tmp_path / "s.yaml"), "--runs", str(tmp_path / "runs")]
    run = tmp_path / "runs" / "s" / "a-seed0"

    def stop() -> None:
        while not list(run.glob("checkpoints/update-*")):
            time.sleep(0.05)
        os.kill(json.loads((run / LOCK).read_text())["pid"], signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert main(command) == 0
    assert len(list(read_jsonl(results))) == 1, "a run that was stopped is no result"

    with monkeypatch.context() as patch:  # the lock of a run that still saves
        patch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2))
        assert main(command) == 0
    assert len(list(read_jsonl(results))) == 1, "a start that was refused is no result"

    assert main(command) == 0
    b, a = read_jsonl(results)
    assert (b["row"], a["row"], a["exit_code"], a["starts"]) == ("b", "a", 0, 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert train.main(["--config", str(config), "train.seed=0"]) == 0
    torch.set_num_threads(threads)
    records = [r for r in RunFolder(tmp_path / "whole").metrics() if r["kind"] in ("raw", "ema")]
    assert a["evaluations"] == [{key: r[key] for key in a["evaluations"][0]} for r in records]
