"""A run as a folder for the Hub: the same model in timm and transformers, figures of the run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

import eval as evaluation
import lipsformer  # noqa: F401  (registers the models)
from lipsformer.engine.weights import load_model
from scripts.export_model import main
from tests.launch import launch
from tests.runs import DIGITS, outcome, write_config

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = {
    **DIGITS,
    "model": {
        "name": "lipsformer_swin_nano",
        "kwargs": {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 3]},
    },
    "data": {**DIGITS["data"], "crop_pct": 0.8},
    "train": {**DIGITS["train"], "epochs": 1},
    "run": {**DIGITS["run"], "report": False},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    config = write_config(folder, SETTINGS, folder / "run")
    assert launch(["--config", str(config)], folder / "log") == [0], (folder / "log.0").read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def hub(run) -> Path:
    out = run.parent / "hub"
    assert main([str(run), str(out), "--formats", "hf", "--note", "A remark."]) == 0
    return out


def best_model(run: Path) -> torch.nn.Module:
    best = json.loads((run / "summary.json").read_text())["best"]
    folder = run / "checkpoints" / f"update-{best['update']:09d}"
    model = timm.create_model(f"local-dir:{folder}", pretrained=False)
    name = {"raw": "model", "ema": "ema"}[best["weights"]]
    model.load_state_dict(load_file(folder / f"{name}.safetensors"))
    return model.eval()


def photo() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (41, 29, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@torch.no_grad()
def test_timm_gives_the_best_weights_of_the_run(run, hub):
    assert sorted(p.name for p in hub.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "train.yaml",
    ]
    images = torch.randn(3, 3, 16, 16)
    model = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    assert torch.equal(model(images), best_model(run)(images))


@torch.no_grad()
def test_transformers_gives_the_same_logits_labels_and_preprocessing(run, hub):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForImageClassification.from_pretrained(hub).eval()
    assert type(model).__name__ == "TimmWrapperForImageClassification"
    assert model.config.id2label == {i: str(i) for i in range(10)}
    processor = transformers.AutoImageProcessor.from_pretrained(hub)
    pixels = processor(photo(), return_tensors="pt")["pixel_values"]
    plain = best_model(run)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(plain))
    assert torch.equal(pixels, transform(photo())[None])
    expected, found = plain.state_dict(), model.timm_model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    # transformers maps the file: tensors off the kernels' alignment may change the last bit
    torch.testing.assert_close(model(pixels).logits, plain(pixels), rtol=1e-5, atol=1e-6)


def test_card_says_what_an_evaluation_of_the_folder_finds(run, hub, tmp_path):
    record = tmp_path / "record.json"
    options = ["--checkpoint", str(hub), "--data", "source=digits", "num_workers=0"]
    assert evaluation.main([*options, "--json", str(record)]) == 0
    (found,) = json.loads(record.read_text())
    card = ModelCard.load(hub / "README.md")
    values = {r.metric_name: r.metric_value for r in card.data.eval_results}
    assert values == {
        "top-1 accuracy (%)": pytest.approx(found["top1"]),
        "top-5 accuracy (%)": pytest.approx(found["top5"]),
    }
    table = dict(re.findall(r"^\| ([^|]+) \| ([\d.]+) \|$", card.text, re.MULTILINE))
    assert table == {
        "top-1 accuracy (%)": f"{found['top1']:.4g}",
        "top-5 accuracy (%)": f"{found['top5']:.4g}",
        "cross entropy": f"{found['loss']:.4g}",
    }
    assert "On the 360 images of the split `val` of digits" in card.text
    assert "shorter side to 20 pixels (bicubic), center crop of 16" in card.text
    assert "\n\nA remark.\n\n" in card.text and card.data.license == "apache-2.0"
    assert str(run) not in card.content
    assert "tag" not in json.loads((hub / "config.json").read_text())["pretrained_cfg"]


@pytest.mark.slow
def test_command_of_the_card_repeats_the_run(run, hub, tmp_path):
    """It knows the folder of the card only: neither the config file of the run nor its folder."""
    (line,) = re.findall(r"^ {4}(lipsformer .*)$", (hub / "README.md").read_text(), re.MULTILINE)
    shutil.copy(hub / "train.yaml", tmp_path)
    program, *arguments = shlex.split(line.replace("FOLDER", str(tmp_path)))
    assert str(run.parent) not in (hub / "train.yaml").read_text()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", program, *arguments]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    again = outcome(tmp_path / "outputs" / "lipsformer_swin_nano")
    assert again["tensors"] == outcome(run)["tensors"]


def test_card_of_held_out_images_and_of_another_size(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["data"]["holdout"] = 0.2
    config.write_text(yaml.safe_dump(settings))
    out = tmp_path / "hub"
    options = ["--formats", "hf", "--img-size", "32"]
    assert main([str(tmp_path / "run"), str(out), *options]) == 0
    card = ModelCard.load(out / "README.md")
    assert "360 images that were held out of the split `train` of digits" in card.text
    assert "with 16 x 16 pixels" in card.text and "center crop of 32" in card.text
    assert {result.dataset_split for result in card.data.eval_results} == {"train"}
    assert json.loads((out / "config.json").read_text())["pretrained_cfg"]["input_size"][1] == 32


@pytest.mark.slow
def test_code_of_the_card_runs_in_a_new_process(hub):
    pytest.importorskip("transformers")
    codes = re.findall(r"```python\n(.*?)```", (hub / "README.md").read_text(), re.DOTALL)
    assert len(codes) == 2
    for code in codes:
        subprocess.run([sys.executable, "-c", code.replace("FOLDER", str(hub))], check=True)


def test_an_unevaluated_checkpoint_is_refused(run, tmp_path, capsys):
    folder = run / "checkpoints"
    before, last = sorted(folder.iterdir())[-2:]
    assert json.loads((before / "state.json").read_text())["update"] == 12  # of 14 in the epoch
    assert main([str(before), str(tmp_path / "a"), "--formats", "hf"]) == 2
    assert "export a checkpoint that was evaluated" in capsys.readouterr().err
    assert main([str(last), str(tmp_path / "b"), "--formats", "hf"]) == 0
    images = torch.randn(2, 3, 16, 16)
    model = timm.create_model(f"local-dir:{tmp_path / 'b'}", pretrained=True).eval()
    assert torch.equal(model(images), load_model(last).eval()(images))
    assert main([str(tmp_path), str(tmp_path / "c")]) == 2
    assert "neither a run, nor a checkpoint" in capsys.readouterr().err


def test_a_checkpoint_that_left_its_run_is_refused(run, tmp_path, capsys):
    alone = shutil.copytree(max((run / "checkpoints").iterdir()), tmp_path / "copies" / "best")
    assert main([str(alone), str(tmp_path / "out"), "--formats", "hf"]) == 2
    error = capsys.readouterr().err
    assert (
        f"error: {tmp_path} has no config.yaml, which the model card needs: put best back" in error
    )
    shutil.copy(run / "config.yaml", tmp_path)
    assert main([str(alone), str(tmp_path / "out"), "--formats", "hf"]) == 2
    assert f"error: {tmp_path} has no environment.json, " in capsys.readouterr().err
