"""Command lines, run from the repository root as `python -m scripts.<name>`."""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any


class _RenamedCommands(MetaPathFinder):
    """Load the table of renamed modules for a command that no finder knows.

    It is not loaded before: `scripts.check_certificate` must run where torch is not installed.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.startswith("scripts."):
            import_module("lipsformer._renamed")  # its finder is asked next


sys.meta_path.append(_RenamedCommands())
