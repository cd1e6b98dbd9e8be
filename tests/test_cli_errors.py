"""A user's mistake costs one line on stderr and exit code 2, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import save_file

import eval as evaluation
import train
from lipsformer._configfile import read_config
from lipsformer.config import Config
from lipsformer.engine.build import build_model
from scripts import _dry_run
from tests.engine.conftest import fresh_process  # noqa: F401
from tests.runs import DIGITS, write_config

ROOT = Path(__file__).resolve().parents[1]


def make_images(folder: Path, classes: dict[str, list[tuple[int, int]]]) -> None:
    for split in ("train", "val"):
        for name, sizes in classes.items():
            (folder / split / name).mkdir(parents=True)
            for number, size in enumerate(sizes):
                Image.new("RGB", size).save(folder / split / name / f"{number}.png")


def folder_run(root: Path) -> list[str]:
    return ["data.source=folder", f"data.root={root}", "data.name=set", "data.num_workers=0"]


def refused(capsys: pytest.CaptureFixture, *arguments: str, program=train.main) -> str:
    assert program(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith("error: ")
    return error


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.lrr=1", ["optim.lrr", "did you mean optim.lr?"]),
        ("optim.lr=-1", ["optim.lr=-1.0", ">= 0"]),
        ("train.global_batch_size=0", ["train.global_batch_size=0", ">= 1"]),
        ("train.batch_size_per_device=7", ["batch_size_per_device=7", "96"]),
        ("train.global_batch_size=96000", ["96000", "drop_last"]),
        ("model.name=lipsformer_tinny", ["'lipsformer_tinny'", "lipsformer_tiny"]),
        ("model.kwargs.dept=3", ["cannot be built", "dept"]),
        ("data.img_size=2000", ["data.img_size=2000", "at most 1024"]),
        ("run.trackers=[[1], 2]", ["run.trackers", "list of single values"]),
        ("lipschitz.sigma_cap=1e30", ["lipschitz.sigma_cap=1e+30", "at most 1e+15"]),
        ("model.kwargs=[1]", ["model.kwargs=[1]", "must be a mapping"]),
        ("model.kwargs.mlp_ratio=0", ["model.kwargs.mlp_ratio=0", "> 0"]),
        ("model.kwargs.embed_dim=-1", ["model.kwargs.embed_dim=-1", "> 0"]),
        ("model.kwargs.embed_dim=400000", ["embed_dim", "GiB of memory"]),
        ("model.kwargs.num_heads=5", ["model.kwargs", "num_heads"]),
        ("model.kwargs.patch_size=0", ["model.kwargs.patch_size=0", "> 0"]),
        ("model.kwargs.drop_path_rate=.nan", ["model.kwargs", "drop_path_rate", "finite"]),
        ("model.kwargs.global_pool=''", ["model.kwargs", "no logits", "(1, 10)"]),
        ("model.kwargs.device=cuda", ["model.kwargs.device", "must not be set"]),
        ("augment.auto_augment=rand-m9-xyz", ["augment.auto_augment", "timm's notation"]),
        ("augment={mixup: 0, mixup_prob: 0.4}", ["augment.mixup_prob=0.4 has no effect"]),
        ("augment.mixup_switch_prob=0.4", ["augment.mixup_switch_prob=0.4 has no effect"]),
        ("augment={reprob: 0, remode: rand}", ["augment.remode='rand' has no effect"]),
        ("augment.scale={a: 1}", ["augment.scale", "must be a list"]),
        ("augment.hflip=[0.5]", ["augment.hflip", "single value"]),
        ("train.drop_last=2", ["train.drop_last=2", "true or false"]),
        ("run.output_dir=/proc/below", ["run.output_dir='/proc/below' cannot be written"]),
        ("run.output_dir=/dev/null/x", ["run.output_dir='/dev/null/x'", "Not a directory"]),
        ("model.checkpoint=nowhere.pth", ["model.checkpoint", "nowhere.pth", "no such file"]),
        ("train={precision: fp16, max_nonfinite_updates: 10}", ["fp16", "on cpu", "bf16"]),
        ("run.trackers=[tensorbord]", ["'tensorbord'", "tensorboard"]),
        ("run.resume=/nowhere", ["run.resume='/nowhere'", "no such checkpoint folder"]),
        ("run.output_dir=", ["run.output_dir"]),
        ("lipschitz.residual_scale_cap=0.5", ["residual_scale_cap=0.5 has no effect, because"]),
        ("lipschitz.gain_cap=1", ["lipschitz.gain_cap=1.0 has no effect", "has no CenterNorm"]),
        ("lipschitz.bound_limit=9", ["bound_limit=9.0", "no Lipschitz bound", "LayerNorm"]),
    ],
)
def test_wrong_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture, override: str, parts: list[str]
) -> None:
    output = tmp_path / "out"
    config = write_config(tmp_path, DIGITS, output)
    error = refused(capsys, "--config", str(config), override)
    for part in parts:
        assert part in error
    assert not output.exists()


def test_batch_norm_cannot_train_on_the_last_image_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The last of 1,437 images was alone in its update, which ended the first epoch."""
    train = {**DIGITS["train"], "global_batch_size": 359, "batch_size_per_device": None}
    settings = {**DIGITS, "model": {"name": "test_resnet"}, "train": {**train, "drop_last": False}}
    error = refused(capsys, "--config", str(write_config(tmp_path, settings, tmp_path / "out")))
    assert "data.img_size=16 in batches of 1, the smallest that" in error
    assert "train.drop_last" in error and "more than 1 value per channel" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "override", "part"),
    [
        ("ecaresnet26t", "lipschitz.sigma_cap=1", "layer1.0.se.conv is of Conv1d"),
        ("test_nfnet", "lipschitz.sigma_cap=1", "stem.conv1 is of ScaledStdConv2d"),
        ("test_nfnet", "lipschitz.monitor_every=1", "stem.conv1 is of ScaledStdConv2d"),
    ],
)
def test_an_instrument_that_cannot_follow_a_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str, override: str, part: str
) -> None:
    config = write_config(tmp_path, {**DIGITS, "model": {"name": name}}, tmp_path / "out")
    error = refused(capsys, "--config", str(config), override)
    assert "the section lipschitz does not fit the model" in error
    assert part in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("classes", "part"),
    [
        (None, "set"),
        ({"cat": [(9, 9)] * 3, "dog": []}, "dog"),
    ],
)
def test_wrong_data(
    tmp_path: Path, capsys: pytest.CaptureFixture, classes: dict | None, part: str
) -> None:
    output = tmp_path / "out"
    config = write_config(tmp_path, DIGITS, output)
    if classes is not None:
        make_images(tmp_path / "root" / "set", classes)
    error = refused(capsys, "--config", str(config), *folder_run(tmp_path / "root"))
    assert part in error
    assert not output.exists()


