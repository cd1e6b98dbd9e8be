"""What the wheel holds, and that it works outside the clone."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def files(folder: str) -> list[Path]:
    path = ROOT / folder
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


CODE = ("lipsformer", "data", "train.py", "eval.py", "scripts", "benchmarks", "tests", "docs")
TOOLS = {  # dependencies that are used without an import
    *{
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
        "pyright",
        "hatchling",
        "ipykernel",
        "onnx",
        "onnxscript",
    },
    *{"tensorboard", "mkdocs-material", "mkdocstrings", "lipsformer"},
}


def unused(dependencies: set[str]) -> set[str]:
    """Return the dependencies that are neither a tool nor imported by any file."""
    modules: dict[str, set[str]] = {}
    for module, names in packages_distributions().items():
        for name in names:
            modules.setdefault(name.lower(), set()).add(module)
    code = "\n".join(path.read_text() for part in CODE for path in files(part))
    imported = {*re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE)}
    return {name for name in dependencies - TOOLS if not modules.get(name, {name}) & imported}


def test_data_is_the_repositorys_own():
    import data

    assert Path(data.__file__).parent == ROOT / "data"


def build_wheel(folder: Path, clone: Path = ROOT) -> Path:
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=clone, check=True, capture_output=True)
    (wheel,) = folder.glob("lipsformer-*.whl")
    return wheel


def test_wheel_holds_the_library_and_inside_it_the_application(tmp_path):
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    kernels = [p for p in (ROOT / "lipsformer").rglob("*") if p.suffix in (".cpp", ".h", ".so")]
    expected = {p.relative_to(ROOT).as_posix() for p in [*files("lipsformer"), *kernels]}
    for part in ("train.py", "eval.py", "data", "scripts", "configs"):
        paths = [ROOT / part, *(ROOT / part).rglob("*")]
        application = [p for p in paths if p.is_file() and "__pycache__" not in p.parts]
        expected |= {f"lipsformer/_app/{p.relative_to(ROOT).as_posix()}" for p in application}
    assert names == expected
    required = {line for line in text.splitlines() if line.startswith("Requires-Dist")}
    core = {re.split(r"[ <>=]+", n)[1] for n in required if "extra ==" not in n}
    assert core == {"torch", "timm", "einops", "omegaconf"}
    if sys.version_info < (3, 11):  # which does not know the modules of most packages
        return
    assert not unused({re.split(r"[ <>=;\[]+", line)[1].lower() for line in required})


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    return install(build_wheel(folder), folder)


def install(wheel: Path, folder: Path) -> Path:
    """Return the bin folder of an environment with a wheel; all else is as it is installed here."""
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


@pytest.mark.slow
def test_a_wheel_with_kernels_compiles_nothing(tmp_path):
    """What `make wheel` does, in a copy; then a forward pass where there is no compiler."""
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    for part in ("lipsformer", "data", "scripts", "configs"):
        shutil.copytree(ROOT / part, clone / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "eval.py", "pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, clone / name)
    build = [sys.executable, "-m", "lipsformer.kernels.build", "lipsformer/kernels/prebuilt"]
    subprocess.run(build, cwd=clone, check=True)
    python = install(build_wheel(tmp_path, clone), tmp_path) / "python"
    code = """
import lipsformer, timm, torch
with torch.no_grad():
    timm.create_model("lipsformer_nano").eval()(torch.zeros(1, 3, 32, 32))
"""
    environment = {"PATH": str(home), "HOME": str(home), "LIPSFORMER_LOG": "kernels"}
    run = subprocess.run(
        [python, "-c", code], cwd=home, env=environment, capture_output=True, text=True, check=True
    )
    lines = [line for line in run.stderr.splitlines() if not line.endswith(": kernel")]
    assert "lipsformer kernels: cosine_windows: kernel\n" in run.stderr and not lines
    assert list(home.iterdir()) == []
