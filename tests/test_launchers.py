"""Every way to start train.py trains, and obeys a signal: all ranks save, the command continues."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file

from data.rng import permutation
from lipsformer.engine.build import timm_config
from tests.data.trees import write_tree
from tests.launch import launch
from tests.runs import DIGITS, outcome, write_config

ROOT = Path(__file__).resolve().parents[1]
# On CPUs through ACCELERATE_USE_CPU: with --cpu Accelerate 1.15 starts a single process.
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
TORCHRUN = ["-m", "torch.distributed.run"]
TWO = ["train.batch_size_per_device=24"]

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(1800)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(command: list[str], log: Path) -> subprocess.Popen:
    with log.open("a") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "ACCELERATE_USE_CPU": "true",
                # Else restarted processes read the dead ones' addresses in the agents' store.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )


def torchrun(options: list[str], config: Path, log: Path, batch: int = 24) -> subprocess.Popen:
    settings = ["--config", str(config), f"train.batch_size_per_device={batch}"]
    return start([*TORCHRUN, *options, *settings], log)


def one_node(
    launcher: str, config: Path, log: Path, *more: str, batch: int = 24
) -> subprocess.Popen:
    port = str(free_port())
    if launcher == "torchrun":
        options = ["--nproc_per_node", "2", "--master_port", port, *more, "train.py"]
        return torchrun(options, config, log, batch)
    settings = ["--config", str(config), f"train.batch_size_per_device={batch}"]
    command = [*ACCELERATE, "--main_process_port", port, *more, "train.py", *settings]
    return start(command, log)


def undisturbed(folder: Path) -> dict:
    """The outcome of the same run on two processes that no launcher knows of."""
    (folder / "a").mkdir()
    config = write_config(folder / "a", DIGITS, folder / "a" / "out")
    assert launch(["--config", str(config), *TWO], folder / "a" / "log", world_size=2) == [0, 0]
    return outcome(folder / "a" / "out")


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("accelerate", signal.SIGTERM),
        ("torchrun", signal.SIGTERM),
        ("torchrun", signal.SIGUSR1),
        ("torchrun", signal.SIGKILL),  # kills only torchrun: its processes stop by themselves
    ],
)
def test_signal_to_the_launcher_saves_on_all_ranks(
    tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    settings = {**DIGITS, "train": {**DIGITS["train"], "epochs": 400}}
    config = write_config(tmp_path, settings, tmp_path / "out")
    log = tmp_path / "log"
    handled = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"]
    process = one_node(launcher, config, log, *(handled if launcher == "torchrun" else ()))
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)
    process.send_signal(number)
    assert process.wait() != 0
    heard = signal.SIGTERM if number == signal.SIGKILL else number
    code = tmp_path / "out" / "exit.json"
    for _ in range(150):  # orphans end after the launcher
        if code.exists():
            break
        time.sleep(0.2)
    assert json.loads(code.read_text())["code"] == 75
    assert f"stopped by signal {heard} after update" in log.read_text()
    newest = max((tmp_path / "out" / "checkpoints").glob("update-*"))
    state = json.loads((newest / "state.json").read_text())
    assert state["world_size"] == 2
    assert f"after update {state['update']}\n" in log.read_text()


def test_a_launcher_that_leaves_one_process_alone_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    options = ["--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no", "train.py", "--config", str(config)]
    process = start(["-m", "accelerate.commands.launch", *options], tmp_path / "log")
    assert process.wait() != 0
    log = (tmp_path / "log").read_text()
    assert log.count("error: `accelerate launch --num_processes N` started one process") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_a_mistake_is_not_tried_again(tmp_path: Path, launcher: str) -> None:
    config = write_config(tmp_path, {**DIGITS, "optim": {"lr": -1.0}}, tmp_path / "out")
    log = tmp_path / "log"
    assert one_node(launcher, config, log, "--max_restarts", "1").wait() != 0
    assert log.read_text().count("optim.lr=-1.0 is not possible") == 1
    assert log.read_text().count("not started again, because it ended with exit code 2") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_an_error_of_one_rank_is_told_once_and_not_met_again(tmp_path: Path, launcher: str) -> None:
    for split in ("train", "val"):
        write_tree(tmp_path / "set" / split, {"a": 4, "b": 4}, size=(19, 17))
    images = sorted((tmp_path / "set" / "train").rglob("*.png"))
    broken = images[permutation(8, "order", 1, 0)[4]]  # the first one of rank 1
    broken.write_bytes(broken.read_bytes()[:99])
    settings = {
        **DIGITS,
        "data": {**DIGITS["data"], "source": "folder", "root": str(tmp_path / "set")},
        "train": {**DIGITS["train"], "global_batch_size": 8},
    }
    config = write_config(tmp_path, settings, tmp_path / "out")
    more = [] if launcher == "accelerate" else ["--max_restarts", "1"]
    process = one_node(launcher, config, tmp_path / "log", *more, batch=4)
    assert process.wait() != 0
    log = (tmp_path / "log").read_text()
    assert log.count(str(broken)) == 1, log
    assert f"error: rank 1: cannot read image {broken}: " in log
    assert log.count("not started again, because it ended with exit code 2") == bool(more)
    record = json.loads((tmp_path / "out" / "exit.json").read_text())
    assert (record["code"], str(broken) in record["reason"]) == (2, True)


def test_eval_tells_an_error_of_one_rank_once(tmp_path: Path) -> None:
    write_tree(tmp_path / "set" / "val", {"a": 4, "b": 4}, size=(19, 17))
    broken = sorted((tmp_path / "set" / "val").rglob("*.png"))[5]  # rank 1 has the odd ones
    broken.write_bytes(broken.read_bytes()[:99])
    model = timm.create_model("lipsformer_nano", num_classes=2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(timm_config(model, ["a", "b"]))
    command = ["--nproc_per_node", "2", "--master_port", str(free_port()), "eval.py"]
    command += ["--checkpoint", str(tmp_path), "--data", "source=folder", "num_workers=0"]
    process = start([*TORCHRUN, *command, f"root={tmp_path / 'set'}"], tmp_path / "log")
    assert process.wait() != 0
    log = (tmp_path / "log").read_text()
    assert log.count(str(broken)) == 1, log
    assert f"error: rank 1: cannot read image {broken}: " in log


@pytest.mark.parametrize(("seconds", "saved"), [("20", True), ("1", False)])
def test_torchrun_waits_for_a_save_as_long_as_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str, saved: bool
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", seconds)
    config, mark = write_config(tmp_path, DIGITS, tmp_path / "out"), tmp_path / "mark"
    options = ["--nproc_per_node", "2", "--master_port", str(free_port())]
    options += ["-m", "tests.late", str(mark), "7"]
    process = torchrun(options, config, tmp_path / "log")
    while not mark.exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait() != 0
    assert (tmp_path / "out" / "exit.json").exists() == saved, (tmp_path / "log").read_text()


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_launchers_train_the_same_run(tmp_path: Path, launcher: str) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    process = one_node(launcher, config, tmp_path / "log")
    assert process.wait() == 0, (tmp_path / "log").read_text()
    assert outcome(tmp_path / "out") == undisturbed(tmp_path)


def test_two_nodes_meet_through_c10d_and_an_elastic_restart_resumes(tmp_path: Path) -> None:
    """One node's process dies by SIGKILL; the agents start both again and the run continues."""
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    options = ["--nnodes", "2", "--nproc_per_node", "1", "--max_restarts", "2"]
    options += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    options += ["--rdzv_id", "test", "--local_addr", "127.0.0.1"]
    options += ["-m", "tests.die_once", str(tmp_path / "died")]
    nodes = [torchrun(options, config, tmp_path / f"log{node}") for node in range(2)]
    logs = [tmp_path / "log0", tmp_path / "log1"]
    assert [node.wait() for node in nodes] == [0, 0], "\n".join(log.read_text() for log in logs)
    starts = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert [start["update"] for start in starts] == [0, 6]
    assert outcome(tmp_path / "out") == undisturbed(tmp_path)
