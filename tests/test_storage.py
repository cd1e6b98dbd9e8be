"""A full disk and lost records: one line, the right exit code, and nothing lost that was saved."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import train
from lipsformer.engine import plots
from lipsformer.engine.checkpoint import CheckpointFolder
from lipsformer.engine.lock import LOCK
from lipsformer.engine.run_files import METRICS
from lipsformer.engine.run_folder import RunFolder
from lipsformer.engine.signals import STOP_SIGNALS
from lipsformer.engine.tracking import Tracking
from tests.runs import DIGITS, write_config

SETTINGS = {
    **DIGITS,
    "train": {
        **DIGITS["train"],
        **{"epochs": 1, "global_batch_size": 480, "batch_size_per_device": 480, "ema_decay": None},
    },
    "run": {**DIGITS["run"], "save_every_updates": 1, "log_every": 1},
}


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def lines_of(capsys: pytest.CaptureFixture) -> list[str]:
    return [s for s in capsys.readouterr().err.splitlines() if s.startswith("error: ")]


def before_second_save(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Do something just before a run writes its second checkpoint."""
    saved = CheckpointFolder.save

    def save(self, step: int, **content) -> Path:
        if step == 2:
            action()
        return saved(self, step, **content)

    monkeypatch.setattr(CheckpointFolder, "save", save)


def test_disk_full_to_the_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "out"
    arguments = ["--config", str(write_config(tmp_path, SETTINGS, output))]
    save_file = "lipsformer.engine.checkpoint.save_file"

    def fill() -> None:  # neither the checkpoint nor the curves find a free byte
        monkeypatch.setattr(save_file, full)
        monkeypatch.setattr(plots, "_plot", full)

    before_second_save(monkeypatch, fill)
    assert train.main(arguments) == 4
    (line,) = lines_of(capsys)
    assert "cannot write checkpoint" in line
    assert "No space left on device" in line
    assert RunFolder(output).weights().step == 1

    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(Tracking, "record", full)
        assert train.main(arguments) == 4
    (line,) = lines_of(capsys)
    assert line.endswith("[Errno 28] No space left on device")

    records = (output / METRICS).read_bytes()
    (output / METRICS).unlink()
    before = sorted(path.name for path in output.iterdir())
    for more in ([], ["--dry-run"]):
        assert train.main([*arguments, *more]) == 2
        (line,) = lines_of(capsys)
        assert f"{METRICS} has 0 bytes, but had" in line
        assert sorted(path.name for path in output.iterdir()) == before
    (output / METRICS).write_bytes(records)
    assert train.main(arguments) == 0
    assert RunFolder(output).summary() is not None


def test_a_disk_that_is_full_at_the_start_leaves_neither_lock_nor_handlers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "out"
    arguments = ["--config", str(write_config(tmp_path, SETTINGS, output))]
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]

    def write_nothing(path: Path, text: str) -> None:
        path.touch()
        full()

    for where, name, action in (
        (Path, "write_text", write_nothing),  # of the lock, the first file of a run
        (Tracking, "__init__", full),  # the last one to be opened
    ):
        assert not output.exists()
        with monkeypatch.context() as patch:
            patch.setattr(where, name, action)
            assert train.main(arguments) == 4
        (line,) = lines_of(capsys)
        assert "No space left on device" in line
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    assert not (output / LOCK).exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory, which can be made read-only."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)  # weights may still be mapped


def test_a_disk_that_becomes_read_only(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["--config", str(write_config(tmp_path, SETTINGS, disk / "out"))]
    arguments.append("run.trackers=[]")  # a file that is open for writing keeps the disk writable

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)

    before_second_save(monkeypatch, lambda: remount("ro"))
    assert train.main(arguments) == 4
    monkeypatch.undo()
    (line,) = lines_of(capsys)
    assert "cannot write checkpoint" in line
    assert "Read-only file system" in line
    assert RunFolder(disk / "out").weights().step == 1

    assert train.main(arguments) == 2
    (line,) = lines_of(capsys)
    assert f"run.output_dir='{disk}/out' cannot be written: Read-only file system" in line
    remount("rw")
    (disk / "out" / LOCK).unlink()  # its owner is this process, which a real start would find dead
    assert train.main(arguments) == 0
    assert RunFolder(disk / "out").summary() is not None


def test_files_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    write = f"""
from pathlib import Path
from lipsformer._files import write_atomically
from lipsformer.engine.checkpoint import CheckpointFolder
folder = Path({str(tmp_path)!r})
write_atomically(folder / "config.yaml", "name: \\u00fc")
texts = {{"config.yaml": "name: \\u00fc"}}
CheckpointFolder(folder).save(3, tensors={{}}, texts=texts, best_step=None)
"""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", write], env=os.environ | ascii_only, check=True)
    for folder in (tmp_path, tmp_path / "update-000000003"):
        assert (folder / "config.yaml").read_bytes() == "name: ü".encode()
