"""Whole runs on GPUs: precisions, compilation, determinism, resuming, several devices, no waits.

With LIPSFORMER_GPU_TESTS=cpu they run on the CPU, which checks the tests and not the GPU.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lipsformer._configfile import read_config
from lipsformer.config import Config
from lipsformer.engine.distributed import start
from lipsformer.engine.steps import train_step
from scripts._assemble import assemble
from tests.conftest import ROOT
from tests.runs import DIGITS, outcome, write_config

ON_CPU = os.environ.get("LIPSFORMER_GPU_TESTS") == "cpu"
GPUS = torch.cuda.device_count()
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_two = pytest.mark.skipif(GPUS < 2 and not ON_CPU, reason="fewer than two CUDA devices")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), *([] if ON_CPU else [needs_cuda])]

LIPSFORMER: dict[str, Any] = {
    **DIGITS,
    "model": {
        "name": "lipsformer_swin_nano",
        "kwargs": {"depths": [2, 2], "num_heads": [2, 4], "embed_dim": 32, "drop_path_rate": 0.0},
    },
    "data": {**DIGITS["data"], "img_size": 32},
    "augment": {"hflip": 0.0},
    "optim": {"lr": 1e-3, "clip_grad": 1.0},
    "train": {**DIGITS["train"], "epochs": 1, "max_nonfinite_updates": 20},
}
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py")
FSDP2 = (
    *("accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    *("--fsdp_transformer_layer_cls_to_wrap", "LipsFormerBlock", "train.py"),
)


def command(config: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> list[str]:
    program = ["-m", *launcher] if launcher else ["train.py"]
    return [sys.executable, *program, "--config", str(config), *overrides]


def run(config: Path, *overrides: str, **options: Any) -> None:
    done = subprocess.run(
        command(config, *overrides, **options), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def losses(folder: Path, *overrides: str, **options: Any) -> list[float]:
    """Losses of the first epoch and of its evaluation."""
    folder.mkdir()
    config = write_config(folder, LIPSFORMER, folder / "out")
    run(config, *overrides, **options)
    records = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an eager run in float32."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    return losses(folder, "train.compile=false", "train.precision=fp32")


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-2), ("bf16", 5e-2)])
def test_precisions_learn_alike(tmp_path, reference, precision, tolerance, compiled):
    found = losses(tmp_path / "run", f"train.precision={precision}", f"train.compile={compiled}")
    assert found == pytest.approx(reference, rel=tolerance)


@pytest.mark.skipif(ON_CPU, reason="a CPU has no fp16")
def test_fp16_with_its_scaler_learns(tmp_path, reference):
    found = losses(tmp_path / "run", "train.precision=fp16")
    # the scaler skips the first updates, so that the losses lag behind
    assert found[-1] == pytest.approx(reference[-1], rel=0.3)


def test_deterministic_runs_are_equal_and_survive_a_kill(tmp_path):
    outcomes = []
    for name in ("whole", "killed"):
        (folder := tmp_path / name).mkdir()
        config = write_config(folder, DIGITS, folder / "out")
        settings = ("train.deterministic=true", "train.precision=bf16")
        if name == "killed":
            process = subprocess.Popen(command(config, *settings), cwd=ROOT)
            while process.poll() is None and not list(folder.glob("out/checkpoints/update-*")):
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
        run(config, *settings)
        outcomes.append(outcome(folder / "out"))
    assert outcomes[0] == outcomes[1]


@needs_two
@pytest.mark.parametrize("launcher", [TORCHRUN, FSDP2], ids=["nccl", "fsdp2"])
def test_two_devices_train_like_one(tmp_path, reference, launcher):
    found = losses(
        tmp_path / "run", "train.compile=false", "train.precision=fp32", launcher=launcher
    )
    assert found == pytest.approx(reference, rel=1e-2)


@pytest.mark.skipif(ON_CPU, reason="only a GPU can wait")
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_batches_are_pinned_and_no_step_waits_for_the_device(tmp_path, compiled):
    path = write_config(tmp_path, LIPSFORMER, tmp_path / "out")
    settings = [f"train.compile={compiled}", "train.precision=bf16", "augment.mixup=0.8"]
    config = read_config(Config, str(path), settings)
    parts = assemble(config, start(config), None)
    parts.state.model.train()
    for step, (batches, count) in enumerate(parts.train_batches.epoch(0)):
        assert all(tensor.is_pinned() for batch in batches for tensor in batch)
        torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
        try:
            train_step(parts.state, batches, count, step, parts.transform)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step == 5:
            break
