"""A mistake that any rank meets is told once, and all ranks end with its exit code."""

from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

import train
from data.rng import permutation
from tests.data.trees import write_tree
from tests.launch import launch
from tests.runs import DIGITS, write_config


def printed(log: Path, ranks: int) -> list[str]:
    return [line for r in range(ranks) for line in Path(f"{log}.{r}").read_text().splitlines()]


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
def test_a_broken_image_of_any_rank_is_named_once(tmp_path: Path, rank: int) -> None:
    for split in ("train", "val"):
        write_tree(tmp_path / "set" / split, {"a": 4, "b": 4}, size=(19, 17))
    images = sorted((tmp_path / "set" / "train").rglob("*.png"))
    order = permutation(8, "order", 1, 0)
    broken = images[order[4 * rank]]  # the first update has four images for each rank
    broken.write_bytes(broken.read_bytes()[:99])
    settings = {
        **DIGITS,
        "data": {**DIGITS["data"], "source": "folder", "root": str(tmp_path / "set")},
        "train": {**DIGITS["train"], "global_batch_size": 8, "batch_size_per_device": 4},
    }
    config = write_config(tmp_path, settings, tmp_path / "out")
    codes = launch(["--config", str(config)], tmp_path / "log", world_size=2)
    lines = printed(tmp_path / "log", 2)
    # Rank 0 holds the ranks' store here. Under torchrun it is the agent, and both end with 2.
    assert codes == [2, 1 if rank == 0 else 2], lines
    (line,) = [line for line in lines if str(broken) in line]
    assert line.startswith(f"error: rank {rank}: cannot read image {broken}: ")
    assert not [line for line in lines if "Traceback" in line]


@pytest.mark.dist
def test_a_mistake_that_all_ranks_meet_is_told_once(tmp_path: Path) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    arguments = ["--config", str(config), "data.source=folder", f"data.root={tmp_path}/nowhere"]
    assert launch(arguments, tmp_path / "log", world_size=2)[0] == 2
    lines = printed(tmp_path / "log", 2)
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert f"{tmp_path}/nowhere" in line
    assert not [line for line in lines if "Traceback" in line]


def test_a_restart_by_torchrun_ends_at_once_after_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["--config", str(write_config(tmp_path, DIGITS, tmp_path / "out"))]
    for attempt, mistake in enumerate(["optim.lr=-1", "optim.lr=1", "optim.lr=1"]):
        # What torchrun sets; the folder belongs to one torchrun.
        name = f"torchelastic_x/id_y/attempt_{attempt}/0/error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / name))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        (tmp_path / name).parent.mkdir(parents=True)
        told = []
        for rank in ("1", "0"):  # torchrun ends the slower one, which may be any
            monkeypatch.setenv("LOCAL_RANK", rank)
            assert train.main([*arguments, mistake]) == 2
            told.append(capsys.readouterr().err)
        printed, repeated = told
        assert printed.count("\n") == 1
        assert not repeated
        assert ("optim.lr=-1" in printed) == (attempt == 0)
        assert ("not started again" in printed) == (attempt > 0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ["DEEPSPEED", "MEGATRON_LM"])
def test_an_engine_that_would_train_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, engine: str
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    assert train.main(["--config", str(config)]) == 2
    assert f"ACCELERATE_USE_{engine}=true is set, but only DDP and" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_process_that_was_to_be_two_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In the environment of `accelerate launch --cpu --num_processes N`, by its own function."""
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    for count, code in (("2", 2), ("1", 0)):
        command = ["--cpu", "--num_processes", count, "--num_machines", "1"]
        command += ["--mixed_precision", "no", "--dynamo_backend", "no", "train.py"]
        options = launch_command_parser().parse_args(command)
        options.num_cpu_threads_per_process = 1
        _, environment = prepare_simple_launcher_cmd_env(options)
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert train.main(["--config", str(config), "--dry-run"]) == code
        errors = capsys.readouterr().err
        assert ("error: `accelerate launch --num_processes N` started one" in errors) == (code == 2)
    assert not (tmp_path / "out").exists()
