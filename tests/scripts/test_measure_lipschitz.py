import json
import math

import pytest
import timm
import torch

from data import Normalize, build_eval_dataset, collate
from lipsformer.analysis.bounds import image_domain, lipschitz_bound
from lipsformer.config import DataConfig
from scripts.measure_lipschitz import load_images, main, measure, table


@pytest.mark.slow
def test_record_table_and_plot_of_a_model(tmp_path, capsys):
    torch.manual_seed(0)
    options = ["--data", "source=digits", "--images", "1", "--iters", "2", "--ascent", "1"]
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png")]
    assert main(["lipsformer_swin_nano", *options, *files]) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    total = record["rows"][0]
    assert total["name"] == "" and total["kind"] == "LipsFormerSwin"
    model = timm.create_model("lipsformer_swin_nano")
    parts = [row for row in record["rows"] if row["kind"] == "LipsFormerBlock"]
    assert len(parts) == sum(len(stage.blocks) for stage in model.stages)
    for row in record["rows"]:
        assert row["estimate"] <= row["bound"] + 1e-5 and row["bound"] <= row["paper_bound"] + 1e-9
        assert row["slack"] == row["bound"] - row["estimate"]
    chained = [row for row in record["rows"] if row["name"] in ("patch_embed", "stages", "head")]
    norm = next(row for row in record["rows"] if row["name"] == "norm")
    product = sum(row["bound"] for row in [*chained, norm])
    assert math.isclose(total["bound"], product, rel_tol=1e-9)
    assert f"{total['bound']:9.3f}" in capsys.readouterr().out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("data", "images"),
    [
        ("random images", "random images"),
        (["source=digits", "img_size=32"], "images of source=digits img_size=32"),
    ],
)
def test_the_table_names_the_images_of_the_estimates(data, images):
    record = {"model": "a model", "norm": "a norm", "data": data, "rows": []}
    assert table(record, 1).startswith(f"a model, a norm; estimates on {images}\n")


def test_images_that_the_model_does_not_take_are_refused_in_one_sentence(tmp_path, capsys):
    written = tmp_path / "record.json"
    arguments = ["lipsformer_swin_nano", "--data", "source=digits", "img_size=33"]
    assert main([*arguments, "--json", str(written)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "does not take images of 33 x 33 pixels (img_size in --data): image size" in error
    assert not written.exists()


def test_images_are_prepared_as_the_model_says():
    model = timm.create_model("lipsformer_swin_nano", pretrained_cfg_overlay={"crop_pct": 0.5})
    found, _ = load_images(model, ["source=digits"], 3)
    known = {key: model.pretrained_cfg[key] for key in ("mean", "std", "interpolation")}
    data = DataConfig(source="digits", img_size=32, crop_pct=0.5, **known)
    images = build_eval_dataset(data, classes=None)
    pixels, _ = collate([images[i * (len(images) // 3)] for i in range(3)])
    assert torch.equal(found, Normalize(data.mean, data.std)(pixels))


def test_the_bound_is_that_of_the_images_that_are_estimated(tmp_path):
    """The bound grows with the image, and its radius depends on the normalization."""
    torch.manual_seed(0)
    model = timm.create_model("lipsformer_swin_nano", embed_dim=8, depths=(1,), num_heads=(2,))
    settings = ["source=digits", "img_size=48", "mean=[0.1,0.2,0.3]", "std=[0.7,0.8,0.9]"]
    record = measure("tiny", model, settings, images=1, iters=1, ascent=0)
    domain = image_domain((48, 48), (0.1, 0.2, 0.3), (0.7, 0.8, 0.9))
    assert record["input_size"] == [3, 48, 48] and record["radius"] == domain.radius
    assert record["rows"][0]["bound"] == lipschitz_bound(model, domain).log10


def test_a_plot_that_cannot_be_written_is_told_before_the_work(tmp_path, capsys):
    assert main(["lipsformer_nano", "--plot", str(tmp_path / "no" / "p.png")]) == 2
    output = capsys.readouterr()
    assert "--plot" in output.err and output.out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lipsformer_nana"], "lipsformer_nana"),
        (["resnet18", "--images", "1"], "ResNet"),
        (["lipsformer_nano", "--images", "0"], "--images"),
        (["lipsformer_nano", "--data", "source=folder", "root=/nowhere"], "/nowhere"),
        (["lipsformer_nano", "--data", "surce=digits"], "surce"),
        (
            ["lipsformer_nano", "--data", "source=digits", "--images", "361"],
            "--images=361 is more than the 360 validation images of --data",
        ),
    ],
)
def test_mistakes_end_in_one_line(argv, message, capsys, tmp_path):
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png")]
    assert main([*argv, *files]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_all_validation_images_can_be_measured():
    model = timm.create_model("lipsformer_swin_nano")
    found, _ = load_images(model, ["source=digits"], 360)
    first, _ = load_images(model, ["source=digits"], 1)
    assert len(found) == len(found.unique(dim=0)) == 360
    assert torch.equal(found[:1], first)
