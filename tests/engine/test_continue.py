"""Which command continues which run: in-process runs of three updates an epoch."""

import itertools
import json
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import train
from lipsformer.engine import claim, steps, stopwatch, trainer, writer
from lipsformer.engine.checkpoint import CheckpointFolder
from lipsformer.engine.exits import EXIT_NONFINITE
from lipsformer.engine.lock import LOCK, FolderLock
from lipsformer.engine.run_files import read_state
from lipsformer.engine.run_folder import RunFolder
from lipsformer.engine.signals import STOP_SIGNALS
from lipsformer.kernels import verdict
from tests.data.trees import write_tree
from tests.runs import DIGITS, outcome, write_config

SMALL = {
    **DIGITS,
    "train": {**DIGITS["train"], "global_batch_size": 479, "batch_size_per_device": None},
    "run": {"save_every_updates": 1, "report": False, "keep": 9, "log_every": 1},
}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture):
    """Start `train.main` on the small run; return exit code and all that was printed."""
    config = write_config(tmp_path, SMALL, tmp_path / "out")

    def start(*overrides: str) -> tuple[int, str]:
        caplog.clear()
        with caplog.at_level("INFO"):
            code = train.main(["--config", str(config), *overrides])
        return code, caplog.text + capsys.readouterr().err

    return start


@pytest.fixture
def finished(run, tmp_path: Path) -> Path:
    assert run()[0] == 0
    return tmp_path / "out"


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir())


def rewind(folder: Path, step: int) -> None:
    """Remove the checkpoints after a step, as if the run had been killed there."""
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("update-")) > step:
            shutil.rmtree(path)


@pytest.mark.slow
def test_rare_evaluations_leave_the_training_as_it_is(run, tmp_path: Path) -> None:
    rare = ("train.epochs=3", "run.eval_every_epochs=2", f"run.output_dir={tmp_path / 'rare'}")
    assert run("train.epochs=3")[0] == 0
    assert run(*rare, "run.save_every_updates=null")[0] == 0
    expected, found = outcome(tmp_path / "out"), outcome(tmp_path / "rare")
    assert found["tensors"] == expected["tensors"]
    assert [entry["epoch"] for entry in expected["history"]] == [1, 2, 3]
    assert found["history"] == expected["history"][1:], "every second epoch, and the last one"
    saved = sorted(path.name[-1] for path in (tmp_path / "rare" / "checkpoints").iterdir())
    assert saved == ["3", "6", "9"], "an epoch without an evaluation is saved as well"
    rewind(tmp_path / "rare", 3)
    assert run(*rare, "run.save_every_updates=null")[0] == 0
    assert outcome(tmp_path / "rare") == found


