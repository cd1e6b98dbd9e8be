"""Every public class and layer function shows its use: its docstring has an example that runs."""

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
import torch

# Classes exported by these packages, and classes defined in the public modules of the others.
EXPORTED = ("lipsformer.layers", "lipsformer.models", "lipsformer.graph")
DEFINED = (
    "lipsformer.models",
    "lipsformer.analysis",
    "lipsformer.engine",
    "lipsformer.config",
    "lipsformer.graph",
    "lipsformer.recipe",
    "data",
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def public_classes() -> Iterator[type]:
    """Yield every public class once, without exceptions and protocols."""
    found: dict[type, None] = {}
    for name in EXPORTED:
        package = importlib.import_module(name)
        exported = getattr(package, "__all__", [n for n in vars(package) if n[0] != "_"])
        found.update(dict.fromkeys(vars(package)[n] for n in exported))
    for name in DEFINED:
        for module in modules(name):
            if module.__name__.rpartition(".")[2].startswith("_"):
                continue
            members = [value for _, value in inspect.getmembers(module, inspect.isclass)]
            found.update(dict.fromkeys(m for m in members if m.__module__ == module.__name__))
    for kind in found:
        if (
            inspect.isclass(kind)
            and kind.__module__ != "builtins"  # Python 3.10 takes tuple[int, int] for a class
            and not kind.__name__.startswith("_")
            and not issubclass(kind, BaseException)
            and Protocol not in kind.__bases__
        ):
            yield kind


def others() -> Iterator[Any]:
    """Yield the functions that the layers export, and all functions and classes with an example."""
    package = importlib.import_module("lipsformer.layers")
    exported = [getattr(package, name) for name in package.__all__]
    found = dict.fromkeys(filter(inspect.isfunction, exported))
    for name in ("lipsformer.layers", "lipsformer.kernels.verdict", *DEFINED):
        for module in modules(name):
            members = [value for _, value in inspect.getmembers(module)]
            kinds = [m for m in members if inspect.isfunction(m) or inspect.isclass(m)]
            own = [m for m in kinds if m.__module__ == module.__name__]
            found.update(dict.fromkeys(m for m in own if ">>> " in (m.__doc__ or "")))
    yield from found


def modules(name: str) -> Iterator[Any]:
    """Yield a module or package and all modules below it."""
    module = importlib.import_module(name)
    yield module
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        yield importlib.import_module(found.name)


SHOWN = list(dict.fromkeys([*public_classes(), *others()]))


@pytest.mark.parametrize(
    "kind", SHOWN, ids=[f"{kind.__module__}.{kind.__qualname__}" for kind in SHOWN]
)
@pytest.mark.filterwarnings("default")
def test_what_is_public_has_an_example_that_runs(kind: Any) -> None:
    docstring = inspect.cleandoc(kind.__doc__ or "")
    assert re.search(r"^Example:\n(.*\n)*?    >>> ", docstring, re.M), "it has no example"
    torch.manual_seed(0)
    example = doctest.DocTestParser().get_doctest(
        docstring,
        {**vars(importlib.import_module(kind.__module__))},
        f"{kind.__module__}.{kind.__qualname__}",
        inspect.getsourcefile(kind),
        None,
    )
    said: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=said.append)
    assert not said, "".join(said)
