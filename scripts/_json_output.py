"""The option `--json` of a command: a file for its figures, or - for standard output."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lipsformer._files import require_writable

STDOUT = "-"


def add_json_option(parser: argparse._ActionsContainer) -> None:
    """Add `--json` to a parser."""
    parser.add_argument("--json", metavar="FILE", help="also write the figures there; - for stdout")


def check_json_target(target: str | None) -> None:
    """Raise a `ConfigError` if the file of `--json` cannot be written, before work is lost."""
    if target not in (None, STDOUT):
        require_writable("--json", target)


def say(target: str | None, text: object) -> None:
    """Print a text for people, to standard error where standard output is for the JSON."""
    print(text, file=sys.stderr if target == STDOUT else sys.stdout)


def write_json(target: str | None, figures: Any) -> None:
    """Write the figures where `--json` asks for them."""
    if target is None:
        return
    text = json.dumps(figures, indent=1) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)
