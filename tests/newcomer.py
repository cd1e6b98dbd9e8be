"""Do what README.md and docs/commands.md say on a bare machine, and check what comes of it.

    python -m tests.newcomer

In a fresh clone, with an empty home and an empty environment, the shell commands of the two pages
are typed into one shell as they are written. Every output is compared with what README promises.
A command that cannot be run here is listed in `LEFT_OUT` with the reason.

Nothing is downloaded. Before a command installs an extra, the packages that the extra declares,
and what these require, are linked into its environment from the one that runs this; pip confirms
that nothing is missing, and a package that is used but not declared is missed.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lipsformer._commands import COMMANDS
from tests.documents import FENCE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which hatchling brings

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "commands.md")
README = "\n".join(page.read_text() for page in PAGES)
DONE = "newcomer's command ended with"
TOOLS = ("hatchling",)  # what pip would fetch to build the wheel

IMAGENET = "needs ImageNet"
CERTIFIED = "needs the certified run; tests/scripts/test_check_certificate.py has its own"
LEFT_OUT = {
    "make test": "what CI runs besides",
    "python train.py --config configs/imagenet/": IMAGENET,
    "accelerate launch train.py --config configs/imagenet/": f"{IMAGENET} and several GPUs",
    "torchrun --nnodes 2": f"{IMAGENET} and two machines",
    "python train.py --config configs/imagenette/": "needs Imagenette and hours",
    "python train.py --config configs/cifar10/": "downloads CIFAR-10",
    "python -m scripts.import_weights": "needs the authors' file",
    "python eval.py --checkpoint OUT --data": f"{IMAGENET} and the converted file",
    "python eval.py --checkpoint outputs/certified/": CERTIFIED,
    "python -m scripts.check_certificate": CERTIFIED,
}

PHOTOS = """
from pathlib import Path
from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
for number, (pixels, label) in enumerate(zip(digits.images[:450], digits.target)):
    if label < 3:
        folder = Path("datasets/my-photos", "val" if number % 5 == 0 else "train", "abc"[label])
        folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((pixels * 15).astype("uint8")).resize((70, 64))
        picture.save(folder / f"{number}.jpg")
