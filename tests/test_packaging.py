"""What is installed, and who may import whom."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# folder: what its files may import besides the standard library; the longest folder decides
CORE = {"torch", "timm"}
ALLOWED = {
    "lipsformer": {*CORE, "einops", "lipsformer.models"},
    "lipsformer/_configfile.py": {"omegaconf", "yaml"},
    "lipsformer/config.py": {"omegaconf", "yaml", "lipsformer._configfile"},
    "lipsformer/__main__.py": {"lipsformer.cli"},
    "lipsformer/cli.py": {"lipsformer"},
    "lipsformer/completion.py": {"lipsformer.cli", "lipsformer.config", "shtab"},
    "lipsformer/kernels": {"torch", "lipsformer.kernels"},
    "lipsformer/layers": {*CORE, "einops", "lipsformer.kernels", "lipsformer.layers"},
    "lipsformer/models": {
        *{*CORE, "einops", "lipsformer.kernels", "lipsformer.layers", "lipsformer.models"}
    },
    "lipsformer/graph": {
        *{"torch", "torch_geometric", "triton", "matplotlib", "numpy"},
        *{"lipsformer.layers", "lipsformer.graph", "lipsformer._configfile"},
    },
    "lipsformer/analysis": {
        *{*CORE, "fvcore", "matplotlib"},
        *{"lipsformer.layers", "lipsformer.models", "lipsformer.analysis"},
    },
}
FORBIDDEN = {
    "lipsformer/engine": {"lipsformer.models", "lipsformer.graph", "data", "scripts", "tests"},
    "data": {"lipsformer.models", "lipsformer.layers", "lipsformer.graph", "lipsformer.engine"},
}


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{path}: import from a parent folder"
            package = path.relative_to(ROOT).parent.parts if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            if module == "lipsformer":
                names |= {f"lipsformer.{alias.name}" for alias in node.names}
            else:
                names.add(module)
    return names


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def files(folder: str) -> list[Path]:
    path = ROOT / folder
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def rule(path: Path) -> str | None:
    relative = path.relative_to(ROOT).as_posix()
    fitting = [f for f in [*ALLOWED, *FORBIDDEN] if relative == f or relative.startswith(f + "/")]
    return max(fitting, key=len, default=None)


@pytest.mark.parametrize("folder", ALLOWED)
def test_library_imports_only_what_its_layer_may(folder):
    checked = [path for path in files(folder) if rule(path) == folder]
    assert checked
    for path in checked:
        outside = {n for n in imports(path) if n.split(".")[0] not in sys.stdlib_module_names}
        alien = {name for name in outside if not within(name, ALLOWED[folder])}
        assert not alien, f"{path.relative_to(ROOT)} imports {sorted(alien)}"


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_application_folders_respect_the_arrows(folder):
    paths = files(folder)
    assert paths
    for path in paths:
        wrong = {name for name in imports(path) if within(name, FORBIDDEN[folder])}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_only_the_engine_knows_accelerate_and_nothing_knows_the_application():
    for path in files("lipsformer"):
        names = imports(path)
        application = {"data", "scripts", "tests", "train", "eval"}
        assert not {n for n in names if within(n, application)}, path
        if "engine" not in path.parts:
            assert not {n for n in names if within(n, {"accelerate"})}, path


def test_import_needs_no_optional_package():
    """Importing registers the models where only the library's own dependencies are installed."""
    optional = ["accelerate", "torch_geometric", "tensorboard", "matplotlib", "fvcore", "sklearn"]
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({optional!r}))\n"
        "import lipsformer, timm\n"
        "model = timm.create_model('lipsformer_nano', device='meta')\n"
        "library = lipsformer.kernels.build.compiled_library\n"
        "assert library.cache_info().currsize == 0  # not compiled\n"
        "print(sum(p.numel() for p in model.parameters()), lipsformer.__file__)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["2371528", str(ROOT / "lipsformer" / "__init__.py")]


def test_data_is_the_repositorys_own():
    import data

    assert Path(data.__file__).parent == ROOT / "data"


def build_wheel(folder: Path) -> Path:
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("lipsformer-*.whl")
    return wheel


def test_wheel_holds_the_library_and_inside_it_the_application(tmp_path):
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    kernels = [p for p in (ROOT / "lipsformer").rglob("*") if p.suffix in (".cpp", ".h")]
    expected = {p.relative_to(ROOT).as_posix() for p in [*files("lipsformer"), *kernels]}
    for part in ("train.py", "eval.py", "data", "scripts", "configs"):
        paths = [ROOT / part, *(ROOT / part).rglob("*")]
        application = [p for p in paths if p.is_file() and "__pycache__" not in p.parts]
        expected |= {f"lipsformer/_app/{p.relative_to(ROOT).as_posix()}" for p in application}
    assert names == expected
    required = {line for line in text.splitlines() if line.startswith("Requires-Dist")}
    core = {re.split(r"[ <>=]+", n)[1] for n in required if "extra ==" not in n}
    assert core == {"torch", "timm", "einops", "omegaconf"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of an environment with the wheel, and all else as it is installed here."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(folder)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # lines of a .pth file in a folder that is named by one are not read: no editable install
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python.parent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_wheel_trains_outside_the_clone_beside_another_data_package(installed, tmp_path):
    for name in ("data", "scripts", "train", "eval"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is not ours')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*command: str) -> str:
        result = subprocess.run(
            [str(installed / command[0]), *command[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    where = run("python", "-c", "import lipsformer; print(lipsformer.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)
    create = "import lipsformer, timm; print(timm.create_model('lipsformer_tiny').embed_dim)"
    assert run("python", "-c", create) == "64\n"
    small = ["train.epochs=1", "data.num_workers=2", "run.trackers=[]", "run.output_dir=out"]
    said = run("lipsformer", "train", "--config", "configs/demo.yaml", *small)
    assert "epoch 1/1" in said and "report      out/report.html" in said
    (shown,) = json.loads(run("lipsformer", "eval", "--checkpoint", "out", "--json", "-"))
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert shown["top1"] == next(r["top1"] for r in records if r["kind"] == "raw")
    assert "2,371,528" in run("lipsformer", "profile", "lipsformer_nano", "--repeats", "1")
    launched = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "lipsformer", "train"]
    two = ["--config", "configs/demo.yaml", *small[:-1], "run.output_dir=two", "run.report=false"]
    assert "2 processes x 32" in run("python", *launched, *two)
