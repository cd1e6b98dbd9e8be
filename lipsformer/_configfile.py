"""Read a config file and `key=value` overrides into frozen dataclasses, and write them again.

This is the only module that knows OmegaConf. Every mistake in a config becomes one `ConfigError`
with a message of one line. The entry points print it and exit with code 2 before anything is
written.
"""

import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

Schema = TypeVar("Schema")


class ConfigError(ValueError):
    """A user's mistake, in one line: what, the value, what is allowed, what to do."""


def require(condition: bool, path: str, value: object, allowed: str) -> None:
    """Raise a `ConfigError` that names the setting, its value and what is allowed."""
    if not condition:
        raise ConfigError(f"{path}={value!r} is not possible: {allowed}")


def require_finite(section: object, name: str) -> None:
    """Raise a `ConfigError` if a number of the section called `name` is NaN or infinite."""
    for item in dataclasses.fields(section):  # pyright: ignore[reportArgumentType]
        value = getattr(section, item.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                require(math.isfinite(number), f"{name}.{item.name}", number, "must be finite")


def read_config(schema: type[Schema], path: str | Path, overrides: Sequence[str] = ()) -> Schema:
    """Reads a YAML file, its `base:` parent if it names one, and `key=value` overrides.

    Later wins: parent, file, overrides. The parent's path is relative to the file, and a parent
    has no parent of its own.

    Raises:
        ConfigError: for anything wrong; the message begins with the file's name.
    """
    path = Path(path)
    layers = [_read_yaml(path)]
    base = layers[0].pop("base", None)
    if base is not None:
        parent = _read_yaml(path.parent / str(base))
        if "base" in parent:
            raise ConfigError(f"{path}: base={str(base)!r} names a base itself; one level only")
        layers.insert(0, parent)
    return make_config(schema, layers, overrides, origin=str(path))


def make_config(
    schema: type[Schema],
    layers: Sequence[Mapping[str, Any]],
    overrides: Sequence[str] = (),
    *,
    origin: str,
) -> Schema:
    """Merges plain mappings and `key=value` overrides, and builds the frozen `schema` of them.

    Args:
        schema: a frozen dataclass.
        layers: nested mappings; later ones win.
        overrides: dotted assignments, which win over all layers; the value is read as YAML.
        origin: what the user calls the source of the mappings, for messages.
    """
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r} is not of the form key=value")
    try:
        merged = OmegaConf.merge(*layers, OmegaConf.from_dotlist(list(overrides)))
        if missing := sorted(OmegaConf.missing_keys(merged)):  # ??? in a file
            be = "is" if len(missing) == 1 else "are"
            raise ConfigError(f"{', '.join(missing)} {be} required and not given")
        _check_keys(OmegaConf.to_container(merged, resolve=True), schema, prefix="")
        # One merge onto the schema: a second one would meet frozen objects.
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), merged))
    except ConfigError as error:
        message = str(error)
        raise ConfigError(
            message if message.startswith(origin) else f"{origin}: {message}"
        ) from None
    except MissingMandatoryValue as error:
        raise ConfigError(f"{origin}: {error.full_key} is required and not given") from None
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{origin}: {_one_line(error)}") from None
    return typing.cast(Schema, config)


def dump_config(config: object) -> str:
    """The whole config as YAML; loading it gives an equal object."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def describe(schema: type) -> str:
    """Every section with its meaning, its settings, their types and defaults, for help texts."""
    lines = []
    for section, kind in typing.get_type_hints(schema).items():
        lines += ["", f"{section}: {inspect.cleandoc(kind.__doc__ or '')}", ""]
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            value = item.default
            if item.default_factory is not dataclasses.MISSING:
                value = item.default_factory()
            default = "required" if value is dataclasses.MISSING else f"default {_in_yaml(value)}"
            name = f"{section}.{item.name}"
            lines.append(f"  {name:32} {_type_name(hints[item.name])}; {default}")
    return "\n".join(lines[1:])


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
    """Refuses what OmegaConf would let through or name badly."""
    if not isinstance(given, dict):
        where = prefix.rstrip(".")
        raise ConfigError(f"{where}={given!r} must be a mapping of settings")
    hints = typing.get_type_hints(schema)
    for key, value in given.items():
        path = f"{prefix}{key}"
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown key {path}={value!r}; did you mean {prefix}{near[0]}? "
                f"Known here: {', '.join(hints)}"
            )
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            _check_keys(value, typing.cast(type, hint), prefix=f"{path}.")
        elif isinstance(value, bool) and _takes_text(hint):
            raise ConfigError(
                f"{path}={value} is text, but YAML reads an unquoted no, yes, on or off "
                'as a boolean; quote it, e.g. "no"'
            )


def _takes_text(hint: Any) -> bool:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return (
        any(option is str or (typing.get_origin(option) is Literal) for option in options)
        and bool not in options
    )


def _one_line(error: Exception) -> str:
    """OmegaConf's message without its type lines, the dotted path first."""
    path, text = "", []
    for line in (line.strip() for line in str(error).splitlines()):
        if line.startswith("full_key: "):
            path = line.removeprefix("full_key: ")
        elif line and not line.startswith(("reference_type", "object_type")):
            text.append(line)
    return f"{path}: {' '.join(text)}" if path else " ".join(text)