def test_the_best_and_the_last_weights_are_saved_whatever_else_is(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One update an epoch, and made-up evaluations that take a million seconds each."""
    raw, ema = (50.0, 60.0, 60.0, 20.0, 30.0), (40.0, 60.0, 50.0, 10.0, 20.0)
    top1, paused = iter(sum(zip(raw, ema, strict=True), ())), 0
    saved, save = [], CheckpointFolder.save

    def evaluate(*_: object, **__: object) -> dict[str, Any]:
        nonlocal paused
        paused += 1
        return {"top1": next(top1), "top5": 100.0, "loss": 1.0, "images": 360}

    def recorded(self, step: int, **content) -> Path:
        saved.append(step)
        return save(self, step, **content)

    def now() -> float:
        return time.perf_counter() + 1e6 * paused

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    monkeypatch.setattr(CheckpointFolder, "save", recorded)
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=now))
    rare = ("run.save_every_updates=null", "run.save_every_epochs=4", "run.keep=1")
    command = ("train.epochs=5", "train.global_batch_size=1437", *rare)
    assert run(*command)[0] == 0
    assert saved == [1, 2, 4, 5], "two better ones, every fourth epoch, and the last one"
    folder = tmp_path / "out"
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["update-000000002", "update-000000005"]
    summary = RunFolder(folder).summary()
    assert summary is not None
    assert summary["best"] == {"epoch": 2, "update": 2, "weights": "ema", "top1": 60.0}
    assert (summary["last"]["epoch"], summary["last"]["raw"]["top1"]) == (5, 30.0)
    for record in RunFolder(folder).metrics():
        if record["kind"] == "train":
            seconds = record["seconds_per_update"]
            assert seconds < 1e5, "an evaluation is no training"
            assert record["images_per_s"] * seconds == pytest.approx(1437)

    shutil.rmtree(folder / "checkpoints" / kept[0])
    assert run(*command)[0] == 0
    summary = RunFolder(folder).summary()
    assert summary is not None
    assert summary["best"]["update"] == 5, "the best one that is left"


def test_settings_that_do_not_change_the_mathematics_may_change(
    run, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, checkpoint = outcome(finished), finished / "checkpoints" / "update-000000005"
    fifth = {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
    rewind(finished, 4)
    copyto = np.copyto

    def slowly(copy: np.ndarray, array: np.ndarray) -> None:
        time.sleep(0.002)
        copyto(copy, array)

    monkeypatch.setattr(writer.np, "copyto", slowly)  # the next update waits for the checkpoint
    code, text = run(
        "train.grad_checkpointing=true",
        "train.deterministic=true",
        "data.num_workers=1",
        "train.max_nonfinite_updates=5",
    )
    assert code == 0, text
    assert "train.grad_checkpointing False -> True" in text
    assert "train.max_nonfinite_updates 3 -> 5" in text
    assert "does not change the mathematics" in text
    assert not torch.are_deterministic_algorithms_enabled(), "the process is left as it was"
    assert outcome(finished)["tensors"] == expected["tensors"]
    again = {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
    assert again == fifth
    rewind(finished, 4)
    code, text = run("optim.lr=0.5", "train.compile=true")
    assert code == 2
    assert "another config (optim.lr 0.01 -> 0.5): set these back" in text


def test_a_run_that_met_its_limit_says_what_may_change_and_continues(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = steps.apply_gradient

    def broken(state, step):
        if 1 <= step <= 4:
            next(state.module.parameters()).grad[:] = torch.nan
        return apply(state, step)

    monkeypatch.setattr(steps, "apply_gradient", broken)
    code, text = run()
    assert code == EXIT_NONFINITE
    assert "train.max_nonfinite_updates=3 allows no more in a row. You may change this" in text
    assert "last finite update 0" in text
    assert json.loads((tmp_path / "out" / "exit.json").read_text())["code"] == EXIT_NONFINITE

    code, text = run()
    assert code == EXIT_NONFINITE
    assert "this run ended with exit code 3, and the same start would end so again" in text
    assert "3 epochs" not in text, "it began to train"

    code, text = run("train.max_nonfinite_updates=9")
    assert code == 0, text
    assert "4 in the whole run" in text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["nonfinite_updates"] == 4
    assert json.loads((tmp_path / "out" / "exit.json").read_text())["code"] == 0


def test_a_moved_checkpoint_begins_a_run_that_the_same_command_continues(
    run, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, run_id = outcome(finished), read_state(newest(finished))["run_id"]
    moved = tmp_path / "moved"
    shutil.copytree(finished / "checkpoints" / "update-000000003", moved)
    command = (f"run.resume={moved}", f"run.output_dir={tmp_path / 'new'}")
    code, text = run(*command, "optim.lr=0.5")
    assert code == 2
    assert "another config (optim.lr 0.01 -> 0.5): set these back" in text
    monkeypatch.setattr(verdict, "_VERDICTS", {"an operator": False})
    code, text = run(*command)
    assert code == 0, text
    assert "has no records of the updates before 3" in text
    found = outcome(tmp_path / "new")
    assert found["tensors"] == expected["tensors"]
    assert found["history"] == expected["history"]

    rewind(tmp_path / "new", 4)
    shutil.rmtree(moved)
    monkeypatch.setattr(verdict, "_VERDICTS", {})
    code, text = run(*command)
    assert code == 0, text
    assert verdict.verdicts() == {"an operator": False}, "it continues with the same kernels"
    assert read_state(newest(tmp_path / "new"))["run_id"] == run_id, "trackers go on with its curve"
    assert "from update 4" in text
    assert outcome(tmp_path / "new")["tensors"] == expected["tensors"]
    best = json.loads((tmp_path / "new" / "summary.json").read_text())["best"]
    assert (tmp_path / "new" / "checkpoints" / f"update-{best['update']:09d}").exists()

    code, text = run(f"run.resume={tmp_path}", command[1])
    assert code == 2
    assert "already holds a run" in text


@pytest.mark.slow
def test_a_start_that_was_killed_while_it_copied_is_repeated(
    run, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, new = outcome(finished), tmp_path / "new"
    rewind(finished, 4)  # the best checkpoint, which is copied first, is that of step 3
    command = [f"run.resume={finished / 'checkpoints' / 'update-000000004'}"]
    command += [f"run.output_dir={new}"]
    for where, name, count in (
        (shutil, "copytree", 2),
        (claim, "write_atomically", 2),
        (claim.Claim, "complete", 1),
    ):
        function, calls = getattr(where, name), itertools.count(1)

        def die(*arguments, function=function, calls=calls, count=count):
            if next(calls) == count:
                raise KeyboardInterrupt
            return function(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, die)
            with pytest.raises(KeyboardInterrupt):
                run(*command)
        assert not (new / "checkpoints").exists()
        (new / LOCK).unlink()  # its owner is this process, which a real start would find dead
    code, text = run(command[1])  # without run.resume it must not begin at update 0
    assert code == 2
    assert f"began with {finished}/checkpoints/update-000000004" in text
    code, text = run(*command)
    assert code == 0, text
    assert "from update 4" in text
    found = outcome(new)
    assert found["tensors"] == expected["tensors"]
    assert found["history"] == expected["history"]
    assert (new / "checkpoints" / "update-000000003").exists()


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_checkpoints_without_their_config_are_refused(run, finished: Path, resume: str) -> None:
    (finished / "config.yaml").unlink()
    code, text = run(f"run.resume={resume}")
    assert code == 2
    assert "holds checkpoints, but their config.yaml is missing" in text


def test_a_run_without_an_intact_checkpoint_does_not_begin_anew(run, finished: Path) -> None:
    for path in (finished / "checkpoints").iterdir():
        (path / "model.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    code, text = run()
    assert code == 2
    assert f"{finished / 'checkpoints'} holds no intact checkpoint: restore one of them" in text
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.filterwarnings("ignore:1 images of train are left out")
def test_another_list_of_skipped_images_is_another_run(run, tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_tree(tmp_path / "set" / split, {"a": 6, "b": 6}, size=(19, 17))
    for name, image in {"one": "a/001.png", "two": "b/002.png"}.items():
        (tmp_path / name).write_bytes(f"train/{image}\r\n".encode())
    shutil.copy(tmp_path / "one", tmp_path / "three")
    data = ["data.source=folder", f"data.root={tmp_path / 'set'}", "train.global_batch_size=11"]
    data += ["train.epochs=1"]
    assert run(*data, f"data.skip_list={tmp_path / 'one'}")[0] == 0
    assert run(*data, f"data.skip_list={tmp_path / 'three'}")[0] == 0
    kept = tmp_path / "out" / "skipped.txt"
    assert run(*data, f"data.skip_list={kept}")[0] == 0, "the run's own copy of a lost list"
    assert kept.read_bytes() == (tmp_path / "one").read_bytes()
    code, text = run(*data, f"data.skip_list={tmp_path / 'two'}")
    assert code == 2
    assert "data.skip_list" in text
    (tmp_path / "two").write_bytes(b"\xff")
    assert run(*data, f"data.skip_list={tmp_path / 'two'}")[0] == 2
    assert run(*data)[0] == 2


def test_the_second_start_says_who_owns_the_folder(
    run, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewind(finished, 4)
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    lock = FolderLock(finished)
    lock.acquire()
    code, text = run()
    assert code == 2
    assert f"{finished} is in use by process " in text
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    lock.release()
    for step in (3, 5):  # another process has trained on after this one chose where to start
        chosen = finished / "checkpoints" / f"update-{step:09d}"
        assert chosen.exists() == (step == 3), "the other process may have removed it"
        with monkeypatch.context() as patch:
            patch.setattr(train, "find_start", lambda _, chosen=chosen: chosen)
            code, text = run()
        assert code == 2
        assert f"another process has continued {finished} meanwhile: repeat the command" in text
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    assert run()[0] == 0
    assert not (finished / "lock.json").exists()


@pytest.mark.parametrize(("log_every", "last"), [(1, 2), (9, 1)])  # at a record, and at a save
def test_a_run_that_was_taken_over_writes_nothing_more(
    run, tmp_path: Path, monkeypatch, log_every: int, last: int
) -> None:
    folder, before = tmp_path / "out", {}

    def lost(state, step):
        if step == last:
            while not (folder / "checkpoints" / f"update-00000000{last}").exists():
                time.sleep(0.01)  # a thread writes it
            (folder / "lock.json").unlink()
            FolderLock(folder).acquire()
            before.update(records(folder))
        return apply(state, step)

    apply = steps.apply_gradient
    monkeypatch.setattr(steps, "apply_gradient", lost)
    code, text = run(f"run.log_every={log_every}")
    assert code == 4
    assert "was taken over by process" in text
    assert newest(folder).name == f"update-00000000{last}"
    assert records(folder) == before
    assert not (folder / "exit.json").exists()


def records(folder: Path) -> dict[Path, bytes]:
    """Return the files of a run but its lock, its checkpoints and those of trackers."""
    paths = [path for path in folder.iterdir() if path.is_file() and path.name != LOCK]
    return {path: path.read_bytes() for path in (*paths, *folder.glob("plots/*"))}


@pytest.mark.parametrize(
    ("image", "place", "difference"),
    [
        ("val/b/001.png", "gone.png", "num_eval_images 13 there, 12 here; restore the data"),
        ("train/b/006.png", "train/a/006.png", "train_labels_sha256"),
    ],
)
def test_other_numbers_of_images_or_other_labels_are_other_data(
    run, tmp_path: Path, image: str, place: str, difference: str
) -> None:
    folder = tmp_path / "set"
    for split in ("train", "val"):
        write_tree(folder / split, {"a": 6, "b": 7}, size=(19, 17))
    data = ["data.source=folder", f"data.root={folder}", "train.global_batch_size=11"]
    assert run(*data, "train.epochs=2")[0] == 0
    rewind(tmp_path / "out", 1)
    (folder / image).rename(folder / place)
    code, text = run(*data, "train.epochs=2")
    assert code == 2
    assert f"was made with other data: {difference}" in text
    (folder / place).rename(folder / image)
    assert run(*data, "train.epochs=2")[0] == 0


def test_a_lost_best_checkpoint_makes_way_for_the_best_one_that_is_there(
    finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = CheckpointFolder(finished / "checkpoints")
    history = read_state(newest(finished))["history"]
    first, last = (entry["update"] for entry in history)
    kept = claim.Claim(RunFolder(finished), checkpoints, last, 0, {"update": first, "top1": 99.0})
    kept.check_best(history)
    assert kept.best == {"update": first, "top1": 99.0}
    (checkpoints.path_of(first) / "model.safetensors").write_bytes(b"")
    kept.check_best(history)
    assert kept.best is not None
    assert (kept.best["update"], kept.best["top1"]) == (last, history[1]["raw"]["top1"])
    assert "is left out" in caplog.text
    shutil.rmtree(checkpoints.path_of(last))
    kept.check_best(history)
    assert kept.best is None


def test_a_warmup_of_no_update_is_refused(run) -> None:
    code, text = run("schedule.warmup_epochs=0.1")
    assert code == 2
    assert "schedule.warmup_epochs=0.1 is not possible: must be 0, or more than half" in text
