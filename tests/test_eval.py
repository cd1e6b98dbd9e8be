"""eval.py reads everything from a checkpoint, and finds what training's last evaluation found."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models._hub import save_config_for_hf

import eval as evaluation
from data import build_eval_dataset
from lipsformer._configfile import make_config, read_config
from lipsformer.analysis.bounds import image_domain, lipschitz_bound
from lipsformer.config import Config, DataConfig
from lipsformer.engine.build import build_model, timm_config
from lipsformer.engine.initial_weights import load_initial_weights
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.run_folder import RunFolder
from tests.engine.conftest import fresh_process  # noqa: F401
from tests.runs import DIGITS, write_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.launch import launch

    folder = tmp_path_factory.mktemp("run")
    config = write_config(folder, DIGITS, folder / "out")
    arguments = ["--config", str(config), "run.trackers=[tensorboard]"]
    assert launch(arguments, folder / "log") == [0], (folder / "log.0").read_text()
    return folder / "out"


def evaluate(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    file = tmp_path / "records.json"
    assert evaluation.main([*arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_same_figures_as_the_last_evaluation_of_training(tmp_path: Path, run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    trained = {r["kind"]: r for r in map(json.loads, lines) if r["kind"] != "train"}
    (last,) = evaluate(tmp_path, "--checkpoint", str(run), "--weights", "last")
    assert last["kind"] == max(("ema", "raw"), key=lambda kind: trained[kind]["top1"])
    for name, kind in {"model.safetensors": "raw", "ema.safetensors": "ema"}.items():
        file = max((run / "checkpoints").iterdir()) / name
        (record,) = evaluate(tmp_path, "--checkpoint", str(file))
        assert (record["kind"], record["weights"], record["update"]) == (kind, str(file), 28)
        for key in ("top1", "top5", "loss", "images"):
            assert record[key] == trained[kind][key]


def test_a_run_stands_for_its_best_weights(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture
) -> None:
    """Also if they are not the newest, and whichever kind they are."""
    records = RunFolder(run).metrics()
    evaluations = [r for r in records if r["kind"] in ("raw", "ema")]
    best = max(evaluations, key=lambda r: r["top1"])
    (found,) = evaluate(tmp_path, "--checkpoint", str(run))
    assert found["top1"] == best["top1"]
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"weights     {found['weights']} (update {found['update']}, epoch ")
    assert line.endswith(f"top-1 {best['top1']:.2f} %)")
    # The first epoch's raw weights, were they the best.
    changed = tmp_path / "changed"
    shutil.copytree(run, changed)
    first, newest = sorted((changed / "checkpoints").iterdir())[-2:]
    state = json.loads((newest / "state.json").read_text())
    state["best"] = {"epoch": 1, "update": int(first.name[-9:]), "weights": "raw", "top1": 99.0}
    write_state(newest, state)
    weights = RunFolder(changed).weights()
    assert (weights.file, weights.kind) == (first / "model.safetensors", "raw")
    assert RunFolder(changed).weights("last").folder == newest
    with pytest.raises(ValueError, match="which='lsat' must be 'best' or 'last'"):
        RunFolder(changed).weights("lsat")
    shutil.rmtree(first)
    with pytest.raises(CheckpointError, match=f"{first} cannot be used: it is incomplete"):
        RunFolder(changed).weights()


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    content = (checkpoint / "state.json").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    manifest["state.json"] = {"bytes": len(content), "sha256": digest}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_any_batch_size_and_any_way_to_name_the_weights(tmp_path: Path, run: Path) -> None:
    folder = max((run / "checkpoints").iterdir())
    (record,) = evaluate(tmp_path, "--checkpoint", str(folder))
    (other,) = evaluate(tmp_path, "--checkpoint", str(folder), "--batch-size", "7")
    assert {**other, "loss": 0} == {**record, "loss": 0}
    assert other["loss"] == pytest.approx(record["loss"], rel=1e-6)
    file = Path(record["weights"])
    assert evaluate(tmp_path, "--checkpoint", str(file)) == [{**record, "checkpoint": str(file)}]
    bare = tmp_path / "bare.safetensors"
    save_file({f"module.{k}": v for k, v in load_file(file).items()}, bare)
    config = ["--config", str(run / "config.yaml")]
    found = evaluate(tmp_path, "--checkpoint", str(bare), *config)
    own = {"checkpoint": str(bare), "weights": str(bare), "kind": None, "update": None}
    assert found == [{**record, **own}]


def test_a_run_in_bf16_is_evaluated_in_bf16(tmp_path: Path, run: Path) -> None:
    file = max((run / "checkpoints").iterdir()) / "model.safetensors"
    (trained,) = (r for r in RunFolder(run).metrics()[-2:] if r["kind"] == "raw")  # in fp32
    text = (run / "config.yaml").read_text().replace("precision: fp32", "precision: bf16")
    (tmp_path / "bf16.yaml").write_text(text)
    arguments = ["--checkpoint", str(file)]
    (found,) = evaluate(tmp_path, *arguments, "--config", str(tmp_path / "bf16.yaml"))
    assert evaluate(tmp_path, *arguments, "--precision", "bf16") == [found]
    assert found["loss"] != trained["loss"]
    assert found["loss"] == pytest.approx(trained["loss"], rel=1e-2)


def test_a_checkpoint_is_a_timm_folder(tmp_path: Path, run: Path) -> None:
    folder = max((run / "checkpoints").iterdir())
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    weights = load_file(folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    config = timm.data.resolve_data_config(model=model)
    assert config["input_size"] == (3, 16, 16)
    assert config["crop_pct"] == 1.0
    assert json.loads((folder / "config.json").read_text())["label_names"] == list("0123456789")
    # Without the run's config.yaml, config.json gives the preprocessing and --data the images.
    (tmp_path / "card").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "card" / name).write_bytes((folder / name).read_bytes())
    arguments = ["--checkpoint", str(tmp_path / "card"), "--data", "source=digits", "num_workers=0"]
    found = evaluate(tmp_path, *arguments)
    expected = evaluate(tmp_path, "--checkpoint", str(folder / "model.safetensors"))[0]
    assert found[0]["top1"] == expected["top1"]
    assert found[0]["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_images_and_classes_that_the_model_does_not_take_end_in_one_line(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture
) -> None:
    options = ["--checkpoint", str(run), "--data", "img_size=33"]
    assert evaluation.main(options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "does not take images of data.img_size=33: " in error
    few = timm.create_model("lipsformer_swin_nano", num_classes=7, embed_dim=8, num_heads=(1,) * 4)
    save_file(few.state_dict(), tmp_path / "model.safetensors")
    save_config_for_hf(few, str(tmp_path / "config.json"))  # without the names of its classes
    assert evaluation.main(["--checkpoint", str(tmp_path), "--data", "source=digits"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "have 10 classes and the model 7 outputs" in error


def test_a_split_is_not_mistaken_for_the_held_out_images(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture
) -> None:
    options = ["--checkpoint", str(run), "--data", "val_split=val", "holdout=0.1"]
    assert evaluation.main(options) == 2
    assert "val_split=val has no effect, because data.holdout=0.1" in capsys.readouterr().err
    (held_out,) = evaluate(tmp_path, *options[:3], "holdout=0.1")
    (split,) = evaluate(tmp_path, *options[:-1], "holdout=0")
    assert (held_out["images"], split["images"]) == (139, 360)


def test_a_run_folder_tells_how_it_was_made(run: Path) -> None:
    (start,) = json.loads((run / "environment.json").read_text())
    assert start["world_size"] == 1
    assert start["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert "global batch 96 = 1 processes x 24 x 4 micro-batches" in start["batch"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["updates"] == 28
    assert summary["best"]["weights"] in ("raw", "ema")
    assert sorted(p.name for p in (run / "plots").iterdir()) == [
        "accuracy.png",
        "grad_norm.png",
        "loss.png",
        "lr.png",
    ]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [r["update"] for r in records if r["kind"] == "train"]
    assert updates == [1, 2, 3, 4, 5, 8, 12, 14, 16, 20, 24, 28]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard" / "lipsformer")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == updates
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(
        [r["loss"] for r in records if r["kind"] == "train"]
    )


def test_fine_tuning_takes_all_weights_but_a_head_of_other_classes(run: Path) -> None:
    folder = max((run / "checkpoints").iterdir())
    file = folder / "ema.safetensors"
    config = read_config(Config, run / "config.yaml", [f"model.checkpoint={file}"])
    weights = load_file(file)

    def initial(classes: str) -> dict[str, torch.Tensor]:
        model = build_model(config, list(classes))
        load_initial_weights(config, model)
        return model.state_dict()

    same = initial("0123456789")
    assert all(torch.equal(same[name], weights[name]) for name in weights)
    other = initial("abc")
    fresh = {name for name in weights if other[name].shape != weights[name].shape}
    assert fresh == {"head.weight", "head.bias"}
    assert all(torch.equal(other[n], weights[n]) for n in weights if n not in fresh)


def test_certified_and_attacked_accuracy(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture
) -> None:
    torch.manual_seed(1)
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
    model = timm.create_model("lipsformer_vit_tiny", num_classes=10, **small).eval()
    mean, std = (0.4, 0.5, 0.6), (0.5, 0.25, 0.3)
    model.pretrained_cfg |= {"input_size": (3, 16, 16), "mean": mean, "std": std, "crop_pct": 1.0}
    (tmp_path / "config.json").write_text(timm_config(model, list("0123456789")))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    data = ["--data", "source=digits", "num_workers=0"]
    arguments = ["--checkpoint", str(tmp_path), *data, "--certify", "1e-6", "36/255"]
    (record,) = evaluate(tmp_path, *arguments)
    text = capsys.readouterr().out
    assert "within 0.1412 (2-norm): certified" in text and "(executed: the float32 program" in text
    assert (tmp_path / "certificate.json").exists()

    found = lipschitz_bound(model, image_domain((16, 16), mean, std))
    bound = found.value / 0.25
    assert record["pixel_bound_log10"] == pytest.approx(math.log10(bound))
    rounding = record["logit_rounding"]
    assert rounding == pytest.approx(found.output.error)
    settings = {"source": "digits", "img_size": 16, "crop_pct": 1.0}
    images = build_eval_dataset(make_config(DataConfig, [settings], origin=""), classes=None)
    rows = model.head.weight.detach().double()
    before = bound / torch.linalg.matrix_norm(rows, 2)  # the constant without the classifier
    radii = {"least": [], "certified_real": []}  # least: with the error of the whole domain
    for image, label in (images[i] for i in range(len(images))):
        pixels = torch.as_tensor(image).permute(2, 0, 1).double() / 255
        pixels = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
        with torch.no_grad():
            logits = model.double()(pixels[None])[0]
        others = torch.arange(10) != label
        constants = before * (rows[label] - rows[others]).norm(dim=1)
        for kind, error in (("least", rounding), ("certified_real", 0.0)):
            margins = logits[label] - logits[others] - math.sqrt(2.0) * error
            radii[kind].append((margins / constants).min().item())
    for row, eps in zip(record["robustness"], (1e-6, 36 / 255), strict=True):
        assert row["eps"] == eps
        least, real = (100 * sum(r > eps for r in radii[kind]) / 360 for kind in radii)
        assert row["certified_real"] == pytest.approx(real)
        assert (
            least - 1e-9
            <= row["certified"]
            <= row["certified_real"]
            <= row["pgd"]
            <= record["top1"]
        )
    assert record["robustness"][0]["certified_real"] > 0.0
    assert record["robustness"][1]["pgd"] < record["top1"]

    for bad, part in ((["--certify", "0"], "--certify=0"), (["--certify"], "LayerNorm")):
        assert evaluation.main(["--checkpoint", str(run), *bad]) == 2
        error = capsys.readouterr().err
        assert part in error and error.count("\n") == 1
