"""The console program `lipsformer`, which starts every command of the application.

In a clone, the application (train.py, eval.py, data/, scripts/, configs/) is the repository itself.
A wheel carries a copy of it in `lipsformer/_app`. The program puts that folder first on its module
path, so that the application's package `data` is found before any other package of that name.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from lipsformer import __version__
from lipsformer._checks import suggest
from lipsformer._commands import COMMANDS, COMPLETION, RENAMED, command_parser, quiet_pipe

_CARRIED = Path(__file__).parent / "_app"
ROOT = _CARRIED if _CARRIED.is_dir() else Path(__file__).parents[1]


@quiet_pipe()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The command and its arguments; None takes them from the process.

    Returns:
        The exit code: 0, 2 for a user's mistake, or the command's own code.
    """
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        _print(overview())
        return 0
    if command == "--version":
        _print(f"lipsformer {__version__}")
        return 0
    if command in RENAMED:
        return _mistake(f"the command {command!r} is now called {RENAMED[command]!r}")
    if command not in (*COMMANDS, COMPLETION):
        known = suggest(command, [*COMMANDS, COMPLETION])
        return _mistake(f"there is no command {command!r}; {known}")
    if str(ROOT) not in sys.path[:1]:
        sys.path.insert(0, str(ROOT))
    try:
        if command == COMPLETION:
            from lipsformer import completion

            return completion.main(rest)
        parser = command_parser(command)
        module = importlib.import_module(COMMANDS[command].module)
    except ModuleNotFoundError as error:
        extra = COMMANDS[command].extra if command in COMMANDS else "train"
        return _mistake(
            f"`lipsformer {command}` needs {error.name}: pip install 'lipsformer[{extra}]'"
        )
    return module.main(resolve_configs(rest), parser)


def overview() -> str:
    """Return the text of `lipsformer --help`."""
    summaries = {name: command.summary for name, command in COMMANDS.items()}
    summaries[COMPLETION] = (
        'print completion for bash, zsh or tcsh: eval "$(lipsformer completion bash)"'
    )
    width = max(map(len, summaries))
    lines = "\n".join(f"  {name:{width}} {summary}" for name, summary in summaries.items())
    return f"""usage: lipsformer COMMAND ...

Lipschitz-continuous transformers for vision and graphs that train without warmup.

{lines}

Begin with
  lipsformer train --config configs/demo.yaml            train on handwritten digits, 3 minutes
  lipsformer train --config configs/demo.yaml --dry-run  show what that would do
  lipsformer train --help                                list all settings with their meaning

The files in configs/ come with the installation. On eight devices:
  torchrun --nproc_per_node 8 -m lipsformer train --config CONFIG
`lipsformer COMMAND --help` explains a command. Exit code 2 means a mistake in the arguments."""


def resolve_configs(arguments: Sequence[str]) -> list[str]:
    """Replace a `--config` path that does not exist by the installed file of the same path.

    Args:
        arguments: The arguments of a command.
    """
    resolved = list(arguments)
    for index, argument in enumerate(resolved):
        if index > 0 and resolved[index - 1] == "--config":
            resolved[index] = _resolve(argument)
        elif argument.startswith("--config="):
            resolved[index] = f"--config={_resolve(argument.removeprefix('--config='))}"
    return resolved


def _resolve(path: str) -> str:
    installed = ROOT / path
    return str(installed) if installed.is_file() and not Path(path).exists() else path


def _mistake(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
