"""One process at a time owns the folder of a run; dead owners are followed, living ones are not."""

import json
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from lipsformer._errors import ConfigError
from lipsformer.engine.lock import LOCK, FolderLock
from lipsformer.engine.run_files import CheckpointError

FORK = multiprocessing.get_context("fork")


def test_the_second_owner_is_told_who_the_first_one_is(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path / "run"), FolderLock(tmp_path / "run")
    first.acquire()
    with pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on .* began 20"):
        second.acquire()
    second.release()
    first.check()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    first.release()
    assert not (tmp_path / "run").exists(), "an empty folder is not left behind"
    second.acquire()
    second.release()


def test_only_parents_that_were_created_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for below, left in (("a/b/c/run", []), ("a/b/c/run", ["b", "b/kept"])):
        lock = FolderLock(tmp_path / below)
        lock.acquire()
        if left:
            (tmp_path / "a/b/kept").touch()
        lock.release()
        assert sorted(str(p.relative_to(tmp_path / "a")) for p in tmp_path.glob("a/**/*")) == left


def hold(folder: Path) -> None:
    FolderLock(folder).acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_process_of_this_machine_is_followed_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = FORK.Process(target=hold, args=(tmp_path,))
    process.start()
    process.join()
    lock = FolderLock(tmp_path)
    with caplog.at_level(logging.WARNING):
        lock.acquire()
    assert "taking" in caplog.text
    lock.check()
    lock.release()


def move_elsewhere(folder: Path) -> None:
    """Make the owner look like a process of another machine."""
    owner = json.loads((folder / LOCK).read_text())
    (folder / LOCK).write_text(json.dumps(owner | {"place": "node7", "host": "node7"}))


def test_an_owner_elsewhere_is_followed_when_its_heartbeat_stops(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, heartbeat=0.1)
    first.acquire()
    move_elsewhere(tmp_path)
    with pytest.raises(ConfigError, match=r"in use by process .* on node7"):
        FolderLock(tmp_path, patience=5).acquire()
    first._ended.set()  # it hangs
    time.sleep(0.3)
    os.utime(tmp_path / LOCK, (2e9, 2e9))  # a clock that jumped
    second = FolderLock(tmp_path, patience=0.5)
    second.acquire()
    with pytest.raises(CheckpointError, match=r"was taken over by process"):
        first.check()
    first.release()  # it wakes, and leaves the new owner alone
    second.check()
    second.release()


def compete(folder: Path, results, told) -> None:
    lock = FolderLock(folder)
    try:
        lock.acquire()
        results.put(1)
        told.wait()
    except ConfigError:
        results.put(0)


def test_of_many_that_follow_a_dead_owner_one_wins(tmp_path: Path) -> None:
    process = FORK.Process(target=hold, args=(tmp_path,))
    process.start()
    process.join()
    results, told = FORK.Queue(), FORK.Event()
    rivals = [FORK.Process(target=compete, args=(tmp_path, results, told)) for _ in range(8)]
    for rival in rivals:
        rival.start()
    assert sum(results.get() for _ in rivals) == 1
    told.set()
    for rival in rivals:
        rival.join()
