"""Who may import whom: the table of ARCHITECTURE.md, no circles, and proof that the rule bites."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("lipsformer", "data", "train.py", "eval.py", "scripts", "benchmarks")

LIBRARY = {
    *{"lipsformer", "lipsformer.config", "lipsformer.recipe", "lipsformer._configfile"},
    *{"lipsformer._checks", "lipsformer._commands", "lipsformer._errors", "lipsformer._files"},
    *{"lipsformer._machine", "lipsformer._modes", "lipsformer._ranks", "lipsformer._settings_help"},
    *{"lipsformer._sharding", "lipsformer._arguments", "lipsformer._hooks"},
    "lipsformer._precision",
    *{"lipsformer.kernels", "lipsformer.layers", "lipsformer.models", "lipsformer.graph"},
    *{"lipsformer.analysis", "lipsformer.engine", "lipsformer.jsonl"},
}

# The modules of this repository that each part may import. A name includes its submodules, but
# "lipsformer" means that package's __init__.py only. The longest path that fits a file decides.
OWN = {
    "lipsformer/__init__.py": {"lipsformer.models"},
    "lipsformer/__main__.py": {"lipsformer.cli"},
    "lipsformer/cli.py": {
        *{"lipsformer", "lipsformer._checks", "lipsformer._commands", "lipsformer.completion"}
    },
    "lipsformer/_arguments.py": set(),
    "lipsformer/_commands.py": set(),
    "lipsformer/completion.py": {"lipsformer._commands", "lipsformer.config"},
    "lipsformer/_checks.py": {"lipsformer._errors"},
    "lipsformer/_configfile.py": {"lipsformer._checks", "lipsformer._errors"},
    "lipsformer/_errors.py": set(),
    "lipsformer/_files.py": {"lipsformer._errors"},
    "lipsformer/_settings_help.py": set(),
    "lipsformer/jsonl.py": set(),
    "lipsformer/_hooks.py": set(),
    "lipsformer/_machine.py": set(),
    "lipsformer/_modes.py": set(),
    "lipsformer/_precision.py": set(),
    "lipsformer/_ranks.py": set(),
    "lipsformer/_sharding.py": set(),
    "lipsformer/config.py": {
        *{"lipsformer._checks", "lipsformer._errors", "lipsformer._machine", "lipsformer.recipe"}
    },
    "lipsformer/recipe.py": {"lipsformer._checks"},
    "lipsformer/kernels": {"lipsformer.kernels"},
    "lipsformer/layers": {
        *{"lipsformer.layers", "lipsformer.kernels", "lipsformer._arguments"},
        *{"lipsformer._hooks", "lipsformer._precision"},
    },
    "lipsformer/models": {
        *{"lipsformer.models", "lipsformer.layers", "lipsformer.kernels"},
        *{"lipsformer._arguments", "lipsformer._files", "lipsformer._hooks"},
        "lipsformer._precision",
    },
    "lipsformer/graph": {
        *{"lipsformer.graph", "lipsformer.layers", "lipsformer.kernels"},
        *{"lipsformer._arguments", "lipsformer._checks", "lipsformer._files"},
        *{"lipsformer._modes", "lipsformer._ranks", "lipsformer.jsonl"},
    },
    "lipsformer/analysis": {
        *{"lipsformer.analysis", "lipsformer.models", "lipsformer.layers", "lipsformer._modes"},
        *{"lipsformer._arguments", "lipsformer._precision", "lipsformer._sharding"},
    },
    "lipsformer/analysis/bounds/graph.py": {
        *{"lipsformer.analysis", "lipsformer.models", "lipsformer.layers", "lipsformer.graph"}
    },
    "lipsformer/engine": {
        *{"lipsformer.engine", "lipsformer.analysis", "lipsformer.models", "lipsformer.kernels"},
        *{"lipsformer.config", "lipsformer._checks", "lipsformer._configfile"},
        *{"lipsformer._machine", "lipsformer._errors", "lipsformer._files", "lipsformer._ranks"},
        *{"lipsformer._sharding", "lipsformer.jsonl"},
    },
    "data": {"data"},
    "data/build.py": {"data", "lipsformer.config"},
    "train.py": {*LIBRARY, "data", "scripts"},
    "eval.py": {*LIBRARY, "data", "scripts"},
    "scripts": {*LIBRARY, "data", "scripts"},
    "benchmarks": {*LIBRARY, "data", "scripts", "benchmarks", "train", "eval", "tests"},
}

# The packages from elsewhere that each part may import besides the standard library; parts that
# are not listed may import any.
ELSEWHERE = {
    "lipsformer/__init__.py": set(),
    "lipsformer/__main__.py": set(),
    "lipsformer/cli.py": set(),
    "lipsformer/_arguments.py": set(),
    "lipsformer/_commands.py": set(),
    "lipsformer/completion.py": {"shtab"},
    "lipsformer/_checks.py": set(),
    "lipsformer/_configfile.py": {"omegaconf", "yaml"},
    "lipsformer/_errors.py": set(),
    "lipsformer/_files.py": set(),
    "lipsformer/_settings_help.py": {"yaml"},
    "lipsformer/jsonl.py": set(),
    "lipsformer/_hooks.py": {"torch"},
    "lipsformer/_machine.py": set(),
    "lipsformer/_modes.py": {"torch"},
    "lipsformer/_precision.py": {"torch"},
    "lipsformer/_ranks.py": {"torch"},
    "lipsformer/_sharding.py": {"torch"},
    "lipsformer/config.py": set(),
    "lipsformer/recipe.py": set(),
    "lipsformer/kernels": {"torch", "timm", "triton", "numpy"},
    "lipsformer/layers": {"torch", "timm", "einops"},
    "lipsformer/models": {"torch", "timm", "einops"},
    "lipsformer/graph": {"torch", "torch_geometric", "triton", "einops", "numpy", "matplotlib"},
    "lipsformer/analysis": {
        *{"torch", "timm", "einops", "torch_geometric", "fvcore", "numpy", "matplotlib"}
    },
    "data": {
        *{"torch", "torchvision", "timm", "torch_geometric", "ogb", "pymetis"},
        *{"numpy", "PIL", "cv2", "simplejpeg", "sklearn", "pyarrow"},
    },
}


def violations(root: Path) -> list[str]:
    """Return one line for every import that the tables forbid, and for every circle."""
    modules = {name(path, root): path.relative_to(root).as_posix() for path in sources(root)}
    found, graph = [], {}
    for module, file in modules.items():
        targets = set(imported(root / file, module, modules))
        graph[module] = {target for target in targets if target in modules} - {module}
        forbidden = sorted(target for target in targets if not allowed(file, target))
        found += [f"{file} imports {target}" for target in forbidden]
    return found + [f"circular import: {' -> '.join(circle)}" for circle in circles(graph)]


def allowed(file: str, target: str) -> bool:
    """Decide whether a file may import a module."""
    top, *rest = target.split(".")
    if top in REPOSITORY:
        if top == "scripts" and not file.startswith("benchmarks/"):
            # One command never imports another.
            shared = bool(rest) and (rest[0] == "reporting" or rest[0].startswith("_"))
        else:
            shared = True
        if target == "lipsformer._renamed":  # names of earlier checkouts
            return file.startswith(("lipsformer/", "scripts/"))
        return shared and any(covers(name, target) for name in rule(OWN, file) or ())
    packages = rule(ELSEWHERE, file)
    return packages is None or top in packages or top in sys.stdlib_module_names


REPOSITORY = {"lipsformer", "data", "scripts", "benchmarks", "tests", "train", "eval"}


def covers(name: str, target: str) -> bool:
    return target == name or (name != "lipsformer" and target.startswith(f"{name}."))


def sources(root: Path) -> Iterator[Path]:
    for part in CHECKED:
        path = root / part
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def name(path: Path, root: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rule(table: dict[str, set[str]], file: str) -> set[str] | None:
    fitting = [part for part in table if file == part or file.startswith(f"{part}/")]
    return table[max(fitting, key=len)] if fitting else None


def imported(path: Path, module: str, modules: dict[str, str]) -> Iterator[str]:
    """Yield the dotted names of all modules that a file imports, at any place within it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join([*base, *([node.module] if node.module else [])])
            source = source if node.level else str(node.module)
            submodules = {f"{source}.{alias.name}" for alias in node.names} & {*modules}
            yield from submodules
            if len(submodules) < len(node.names):
                yield source


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the shortest circle through every module that lies on one, each circle once."""
    found: dict[frozenset, list[str]] = {}
    for start in graph:
        paths = [[start]]
        seen = {start}
        while paths:
            path = paths.pop(0)
            if start in graph[path[-1]]:
                found.setdefault(frozenset(path), [*path, start])
                break
            for following in sorted(graph[path[-1]] - seen):
                seen.add(following)
                paths.append([*path, following])
    return list(found.values())


def test_every_import_follows_the_table_and_there_are_no_circles() -> None:
    assert violations(ROOT) == []


# file: (line that is appended to it, import that the rule must then forbid)
DELIBERATE = {
    "lipsformer/kernels/build.py": ("import lipsformer.layers.linear", "lipsformer.layers.linear"),
    "lipsformer/layers/linear.py": ("from lipsformer.models import convert", "lipsformer.models"),
    "lipsformer/layers/conv.py": ("import accelerate", "accelerate"),
    "lipsformer/models/inference.py": ("from lipsformer import analysis", "lipsformer.analysis"),
    "lipsformer/models/lipsformer_vit.py": (
        "import lipsformer.graph.norm",
        "lipsformer.graph.norm",
    ),
    "lipsformer/graph/norm.py": ("import lipsformer.models", "lipsformer.models"),
    "lipsformer/analysis/cost.py": ("from lipsformer import engine", "lipsformer.engine"),
    "lipsformer/analysis/plots.py": ("import lipsformer.graph", "lipsformer.graph"),
    "lipsformer/engine/optim.py": ("def f():\n    import data.rng", "data.rng"),
    "lipsformer/engine/metrics.py": ("from lipsformer.graph import norm", "lipsformer.graph.norm"),
    "lipsformer/engine/schedule.py": ("from scripts import report", "scripts.report"),
    "lipsformer/config.py": ("from lipsformer.layers import CenterNorm", "lipsformer.layers"),
    "lipsformer/cli.py": ("from lipsformer.models import convert", "lipsformer.models"),
    "data/rng.py": ("from lipsformer.config import DataConfig", "lipsformer.config"),
    "data/build.py": ("from lipsformer.engine import optim", "lipsformer.engine.optim"),
    "scripts/check_data.py": ("from scripts import make_shards", "scripts.make_shards"),
    "scripts/make_shards.py": ("import train", "train"),
    "train.py": ("from scripts import check_data", "scripts.check_data"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the violations of a copy of the code with one deliberate violation per file."""
    folder = tmp_path_factory.mktemp("copy")
    for part in CHECKED:
        copy = shutil.copy if (ROOT / part).is_file() else shutil.copytree
        copy(ROOT / part, folder / part)
    for file, (line, _) in {**DELIBERATE, "data/errors.py": ("import data.loader", "")}.items():
        path = folder / file
        path.write_text(f"{path.read_text()}\n{line}\n")
    return violations(folder)


@pytest.mark.parametrize("file", DELIBERATE)
def test_a_forbidden_import_is_found(found: list[str], file: str) -> None:
    assert f"{file} imports {DELIBERATE[file][1]}" in found


def test_a_circular_import_is_found(found: list[str]) -> None:
    assert "circular import: data.errors -> data.loader -> data.errors" in found


def test_import_needs_no_optional_package() -> None:
    """Importing registers the models where only the library's own dependencies are installed.

    Only `lipsformer.graph` needs another package, and says so.
    """
    optional = ["accelerate", "torch_geometric", "tensorboard", "matplotlib", "fvcore", "sklearn"]
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({optional!r}))\n"
        "import lipsformer, timm\n"
        "model = timm.create_model('lipsformer_nano', device='meta')\n"
        "library = lipsformer.kernels.build.compiled_library\n"
        "assert library.cache_info().currsize == 0  # not compiled\n"
        "print(sum(p.numel() for p in model.parameters()), lipsformer.__file__)\n"
        "import lipsformer.graph\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == ["2371528", str(ROOT / "lipsformer" / "__init__.py")]
    assert run.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: lipsformer.graph needs PyTorch Geometric; "
        "install it with pip install 'lipsformer[graph]'"
    )
