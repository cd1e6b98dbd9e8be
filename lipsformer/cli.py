"""The command `lipsformer`: one word for each entry point of the application.

The application (train.py, eval.py, data/, scripts/, configs/) is run from the root of a clone; a
wheel carries a copy of it in `lipsformer/_app`. Its folder goes first on the module path of this
process alone, so that its `data` neither hides nor meets another package of that name.
"""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lipsformer import __version__

_CARRIED = Path(__file__).parent / "_app"
ROOT = _CARRIED if _CARRIED.is_dir() else Path(__file__).parents[1]


class Command(NamedTuple):
    """An entry point: module with `make_parser()` and `main(argv)`, the extra that it needs."""

    module: str
    extra: str
    summary: str


COMMANDS = {
    "train": Command("train", "train", "train an image model, or show what would be trained"),
    "eval": Command("eval", "train", "top-1, top-5 and loss of a checkpoint"),
    "profile": Command("scripts.profile_model", "train", "parameters, GMACs, memory and speed"),
    "convert": Command("scripts.convert_checkpoint", "train", "read a released checkpoint"),
    "export": Command("scripts.export_model", "export", "write torch.export, ONNX, timm's format"),
    "report": Command("scripts.report", "train", "tell the story of runs in one HTML page"),
    "graph": Command("scripts.train_graph", "train,graph", "train a graph network"),
    "measure": Command("scripts.measure_lipschitz", "train", "Lipschitz bounds and estimates"),
    "check-data": Command("scripts.check_data", "train", "find images that cannot be read"),
    "demo": Command("scripts.demo", "train,web", "a page in the browser for your own pictures"),
}
COMPLETION = "completion"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        The exit code: 0, 2 for a mistake, or what the command says.
    """
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        _say(overview())
        return 0
    if command == "--version":
        _say(f"lipsformer {__version__}")
        return 0
    if command not in (*COMMANDS, COMPLETION):
        near = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.0)
        return _mistake(f"there is no command {command!r}; did you mean {near[0]!r}?")
    if str(ROOT) not in sys.path[:1]:
        sys.path.insert(0, str(ROOT))
    try:
        if command == COMPLETION:
            from lipsformer import completion

            return completion.main(rest)
        module = importlib.import_module(COMMANDS[command].module)
    except ModuleNotFoundError as error:
        extra = COMMANDS[command].extra if command in COMMANDS else "train"
        return _mistake(
            f"`lipsformer {command}` needs {error.name}: pip install 'lipsformer[{extra}]'"
        )
    rest = with_own_config(rest)
    command_parser(command, module).parse_intermixed_args(rest)  # prints help, names mistakes
    return module.main(rest)


def overview() -> str:
    """What `lipsformer --help` says."""
    words = {name: command.summary for name, command in COMMANDS.items()}
    words[COMPLETION] = 'completion for bash, zsh or tcsh: eval "$(lipsformer completion bash)"'
    lines = "\n".join(f"  {name:11} {summary}" for name, summary in words.items())
    return f"""usage: lipsformer COMMAND ...

Lipschitz-continuous transformers for vision and graphs that train without warmup.

{lines}

Begin with
  lipsformer train --config configs/demo.yaml            handwritten digits, about 2 minutes
  lipsformer train --config configs/demo.yaml --dry-run  only show what that would do
  lipsformer train --help                                all settings, with their meaning

The files in configs/ come with the installation. On eight devices:
  torchrun --nproc_per_node 8 -m lipsformer train --config CONFIG
`lipsformer COMMAND --help` explains a command. Exit code 2 is a mistake in what was given."""


def command_parser(name: str, module: Any) -> argparse.ArgumentParser:
    """The command's own parser, in the words of the console.

    Args:
        name: Of the command.
        module: Its module.
    """
    parser: argparse.ArgumentParser = module.make_parser()
    parser.prog = f"lipsformer {name}"
    own = {f"python -m {module.__name__}", f"python {module.__name__}.py"}
    for text in ("description", "epilog"):
        words = getattr(parser, text) or ""
        for before in own:
            words = words.replace(before, parser.prog)
        words = words.replace(f"accelerate launch {name}.py", f"torchrun -m {parser.prog}")
        setattr(parser, text, words)
    return parser


def with_own_config(arguments: Sequence[str]) -> list[str]:
    """The arguments with a `--config` that is not here taken from those of the application.

    Args:
        arguments: Of a command.
    """
    found = list(arguments)
    for index, argument in enumerate(found):
        if index > 0 and found[index - 1] == "--config":
            found[index] = _own(argument)
        elif argument.startswith("--config="):
            found[index] = f"--config={_own(argument.removeprefix('--config='))}"
    return found


def _own(path: str) -> str:
    carried = ROOT / path
    return str(carried) if carried.is_file() and not Path(path).exists() else path


def _mistake(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