"""


class Terminal:
    """A shell in an empty environment, in which nothing reads what is typed for it.

    Args:
        home: its home, an empty folder.
    """

    def __init__(self, home: Path):
        environment = {
            "HOME": str(home),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_CONFIG_FILE": os.devnull,
        }
        self.home = home
        self.shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=home,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, command: str) -> str:
        """What the command prints.

        Raises:
            AssertionError: if it fails.
        """
        assert self.shell.stdin is not None and self.shell.stdout is not None
        self.shell.stdin.write(f'{{ {command}\n}} < /dev/null\nprintf "\\n{DONE} $?\\n"\n')
        self.shell.stdin.flush()
        lines = []
        for line in self.shell.stdout:
            if line.startswith(DONE):
                output = "".join(lines)
                assert line.split()[-1] == "0", f"{command}\n{output}"
                return output
            lines.append(line)
        raise AssertionError(f"{command}\nended the shell\n{''.join(lines)}")


def link_packages(requirements: Iterable[str], site: Path) -> None:
    """Links what is required, and what that requires, into an environment's folder of packages."""
    waiting, seen = [Requirement(text) for text in requirements], set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
        for text in found.requires or ():
            more = Requirement(text)
            extras = wanted.extras or {""}
            if more.marker is None or any(more.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(more)


def requirements_of(extras: Iterable[str]) -> list[str]:
    """What this package and its extras require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*TOOLS, *project["dependencies"]]
    for extra in extras:
        for text in project["optional-dependencies"][extra]:
            own = re.fullmatch(r"lipsformer\[(.*)\]", text)
            required += requirements_of(own[1].split(",")) if own else [text]
    return required


def prepare_install(terminal: Terminal, command: str) -> None:
    """Provides what the command is about to install."""
    python = "python"
    if command.startswith("make "):  # the environment as make would set it up
        python = ".venv/bin/python"
        terminal.type(f"{Path(sys.executable).resolve()} -m venv .venv")
        command = terminal.type(f"make --dry-run {command.split()[1]}")
    extras = re.findall(r"\[([a-z,]+)\]", command)
    site = terminal.type(f"{python} -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))'")
    named = ",".join(extras).split(",") if extras else ()
    link_packages(requirements_of(named), Path(site.strip()))


class Step(NamedTuple):
    """How a command is checked: with its output, and the terminal for more; what it needs first."""

    check: Callable[[str, Terminal], None]
    before: str = ""
    server: bool = False


def says(*patterns: str) -> Callable[[str, Terminal], None]:
    """A check that the output holds all the patterns."""

    def check(output: str, _: Terminal) -> None:
        for pattern in patterns:
            assert re.search(pattern, output, re.MULTILINE), f"no {pattern!r} in\n{output}"

    return check


def trained(output: str, terminal: Terminal) -> None:
    """The demo's accuracy is that of README's table, and what it names is there."""
    promised, found = (
        re.search(pattern, text, re.MULTILINE)
        for pattern, text in (
            (r"^\| digits.*\| ([\d.]+) % \| `make demo` \|", README),
            (r"^best: .*top-1 ([\d.]+) %", output),
        )
    )
    assert promised and found and abs(float(promised[1]) - float(found[1])) < 2, output
    for name, inside in {
        "checkpoint": "*.safetensors",
        "curves": "*.png",
        "tensorboard": "*",
    }.items():
        path = re.search(rf"^{name} +(\S+)", output, re.MULTILINE)
        assert path and list((clone(terminal) / path[1]).glob(inside)), f"no {name}:\n{output}"
    assert (clone(terminal) / "outputs/demo/report.html").stat().st_size < 5_000_000


def evaluated(output: str, terminal: Terminal) -> None:
    """The accuracy of the run's best evaluation, on all 360 images."""
    best = json.loads((clone(terminal) / "outputs/demo/summary.json").read_text())["best"]
    says(
        rf"^weights .*\(update {best['update']}, .*, top-1 {best['top1']:.2f} %\)$",
        rf"^data +{best['top1']:.3f} .* 360$",
    )(output, terminal)


def profiled(output: str, _: Terminal) -> None:
    """Parameters and GMACs are those of README's table."""
    row = re.search(r"^\| `lipsformer_tiny`[^|]*\|[^|]*\| ([\d,]+) \| ([\d.]+) \|", README, re.M)
    assert row and re.search(rf"^ +total +{row[1]} +{row[2]}", output, re.MULTILINE), output
    says("^swin_tiny_patch4_window7_224 ", "images/s, peak memory")(output, _)


def measured(output: str, _: Terminal) -> None:
    """The bound of the model and of every layer is at least the estimate."""
    lines = re.findall(r"^\S.*?(-?[\d.]+) +-?[\d.]+ +(-?[\d.]+) +-?[\d.]+$", output, re.MULTILINE)
    assert len(lines) > 30 and all(float(a) >= float(b) - 2e-3 for a, b in lines), output


def exported_for_the_hub(_: str, terminal: Terminal) -> None:
    """timm loads the folder where lipsformer is imported, and the card has the run's accuracy."""
    folder = clone(terminal)
    best = json.loads((folder / "outputs/demo/summary.json").read_text())["best"]
    assert f"{best['top1']:.4g} |" in (folder / "HUB/README.md").read_text()
    load = "timm.create_model('local-dir:HUB', pretrained=True).num_classes"
    says("^10$")(terminal.type(f'python -c "import lipsformer, timm; print({load})"'), terminal)


def wheel_with_kernels(_: str, terminal: Terminal) -> None:
    """The wheel holds the kernels for AVX2, AVX-512 and AVX-512 with bf16."""
    (wheel,) = (clone(terminal) / "dist").glob("lipsformer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert sum(name.endswith(".so") for name in archive.namelist()) == 3


def served(output: str, _: Terminal) -> None:
    """The page is there."""
    with urllib.request.urlopen(output.strip()) as answer:
        assert b"lipsformer_nano on your pictures" in answer.read()


def answered(output: str, terminal: Terminal) -> None:
    """The server names five digits, and the probabilities of all ten would add up to one."""
    picture = next((clone(terminal) / "datasets/my-photos/val/a").glob("*.jpg")).read_bytes()
    with urllib.request.urlopen(output.strip(), data=picture) as answer:
        found = json.loads(answer.read())
    assert len(found) == 5 and set(found) < set("0123456789") and 0.5 < sum(found.values()) < 1.01


def clone(terminal: Terminal) -> Path:
    """The folder with the repository."""
    return terminal.home / "lipsformer"


def there(*paths: str) -> Callable[[str, Terminal], None]:
    """A check that the command wrote these files."""

    def check(output: str, terminal: Terminal) -> None:
        for path in paths:
            assert (clone(terminal) / path).is_file(), f"no {path}\n{output}"

    return check


nothing = says("")
STEPS = {
    "make demo": Step(trained),
    "source .venv/bin/activate": Step(nothing),
    "pip install -e": Step(says("Successfully installed lipsformer")),
    "python train.py --config configs/demo.yaml data.source=folder": Step(
        there("outputs/mine/report.html"), before=f"python - <<'END'\n{PHOTOS}\nEND"
    ),
    "python train.py --config configs/finetune.yaml": Step(
        says(r"^report +outputs/finetune/report.html")
    ),
    "make wheel": Step(wheel_with_kernels),
    "python -m venv": Step(nothing),
    'pip install "$(ls dist': Step(says("Successfully installed lipsformer")),
    "cd ~": Step(nothing),
    "lipsformer --help": Step(says(*(f"^  {name} " for name in COMMANDS))),
    # the first key that a command begins with counts
    "lipsformer train --config configs/demo.yaml --dry-run --world-size": Step(
        says("MiB +peak", "True +each image once", "True +updates as on one rank")
    ),
    "lipsformer train --config configs/demo.yaml --dry-run": Step(
        says("^# config", "^# model", "^lr at update +0 +4.000e-03", "GiB +together", "nothing was")
    ),
    'eval "$(lipsformer completion bash)"': Step(
        lambda _, terminal: says("lipsformer")(terminal.type("complete -p lipsformer"), terminal)
    ),
    # a and b stand for any two runs
    "python -m scripts.report outputs/a outputs/b": Step(
        there("a_and_b.html"), before="cp -r outputs/demo outputs/a; cp -r outputs/mine outputs/b"
    ),
    "python -m scripts.demo": Step(served, server=True),
    "python -m scripts.serve": Step(answered, server=True),
    "python eval.py --checkpoint outputs/demo": Step(evaluated),
    "python -m scripts.profile_model": Step(profiled),
    "python -m scripts.measure_lipschitz": Step(measured),
    "python -m scripts.export_model lipsformer_nano exported": Step(
        there("exported/model.onnx", "exported/model.pt2", "exported/model.safetensors")
    ),
    "python -m scripts.export_model outputs/demo HUB": Step(exported_for_the_hub),
}


def commands_of(text: str) -> list[str]:
    """The commands of a block, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"\s+# .*", "", line).strip())]


def key_of(command: str) -> str:
    """The key of the command in `STEPS` or `LEFT_OUT`.

    Raises:
        AssertionError: if there is none.
    """
    keys = [key for key in (*STEPS, *LEFT_OUT) if command.startswith(key)]
    assert keys, f"a new command in README.md, say how it is checked: {command}"
    return keys[0]


def start_server(terminal: Terminal, command: str) -> str:
    """Starts what runs until it is stopped; returns the address that it names."""
    # Emptied at once: the shell in the background may open it later than it is read here.
    terminal.type(f": > server.log; {command} > server.log 2>&1 &")
    for _ in range(600):
        log = (clone(terminal) / "server.log").read_text()
        if address := re.search(r"^open (\S+)", log, re.MULTILINE):
            return address[1]
        time.sleep(0.2)
    raise AssertionError(f"{command}\n{log}")


def follow(terminal: Terminal) -> None:
    """Type the commands of the pages, block by block, each block in the clone's environment."""
    activate = ":"
    for language, _, text in FENCE.findall(README):
        terminal.type(f"cd {clone(terminal)} && {activate}")
        if language == "python":
            terminal.type(f"python - <<'END'\n{text}\nEND")
        if language != "bash":
            continue
        for command in commands_of(text):
            step = STEPS.get(key_of(command))
            if step is None:
                continue
            if "install" in command or command.startswith("make "):
                prepare_install(terminal, command)
            terminal.type(step.before or ":")
            started = time.perf_counter()
            output = (start_server if step.server else Terminal.type)(terminal, command)
            step.check(output, terminal)
            if step.server:
                terminal.type("kill $! && wait $!")
            if command.startswith("source "):
                activate = command
            sys.stdout.write(f"{time.perf_counter() - started:6.1f} s  {command}\n")
            sys.stdout.flush()


def main() -> None:
    """Runs the test."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(Path(folder))
        with terminal.shell:  # it ends when nothing more is typed
            subprocess.run(["git", "clone", "--quiet", ROOT, clone(terminal)], check=True)
            follow(terminal)


if __name__ == "__main__":
    main()
