"""What the README says stays true: its code, its files and its counts."""

import re

import pytest
import timm
import torch

import lipsformer  # noqa: F401  (registers)
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def test_the_fine_tuning_example_takes_a_step():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    torch.manual_seed(0)
    exec(code, names)
    moments = names["optimizer"].state
    assert len(moments) == len(list(names["model"].parameters()))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"configs/[\w/]+\.yaml", README))))
def test_named_configs_exist(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(
    "module", sorted(set(re.findall(r"-m ((?:scripts|benchmarks)\.\w+)", README)))
)
def test_named_modules_exist(module):
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.parametrize(
    ("name", "count"), re.findall(r"^\| `(lipsformer_\w+)`[^|]*\|[^|]*\| ([\d,]+) \|", README, re.M)
)
def test_parameter_counts(name, count):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert sum(p.numel() for p in model.parameters()) == int(count.replace(",", ""))
