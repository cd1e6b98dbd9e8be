"""The queue of runs continues what was stopped, and the pages have the tables of its results."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import yaml

import train
from benchmarks.study import plan, pool
from benchmarks.study.__main__ import main
from benchmarks.study.plan import Study, stale
from benchmarks.study.record import costs
from benchmarks.study.table import table
from lipsformer import convert
from lipsformer._configfile import dump_config, read_config
from lipsformer._errors import ConfigError
from lipsformer.config import Config
from lipsformer.engine.checkpoint import CheckpointFolder
from lipsformer.engine.lock import LOCK, FolderLock
from lipsformer.engine.run_files import MODEL, STATE
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
    assert stale(study) == []


def test_the_page_names_the_hours_of_all_studies():
    seconds = sum(record["wall_seconds"] for path in RESULTS for record in read_jsonl(path))
    page = (ROOT / "docs/results.md").read_text()
    assert f"The runs of the studies took {seconds / 3600:.1f} hours in all." in page


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
    with results.open("a") as file:
        file.write(json.dumps({**line("a", 9, 1.0), "wall_seconds": 5.0}) + "\n")  # no seed of it
    rows = {"a": "optim.lr=1e-3", "b": ""}
    study = Study(title="", config="", results=str(results), rows=rows, seeds=(0, 1))
    *_, row, _, missing = table(study).splitlines()
    cells = "| a | 72.50 ± 2.12 | 2 | 2.11 | 34.1 | 0.102 | 117 | 1.00 |"
    assert row == cells  # the standard deviation of 71 and 74 is 3 / sqrt(2)
    assert missing == "Not run: `b` (seed 0), `b` (seed 1)."
    study = replace(study, row_seeds={"a": (0, 1, 2)})
    with results.open("a") as file:  # a mean over the seeds that did not diverge must say so
        file.write(json.dumps({"row": "a", "seed": 2, "exit_code": 3, "evaluations": []}) + "\n")
    cells = cells.replace("| 2 |", "| 2, and exit code 3 |")
    assert cells in table(study).splitlines()


@pytest.mark.parametrize(
    "setting",
    ["train.drop_last=false", "augment.img_sizes=[8,16]", "loss.teacher=resnet50.a1_in1k"],
)
def test_settings_whose_costs_are_not_counted_are_refused(tmp_path, setting):
    config = write_config(tmp_path, DIGITS, tmp_path / "run")
    study = Study(title="", config=str(config), results="none.jsonl", rows={"a": setting})
    with pytest.raises(ConfigError, match=f"{setting.partition('=')[0]}.* a study counts costs"):
        study.run_config("a", 0)


@pytest.mark.slow
@pytest.mark.dist
def test_a_queue_that_is_stopped_goes_on_where_it_was(tmp_path):
    config, results = write_config(tmp_path, DIGITS, tmp_path / "whole"), tmp_path / "results.jsonl"
    with_config = {"config": dump_config(read_config(Config, config, ["train.seed=0"]))}
    results.write_text(f"{json.dumps(line('b', 0, 90.0) | with_config)}\n")
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

    lock = FolderLock(run)  # as if the run still saved
    lock.acquire()
    assert main(command) == 2
    lock.release()
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


# A train.py that takes its name from its folder and does what the test says.
FAKE = """
import json, os, pathlib, signal, sys, time
from omegaconf import OmegaConf

settings = [a for a in sys.argv if a.startswith("run.output_dir=")]
folder = pathlib.Path(OmegaConf.from_dotlist(settings).run.output_dir)
row = folder.name.removesuffix("-seed0")
with open("starts.txt", "a") as starts:
    starts.write(row + chr(10))

START = {"git_commit": "c0ffee", "cpu": "a CPU", "threads": 7, "world_size": 3, "device": "a GPU"}

def records():
    (folder / "metrics.jsonl").write_text("")
    (folder / "environment.json").write_text(json.dumps([START]))
