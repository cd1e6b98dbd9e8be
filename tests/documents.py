"""What Markdown pages promise: their code blocks, and whether each command in them can work.

A command is not run but handed to what would read it: the argument parser of its program, the
loader of the config that it names, Make's and pip's own files.
"""

import argparse
import importlib
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser as torchrun_parser

import eval as evaluation
import train
from lipsformer._configfile import make_config, read_config
from lipsformer.config import Config, DataConfig
from lipsformer.engine.build import build_model
from lipsformer.engine.step_share import share_of_step

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r'^```(\w*)(?: title="(.+?)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_built: set[str] = set()  # the models that could be built; many commands share one


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it is to be saved as if any, its text."""

    language: str
    title: str
    text: str


def read_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(*match) for match in FENCE.findall(page.read_text())]


def read_commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words; comments and continued lines are taken care of."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_command(words: Sequence[str], own_scripts: Sequence[str] = ()) -> None:
    """Fails unless the command's program would accept it.

    Args:
        words: the command.
        own_scripts: files that the page tells to write, which take the arguments of train.py.
    """
    match list(words):
        case ["python", "-m", "pytest", "-m", marker, *paths]:
            assert f'"{marker}: ' in (ROOT / "pyproject.toml").read_text(), f"no marker {marker}"
            assert all((ROOT / path).exists() for path in paths), paths
        case ["source" | "cd" | "eval", *_] | ["python", "-m", "venv", *_]:
            pass  # typed into a shell by tests.newcomer
        case ["lipsformer", "train", *arguments]:
            check_script("train.py", arguments, own_scripts)
        case ["python", script, "train" | "eval" as command, *arguments] if script in own_scripts:
            check_script(f"{command}.py", arguments, own_scripts)
        case ["lipsformer", "--help"]:
            pass
        case ["python", "-m", "pytest", file] if file in own_scripts:
            pass
        case ["python", "-m", module, *arguments]:
            check_module(module, arguments)
        case ["python", script, *arguments]:
            check_script(script, arguments, own_scripts)
        case ["accelerate", "launch", *arguments]:
            options = launch_command_parser().parse_args(arguments)
            check_script(
                options.training_script,
                options.training_script_args,
                own_scripts,
                options.num_processes or 1,
            )
        case ["torchrun", *arguments]:
            options = torchrun_parser().parse_args(arguments)
            if options.module:
                check_module(options.training_script, options.training_script_args)
            else:
                check_script(
                    options.training_script,
                    options.training_script_args,
                    own_scripts,
                    int(options.nnodes.split(":")[-1]) * int(options.nproc_per_node),
                )
        case ["timeout", "--preserve-status", seconds, *command]:
            assert float(seconds) > 0
            check_command(command, own_scripts)
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), f"no target {target}"
        case ["pip", "install", "-e", requirement] | ["pip", "install", requirement]:
            check_extras(requirement)
        case ["sbatch", nodes, script, config, *overrides]:
            subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
            gpus = 8 * int(nodes.removeprefix("--nodes="))
            check_training(config, tuple(overrides), gpus)
        case ["sky", "jobs", "launch", "--num-nodes", number, file, *settings]:
            assert settings[::2] == ["--env"] * (len(settings) // 2)
            given = dict(setting.split("=", 1) for setting in settings[1::2])
            assert given.keys() <= yaml.safe_load((ROOT / file).read_text())["envs"].keys()
            check_training(given["CONFIG"], tuple(given["SETTINGS"].split()), 8 * int(number))
        case ["kubectl", "apply", "-f", file]:
            assert yaml.safe_load((ROOT / file).read_text())["kind"] == "Job"
        case _:
            raise AssertionError(f"no check for the command {shlex.join(words)}: write one")


def check_script(
    script: str, arguments: Sequence[str], own_scripts: Sequence[str], world_size: int = 1
) -> None:
    """A script of the repository's root, or one that the page tells to write."""
    if script == "eval.py":
        overrides = parse(evaluation.main, arguments).data
        make_config(DataConfig, [{"source": "folder"}], overrides, origin=script)
    else:
        assert script == "train.py" or script in own_scripts, f"no check for {script}"
        options = parse(train.main, arguments)
        world_size = options.world_size or world_size
        check_training(options.config, tuple(options.overrides), world_size)


def check_module(name: str, arguments: Sequence[str]) -> None:
    """A module with a `main`; what it names below configs/ or scripts/ must be there."""
    package = importlib.import_module(name)
    module = (
        importlib.import_module(f"{name}.__main__") if hasattr(package, "__path__") else package
    )
    options = parse(module.main, arguments)
    schemas = {"scripts.train_graph": "GraphConfig", "scripts.graph_sweep": "GraphSweepConfig"}
    schema = schemas.get(name)
    if schema is not None:
        read_config(getattr(module, schema), ROOT / options.config, options.overrides)


@cache
def check_training(config: str, overrides: tuple[str, ...], world_size: int = 1) -> None:
    """The config loads with the overrides, its batch can be shared, its model can be built."""
    loaded = read_config(Config, ROOT / config, overrides)
    share_of_step(loaded.train, world_size)
    loaded = replace(loaded, model=replace(loaded.model, checkpoint=None))
    described = repr((loaded.model, loaded.data, loaded.train.grad_checkpointing))
    if described not in _built:
        with torch.device("meta"):
            build_model(loaded, [str(number) for number in range(10)])
        _built.add(described)


def check_extras(requirement: str) -> None:
    """The extras of the package are those of pyproject.toml."""
    extras = re.search(r"^(?:\.|lipsformer|\$\(ls dist/lipsformer-\*\.whl\))\[(.*)\]$", requirement)
    assert extras, requirement
    for extra in extras[1].split(","):
        assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(), f"no extra {extra}"


class Parsed(Exception):
    """Thrown in place of what a program would do with its arguments."""


def parse(main: Callable[..., Any], arguments: Sequence[str]) -> argparse.Namespace:
    """What the parser within `main` makes of the arguments; nothing behind it is run."""

    def stopping(method: str) -> Any:
        original = getattr(argparse.ArgumentParser, method)

        def parse_and_stop(self: argparse.ArgumentParser, *given: Any) -> None:
            raise Parsed(original(self, *given))

        return patch.object(argparse.ArgumentParser, method, parse_and_stop)

    argv = ["program", *arguments]  # for those that read it themselves
    with stopping("parse_args"), stopping("parse_intermixed_args"), patch("sys.argv", argv):
        try:
            main(list(arguments)) if main.__code__.co_argcount else main()
        except Parsed as parsed:
            return parsed.args[0]
        except SystemExit as error:
            raise AssertionError(f"refused: {shlex.join(arguments)}") from error
    raise AssertionError(f"{main} parses no arguments")
