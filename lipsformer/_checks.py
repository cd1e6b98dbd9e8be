"""Checks of settings. Each raises a `ConfigError` that says in one sentence what is allowed."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lipsformer._errors import ConfigError


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


def optional(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return the check that accepts null, and otherwise what `fits` accepts."""
    return lambda value: value is None or fits(value)


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
