"""Runs of the version before checkpoint format 2: their weights load, they cannot be continued.

`before_rebuild/` is such a run, made by that version: a small LipsFormer on digits of 16 pixels,
two epochs, EMA 0.8. Its parameters have the names that they had then.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import eval as evaluation
import train
from lipsformer.engine.build import build_model
from lipsformer.engine.initial_weights import load_initial_weights
from lipsformer.engine.run_folder import RunFolder
from lipsformer.engine.weights import load_model
from scripts import export_model, measure_lipschitz

OLD = Path(__file__).with_name("before_rebuild")
RECORDED = {"raw": 66.38888888888889, "ema": 67.22222222222223}  # top-1 of its last evaluation


def test_the_folder_is_what_it_says() -> None:
    state = json.loads((OLD / "checkpoints" / "update-000000058" / "state.json").read_text())
    assert state["format"] == 1
    assert {kind: state["history"][-1][kind]["top1"] for kind in RECORDED} == RECORDED


@pytest.mark.parametrize("kind", RECORDED)
def test_evaluation_finds_the_recorded_accuracy(tmp_path: Path, kind: str) -> None:
    file = {"raw": "model", "ema": "ema"}[kind]
    path = OLD / "checkpoints" / "update-000000058" / f"{file}.safetensors"
    records = tmp_path / "records.json"
    assert evaluation.main(["--checkpoint", str(path), "--json", str(records)]) == 0
    (record,) = json.loads(records.read_text())
    assert record["top1"] == pytest.approx(RECORDED[kind])
    assert (record["kind"], record["update"]) == (kind, 58)


def test_every_command_takes_the_best_weights_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    line = (
        f"weights     {OLD}/checkpoints/update-000000058/ema.safetensors "
        "(update 58, epoch 2, EMA, top-1 67.22 %)"
    )
    assert evaluation.main(["--checkpoint", str(OLD)]) == 0
    assert capsys.readouterr().out.startswith(line)
    assert measure_lipschitz.main([str(OLD), "--images", "1", "--iters", "1"]) == 0
    assert capsys.readouterr().out.startswith(line)
    assert export_model.main([str(OLD), str(tmp_path / "hub"), "--formats", "hf"]) == 0
    assert capsys.readouterr().out.startswith(line)
    exported = load_model(tmp_path / "hub").eval()
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(exported(images), load_model(OLD).eval()(images))
    assert "| top-1 accuracy (%) | 67.22 |" in (tmp_path / "hub" / "README.md").read_text()


def test_fine_tuning_begins_with_its_weights() -> None:
    config = RunFolder(OLD).config([f"model.checkpoint={OLD}"])
    images = torch.randn(2, 3, 16, 16)
    expected = load_model(OLD).eval()(images)
    model = build_model(config, list("0123456789"))
    load_initial_weights(config, model)
    torch.testing.assert_close(model.eval()(images), expected, rtol=0, atol=0)


def test_continuing_is_refused_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(OLD, run)
    arguments = ["--config", str(run / "config.yaml"), f"run.output_dir={run}"]
    assert train.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    checkpoint = run / "checkpoints" / "update-000000058"
    assert f"{checkpoint} has checkpoint format 1 of another version" in error
    assert f"model.checkpoint={checkpoint} and another run.output_dir" in error
    assert not (run / "plots").exists()
