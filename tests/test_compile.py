"""A compiled run is the run that was not compiled, up to rounding, and so is its average."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch
from tests.runs import DIGITS, write_config

# Three equal batches of 32 px make one graph for training.
SMALL: dict[str, Any] = {
    **DIGITS,
    "model": {
        "name": "lipsformer_nano",
        "kwargs": {"depths": [1, 1, 1, 1], "drop_path_rate": 0.0},
    },
    "data": {**DIGITS["data"], "img_size": 32},
    "train": {"epochs": 1, "global_batch_size": 479, "precision": "fp32", "ema_decay": 0.9},
    "optim": {"lr": 1e-3, "clip_grad": 1.0},
}


def losses(folder: Path, compiled: bool) -> dict[tuple[str, int], float]:
    folder.mkdir()
    path = write_config(folder, SMALL, folder / "out")
    log = folder / "log"
    codes = launch(["--config", str(path), f"train.compile={str(compiled).lower()}"], log)
    assert codes == [0], log.read_text()
    records = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return {(r["kind"], r["update"]): r["loss"] for r in records}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_run_equals_the_eager_one(tmp_path: Path) -> None:
    eager = losses(tmp_path / "eager", compiled=False)
    assert {kind for kind, _ in eager} == {"train", "raw", "ema"}
    assert losses(tmp_path / "compiled", compiled=True) == pytest.approx(eager, rel=1e-3)
