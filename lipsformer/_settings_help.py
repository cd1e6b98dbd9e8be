"""Describe the settings of a config for `--help`, from its dataclasses and their docstrings."""

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from typing import Any, Literal

import yaml


def describe(schema: type) -> str:
    """Return the help text of a schema: what its sections and settings mean, types and defaults."""
    lines = []
    for section, kind in typing.get_type_hints(schema).items():
        about, meanings = read_docstring(kind)
        lines += ["", f"{section}: {about}", ""]
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            value = item.default
            if item.default_factory is not dataclasses.MISSING:
                value = item.default_factory()
            default = "required" if value is dataclasses.MISSING else f"default {_in_yaml(value)}"
            name = f"{section}.{item.name}"
            lines.append(f"  {name:32} {_type_name(hints[item.name])}; {default}")
            meaning = textwrap.wrap(meanings.get(item.name, ""), 94, break_on_hyphens=False)
            lines += [f"      {line}" for line in meaning]
    return "\n".join(lines[1:])


def read_docstring(section: type) -> tuple[str, dict[str, str]]:
    """Return what a section's docstring says before `Args:`, and the meaning of each setting there.

    Args:
        section: A dataclass.
    """
    text, _, _ = inspect.cleandoc(section.__doc__ or "").partition("\n\nExample:")
    about, _, settings = text.partition("\n\nArgs:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", settings, re.MULTILINE)
    return about, {name: " ".join(meaning.split()) for name, meaning in entries}


def _type_name(hint: Any) -> str:
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(str, options))
    if isinstance(hint, types.UnionType):
        return " | ".join("null" if o is types.NoneType else _type_name(o) for o in options)
    if typing.get_origin(hint) is tuple:
        inner = ["..." if option is ... else _type_name(option) for option in options]
        return f"[{', '.join(inner)}]"
    kind = typing.get_origin(hint) or hint
    return {str: "text", dict: "mapping"}.get(kind) or kind.__name__


def _in_yaml(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
