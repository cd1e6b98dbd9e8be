"""A damaged or unfinished checkpoint is named and passed over; a failed save costs nothing."""

import argparse
import json
import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm import create_model
from timm.utils import CheckpointSaver
from torch import nn

from lipsformer._configfile import read_config
from lipsformer._errors import ConfigError
from lipsformer.config import Config
from lipsformer.engine.checkpoint import CheckpointFolder
from lipsformer.engine.resume import find_start
from lipsformer.engine.run_files import MODEL, CheckpointError, find_fault
from lipsformer.engine.run_folder import find_weights
from lipsformer.engine.weights import load_weights, read_weights, strip_wrappers
from tests.full_disk import full_disk
from tests.runs import DIGITS, write_config

STATE = {"updates_per_epoch": 5, "history": [], "best": None}


def save(folder: CheckpointFolder, step: int, best: int | None = None, size: int = 1000) -> Path:
    return folder.save(
        step,
        tensors={MODEL: {"w": torch.full((size,), float(step))}},
        texts={"state.json": json.dumps({"update": step, **STATE})},
        best_step=best,
    )


def numbers(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    for update in (3, 6, 9, 12):
        save(folder, update, best=3)
    names = ["update-000000003", "update-000000009", "update-000000012"]
    assert numbers(folder) == names
    for update in (15, 18, 21):
        save(folder, update, best=9)
    assert numbers(folder) == ["update-000000009", "update-000000018", "update-000000021"]


def truncate(path: Path) -> None:
    (path / MODEL).write_bytes((path / MODEL).read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / MODEL).read_bytes())
    content[-7] ^= 4
    (path / MODEL).write_bytes(content)


def remove_a_file(path: Path) -> None:
    (path / "state.json").unlink()


def remove_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def empty_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{}")


def garble_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"model')


