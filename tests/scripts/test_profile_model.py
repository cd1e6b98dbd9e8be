"""The command line of the profiles: figures, text and mistakes."""

import json

import pytest
import torch

from lipsformer._errors import ConfigError
from scripts.profile_model import main, profile_model, table

OPTIONS = {
    "img_size": None,
    "batch_size": 2,
    "precision": "fp32",
    "device": "cpu",
    "train": False,
    "repeats": 1,
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_and_mode_change_nothing_that_is_counted(precision, train):
    options = {**OPTIONS, "precision": precision, "train": train}
    record = profile_model("lipsformer_swin_nano", **options)
    assert record["parameters"] == 2_367_906
    assert record["gmacs"] == pytest.approx(0.032493568)
    assert sum(part["macs"] for part in record["parts"]) == round(record["gmacs"] * 1e9)
    assert record["images_per_second"] > 0
    assert record["mode"] == ("train" if train else "inference")


def test_image_size_reaches_models_with_and_without_a_fixed_one():
    options = {**OPTIONS, "img_size": 64}
    vit = profile_model("vit_tiny_patch16_224", **options)
    assert {part["name"]: part["output"] for part in vit["parts"]}["patch_embed"] == (16, 192)
    swin = profile_model("lipsformer_swin_nano", **options)
    assert {part["name"]: part["output"] for part in swin["parts"]}["stages.3"] == (4, 4, 256)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        (
            "lipsformer_nano",
            33,
            "--img-size 33 is not possible for lipsformer_nano: img_size=33 is",
        ),
        ("resnet18", -1, "--img-size -1 is not possible for resnet18: it must be at least 1"),
        ("lipsformer_contractive_nano", 64, r"--img-size 64 is not .* must be \(32, 32\)"),
        ("vit_tiny_patch16_224", 5, "--img-size 5 is not possible for vit_tiny_patch16_224: Input"),
        ("local-dir:nowhere", None, "the model 'local-dir:nowhere' cannot be built: Config file"),
    ],
)
def test_models_that_are_not_there_or_take_no_such_images_are_named(name, size, message):
    with pytest.raises(ConfigError, match=message):
        profile_model(name, **{**OPTIONS, "img_size": size})


def test_table_holds_the_totals():
    text = table(profile_model("lipsformer_nano", **OPTIONS)).splitlines()
    assert text[0] == "lipsformer_nano  3x32x32"
    assert text[-2].split() == ["total", "2,371,528", "0.0327", "399,592"]
    assert text[-1].startswith("  inference, fp32, batch 2: ")


@pytest.mark.slow
def test_command_line_writes_a_record_of_each_model(tmp_path, capsys):
    names = ["lipsformer_swin_nano", "lipsformer_nano"]
    file = tmp_path / "records.json"
    quick = ["--batch-size", "1", "--repeats", "1"]
    assert main([*names, "--json", str(file), *quick]) == 0
    printed = capsys.readouterr().out
    records = json.loads(file.read_text())
    assert [record["model"] for record in records] == names
    assert [record["parameters"] for record in records] == [2_367_906, 2_371_528]
    assert all(record["torch"] == torch.__version__ for record in records)
    assert all(f"{record['images_per_second']:.1f} images/s" in printed for record in records)
    assert main([*names, "--json", "-", *quick]) == 0
    output, errors = capsys.readouterr()
    assert [record["gmacs"] for record in json.loads(output)] == [r["gmacs"] for r in records]
    assert errors.count("images/s") == 2


def test_a_file_for_the_figures_that_cannot_be_written_is_named(capsys):
    assert main(["lipsformer_nano", "--json", "/nowhere/at/all"]) == 2
    error = capsys.readouterr().err
    assert "--json '/nowhere/at/all' cannot be written: No such file" in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lipsformer_tny"], "'lipsformer_tny' is no timm model, did you mean 'lipsformer_tiny'"),
        (["lipsformer_nano", "--precision", "fp8"], "invalid choice: 'fp8'"),
        (["lipsformer_nano", "--image-size", "32"], "unrecognized arguments"),
        (["lipsformer_nano", "--repeats", "0"], "--repeats 0: must be >= 1"),
        (["lipsformer_nano", "--device", "gpu"], "--device gpu: PyTorch finds no such device"),
        (["lipsformer_nano", "--device", "cuda:99"], "--device cuda:99: PyTorch finds no such"),
        (["lipsformer_nano", "--device", "cpu:x"], "use one of ['cpu'"),
        (["lipsformer_nano", "--batch-size", "0"], "--batch-size 0: must be >= 1"),
    ],
)
def test_mistakes_are_named(capsys, argv, message):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert message in capsys.readouterr().err
