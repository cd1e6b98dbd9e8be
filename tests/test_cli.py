"""The command `lipsformer`: its parts, its words, its completion, and one line for mistakes."""

import importlib
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from data import DataWarning
from lipsformer import cli
from lipsformer._commands import COMMANDS, plain_warnings, quiet_pipe
from lipsformer._configfile import make_config
from lipsformer._settings_help import describe
from lipsformer.config import Config
from tests.conftest import ROOT
from tests.engine.conftest import fresh_process  # noqa: F401
from tests.runs import DIGITS, write_config


def said(capsys: pytest.CaptureFixture, *arguments: str, code: int = 0) -> str:
    try:
        found = cli.main(arguments)
    except SystemExit as end:
        found = end.code
    assert found == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_the_summaries_of_the_overview_stand_in_one_column() -> None:
    (table,) = re.findall(r"(?:^  [a-z-]+ +\S.*\n)+(?=\nBegin)", cli.overview(), re.M)
    columns = [re.match(r"  \S+ +", line) for line in table.splitlines()]
    assert len(columns) == len(COMMANDS) + 1
    assert len({match and match.end() for match in columns}) == 1


def test_overview_names_every_command_and_works_from_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(capsys, "--help")
    for name in COMMANDS:
        assert f"\n  {name} " in text
    assert said(capsys) == text
    assert cli.ROOT == ROOT
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_help_speaks_of_the_console_command(name: str, capsys: pytest.CaptureFixture) -> None:
    text = said(capsys, name, "--help")
    assert text.startswith(f"usage: lipsformer {name} ")
    assert f"\n    lipsformer {name} " in text, "its help lacks an example"
    assert "python -m" not in text and "python train.py" not in text


def test_help_of_train_lists_every_setting_with_its_default(capsys: pytest.CaptureFixture) -> None:
    text = said(capsys, "train", "--help")
    for section in fields(Config):
        for item in fields(section.type):
            assert f"  {section.name}.{item.name} " in text
    # what the help calls default is what the schema takes: reading it back changes nothing
    required = {"model": {"name": "m"}, "data": {"source": "digits"}, "optim": {"lr": 1.0}}
    required |= {"train": {"epochs": 1, "global_batch_size": 1}, "run": {"output_dir": "o"}}
    lines = [line.strip() for line in describe(Config).splitlines() if "; default " in line]
    stated = [f"{line.split()[0]}={line.partition('; default ')[2]}" for line in lines]
    assert len(stated) == sum(len(fields(s.type)) for s in fields(Config)) - 6
    assert make_config(Config, [required], stated, origin="help") == make_config(
        Config, [required], origin="schema"
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian"], ["'trian'", "did you mean train?"]),
        (["zzz"], ["'zzz'", "known are train, eval,", "completion"]),
        (["convert"], ["'convert'", "now called 'import-weights'"]),
        (["train", "--config", "configs/demo.yaml", "optim.lr=-1"], ["optim.lr=-1.0", ">= 0"]),
        (["train", "--config", "configs/nowhere.yaml"], ["configs/nowhere.yaml", "no such config"]),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = said(capsys, *arguments, code=2)
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(part in error for part in parts)


@pytest.mark.parametrize(
    "arguments",
    [
        ["measure", "NAME"],
        ["replay", "NAME"],
        ["report", "NAME"],
        ["prepare-imagenet", "NAME"],
        ["make-shards", "--verify", "NAME"],
        ["import-weights", "weights.pth", "NAME"],
        ["export", "lipsformer_nano", "out", "--checkpoint", "NAME"],
    ],
)
def test_what_the_operating_system_refuses_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture
) -> None:
    name = 300 * "x"
    error = said(capsys, *(name if word == "NAME" else word for word in arguments), code=2)
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "File name too long" in error and name in error


def test_options_may_stand_between_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    error = said(capsys, "train", "a.b=1", "--config", str(config), "optim.lr=-1", code=2)
    assert "unknown key a={'b': 1}" in error
    graph = str(ROOT / "configs/graph/cora_gat.yaml")
    error = said(capsys, "graph", "a.b=1", "--config", graph, "train.seeds=[0]", code=2)
    assert "unknown key a={'b': 1}" in error


def test_usage_of_a_mistaken_flag_names_the_command(capsys: pytest.CaptureFixture) -> None:
    error = said(capsys, "eval", "--chekpoint", "x", code=2)
    assert error.startswith("usage: lipsformer eval ")


