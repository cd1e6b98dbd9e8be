"""What README and documentation say stays true: code, commands, files, counts, links, the site."""

import contextlib
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import timm
import torch
import yaml

import lipsformer  # noqa: F401  (registers)
import train
from lipsformer._commands import COMMANDS
from lipsformer._configfile import make_config
from lipsformer.config import Config
from lipsformer.engine.step_share import share_of_step
from tests import newcomer
from tests.documents import ROOT, check_command, read_blocks, read_commands

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
MODEL_ROW = r"^\| `(lipsformer_\w+)`[^|]*\|[^|]*\| (\d[\d,]{6,}) \|"


class FakeTrainer:
    """Ray's trainer for one worker: the function runs in a second thread, as under Ray."""

    num_workers = 0

    def __init__(self, function, *, scaling_config: dict, run_config: dict):
        self.function = function
        FakeTrainer.num_workers = scaling_config["num_workers"]

    def fit(self):
        with ThreadPoolExecutor() as threads:
            threads.submit(self.function).result()


@pytest.fixture
def fake_ray(monkeypatch) -> list[Config]:
    """Stands in for Ray, which is not installed; returns the configs that would be trained."""
    ray = types.ModuleType("ray")
    ray.__dict__["init"] = lambda *, runtime_env: None
    settings = dict.fromkeys(("FailureConfig", "RunConfig", "ScalingConfig"), dict)
    for name, members in {
        "ray.train": settings,
        "ray.train.torch": {"TorchTrainer": FakeTrainer},
    }.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__dict__.update(members)
    monkeypatch.setitem(sys.modules, "ray", ray)
    trained: list[Config] = []
    monkeypatch.setattr(train, "train", trained.append)
    return trained


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_a_page_work_in_order(page, tmp_path, monkeypatch, fake_ray):
    """In an empty folder: Python runs, what it prints is shown, commands and configs are accepted.

    A Python block with a title is a file to save. The tests in it are run.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    torch.manual_seed(0)
    names: dict = {"__name__": "page"}
    saved, printed = [], None
    for block in read_blocks(page):
        match block.language:
            case "python":
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    if block.title:
                        saved.append(block.title)
                        (tmp_path / block.title).write_text(block.text)
                        run_tests(importlib.import_module(Path(block.title).stem), tmp_path)
                    else:
                        exec(block.text, names)
                printed = output.getvalue()
            case "text":
                assert block.text == printed
            case "bash":
                for words in read_commands(block.text):
                    check_command(words, saved)
            case "yaml":
                make_config(Config, [yaml.safe_load(block.text)], origin=page.name)
            case language:
                assert page == README and not language, f"no check for a block of {language!r}"
    assert len(fake_ray) == (page.name == "several-nodes.md")
    for config in fake_ray:
        share_of_step(config.train, FakeTrainer.num_workers)


def run_tests(module: types.ModuleType, tmp_path: Path) -> None:
    """Call the test functions of a module, which may use pytest's fixture `tmp_path`."""
    for name, value in vars(module).items():
        if name.startswith("test_"):
            value(*[tmp_path for _ in inspect.signature(value).parameters])


def test_the_newcomer_types_every_command_or_says_why_not():
    pages = [block for page in newcomer.PAGES for block in read_blocks(page)]
    blocks = [block.text for block in pages if block.language == "bash"]
    commands = [command for text in blocks for command in newcomer.commands_of(text)]
    known = {newcomer.key_of(command) for command in commands}
    assert known == {*newcomer.STEPS, *newcomer.LEFT_OUT}


def test_the_page_of_commands_lists_every_command():
    page = (ROOT / "docs/commands.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| `python (?:-m )?(\S+?)(?:\.py)?` \|", page, re.M)
    assert dict(rows) == {name: command.module for name, command in COMMANDS.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_modules_exist(page):
    text = re.sub(r"--output \S+", "", page.read_text())  # written, not read
    folders = "configs|scripts|benchmarks|notebooks|lipsformer|data|tests|docs"
    for path in set(re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]+\.\w+", text)):
        assert (ROOT / path).is_file() or path.startswith("configs/my-"), path
    for module in set(re.findall(r"\b((?:scripts|benchmarks)\.\w+)", text)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@pytest.mark.parametrize(
    "target", re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()), ids=str
)
def test_links_of_the_readme(target):
    assert (ROOT / target).exists()


@pytest.mark.parametrize(
    ("name", "count"),
    sorted({row for page in PAGES for row in re.findall(MODEL_ROW, page.read_text(), re.M)}),
)
def test_parameter_counts(name, count):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert sum(p.numel() for p in model.parameters()) == int(count.replace(",", ""))


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    """Strict: a dead link, a dead anchor or a page outside the navigation is an error."""
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr
    assert "WARNING" not in build.stderr
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    assert len(pages) > len(PAGES)
    for page, text in pages.items():
        fetched = re.findall(r"<(?:link|script|img|iframe)[^>]*(?:href|src)=\"?https?:[^>]*>", text)
        assert not fetched, page
        prose = re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert not re.search(r"\$\$|\\[(\[]|\\(?:frac|mathrm|max|sqrt)|:math:", prose), page
        assert not re.search(r"<p>(?:(?!</p>).)*\n(?:- |1\. )", prose, re.DOTALL), page  # no list
