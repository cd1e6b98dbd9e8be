"""A run that diverges stops with its numbers, and the replay names where it began."""

import json
from pathlib import Path

import pytest

import train
from data.rng import permutation
from lipsformer.engine.exits import EXIT_NONFINITE
from scripts import replay
from tests.engine.conftest import fresh_process  # noqa: F401
from tests.launch import launch
from tests.runs import DIGITS, write_config


@pytest.mark.parametrize("saved", [False, True])
def test_divergence_is_stopped_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture, saved: bool
) -> None:
    """Weights of 1e36 after the first update make the second one overflow."""
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    arguments = ["--config", str(config), "optim.lr=1e36", "optim.weight_decay=0"]
    arguments.append("train.max_nonfinite_updates=0")
    if saved:
        arguments.append("run.save_every_updates=1")
    assert train.main(arguments) == EXIT_NONFINITE
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not finite at update 1 (lr 9.97e+35, loss nan" in error
    assert "last finite update 0: lr 1e+36, loss 2.299, gradient norm 1.088" in error
    kept = sorted(path.name for path in (tmp_path / "out").glob("checkpoints/*"))
    assert kept == (["update-000000001"] if saved else [])

    assert replay.main([str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["update"] == 1
    assert found["samples"] == permutation(1437, "order", 1, 0)[96:192].tolist()
    assert found["loss"] == "nan"
    assert found["inputs"] == found["weights"] == []
    assert found["outputs"][0] == "patch_embed.proj (Conv2d)"
    assert "head.weight" in found["gradients"]
    if saved:
        (tmp_path / "out/checkpoints/update-000000001/optimizer.safetensors").unlink()
        assert replay.main([str(tmp_path / "out")]) == 2
        assert "is lost: optimizer.safetensors is missing" in capsys.readouterr().err


def test_a_healthy_run_has_nothing_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert replay.main([str(tmp_path)]) == 2
    assert "has no replay.json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.dist
def test_the_update_of_two_ranks_is_replayed_on_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With mixup and drop path, whose random numbers belong to a rank, and micro-batches."""
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    arguments = ["--config", str(config), "train.epochs=1", "run.save_every_updates=3"]
    arguments += ["train.global_batch_size=192", "run.keep=1", "run.log_every=1"]
    assert launch(arguments, tmp_path / "log", world_size=2) == [0, 0]
    records = [json.loads(s) for s in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    (expected,) = [r for r in records if r["kind"] == "train" and r["update"] == 5]

    # As if update 4 of 7 had been the one that failed.
    record = {"update": 4, "samples": [], "checkpoint": None, "world_size": 2}
    for key in ("samples_per_micro_batch", "micro_batch"):  # today's name and the earlier one
        (tmp_path / "out" / "replay.json").write_text(json.dumps({**record, key: 24}))
        assert replay.main([str(tmp_path / "out")]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["loss"] == f"{expected['loss']:.6g}"
        assert found["grad_norm"] == f"{expected['grad_norm']:.6g}"