def test_wrong_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    wrong = tmp_path / "wrong.safetensors"
    wrong.write_bytes(b"not weights at all")
    output = tmp_path / "out"
    config = write_config(tmp_path, DIGITS, output)
    error = refused(capsys, "--config", str(config), f"model.checkpoint={wrong}")
    assert "wrong.safetensors is not a file of weights" in error
    assert not output.exists()
    error = refused(
        capsys, "--checkpoint", str(wrong), "--config", str(config), program=evaluation.main
    )
    assert "wrong.safetensors is not a file of weights" in error
    error = refused(capsys, "--checkpoint", str(tmp_path / "none"), program=evaluation.main)
    assert "no such file or folder" in error
    error = refused(capsys, "--checkpoint", str(tmp_path), program=evaluation.main)
    assert "neither a run, nor a checkpoint" in error
    for option, says in {
        ("--batch-size", "0"): "--batch-size=0",
        ("--attack-every", "1"): "--attack-every=1 has no effect without --certify: leave it out",
        ("--certify", "--attack-every", "0"): "--attack-every=0 must be >= 1",
    }.items():
        arguments = ("--checkpoint", str(tmp_path), *option)
        assert says in refused(capsys, *arguments, program=evaluation.main)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_a_damaged_description_of_the_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes
) -> None:
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(content)
    error = refused(capsys, "--checkpoint", str(tmp_path), program=evaluation.main)
    assert f"{tmp_path / 'config.json'} " in error and "restore the file" in error


