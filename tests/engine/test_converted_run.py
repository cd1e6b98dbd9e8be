"""`model.convert: true`: a run trains, continues, evaluates and passes on a converted model."""

import json
from pathlib import Path

import pytest
import timm
import torch
from timm.models._hub import save_for_hf

import eval as evaluation
import train
from lipsformer import convert
from lipsformer.engine.weights import load_model
from tests.runs import DIGITS, write_config

SHAPE = {"patch_size": 8, "embed_dim": 22, "depth": 2, "num_heads": 2}
LARGE = ["train.global_batch_size=479", "train.batch_size_per_device=479", "train.epochs=1"]
NAME = "deit_tiny_distilled_patch16_224"


def settings(**model: object) -> dict:
    return {**DIGITS, "model": {"name": NAME, "kwargs": SHAPE, "convert": True, **model}}


def test_a_converted_model_is_trained_evaluated_and_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = {"attn": "lipschitznorm", "residual_scale": 0.3}
    out = tmp_path / "out"
    config = write_config(tmp_path, settings(convert_kwargs=arguments), out)
    assert train.main(["--config", str(config), *LARGE]) == 0
    records = tmp_path / "records.json"
    assert evaluation.main(["--checkpoint", str(out), "--json", str(records)]) == 0
    recorded = json.loads((out / "summary.json").read_text())["best"]["top1"]
    assert json.loads(records.read_text())[0]["top1"] == recorded
    trained = load_model(out).eval()
    assert trained.blocks[0].ls1.gamma.shape == (22,)  # pyright: ignore

    # a second run begins with its weights, and one that would not convert is told to
    again = write_config(tmp_path, settings(convert_kwargs=arguments), tmp_path / "again")
    more = [f"model.checkpoint={out}", "optim.lr=0", "schedule.min_lr=0", "train.ema_decay=null"]
    assert train.main(["--config", str(again), *LARGE, *more]) == 0
    begun = load_model(tmp_path / "again").state_dict()
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(begun[name], tensor, rtol=0, atol=0)
    capsys.readouterr()
    plain = ["model.convert=false", f"model.checkpoint={out}"]
    config = write_config(tmp_path, settings(), tmp_path / "plain")
    assert train.main(["--config", str(config), *LARGE, *plain]) == 2
    assert "holds a converted model; set model.convert=true" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["folder", "file"])
def test_trained_weights_are_converted_only_if_they_are_kept(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch.manual_seed(2)
    overlay = {"input_size": (3, 16, 16), "num_classes": 10}
    source = timm.create_model(NAME, num_classes=10, pretrained_cfg_overlay=overlay, **SHAPE)
    if form == "folder":
        save_for_hf(source, tmp_path / "source", safe_serialization=True)
    else:
        torch.save({"state_dict": source.state_dict()}, tmp_path / "source")
    checkpoint = f"model.checkpoint={tmp_path / 'source'}"
    config = write_config(tmp_path, settings(), tmp_path / "out")
    command = ["--config", str(config), *LARGE, checkpoint]
    assert train.main(command) == 2
    assert "set model.convert_kwargs.spectral_init=false" in capsys.readouterr().err
    still = ["optim.lr=0", "schedule.min_lr=0", "train.ema_decay=null"]
    assert train.main([*command, *still, "model.convert_kwargs={spectral_init: false}"]) == 0
    expected = convert(source, spectral_init=False).state_dict()
    for name, tensor in load_model(tmp_path / "out").state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
