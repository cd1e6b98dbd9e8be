"""FSDP2 gives the figures of DDP; its checkpoints are those of one plain model."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

from tests.launch import Event, launch
from tests.runs import DIGITS, outcome, write_config

TWO = ["train.batch_size_per_device=24"]

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def run(folder: Path, *, sharded: bool, event: Event | None = None) -> dict[str, Any] | None:
    folder.mkdir(exist_ok=True)
    config = write_config(folder, DIGITS, folder / "out")
    arguments = ["--config", str(config), *TWO]
    codes = launch(arguments, folder / "log", world_size=2, sharded=sharded, event=event)
    if event is not None:
        assert codes == [-signal.SIGKILL] * 2
        return None
    assert codes == [0, 0], (folder / "log.0").read_text()
    return outcome(folder / "out")


def engine(folder: Path) -> str:
    return json.loads((folder / "out" / "environment.json").read_text())[-1]["distributed"]


def test_sharded_run_resumes_and_equals_ddp(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", sharded=True)
    assert engine(tmp_path / "whole") == "FSDP"
    run(tmp_path / "killed", sharded=True, event=Event("torch.optim", "AdamW.step", 9))
    assert run(tmp_path / "killed", sharded=True) == whole

    # The same run by DDP, to rounding; and one that begins as the one and ends as the other.
    run(tmp_path / "mixed", sharded=True, event=Event("torch.optim", "AdamW.step", 9))
    plain, mixed = run(tmp_path / "ddp", sharded=False), run(tmp_path / "mixed", sharded=False)
    assert engine(tmp_path / "mixed") == "MULTI_CPU"
    assert whole is not None
    for other in (plain, mixed):
        assert other is not None
        for a, b in zip(whole["records"], other["records"], strict=True):
            assert b == {**b, "kind": a["kind"], "update": a["update"]}
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)

    # Full weights, EMA included, in a process that knows nothing of shards.
    folder = max((tmp_path / "whole" / "out" / "checkpoints").iterdir())
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    reference = max((tmp_path / "ddp" / "out" / "checkpoints").iterdir())
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in ("model.safetensors", "ema.safetensors"):
        weights, expected = load_file(folder / name), load_file(reference / name)
        assert {key: tensor.shape for key, tensor in weights.items()} == shapes
        for key, tensor in expected.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-2, atol=1e-3)
