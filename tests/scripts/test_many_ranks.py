"""What a dry run says of many ranks is what two real ones do."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import train
from tests.runs import DIGITS, write_config
from tests.two_ranks import measure

LARGER = {
    **DIGITS,
    "model": {"name": "lipsformer_nano", "kwargs": {"drop_path_rate": 0.2}},
    "data": {**DIGITS["data"], "img_size": 32},
    "train": {**DIGITS["train"], "global_batch_size": 76, "batch_size_per_device": 19},
}


def predict(tmp_path: Path, settings: list[str], *options: str) -> dict[str, Any]:
    file = tmp_path / "predicted.json"
    arguments = ["--config", *settings, "--dry-run", *options, "--json", str(file)]
    assert train.main(arguments) == 0
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_ranks_send_and_hold_what_was_predicted(tmp_path: Path, precision: str) -> None:
    config = str(write_config(tmp_path, LARGER, tmp_path / "out"))
    settings = [config, f"train.precision={precision}"]
    predicted = predict(tmp_path, settings, "--world-size", "2")
    measured = measure(settings, tmp_path / "measured")
    sent = [(r["operation"].replace("_", ""), r["bytes"]) for r in predicted["collectives"]]
    assert Counter(sent) == Counter(map(tuple, measured["sent"]))
    assert predicted["memory"]["peak"] == pytest.approx(measured["peak"], rel=0.1)


@pytest.mark.slow
@pytest.mark.dist
def test_two_sharded_ranks_send_what_was_predicted(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, DIGITS, tmp_path / "out"))
    predicted = predict(tmp_path, [config], "--world-size", "2", "--shard", "2")
    measured = measure([config], tmp_path / "measured", sharded=True)
    names = {"all_gather": "allgather_base", "reduce_scatter": "reduce_scatter_base"}
    sent: Counter[tuple[str, int]] = Counter()
    for row in predicted["collectives"]:
        if row["operation"] in names:
            sent[names[row["operation"]], row["bytes"]] += row["times"]
    found = Counter((name, size) for name, size in measured["sent"] if name in names.values())
    assert sent == found


@pytest.mark.parametrize(
    ("settings", "steps", "images", "left_out"),
    [
        ([], 19, 1437, 0),  # the last update has 51
        (["train.drop_last=true"], 18, 1386, 51),
        (["augment.repeats=3"], 17, 427, 1010),  # 1280 views, which is five times timm's 256
    ],
)
def test_samplers_of_seven_ranks_deal_every_image_once(
    tmp_path: Path, settings: list[str], steps: int, images: int, left_out: int
) -> None:
    config = str(write_config(tmp_path, DIGITS, tmp_path / "out"))
    batch = ["train.global_batch_size=77", "train.batch_size_per_device=11"]
    batch += ["train.drop_last=false", *settings]
    found = predict(tmp_path, [config, *batch], "--world-size", "7")
    assert found["steps_per_epoch"] == steps
    assert found["samplers"] == {
        "ranks": 7,
        "images": images,
        "left_out": left_out,
        "each_image_once": True,
        "updates_as_on_one_rank": True,
        "each_validation_image_once": True,
        "data": "found",
    }


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = str(write_config(tmp_path, DIGITS, tmp_path / "out"))
    for options, message in (
        (["--dry-run", "--world-size", "8", "--shard", "3"], "--shard 3 must be a divisor"),
        (["--dry-run", "--world-size", "0"], "--world-size 0"),
        (["--world-size", "8"], "--world-size 8 needs --dry-run"),
        (["--dry-run", "--world-size", "7"], "cannot be shared by 7 processes"),
    ):
        assert train.main(["--config", config, *options]) == 2
        assert message in capsys.readouterr().err
