"""Read a config file and `key=value` overrides into frozen dataclasses, and write them again.

Every mistake in a config becomes one `ConfigError` with a message of one line. The entry points
print the message and exit with code 2 before anything is written.
"""

import dataclasses
import difflib
import inspect
import json
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

Schema = TypeVar("Schema")

# Type of the items of a list: what YAML gives for it, and its name in messages.
_ITEMS = {int: (int, "whole numbers"), float: (int | float, "numbers"), str: (str, "words")}


class ConfigError(ValueError):
    """A user's mistake. The message names the setting, its value and what is allowed."""


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the known name that is nearest to a word, or all known names if none is near.

    Args:
        word: What the user wrote.
        known: The names that are allowed.
        prefix: Stands before every name in the message.
    """
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"known are {', '.join(prefix + name for name in names)}"


def require(condition: bool, path: str, value: object, allowed: str) -> None:
    """Raise a `ConfigError` that names the setting, its value and what is allowed."""
    if not condition:
        raise ConfigError(f"{path}={value!r} is not possible: {allowed}")


def require_each(
    section: object, prefix: str, names: Iterable[str], fits: Callable[[Any], bool], allowed: str
) -> None:
    """Raise a `ConfigError` for the first of several settings whose value does not fit.

    Args:
        section: The section of the config.
        prefix: Its name.
        names: Names of the settings.
        fits: Returns whether a value is allowed.
        allowed: What is allowed, for the message.
    """
    for name in names:
        value = getattr(section, name)
        require(fits(value), f"{prefix}.{name}", value, allowed)


def require_effect(section: object, prefix: str, name: str, works: bool, needs: str) -> None:
    """Refuse a value that is not the default where it would be ignored in silence.

    Args:
        section: The section of the config.
        prefix: Its name.
        name: Name of the setting.
        works: Whether the setting has an effect.
        needs: What would give it an effect, for the message.

    Raises:
        ConfigError: If the setting has no effect and another value than its default.
    """
    value = getattr(section, name)
    if not works and value != getattr(type(section), name):
        raise ConfigError(
            f"{prefix}.{name}={value!r} has no effect without {needs}: "
            "remove it, or set what it needs"
        )


def require_writable(option: str, file: str | Path) -> None:
    """Raise a `ConfigError` that names the option unless a file can be written; leave it as it is.

    Commands call it before their work, whose result would be lost otherwise.
    """
    path = Path(file)
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} {str(file)!r} cannot be written: {reason}") from None


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """Return what a JSON file holds.

    Args:
        path: The file.
        kind: What it must hold, a dict or a list.

    Raises:
        ConfigError: If it is damaged; the message is one sentence.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read as JSON: {reason}; restore the file") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{path} holds no JSON {kind.__name__}; restore the file")
    return value


def numbers_in(value: object) -> list[int | float]:
    """Return all numbers in a value, which may be a list or mapping of values; no booleans."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers_in(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def require_finite(section: object, name: str) -> None:
    """Raise a `ConfigError` if a number of the section called `name` is NaN or infinite."""
    for item in dataclasses.fields(section):  # pyright: ignore[reportArgumentType]
        value = getattr(section, item.name)
        for number in numbers_in(value):
            finite = isinstance(number, int) or math.isfinite(number)
            require(finite, f"{name}.{item.name}", value, "must be finite")


def read_config(schema: type[Schema], path: str | Path, overrides: Sequence[str] = ()) -> Schema:
    """Read a YAML file, the parent file that its key `base` names, and `key=value` overrides.

    The file overrides its parent, and the overrides override both. The parent's path is relative
    to the file. A parent cannot have a parent.

    Args:
        schema: A frozen dataclass.
        path: The YAML file.
        overrides: Assignments such as `optim.lr=1e-3`.

    Raises:
        ConfigError: For any mistake; the message begins with the file's name.
    """
    path = Path(path)
    layers = [_read_yaml(path)]
    base = layers[0].pop("base", None)
    if base is not None:
        parent = _read_yaml(path.parent / str(base))
        if "base" in parent:
            raise ConfigError(f"{path}: base={str(base)!r} has a base too; use one level only")
        layers.insert(0, parent)
    return make_config(schema, layers, overrides, origin=str(path))


def make_config(
    schema: type[Schema],
    layers: Sequence[Mapping[str, Any]],
    overrides: Sequence[str] = (),
    *,
    origin: str,
) -> Schema:
    """Merge nested mappings and `key=value` overrides, and build the frozen `schema` from them.

    Args:
        schema: A frozen dataclass.
        layers: Nested mappings. A later one overrides an earlier one.
        overrides: Dotted assignments, which override all layers. Values are read as YAML.
        origin: Where the mappings come from; messages begin with it.

    Raises:
        ConfigError: For any mistake.
    """
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r} is not of the form key=value")
    try:
        merged = OmegaConf.merge(*layers)
        for override in overrides:
            _override(merged, override)
        if missing := sorted(OmegaConf.missing_keys(merged)):  # ??? in a file
            be = "is" if len(missing) == 1 else "are"
            raise ConfigError(f"{', '.join(missing)} {be} required and not given")
        _check_keys(OmegaConf.to_container(merged, resolve=True), schema, prefix="")
        # One merge onto the schema: a second one would meet frozen objects.
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), merged))
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    except MissingMandatoryValue as error:
        raise ConfigError(f"{origin}: {error.full_key} is required and not given") from None
    except (OmegaConfBaseException, yaml.YAMLError, TypeError) as error:
        raise ConfigError(f"{origin}: {_one_line(error)}") from None
    return typing.cast(Schema, config)


def dump_config(config: object) -> str:
    """Return the whole config as YAML. Reading it gives an equal object."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def dotted(config: Any) -> dict[str, Any]:
    """Return all settings of a config by their names `section.key`."""
    sections = dataclasses.asdict(config)
    return {f"{section}.{key}": v for section, keys in sections.items() for key, v in keys.items()}


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


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such config file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: must hold a mapping of sections, not a {type(content).__name__}"
        )
    return typing.cast(dict[str, Any], content)