def test_a_damaged_file_of_a_run_ends_its_next_start_in_one_line_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "out"
    config = write_config(tmp_path, DIGITS, output)
    arguments = ("--config", str(config), "train.epochs=1")
    assert train.main(list(arguments)) == 0
    for name, says in {
        "exit.json": "cannot be read as JSON",
        "environment.json": "cannot be read as JSON",
        "lock.json": "is damaged: remove it if no other process trains",
        "metrics.jsonl": "is no JSON: repair it",
    }.items():
        intact = (output / name).read_bytes() if (output / name).exists() else None
        # as long as the records were, which a run that continues demands
        (output / name).write_text("{" + (len(intact or b"") - 2) * " " + "\n")
        capsys.readouterr()
        before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
        assert f"{output / name} {says}" in refused(capsys, *arguments)
        assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
        if intact is None:
            (output / name).unlink()
        else:
            (output / name).write_bytes(intact)


def test_eval_says_before_its_work_that_a_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = ("--checkpoint", str(tmp_path), "--json", "/nowhere/at/all")
    error = refused(capsys, *arguments, program=evaluation.main)
    assert "--json '/nowhere/at/all' cannot be written: No such file or directory" in error
    written = tmp_path / "records.json"
    arguments = ("--checkpoint", str(tmp_path / "none"), "--json", str(written))
    assert "no such file or folder" in refused(capsys, *arguments, program=evaluation.main)
    assert not written.exists()


def test_eval_takes_another_precision_than_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fp16 = {"precision": "fp16", "max_nonfinite_updates": 10}
    settings = {**DIGITS, "train": {**DIGITS["train"], **fp16}}
    config = write_config(tmp_path, settings, tmp_path / "out")
    weights = tmp_path / "model.safetensors"
    classes = [str(digit) for digit in range(10)]
    save_file(build_model(read_config(Config, config), classes).state_dict(), weights)
    arguments = ("--checkpoint", str(weights), "--config", str(config))
    assert "fp16' is not possible on cpu" in refused(capsys, *arguments, program=evaluation.main)
    AcceleratorState._reset_state(True)
    assert evaluation.main([*arguments, "--precision", "fp32"]) == 0
    assert "classes     matched by their order" in capsys.readouterr().out
    named = (*arguments, "--class-map", "names.json")
    error = refused(capsys, *named, program=evaluation.main)
    assert "--class-map has no effect, because" in error


def test_folder_of_another_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "out"
    config = write_config(tmp_path, DIGITS, output)
    output.mkdir()
    (output / "config.yaml").write_text(config.read_text())
    error = refused(capsys, "--config", str(config), "optim.lr=3e-3")
    assert "optim.lr 0.01 -> 0.003" in error
    assert "name another run.output_dir" in error
    error = refused(capsys, "--config", str(config), "run.resume=none")
    assert "already holds a run" in error
    assert [path.name for path in output.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("options", [["--shard", "2"], ["--json", "ranks.json"]])
def test_options_of_many_ranks_need_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture, options: list[str]
) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    assert "need --dry-run --world-size" in refused(
        capsys, "--config", str(config), "--dry-run", *options
    )


def test_a_dry_run_without_enough_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    monkeypatch.setattr(_dry_run, "part_costs", lambda *_: torch.empty(2**55))
    error = refused(capsys, "--config", str(config), "--dry-run")
    assert "data.img_size=16 is too large for this machine" in error
    assert not (tmp_path / "out").exists()


def test_output_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    (tmp_path / "out").write_text("a file")
    assert "Not a directory" in refused(capsys, "--config", str(config))
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").write_text("a file")
    assert "checkpoints is not a folder" in refused(capsys, "--config", str(config), "--dry-run")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoints"]
    assert "cannot be written" in refused(
        capsys, "--config", str(config), f"run.output_dir={'x' * 300}"
    )


def test_traceback_never_reaches_the_shell(tmp_path: Path) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    command = [sys.executable, "train.py", "--config", str(config), "optim.lr=-1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert json.dumps("optim.lr=-1.0")[1:-1] in result.stderr
