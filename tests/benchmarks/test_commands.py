"""The commands of the GPU run, which nothing else reads until there is a GPU."""

import shlex

import pytest

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
