"""The launch files are valid, name files that exist, and pass on what makes a stop a pause."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lipsformer._configfile import read_config
from lipsformer.config import Config

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "scripts" / "launch"


def document(name: str) -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / name).read_text())


def shell_check(script: str) -> None:
    result = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_every_config_and_script_that_is_named_exists(path: Path) -> None:
    text = path.read_text()
    configs = set(re.findall(r"configs/\S+\.yaml", text))
    assert configs
    for config in configs:
        read_config(Config, ROOT / config)
    assert "train.py --config" in text
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in text
    # Two minutes of grace reach the processes, and each of the signals reaches every rank.
    assert re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT(=|.*\n +value: \")110\b", text)
    assert "--signals-to-handle SIGTERM,SIGINT,SIGUSR1,SIGUSR2" in text


def test_skypilot_task() -> None:
    task = document("skypilot.yaml")
    assert set(task) <= {
        "name", "resources", "num_nodes", "workdir", "envs", "file_mounts", "setup", "run",
    }  # fmt: skip
    shell_check(task["setup"])
    shell_check(task["run"])


def test_kubernetes_job() -> None:
    job = document("kubernetes.yaml")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy demands it"
    (container,) = pod["containers"]
    shell_check(container["args"][0])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """A SLURM of three shell scripts: srun runs its command here, scontrol writes down calls."""
    scripts = {
        "srun": f'echo "$1" >> {tmp_path}/calls; shift; exec "$@"',
        "scontrol": f"""echo "$@" >> {tmp_path}/calls
            case "$1 $2" in
              "show hostnames") echo node1; seq -f "node%g" 2 100000 ;;
              "show job")  # what follows the time does not fit into a pipe
                echo "   SuspendTime=None PreemptTime=${{FAKE_PREEMPT_TIME:-None}}"
                printf "   Comment=%100000d\\n" 0 ;;
            esac""",
        "torchrun": f'echo "$@" > {tmp_path}/arguments; trap "exit 1" TERM\n'
        f"touch {tmp_path}/started; [ -z $FAKE_STATUS ] || exit $FAKE_STATUS\n"
        "while true; do sleep 0.05; done",
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "12",
        "SLURM_GPUS_ON_NODE": "4",
    }


def submit(cluster: dict[str, str], **more: str) -> subprocess.Popen:
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "configs/demo.yaml", "optim.lr=1e-3"]
    return subprocess.Popen(command, env={**cluster, **more})


def test_slurm_job_goes_back_into_the_queue_when_signaled(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    job = submit(cluster)
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait() == 0
    assert "requeue 17" in (tmp_path / "calls").read_text()
    assert "--cpus-per-task=12" in (tmp_path / "calls").read_text()
    called = (tmp_path / "arguments").read_text()
    assert "--nnodes 2 --nproc_per_node 4" in called
    assert "--rdzv_endpoint node1:29500" in called
    assert called.endswith("train.py --config configs/demo.yaml optim.lr=1e-3\n")


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (1, True)])
def test_a_preempted_slurm_job_goes_back_into_the_queue_unless_it_is_complete(
    tmp_path: Path, cluster: dict[str, str], status: int, requeued: bool
) -> None:
    """SLURM may signal the tasks of a job that it preempts and not the script."""
    more = {"FAKE_STATUS": str(status), "FAKE_PREEMPT_TIME": "2026-11-28T03:00:00"}
    assert submit(cluster, **more).wait() == 0
    assert ("requeue 17" in (tmp_path / "calls").read_text()) == requeued


@pytest.mark.parametrize("status", [0, 2])
def test_slurm_job_ends_with_its_own_status(
    tmp_path: Path, cluster: dict[str, str], status: int
) -> None:
    assert submit(cluster, FAKE_STATUS=str(status)).wait() == status
    assert "requeue" not in (tmp_path / "calls").read_text()