"""


class Queue:
    """A study of the given rows whose train.py is `FAKE` with a body of the test."""

    def __init__(self, folder: Path, monkeypatch, rows: dict[str, str], body: str):
        monkeypatch.setattr(plan, "ROOT", folder)
        monkeypatch.setattr(pool, "ROOT", folder)
        (folder / "train.py").write_text(FAKE + body)
        self.config = write_config(folder, DIGITS, folder / "unused")
        self.folder, self.results = folder, folder / "results.jsonl"
        study = {"title": "t", "config": str(self.config), "rows": rows}
        (folder / "s.yaml").write_text(json.dumps({**study, "results": str(self.results)}))

    def run(self, *options: str) -> int:
        runs = str(self.folder / "runs")
        return main([str(self.folder / "s.yaml"), "--runs", runs, *options])

    def starts(self) -> list[str]:
        path = self.folder / "starts.txt"
        return path.read_text().split() if path.exists() else []

    def lines(self) -> dict[str, dict]:
        return {line["row"]: line for line in read_jsonl(self.results)}


def save_checkpoint(run: Path, classes: int) -> RunFolder:
    """Save what a run records about its classes; return the run."""
    state = {"update": 1, "updates_per_epoch": 1, "history": [], "best": None}
    CheckpointFolder(run / "checkpoints").save(
        1,
        tensors={MODEL: {"weight": torch.zeros(1)}},
        texts={STATE: json.dumps({**state, "classes": list(range(classes))})},
        best_step=None,
    )
    return RunFolder(run)


def test_every_row_has_its_folder_whatever_its_name_means_in_yaml(tmp_path, monkeypatch):
    rows = dict.fromkeys(("a", "a #1", "a: b", "'a", 'a "b"', "a\\n"), "")
    queue = Queue(tmp_path, monkeypatch, rows, "records()\nsys.exit(3)")
    assert queue.run() == 0
    assert queue.lines().keys() == rows.keys()


def test_damaged_results_are_one_sentence(tmp_path, monkeypatch, capsys):
    queue = Queue(tmp_path, monkeypatch, {"a": ""}, "")
    queue.results.write_text('{"row"\n{}\n')
    assert queue.run() == 2
    assert capsys.readouterr().err.startswith(f"error: line 1 of {queue.results} is no JSON: ")
    assert queue.starts() == []


def test_only_complete_and_diverged_runs_are_results(tmp_path, monkeypatch, capsys):
    codes = (0, 1, 3, 4, 5, 75, -2, -6, -9, -11, -15)
    body = """
records()
code = int(row)
if code < 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
    queue = Queue(tmp_path, monkeypatch, {str(code): "" for code in codes}, body)
    save_checkpoint(tmp_path / "runs/s/0-seed0", classes=10)
    finished = {"0": 0, "3": 3, "5": 5}  # see the exit codes in train.py
    assert queue.run() == 1
    assert {row: line["exit_code"] for row, line in queue.lines().items()} == finished
    said = capsys.readouterr().out.splitlines()
    failed = [int(text.split()[0]) for text in said if "failed with exit code" in text]
    assert failed == [1, 4, -6, -9, -11]
    assert queue.run() == 1
    assert len(queue.lines()) == len(finished)
    assert queue.starts() == [*map(str, codes), *(str(c) for c in codes if str(c) not in finished)]


def test_a_run_that_fails_is_named_with_its_reason_and_the_others_go_on(
    tmp_path, monkeypatch, capsys
):
    body = """
if row == "crash":
    raise ImportError("no numpy")
if row == "mistake":
    print("error: no datasets/x", file=sys.stderr)
    sys.exit(2)
records()
sys.exit(3 if row == "diverges" else 75)
"""
    rows = dict.fromkeys(("crash", "mistake", "stopped", "diverges"), "")
    queue = Queue(tmp_path, monkeypatch, rows, body)
    assert queue.run() == 2
    crash, mistake, stopped, diverges = capsys.readouterr().out.splitlines()
    assert crash.startswith("crash seed 0 failed with exit code 1,")
    assert crash.endswith("ends with: ImportError: no numpy")
    assert mistake.startswith("mistake seed 0 failed with exit code 2,")
    assert mistake.endswith("ends with: error: no datasets/x")
    assert stopped.startswith("stopped seed 0 has not ended")
    assert diverges == "diverges seed 0: exit code 3"
    (line,) = queue.lines().values()
    assert line["row"] == "diverges"
    assert line["machine"]["threads"] == 7, "those of the training, not of the queue"
    assert line["machine"]["world_size"] == 3
    assert line["machine"]["device"] == "a GPU"
    assert queue.run("--only", "crash", "stopped") == 1
    assert queue.run("--only", "stopped", "diverges") == 0