def flip_a_bit_of_the_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"bytes"', '"bytus"', 1))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "model.safetensors has 4071 bytes instead of 4072"),
        (flip_a_bit, "model.safetensors is damaged"),
        (remove_a_file, "state.json is missing"),
        (remove_the_manifest, "incomplete, manifest.json is missing"),
        (garble_the_manifest, "manifest.json cannot be read"),
        (flip_a_bit_of_the_manifest, "manifest.json does not give bytes and sha256 of every file"),
        (empty_the_manifest, "manifest.json does not list model.safetensors and state.json"),
    ],
)
def test_a_damaged_newest_is_named_and_the_one_before_is_used(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    good, broken = save(folder, 5), save(folder, 10)
    assert folder.newest() == broken
    damage(broken)
    with caplog.at_level(logging.WARNING):
        assert folder.newest() == good
    assert str(broken) in caplog.text
    assert reason in caplog.text
    # The run goes back to 5, passes 8 and writes 10 again; the broken one must not survive that.
    save(folder, 8)
    assert numbers(folder) == ["update-000000005", "update-000000008"]
    again = save(folder, 10)
    assert find_fault(again) is None
    assert torch.equal(load_file(again / MODEL)["w"], torch.full((1000,), 10.0))


def test_a_damaged_checkpoint_that_is_named_is_not_continued(tmp_path: Path) -> None:
    damaged = save(CheckpointFolder(tmp_path / "checkpoints"), 5)
    truncate(damaged)
    path = write_config(tmp_path, DIGITS, tmp_path / "out")
    config = read_config(Config, path, [f"run.resume={damaged}"])
    with pytest.raises(ConfigError, match=r"not a usable checkpoint: model.safetensors has 4071 b"):
        find_start(config)


def test_an_unfinished_save_is_invisible(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    good = save(folder, 5)
    good.with_name(".update-000000008").mkdir()
    assert folder.newest() == good
    save(folder, 10)
    assert numbers(folder) == ["update-000000005", "update-000000010"]


def test_a_step_is_saved_again_though_the_last_save_of_it_was_killed_in_its_cleaning(
    tmp_path: Path,
) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    good = save(folder, 5)
    aside = good.with_name(".update-000000005.old")
    aside.mkdir()
    (aside / MODEL).touch()
    save(folder, 5, size=7)
    assert numbers(folder) == ["update-000000005"]
    assert len(load_file(good / MODEL)["w"]) == 7


def test_a_kill_between_the_two_renames_of_a_second_save_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=1)
    save(folder, 5)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name == ".update-000000005":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(folder, 5, size=7)
    for _ in range(2):
        newest = folder.newest()
        assert newest is not None
        assert folder.last_name() == newest.name
        assert torch.equal(load_file(newest / MODEL)["w"], torch.full((1000,), 5.0))
        with full_disk(20_000), pytest.raises(CheckpointError, match=f"last good one is {newest}"):
            save(folder, 5, size=10_000)
    again = save(folder, 5, size=7)
    assert numbers(folder) == ["update-000000005"]
    assert len(load_file(again / MODEL)["w"]) == 7


def test_an_old_checkpoint_that_cannot_be_removed_is_named_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a file that another process reads is renamed instead of removed."""
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=1)
    busy, foreign = save(folder, 5), folder.path / "update-notes"
    foreign.mkdir()

    def refuse(path: Path, **_: object) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        newest = folder.path / "update-000000010"
        patch.setattr("shutil.rmtree", lambda p, **o: None if o else refuse(p))
        assert save(folder, 10) == newest
    assert f"{busy} cannot be removed" in caplog.text
    assert folder.newest() == newest
    assert foreign.exists(), "not a checkpoint"
    save(folder, 15)
    assert numbers(folder) == ["update-000000015", "update-notes"]


def test_a_failing_write_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with full_disk(20_000):
        refuse_to_save(tmp_path, size=10_000)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_leaves_the_last_checkpoint(small_disk: Path) -> None:
    refuse_to_save(small_disk, size=100_000)


def refuse_to_save(path: Path, *, size: int) -> None:
    folder = CheckpointFolder(path / "checkpoints", keep=1)
    good = save(folder, 5)
    with pytest.raises(CheckpointError) as caught:
        save(folder, 10, size=size)
    message = str(caught.value)
    assert "update-000000010" in message
    assert f"the last good one is {good}" in message
    assert "\n" not in message
    assert numbers(folder) == ["update-000000005"]
    assert find_fault(good) is None
    save(folder, 15)
    assert numbers(folder) == ["update-000000015"]


@pytest.mark.parametrize(
    "name", ["a.b", "module.a.b", "_orig_mod.a.b", "module._orig_mod.a.b", "_orig_mod.module.a.b"]
)
def test_wrappers_leave_no_trace_in_names(tmp_path: Path, name: str) -> None:
    assert strip_wrappers(name) == "a.b"
    torch.save({"state_dict": {name: torch.arange(3.0)}}, tmp_path / "w.pth")
    assert torch.equal(read_weights(tmp_path / "w.pth")["a.b"], torch.arange(3.0))


@pytest.mark.parametrize(
    "content",
    [torch.ones(2), {"model": [torch.ones(2)]}, {1: torch.ones(2)}, {"state_dict": {"a.b": 3}}],
)
def test_a_file_without_a_mapping_of_tensors_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="it holds no mapping of names to tensors"):
        read_weights(tmp_path / "w.pth")


def test_weights_that_need_unpickling_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "config": Path("x")}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"weights: it holds a pathlib\.\S+, and only"):
        read_weights(tmp_path / "w.pth")
    (tmp_path / "model.onnx").write_bytes(b"no tensors of torch")
    with pytest.raises(CheckpointError, match=r"weights: expected \.safetensors, or tensors"):
        read_weights(tmp_path / "model.onnx")


def test_the_checkpoints_of_timms_train_script_are_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    arguments = argparse.Namespace(model="linear", lr=0.1, crop_pct=None)
    saver = CheckpointSaver(model, optimizer, args=arguments, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, 50.0)
    for name in ("last.pth.tar", "model_best.pth.tar"):
        weights = read_weights(tmp_path / name)
        assert weights.keys() == model.state_dict().keys()
        assert all(torch.equal(weights[key], model.state_dict()[key]) for key in weights)


def test_a_classifier_of_another_size_stays_random_only_if_that_is_asked_for(
    tmp_path: Path,
) -> None:
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
    trained, model = (create_model("vit_tiny_patch16_224", num_classes=n, **small) for n in (7, 5))
    save_file(trained.state_dict(), tmp_path / MODEL)
    with pytest.raises(CheckpointError, match=r"another shape \['head.weight \(7, 24\) for"):
        load_weights(model, tmp_path / MODEL)
    head = model.head.weight.clone()
    load_weights(model, tmp_path / MODEL, new_head=True)
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.blocks[0].mlp.fc1.weight, trained.blocks[0].mlp.fc1.weight)


def test_weights_of_run_checkpoint_and_file(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    with pytest.raises(CheckpointError, match="neither a run"):
        find_weights(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such file"):
        find_weights(300 * "x")  # longer than a file name may be
    save(folder, 5)
    newest = save(folder, 10)
    for path in (tmp_path, newest, newest / MODEL):
        found = find_weights(path)
        assert (found.file, found.kind, found.step, found.epoch) == (newest / MODEL, "raw", 10, 2)
        assert (
            str(found) == f"weights     {newest / MODEL} (update 10, epoch 2, raw, not evaluated)"
        )
    flip_a_bit(newest)
    with pytest.raises(CheckpointError, match="is damaged"):
        find_weights(newest)
