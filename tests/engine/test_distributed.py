"""Two and three processes give the gradient, the lr trace and the counts of one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import eval as evaluation
from lipsformer.engine.distributed import make_accelerator
from tests.launch import Event, launch
from tests.runs import DIGITS, write_config

# Without what is drawn per rank, so that the mathematics is the same on any number of processes.
PLAIN = {
    **DIGITS,
    "model": {
        "name": "vit_tiny_patch16_224",
        "kwargs": {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2},
    },
    "augment": {"hflip": 0.0},
    "train": {
        "epochs": 1,
        "global_batch_size": 96,
        "precision": "fp32",
        "ema_decay": 0.9,
        "drop_last": False,  # the last group has 93 samples
        "eval_batch_size": 64,
    },
    "run": {"log_every": 1, "dense_updates": 0, "keep": 20, "save_every_updates": 1},
}


def result(folder: Path, world_size: int, *overrides: str) -> tuple[Path, list[dict]]:
    folder.mkdir()
    config = write_config(folder, PLAIN, folder / "out")
    arguments = ["--config", str(config), *overrides]
    codes = launch(arguments, folder / "log", world_size=world_size)
    assert codes == [0] * world_size, (folder / "log.0").read_text()
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return folder / "out", [json.loads(line) for line in lines]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, ["train.batch_size_per_device=16", "train.eval_batch_size=7"]),
        pytest.param(3, ["train.eval_batch_size=50"], marks=pytest.mark.slow),
    ],
)
def test_processes_do_not_change_the_mathematics(
    tmp_path: Path, world_size: int, overrides: list[str]
) -> None:
    one, one_records = result(tmp_path / "one", 1)
    many, many_records = result(tmp_path / "many", world_size, *overrides)

    first = "checkpoints/update-000000001/optimizer.safetensors"
    moments = load_file(one / first), load_file(many / first)
    for name, moment in moments[0].items():
        if name.endswith("exp_avg"):  # a tenth of the first gradient
            torch.testing.assert_close(moments[1][name], moment, rtol=1e-4, atol=1e-7)

    for a, b in zip(one_records, many_records, strict=True):
        assert (a["kind"], a["update"]) == (b["kind"], b["update"])
        if a["kind"] == "train":
            assert a["lr"] == b["lr"]
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    assert [r["images"] for r in many_records if r["kind"] != "train"] == [360, 360]


@pytest.mark.slow
@pytest.mark.dist
def test_evaluation_counts_are_those_of_one_process(tmp_path: Path) -> None:
    """The same weights: a run of lr 0 keeps its initial ones on any number of processes."""
    found = []
    for world_size, batch_size in ((1, 64), (2, 7), (3, 360)):
        _, records = result(
            tmp_path / str(world_size),
            world_size,
            "optim.lr=0",
            "schedule.min_lr=0",
            "train.global_batch_size=1434",
            "train.drop_last=true",
            f"train.eval_batch_size={batch_size}",
        )
        found.append([r for r in records if r["kind"] != "train"])
    assert [r["kind"] for r in found[0]] == ["raw", "ema"]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert [b[key] for key in ("top1", "top5", "images")] == [
                a[key] for key in ("top1", "top5", "images")
            ]
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.dist
def test_another_number_of_processes_needs_the_option(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = write_config(tmp_path, {**PLAIN, "train": {**PLAIN["train"], "epochs": 2}}, folder)
    arguments = ["--config", str(config)]
    event = Event("lipsformer.engine.steps", "train_step", 18)
    launch(arguments, tmp_path / "log", event=event)
    assert launch(arguments, tmp_path / "refused", world_size=2) == [2, 2]
    message = (tmp_path / "refused.0").read_text()
    assert "1 processes x 96 samples x 1 micro-batches before, 2 x 48 x 1 now" in message
    assert "run.allow_world_size_change=true" in message
    allowed = [*arguments, "run.allow_world_size_change=true"]
    assert launch(allowed, tmp_path / "allowed", world_size=2) == [0, 0]
    assert "mixup, erasing and drop path draw differently" in (tmp_path / "allowed.0").read_text()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["update"] for r in records if r["kind"] == "train"] == list(range(1, 31))


@pytest.mark.slow
@pytest.mark.dist
def test_batch_norm_is_evaluated_with_the_statistics_that_are_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = {"name": "resnet10t", "kwargs": {}}
    train = {**PLAIN["train"], "global_batch_size": 479, "ema_decay": 0.5}
    settings = {**PLAIN, "model": model, "train": train}
    config = write_config(tmp_path, settings, tmp_path / "out")
    arguments = ["--config", str(config), "run.report=false"]
    arguments += ["train.global_batch_size=478", "train.drop_last=true"]
    assert launch(arguments, tmp_path / "log", world_size=2) == [0, 0]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    in_run = {r["kind"]: r for r in map(json.loads, lines) if "top1" in r}
    folder = max((tmp_path / "out" / "checkpoints").iterdir())
    for kind, name in (("raw", "model"), ("ema", "ema")):
        command = ["--checkpoint", str(folder / f"{name}.safetensors")]
        assert evaluation.main([*command, "--json", str(tmp_path / name)]) == 0
        (record,) = json.loads((tmp_path / name).read_text())
        assert record["loss"] == pytest.approx(in_run[kind]["loss"], rel=1e-6)
        assert record["top1"] == in_run[kind]["top1"]


@pytest.mark.parametrize(
    ("precision", "supported", "warned"),
    [("bf16", False, True), ("bf16", True, False), ("fp32", False, False)],
)
def test_a_processor_without_bf16_is_warned_of(
    precision: str, supported: bool, warned: bool, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    make_accelerator(precision)
    assert ("set train.precision=fp32" in caplog.text) == warned
