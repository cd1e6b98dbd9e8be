"""Commands that no other test runs: those of the GPU run, the studies, and the comparison."""

import shlex

import pytest

from benchmarks import same_numbers
from benchmarks.gpu import COMMANDS
from benchmarks.study.plan import ROOT, Study
from lipsformer._configfile import read_config
from tests.documents import check_command, check_training


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted(command):
    check_command(shlex.split(command))


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("benchmarks/studies/*.yaml")), ids=lambda p: p.stem
)
def test_every_run_of_a_study_is_a_model_and_a_config(path):
    study = read_config(Study, path)
    for row, seed in dict(study.runs()).items():  # one seed of every row
        check_training(study.config, tuple(study.settings(row, seed)))


def test_models_are_not_compared_with_a_folder_that_is_no_checkout(tmp_path, monkeypatch, capsys):
    """Its process would import the installed library, and find the same numbers."""
    monkeypatch.setattr("sys.argv", ["same_numbers", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        same_numbers.main()
    assert f"{tmp_path} is no checkout" in capsys.readouterr().err
