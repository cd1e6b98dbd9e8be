"""A run that is killed and started again is, bit for bit, the run that was not."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lipsformer.engine.exits import EXIT_STOPPED
from tests.launch import Event, launch, running
from tests.runs import DIGITS, outcome, write_config

CHECKPOINT = "lipsformer.engine.checkpoint"
# What a run of 28 updates with a checkpoint every third and after each epoch does, and how often.
MOMENTS = {
    ("lipsformer.engine.steps", "train_step"): 28,
    ("torch.optim", "AdamW.step"): 28,
    ("lipsformer.engine.evaluation", "EvalSums.add"): 8,
    ("lipsformer.engine.tracking", "Tracking.record"): 12,
    ("lipsformer.engine.train_state", "TrainState.state_dict"): 11,
    (CHECKPOINT, "save_file"): 33,
    (CHECKPOINT, "manifest_entry"): 66,
    (CHECKPOINT, "flush"): 90,
    (CHECKPOINT, "CheckpointFolder._prune"): 11,
}


def settings(workers: int, world_size: int) -> list[str]:
    return [
        f"data.num_workers={workers}",
        f"train.batch_size_per_device={48 // world_size}",
        "run.trackers=[tensorboard]",
    ]


# with the project's kernels for the CPU, whose threads must not decide anything
LIPSFORMER: dict = {
    **DIGITS,
    "model": {
        "name": "lipsformer_nano",
        "kwargs": {
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [2, 4],
            "split_sizes": [2, 4],
            "drop_path_rate": 0.2,
        },
    },
}


def reference(folder: Path, workers: int, world_size: int, run: dict = DIGITS) -> dict:
    folder.mkdir()
    config = write_config(folder, run, folder / "out")
    arguments = ["--config", str(config), *settings(workers, world_size)]
    assert launch(arguments, folder / "log", world_size=world_size) == [0] * world_size
    return outcome(folder / "out")


def killed(
    folder: Path, workers: int, world_size: int, events: list[Event], run: dict = DIGITS
) -> dict:
    folder.mkdir()
    config = write_config(folder, run, folder / "out")
    arguments = ["--config", str(config), *settings(workers, world_size)]
    for event in events:
        codes = launch(arguments, folder / "log", world_size=world_size, event=event)
        assert codes == [-signal.SIGKILL] * world_size, (event, codes)
    assert launch(arguments, folder / "log", world_size=world_size) == [0] * world_size
    return outcome(folder / "out")


def same(found: dict, expected: dict) -> None:
    assert found["update"] == expected["update"] == 28
    assert found["records"] == expected["records"]
    assert found["history"] == expected["history"]
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, content in expected["tensors"].items():
        assert found["tensors"][name] == content, f"{name} differs"


def test_killed_in_every_phase(tmp_path: Path) -> None:
    events = [
        Event("lipsformer.engine.steps", "train_step", 2),  # before the first checkpoint
        Event("torch.optim", "AdamW.step", 5),  # in an update, between two checkpoints
        Event(CHECKPOINT, "save_file", 2),  # in a save: some files written
        Event(CHECKPOINT, "flush", 8),  # all but the rename
        Event(CHECKPOINT, "CheckpointFolder._prune", 1),  # renamed, the old ones still there
        Event("lipsformer.engine.evaluation", "EvalSums.add", 1),  # in an evaluation
        Event("lipsformer.engine.tracking", "Tracking.record", 5),  # between two records
    ]
    same(killed(tmp_path / "b", 0, 1, events), reference(tmp_path / "a", 0, 1))

    # TensorBoard shows one curve on the same axis, without what the dead processes had written.
    records = outcome(tmp_path / "a" / "out")["records"]
    folder = tmp_path / "b" / "out" / "tensorboard" / "lipsformer"
    points = EventAccumulator(str(folder)).Reload().Scalars("train/loss")
    expected = [(r["update"], r["loss"]) for r in records if r["kind"] == "train"]
    assert [point.step for point in points] == [update for update, _ in expected]
    assert [point.value for point in points] == pytest.approx([loss for _, loss in expected])


@pytest.mark.slow
@pytest.mark.dist
def test_killed_with_two_processes_and_a_worker_each(tmp_path: Path) -> None:
    expected = reference(tmp_path / "a", 1, 2, LIPSFORMER)
    event = Event("torch.optim", "AdamW.step", 5)
    same(killed(tmp_path / "b", 1, 2, [event], LIPSFORMER), expected)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_twenty_random_moments(tmp_path: Path, workers: int, world_size: int) -> None:
    """Twenty runs, each killed at a moment drawn from all that a run does."""
    draw = random.Random(f"{workers}/{world_size}")
    expected = reference(tmp_path / "a", workers, world_size)
    # Only the main process writes checkpoints and records.
    moments = [m for m in MOMENTS if world_size == 1 or m[0] not in (CHECKPOINT,)]
    for number in range(20):
        module, name = draw.choice(moments)
        most = MOMENTS[module, name] // (world_size if "EvalSums" in name else 1)
        event = Event(module, name, draw.randint(1, most))
        same(killed(tmp_path / f"b{number}", workers, world_size, [event]), expected)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_twenty_random_moments_of_a_save(tmp_path: Path) -> None:
    draw = random.Random(7)
    expected = reference(tmp_path / "a", 0, 1)
    moments = [moment for moment in MOMENTS if moment[0] == CHECKPOINT]
    for number in range(20):
        moment = draw.choice(moments)
        event = Event(*moment, draw.randint(1, MOMENTS[moment]))
        same(killed(tmp_path / f"b{number}", 0, 1, [event]), expected)


def test_stopped_by_a_signal_and_started_again(tmp_path: Path) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    arguments = ["--config", str(config), *settings(0, 1)]
    for number, signal_number in enumerate((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)):
        event = Event("lipsformer.engine.steps", "train_step", 5)
        codes = launch(arguments, tmp_path / "log", event=event, signal_number=signal_number)
        assert codes == [EXIT_STOPPED]
        newest = max((tmp_path / "out" / "checkpoints").iterdir())
        assert json.loads((newest / "state.json").read_text())["update"] == 5 * (number + 1)
    event = Event("lipsformer.engine.evaluation", "EvalSums.add", 2)  # in the last evaluation
    codes = launch(arguments, tmp_path / "log", event=event, signal_number=signal.SIGTERM)
    assert codes == [EXIT_STOPPED]
    assert launch(arguments, tmp_path / "log") == [0]
    same(outcome(tmp_path / "out"), reference(tmp_path / "a", 0, 1))


@pytest.mark.slow
def test_a_second_start_leaves_the_first_one_alone(tmp_path: Path) -> None:
    expected = reference(tmp_path / "a", 0, 1)
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    arguments = ["--config", str(config), *settings(0, 1)]
    event = Event("lipsformer.engine.steps", "train_step", 9)
    with running(arguments, tmp_path / "one", event=event, number=signal.SIGSTOP) as (first,):
        assert first.pid is not None
        while psutil.Process(first.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.05)
        assert launch(arguments, tmp_path / "two") == [2]
        os.kill(first.pid, signal.SIGCONT)
        first.join()
    assert first.exitcode == 0
    lines = (tmp_path / "two.0").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert f"is in use by process {first.pid} on " in line
    same(outcome(tmp_path / "out"), expected)


def test_a_fine_tuned_run_continues_without_the_weights_that_it_began_with(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(Path(__file__).with_name("before_rebuild"), weights)
    settings = yaml.safe_load((weights / "config.yaml").read_text())
    settings["model"]["checkpoint"] = str(weights)
    settings["train"] |= {"epochs": 1, "global_batch_size": 288}
    config = write_config(tmp_path, settings, tmp_path / "out")
    event = Event("lipsformer.engine.steps", "train_step", 2)
    arguments, log = ["--config", str(config)], tmp_path / "log"
    assert launch(arguments, log, event=event, signal_number=signal.SIGTERM) == [EXIT_STOPPED]
    assert f"weights     {weights}/checkpoints/" in (tmp_path / "log.0").read_text()
    shutil.rmtree(weights)
    assert launch(arguments, log) == [0], (tmp_path / "log.0").read_text()
