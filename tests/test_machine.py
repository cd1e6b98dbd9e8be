"""What is known about the code and the processor: compared with git's and util-linux's commands."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lipsformer import _machine
from lipsformer._machine import commit, cpu_name
from lipsformer.config import DataConfig


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_checkout_is_marked_only_while_a_tracked_file_differs(tmp_path):
    assert commit(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")  # a tag must not replace the commit
    head = git(tmp_path, "rev-parse", "HEAD")[:12]
    (tmp_path / "untracked").write_text("")
    assert commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{head}-dirty"


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None


def test_the_processor_is_the_first_model_name_of_cpuinfo(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(_machine, "Path", lambda _: cpuinfo)
    monkeypatch.setattr(platform, "processor", lambda: "Zuse Z1")
    assert cpu_name() == "Zuse Z1"
    monkeypatch.setattr(platform, "processor", lambda: "")  # as where `uname -p` knows none
    assert cpu_name() == os.uname().machine
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Zuse Z3: relay\nmodel name\t: other\n")
    assert cpu_name() == "Zuse Z3: relay"


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset of util-linux")
def test_a_run_has_no_more_workers_than_cores():
    program = (
        "from lipsformer.config import DataConfig; print(DataConfig(source='digits').num_workers)"
    )
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "--cpu-list", core, sys.executable, "-c", program]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "1\n"
    assert DataConfig(source="digits").num_workers == min(4, _machine.cores())