def test_two_queues_do_not_share_a_file_of_results(tmp_path, monkeypatch, capsys):
    queue = Queue(tmp_path, monkeypatch, {"a": ""}, "records()\nsys.exit(3)")
    lock = FolderLock(tmp_path / "results.jsonl.lock")
    lock.acquire()
    assert queue.run() == 2
    assert "results.jsonl.lock is in use by process" in capsys.readouterr().err
    assert queue.starts() == []
    assert queue.run("--table") == 0
    lock.release()
    assert queue.run() == 0
    assert queue.run() == 0
    assert queue.starts() == ["a"]
    assert [path.name for path in tmp_path.glob("results.jsonl*")] == ["results.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_queue_stops_its_trainings(tmp_path, monkeypatch, number):
    body = """
def stop(*_):
    (folder / "saved").touch()
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
(folder / "listens").touch()
time.sleep(20)
"""
    queue = Queue(tmp_path, monkeypatch, dict.fromkeys("abc", ""), body)

    def send() -> None:
        while len(list(tmp_path.glob("runs/s/*/listens"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    def ignore(*_: object) -> None:
        """Spare pytest the signal if the queue does not take it."""

    before = signal.signal(number, ignore)
    try:
        threading.Thread(target=send, daemon=True).start()
        assert queue.run("--workers", "2") == 75
        assert signal.getsignal(number) is ignore
    finally:
        signal.signal(number, before)
    assert sorted(path.parent.name for path in tmp_path.glob("runs/s/*/saved")) == [
        "a-seed0",
        "b-seed0",
    ]
    assert not (tmp_path / "runs/s/c-seed0").exists(), "it was started after the signal"
    assert queue.lines() == {}


def test_the_hours_are_those_of_all_starts(tmp_path, monkeypatch):
    body = """
records()
logs = sorted((folder / "logs").iterdir())
os.utime(logs[-1], (0, 0))  # it has not written for long
sys.exit(75 if len(logs) < 3 else 3)
"""
    queue = Queue(tmp_path, monkeypatch, {"a": ""}, body)
    for hours in (1, 2):
        assert queue.run() == 0
        newest = max((tmp_path / "runs/s/a-seed0/logs").iterdir())
        # as if the queue had been killed, and the training had written its last line then
        os.utime(newest, (0, float(newest.stem) + 3600 * hours))
    assert queue.run() == 0
    assert queue.lines()["a"]["wall_seconds"] == pytest.approx(3 * 3600, abs=60)


def test_costs_are_those_of_the_model_of_the_run(tmp_path):
    settings = {**DIGITS, "model": {"name": "resnet18"}, "data": {**DIGITS["data"], "img_size": 32}}
    config = read_config(Config, write_config(tmp_path, settings, tmp_path))
    found = costs(config, save_checkpoint(tmp_path / "resnet", classes=7), images=1000)
    # torchvision's ResNet-18 has 11,689,512 parameters and 1,814,073,344 multiply-adds at 224 px,
    # 513,000 and 512,000 of them in the classifier. Every side of a map is a seventh at 32 px.
    macs = (1_814_073_344 - 512_000) // 49 + 512 * 7
    assert found["parameters"] == 11_689_512 - 513_000 + 513 * 7
    assert found["gmacs"] == pytest.approx(macs / 1e9, rel=1e-12)
    assert found["pflop"] == pytest.approx(6 * macs * 1000 / 1e15, rel=1e-12)


def test_costs_are_those_of_a_converted_model(tmp_path):
    kwargs = DIGITS["model"]["kwargs"]
    settings = {**DIGITS, "model": {**DIGITS["model"], "convert": True}}
    config = read_config(Config, write_config(tmp_path, settings, tmp_path))
    found = costs(config, save_checkpoint(tmp_path / "run", classes=7), images=1)
    plain = timm.create_model(DIGITS["model"]["name"], num_classes=7, img_size=16, **kwargs)
    before = sum(p.numel() for p in plain.parameters())
    after = sum(p.numel() for p in convert(plain).parameters())
    assert found["parameters"] == after != before


def test_costs_are_those_of_a_committed_run(tmp_path):
    study = read_config(Study, ROOT / "benchmarks/studies/cifar10_10_epochs.yaml")
    committed = {line["row"]: line for line in read_jsonl(ROOT / study.results)}
    row = "light augmentation, alpha 1"
    images = committed[row]["images"]
    found = costs(study.run_config(row, 0), save_checkpoint(tmp_path, classes=10), images)
    assert found == {key: committed[row][key] for key in found}
    assert found["parameters"] == 2_118_084
    assert f"{1000 * found['gmacs']:.1f}" == "34.1"


def test_a_result_of_other_settings_is_named_and_not_replaced(tmp_path, monkeypatch, capsys):
    rows = {"same": "", "changed": "optim.lr=2e-3", "less": ""}
    queue = Queue(tmp_path, monkeypatch, rows, "sys.exit(1)")
    settings = {"same": [], "changed": ["optim.lr=4e-3"], "less": ["optim.weight_decay=0.25"]}
    settings["of an earlier study"] = ["optim.lr=8e-3"]
    lines = []
    for row, then in settings.items():
        text = dump_config(read_config(Config, queue.config, [*then, "train.seed=0"]))
        config = yaml.safe_load(text)
        # Neither where a run was nor how fast matters, nor a setting that is newer than the line.
        config["run"]["output_dir"] = "elsewhere"
        config["train"]["compile"] = True
        config["data"]["num_workers"] = 7
        del config["optim"]["layer_decay"], config["lipschitz"]
        lines.append(line(row, 0, 90.0) | {"wall_seconds": 1, "config": yaml.safe_dump(config)})
    queue.results.write_text("".join(f"{json.dumps(entry)}\n" for entry in lines))
    for options in (), ("--table",):
        assert queue.run(*options) == 0
        changed, less = capsys.readouterr().err.splitlines()
        assert changed.startswith(
            "changed seed 0 was trained with optim.lr=0.004, and is now 0.002:"
        )
        assert less.startswith(
            "less seed 0 was trained with optim.weight_decay=0.25, and is now 0.05:"
        )
    assert queue.starts() == []