def _check_keys(given: Any, schema: type, prefix: str) -> None:
    """Refuse what OmegaConf would accept or report badly."""
    if not isinstance(given, dict):
        where = prefix.rstrip(".")
        raise ConfigError(f"{where}={given!r} must be a mapping of settings")
    hints = typing.get_type_hints(schema)
    for key, value in given.items():
        path = f"{prefix}{key}"
        if key not in hints:
            raise ConfigError(f"unknown key {path}={value!r}; {suggest(str(key), hints, prefix)}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            _check_keys(value, typing.cast(type, hint), prefix=f"{path}.")
        elif isinstance(value, bool) and _takes_text(hint):
            raise ConfigError(
                f"{path}={value} is text, but YAML reads an unquoted no, yes, on or off "
                'as a boolean; quote it, e.g. "no"'
            )
        elif isinstance(value, int | float) and str in (hint, *typing.get_args(hint)):
            raise ConfigError(
                f"{path}={value} is text, but YAML reads it unquoted as a number, so that 010 "
                'becomes 8; quote it, e.g. "010"'
            )
        else:
            _check_container(path, value, hint)


def _override(config: Any, override: str) -> None:
    """Replace one `key=value` of a config.

    Raises:
        ConfigError: If the value does not fit, or a part of it would be lost as a comment.
    """
    value = override.partition("=")[2]
    node = yaml.compose(value)
    if comment := value[node.end_mark.index if node else 0 :].strip():
        raise ConfigError(
            f"override {override!r} is not possible: YAML reads {comment!r} as a comment; quote "
            "the whole value within the quotes of the shell"
        )
    try:
        config.merge_with(OmegaConf.from_dotlist([override]))
    except TypeError:  # a list in place of a mapping
        raise ConfigError(f"{override} is not possible: must be a mapping") from None


def _check_container(path: str, value: Any, hint: Any) -> None:
    """Refuse lists, mappings and booleans where the type is another, and others where it is not."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in options:
        return
    kinds = {typing.get_origin(option) or option for option in options}
    if dict in kinds:
        require(isinstance(value, dict), path, value, "must be a mapping")
        assert isinstance(value, dict)
        _, inner = next(typing.get_args(o) for o in options if typing.get_origin(o) is dict)
        for name, item in value.items() if inner is not Any else ():
            _check_container(f"{path}.{name}", item, inner)
    elif tuple in kinds:
        require(isinstance(value, (list, tuple)), path, value, "must be a list of values")
        assert isinstance(value, (list, tuple))
        values = next(typing.get_args(o) for o in options if typing.get_origin(o) is tuple)
        fits = ... in values or len(value) == len(values)
        nested = any(isinstance(item, list | dict) for item in value)
        require(not nested, path, value, "must be a list of single values")
        require(fits, path, value, f"must have length {len(values)}, not length {len(value)}")
        # OmegaConf's message about a wrong item names neither the key nor the value.
        accepted, called = _ITEMS[values[0]]
        fits = all(isinstance(item, accepted) and not isinstance(item, bool) for item in value)
        require(fits, path, value, f"must be a list of {called}")
    elif bool in kinds:
        require(isinstance(value, bool), path, value, "must be true or false")
    else:
        require(not isinstance(value, list | dict), path, value, "must be a single value")


def _takes_text(hint: Any) -> bool:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return (
        any(option is str or (typing.get_origin(option) is Literal) for option in options)
        and bool not in options
    )


def _one_line(error: Exception) -> str:
    """Return OmegaConf's message in one line, with the dotted path first."""
    path, text = "", []
    for line in (line.strip() for line in str(error).splitlines()):
        if line.startswith("full_key: "):
            path = line.removeprefix("full_key: ")
        elif line and not line.startswith(("reference_type", "object_type")):
            text.append(line)
    return f"{path}: {' '.join(text)}" if path else " ".join(text)
