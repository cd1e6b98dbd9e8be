"""Read a config file and `key=value` overrides into frozen dataclasses, and write them again.

Every mistake in a config becomes one `ConfigError` with a message of one line. The entry points
print the message and exit with code 2 before anything is written.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lipsformer._checks import require, suggest
from lipsformer._errors import ConfigError

Schema = TypeVar("Schema")

# Type of the items of a list: what YAML gives for it, and its name in messages.
_ITEMS = {int: (int, "whole numbers"), float: (int | float, "numbers"), str: (str, "words")}


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
        overrides: Dotted assignments, which override all layers. Values are read as YAML. A mapping
            changes the keys that it names, and an empty one removes all keys.
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
        else:
            _check_value(path, value, hint)


def _override(config: Any, override: str) -> None:
    """Replace one `key=value` of a config.

    Raises:
        ConfigError: If the value is ???, or if a part of it would be lost as a comment.
    """
    value = override.partition("=")[2]
    node = yaml.compose(value)
    if comment := value[node.end_mark.index if node else 0 :].strip():
        raise ConfigError(
            f"override {override!r} is not possible: YAML reads {comment!r} as a comment; quote "
            "the whole value within the quotes of the shell"
        )
    given = OmegaConf.from_dotlist([override])
    if missing := sorted(OmegaConf.missing_keys(given)):  # a merge would keep the earlier value
        raise ConfigError(
            f"{', '.join(missing)} is ???, which stands for a missing value: give one"
        )
    replaces = isinstance(node, yaml.MappingNode) and not node.value  # a merge would keep all keys
    try:
        config.merge_with(given)
    except TypeError:  # a list in place of a mapping, or the reverse, which `_check_keys` refuses
        replaces = True
    if replaces:
        key = override.partition("=")[0]
        OmegaConf.update(config, key, OmegaConf.select(given, key), merge=False)


def _check_value(path: str, value: Any, hint: Any) -> None:
    """Refuse a value of another kind than its type: mapping, list, boolean or single value."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in options:
        return
    kinds = {typing.get_origin(option) or option for option in options}
    if dict in kinds:
        require(isinstance(value, dict), path, value, "must be a mapping")
        assert isinstance(value, dict)
        _, inner = next(typing.get_args(o) for o in options if typing.get_origin(o) is dict)
        for name, item in value.items() if inner is not Any else ():
            _check_value(f"{path}.{name}", item, inner)
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
    elif isinstance(value, bool) and kinds & {str, Literal}:
        raise ConfigError(
            f"{path}={value} is text, but YAML reads an unquoted no, yes, on or off "
            'as a boolean; quote it, e.g. "no"'
        )
    elif isinstance(value, int | float) and str in kinds:
        raise ConfigError(
            f"{path}={value} is text, but YAML reads it unquoted as a number, so that 010 "
            'becomes 8; quote it, e.g. "010"'
        )
    else:
        require(not isinstance(value, list | dict), path, value, "must be a single value")


def _one_line(error: Exception) -> str:
    """Return OmegaConf's message in one line, with the dotted path first."""
    path, text = "", []
    for line in (line.strip() for line in str(error).splitlines()):
        if line.startswith("full_key: "):
            path = line.removeprefix("full_key: ")
        elif line and not line.startswith(("reference_type", "object_type")):
            text.append(line)
    return f"{path}: {' '.join(text)}" if path else " ".join(text)
