"""FSDP2 and HSDP give the figures of DDP; their checkpoints are those of one plain model."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

import train
from lipsformer.engine.exits import EXIT_STOPPED
from tests.data.trees import write_tree
from tests.engine.test_distributed import PLAIN
from tests.launch import Event, fsdp2_environment, hsdp_options, launch
from tests.runs import DIGITS, outcome, write_config

TWO = ["train.batch_size_per_device=24"]


def run(folder: Path, *, sharded: bool, event: Event | None = None) -> dict[str, Any] | None:
    folder.mkdir(exist_ok=True)
    config = write_config(folder, DIGITS, folder / "out")
    arguments = ["--config", str(config), *TWO]
    codes = launch(arguments, folder / "log", world_size=2, sharded=sharded, event=event)
    if event is not None:
        assert codes == [-signal.SIGKILL] * 2
        return None
    assert codes == [0, 0], (folder / "log.0").read_text()
    return outcome(folder / "out")


def engine(folder: Path) -> str:
    return json.loads((folder / "out" / "environment.json").read_text())[-1]["distributed"]


@pytest.mark.slow
@pytest.mark.dist
def test_sharded_run_resumes_and_equals_ddp(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", sharded=True)
    assert engine(tmp_path / "whole") == "FSDP"
    run(tmp_path / "killed", sharded=True, event=Event("torch.optim", "AdamW.step", 9))
    assert run(tmp_path / "killed", sharded=True) == whole

    # The same run by DDP, to rounding; and one that begins as the one and ends as the other.
    run(tmp_path / "mixed", sharded=True, event=Event("torch.optim", "AdamW.step", 9))
    plain, mixed = run(tmp_path / "ddp", sharded=False), run(tmp_path / "mixed", sharded=False)
    assert engine(tmp_path / "mixed") == "MULTI_CPU"
    assert whole is not None
    for other in (plain, mixed):
        assert other is not None
        for a, b in zip(whole["records"], other["records"], strict=True):
            assert b == {**b, "kind": a["kind"], "update": a["update"]}
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)

    # Full weights, EMA included, in a process that knows nothing of shards.
    folder = max((tmp_path / "whole" / "out" / "checkpoints").iterdir())
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    reference = max((tmp_path / "ddp" / "out" / "checkpoints").iterdir())
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in ("model.safetensors", "ema.safetensors"):
        weights, expected = load_file(folder / name), load_file(reference / name)
        assert {key: tensor.shape for key, tensor in weights.items()} == shapes
        for key, tensor in expected.items():
            # The gradients of the biases of keys consist mostly of rounding, but AdamW moves a
            # weight by about the learning rate at each update, whatever the size of its gradient.
            atol = 4e-3 if key.endswith("qkv.bias") else 1e-3
            torch.testing.assert_close(weights[key], tensor, rtol=1e-2, atol=atol)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("sharded", [True, False])
def test_every_rank_of_a_sharded_model_needs_an_image_to_evaluate(tmp_path: Path, sharded) -> None:
    """Otherwise the others would wait for its part of the weights for ever."""
    write_tree(tmp_path / "set" / "train", {"a": 6, "b": 6}, size=(19, 17))
    write_tree(tmp_path / "set" / "val", {"a": 1, "b": 1}, size=(19, 17))
    arguments = ["--config", str(write_config(tmp_path, PLAIN, tmp_path / "out"))]
    arguments += ["data.source=folder", f"data.root={tmp_path / 'set'}", "train.epochs=1"]
    arguments += ["train.global_batch_size=12", "train.batch_size_per_device=4"]
    codes = launch(arguments, tmp_path / "log", world_size=3, sharded=sharded)
    text = (tmp_path / "log.0").read_text()
    assert codes == ([2] * 3 if sharded else [0] * 3), text
    assert ("data.val_split='val' is not possible: it has 2 images, and each" in text) == sharded
    assert (tmp_path / "out" / "checkpoints").exists() == (not sharded)


@pytest.mark.slow
@pytest.mark.dist
def test_batch_norm_and_its_average_are_those_of_ddp(tmp_path: Path) -> None:
    """Running statistics are averaged with the weights, but they are not sharded."""
    kwargs = {"embed_dim": 16, "depth": [1, 1, 1], "num_heads": 2}
    model = {"name": "visformer_tiny", "kwargs": kwargs}
    config = write_config(tmp_path, {**PLAIN, "model": model}, tmp_path / "run")
    arguments = ["--config", str(config), "data.img_size=32", "run.report=false"]
    arguments += ["train.global_batch_size=478", "train.drop_last=true", "optim.lr=1e-3"]
    found = []
    for sharded in (False, True):
        folder = tmp_path / f"sharded-{sharded}"
        codes = launch(
            [*arguments, f"run.output_dir={folder}"],
            tmp_path / "log",
            world_size=2,
            sharded=sharded,
        )
        assert codes == [0, 0], (tmp_path / "log.0").read_text()
        found.append(max((folder / "checkpoints").iterdir()))
    for name in ("model.safetensors", "ema.safetensors"):
        expected, weights = (load_file(folder / name) for folder in found)
        statistics = [key for key in expected if "running" in key]
        assert statistics
        for key in statistics:
            torch.testing.assert_close(weights[key], expected[key], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.dist
def test_the_losses_of_a_teacher_are_those_of_ddp_in_mixed_precision(tmp_path: Path) -> None:
    """They are computed from logits in float32: in bfloat16 sums over images lose their digits."""
    deit = {**PLAIN["model"], "name": "deit_tiny_distilled_patch16_224"}
    config = str(write_config(tmp_path, {**PLAIN, "model": deit}, tmp_path / "run"))
    arguments = ["--config", config, "run.report=false", "train.global_batch_size=284"]
    teacher = tmp_path / "teacher"
    settings = ["train.seed=5", "train.ema_decay=null", f"run.output_dir={teacher}"]
    assert launch([*arguments, *settings], tmp_path / "log") == [0]
    settings = ["train.precision=bf16", "loss.distill_type=token", f"loss.teacher={teacher}"]
    losses = []
    for sharded in (False, True):
        folder = tmp_path / f"sharded-{sharded}"
        codes = launch(
            [*arguments, *settings, f"run.output_dir={folder}"],
            tmp_path / "log",
            world_size=2,
            sharded=sharded,
        )
        assert codes == [0, 0], (tmp_path / "log.0").read_text()
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses.append(json.loads(lines[0])["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            ["model.name=resnet10t", "model.kwargs={}"],
            "model.name='resnet10t' cannot be distributed: Could not find",
        ),
        (
            [*TWO, "optim.name=cadamw"],
            "optim.name='cadamw' cannot update the weights that FSDP2 shards",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_anything_is_written(
    tmp_path: Path, settings: list[str], reason: str
) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    arguments = ["--config", str(config), *settings]
    assert launch(arguments, tmp_path / "log", world_size=2, sharded=True) == [2, 2]
    assert f"error: rank 0: {reason}" in (tmp_path / "log.0").read_text()
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_that_four_ranks_saved_continues_on_two_and_on_one(
    tmp_path: Path, replicas: int
) -> None:
    """With FSDP2, and with HSDP as two replicas on two ranks each; losses are those of one rank."""

    def go(name: str, world_size: int, *, seen: bool = False, **options: Any) -> list[int]:
        config = write_config(tmp_path, PLAIN, tmp_path / name)
        arguments = ["--config", str(config), "run.report=false"]
        more = ["run.allow_world_size_change=true"] if seen else []
        return launch([*arguments, *more], tmp_path / "log", world_size=world_size, **options)

    def records(name: str) -> list[dict[str, Any]]:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    assert go("one", 1) == [0]
    event = Event("lipsformer.engine.steps", "train_step", 8)
    stop = {"event": event, "signal_number": signal.SIGTERM}
    codes = go("two", 4, sharded=True, replicas=replicas, **stop)
    assert codes == [EXIT_STOPPED] * 4, (tmp_path / "log.0").read_text()
    environment = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert (environment[-1]["distributed"], environment[-1]["world_size"]) == ("FSDP", 4)
    shutil.copytree(tmp_path / "two", tmp_path / "alone")
    assert go("two", 2, seen=True, sharded=True) == [0, 0], (tmp_path / "log.0").read_text()
    assert go("alone", 1, seen=True) == [0]
    expected = records("one")
    assert [r["update"] for r in expected if r["kind"] == "train"] == list(range(1, 16))
    for name in ("two", "alone"):
        for found, record in zip(records(name), expected, strict=True):
            assert (found["kind"], found["update"]) == (record["kind"], record["update"])
            assert found["loss"] == pytest.approx(record["loss"], rel=1e-4), found["update"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (hsdp_options(2, 3), "dp_replicate_size=2, dp_shard_size=3"),
        (hsdp_options(4, 1), "dp_shard_size at least 2"),
        (["--use_parallelism_config", "--parallelism_config_tp_size", "4"], "tp_size=4"),
    ],
)
def test_a_mesh_that_is_not_hsdp_of_all_ranks_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    options: list[str],
    reason: str,
) -> None:
    for name, value in (fsdp2_environment(*options) | {"WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    assert train.main(["--config", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert "only HSDP trains here, with dp_replicate_size x dp_shard_size = 4 processes" in line
    assert not (tmp_path / "out").exists()