def test_missing_package_is_named_with_its_extra(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(
            f"No module named 'torch_geometric' for {name}", name="torch_geometric"
        )

    monkeypatch.setattr(importlib, "import_module", absent)
    error = said(capsys, "graph", "--help", code=2)
    assert error == (
        "error: `lipsformer graph` needs torch_geometric: pip install 'lipsformer[train,graph]'\n"
    )


def test_own_config_stands_in_only_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = str(ROOT / "configs/demo.yaml")
    assert cli.resolve_configs(["--config", "configs/demo.yaml"]) == ["--config", own]
    assert cli.resolve_configs(["--config=configs/demo.yaml", "a"]) == [f"--config={own}", "a"]
    assert cli.resolve_configs(["configs/demo.yaml"]) == ["configs/demo.yaml"]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").touch()
    given = ["--config", "configs/demo.yaml"]
    assert cli.resolve_configs(given) == given


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    program = (
        f"source {script}; COMP_WORDS=({' '.join(map(repr, words))}); "
        f"COMP_CWORD={len(words) - 1}; COMP_LINE=; _shtab_lipsformer; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_bash_completes_commands_options_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(said(capsys, "completion", "bash"))
    assert completed(script, "lipsformer", "e") == ["eval", "export"]
    assert completed(script, "lipsformer", "train", "--d") == ["--dry-run"]
    assert completed(script, "lipsformer", "train", "optim.l") == [
        "optim.lr=",
        "optim.layer_decay=",
    ]
    assert completed(script, "lipsformer", "profile", "--precision", "b") == ["bf16"]


@pytest.fixture
def still(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing may change."""
    before = sorted(tmp_path.rglob("*"))
    yield tmp_path
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_shows_what_training_would_do_and_writes_nothing(
    still: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture
) -> None:
    config = write_config(tmp_path_factory.mktemp("config"), DIGITS, still / "out")
    text = said(capsys, "train", "--config", str(config), "--dry-run")
    assert f"output_dir: {still}/out" in text and "embed_dim: 24" in text
    assert "1,437 training images, 360 validation images, 10 classes" in text
    assert "2 epochs x 14 updates; global batch 96 = 1 processes x 24 x 4" in text
    for update in (0, 7, 14, 20, 27):
        lr = 1e-4 + (1e-2 - 1e-4) * (1 + math.cos(math.pi * update / 28)) / 2
        assert f"lr at update {update:8}  {lr:.3e}" in text
    weights = 3 * 64 * 24 + 24 + 24 + 5 * 24  # patches, class token, positions
    weights += 2 * (4 * 24 + 24 * 72 + 72 + 24 * 24 + 24 + 8 * 24 * 24 + 96 + 24) + 2 * 24 + 250
    assert f"{weights:,}" in text
    assert f"{4 * weights / 2**30:8.3f} GiB  weights" in text
    assert "# memory of one process on a CPU, estimated" in text and "A GPU keeps more" in text
    assert "nothing was written" in text


def test_dry_run_of_a_model_with_batch_norm_on_a_single_pixel(
    still: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture
) -> None:
    model = {"name": "test_resnet"}  # its last map is 1 x 1 for digits of 16 pixels
    folder = tmp_path_factory.mktemp("config")
    config = write_config(folder, {**DIGITS, "model": model}, still / "out")
    text = said(capsys, "train", "--config", str(config), "--dry-run")
    assert "kept for the backward pass" in text and "nothing was written" in text


@pytest.mark.parametrize(
    "command",
    [
        "lipsformer --help",
        pytest.param(
            "benchmarks.study benchmarks/studies/cifar10_bf16.yaml --table", marks=pytest.mark.slow
        ),
    ],
)
def test_a_command_whose_reader_has_left_ends_as_a_unix_tool(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [sys.executable, "-m", *command.split()]
    result = subprocess.run(
        arguments, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


def test_another_broken_pipe_keeps_its_traceback() -> None:
    with pytest.raises(BrokenPipeError, match="of a worker"), quiet_pipe():
        raise BrokenPipeError("of a worker")


def test_only_warnings_of_our_own_kinds_lose_the_place_to_which_they_point() -> None:
    place = ("file.py", 7, "x = 1")
    usual = warnings.formatwarning("odd", UserWarning, *place)
    with plain_warnings():
        assert warnings.formatwarning("3 left out", DataWarning, *place) == "warning: 3 left out\n"
        assert warnings.formatwarning("odd", UserWarning, *place) == usual
    assert "file.py:7" in warnings.formatwarning("3 left out", DataWarning, *place)
