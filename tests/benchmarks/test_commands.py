"""The commands of the GPU run, which nothing else reads until there is a GPU."""

import shlex

import pytest

from benchmarks.convergence import ROWS, overrides
from benchmarks.gpu import COMMANDS
from tests.documents import check_command, check_training


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted(command):
    check_command(shlex.split(command))


@pytest.mark.parametrize("row", ROWS)
def test_every_run_of_a_row_is_a_model_and_a_config(row, tmp_path):
    config, _, models = ROWS[row]
    for model in models:
        check_training(config, tuple(overrides(row, model, 1e-3, tmp_path)))
