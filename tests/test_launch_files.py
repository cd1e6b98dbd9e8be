"""The files in scripts/launch/ with the real torchrun: two ranks train, stop and fail as they say.

SLURM is two scripts here: srun runs its command, and scontrol writes down what it is asked for. The
commands of the other two files run in a shell, with the variables that the cluster would set.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.runs import DIGITS, write_config

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "scripts" / "launch"
ONE_RESTART = ("--max_restarts 3", "--max_restarts 1")  # tells as much, in half the time
LONG = {**DIGITS, "train": {**DIGITS["train"], "epochs": 400}}

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(900)]


@contextlib.contextmanager
def started(
    kind: str, folder: Path, *overrides: str, preempt_time: str = "None"
) -> Iterator[subprocess.Popen]:
    """A launch file that runs on two ranks of this machine; their outputs go to `folder`/log."""
    config, out = folder / "run.yaml", folder / "out"
    environment = {
        **os.environ,
        "PATH": f"{folder}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    more = " ".join(["train.batch_size_per_device=24", *overrides])
    if kind == "slurm":
        scripts = {
            "srun": f'echo "$1" >> {folder}/calls; shift; exec "$@"',
            "scontrol": f"""echo "$@" >> {folder}/calls
                case "$1 $2" in
                  "show hostnames") echo 127.0.0.1 ;;
                  "show job") echo "   SuspendTime=None PreemptTime={preempt_time}" ;;
                esac""",
        }
        for name, body in scripts.items():
            (folder / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / name).chmod(0o755)
        environment |= {
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_NNODES": "1",
            "SLURM_CPUS_PER_TASK": "2",
            "SLURM_GPUS_ON_NODE": "2",
        }
        script = (LAUNCH / "slurm.sbatch").read_text()
        (folder / "slurm.sbatch").write_text(script.replace(*ONE_RESTART))
        command = f"exec bash {folder}/slurm.sbatch {config} run.output_dir={out} {more}"
    elif kind == "kubernetes":
        job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
        (container,) = job["spec"]["template"]["spec"]["containers"]
        environment |= {item["name"]: item["value"] for item in container["env"]}
        (command,) = container["args"]
        command = command.replace(*ONE_RESTART)
        for ours, cluster in (
            ("--nproc_per_node 2", "--nproc_per_node 8"),
            (str(config), "configs/imagenet/lipsformer_tiny_100ep.yaml"),
            (str(out), "/outputs/lipsformer_tiny_100ep"),
        ):
            assert cluster in command
            command = command.replace(cluster, ours)
        command += f" {more}"
    else:
        task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
        environment |= {
            "CONFIG": str(config),
            "SKYPILOT_NUM_NODES": "1",
            "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NUM_GPUS_PER_NODE": "2",
            "SKYPILOT_NODE_IPS": "127.0.0.1",
        }
        command = task["run"].strip().replace('"/outputs/$(basename "$CONFIG" .yaml)"', str(out))
        assert str(out) in command
        command += f" {more}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "skypilot"])
def test_a_stop_of_the_cluster_saves_on_all_ranks(tmp_path: Path, kind: str) -> None:
    write_config(tmp_path, LONG, tmp_path / "out")
    metrics = tmp_path / "out" / "metrics.jsonl"
    with started(kind, tmp_path) as process:
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        if kind == "slurm":
            process.send_signal(signal.SIGUSR1)  # to the script only, by --signal=B:USR1
        elif kind == "kubernetes":
            process.send_signal(signal.SIGTERM)  # to process 1 of the container
        else:
            os.killpg(process.pid, signal.SIGTERM)  # SkyPilot ends the processes of its task
        status, code = process.wait(), tmp_path / "out" / "exit.json"
        for _ in range(300):  # a shell may end before the torchrun that it started
            if code.exists():
                break
            time.sleep(0.2)
    log = (tmp_path / "log").read_text()
    assert json.loads(code.read_text())["code"] == 75, log
    newest = max((tmp_path / "out" / "checkpoints").glob("update-*"))
    state = json.loads((newest / "state.json").read_text())
    assert state["world_size"] == 2
    assert f"stopped by signal {signal.SIGTERM} after update {state['update']}\n" in log
    if kind == "slurm":
        assert "requeue 17" in (tmp_path / "calls").read_text()
    assert (status == 0) == (kind == "slurm")


@pytest.mark.parametrize("preempt_time", ["None", "2026-11-28T03:00:00"])
def test_a_preempted_job_of_slurm_returns_to_the_queue(tmp_path: Path, preempt_time: str) -> None:
    """SLURM signals the tasks of a job that it preempts, but not its script."""
    write_config(tmp_path, LONG, tmp_path / "out")
    metrics = tmp_path / "out" / "metrics.jsonl"
    with started("slurm", tmp_path, preempt_time=preempt_time) as process:
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        status = process.wait()
    assert json.loads((tmp_path / "out" / "exit.json").read_text())["code"] == 75
    calls = (tmp_path / "calls").read_text()
    assert "--cpus-per-task=2" in calls
    assert ("requeue 17" in calls) == (status == 0) == (preempt_time != "None")


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "skypilot"])
def test_a_mistake_is_told_once_and_not_tried_again(tmp_path: Path, kind: str) -> None:
    write_config(tmp_path, DIGITS, tmp_path / "out")
    with started(kind, tmp_path, "optim.lr=-1") as process:
        status = process.wait()
    log = (tmp_path / "log").read_text()
    assert status == 1, log
    assert log.count("optim.lr=-1.0 is not possible") == 1, log
    restarts = 0 if kind == "skypilot" else 1
    assert log.count("not started again, because it ended with exit code 2") == restarts, log
    assert not (tmp_path / "out").exists()
    if kind == "slurm":
        assert "requeue" not in (tmp_path / "calls").read_text()
    if kind == "kubernetes":  # the pod's code of a mistake ends the job
        job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
        rules = job["spec"]["podFailurePolicy"]["rules"]
        assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
        assert rules[1]["onExitCodes"]["values"] == [status]
