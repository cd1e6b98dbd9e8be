"""Run every GPU test, and print the predictions of docs/gpu.md beside measurements of this GPU.

    python -m benchmarks.gpu                       # under an hour; writes gpu_report.json
    python -m benchmarks.gpu --models swin_tiny_patch4_window7_224 lipsformer_swin_tiny \\
        --modes eager regions                      # without the tests
    python -m benchmarks.gpu --only models graph_layers
    python -m benchmarks.gpu --only all            # hours: speed, rooflines, scaling, convergence
    python -m benchmarks.gpu --list

Please send gpu_report.json back with an issue: it holds the tests that failed, the figures,
versions, and the names of processor and GPU. With `--only`, results are written to
benchmarks/results and docs/images. A command that fails does not stop the others, but the exit code
is then not 0.
"""

import functools
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.gpu_measure import MODES, Record, compare, measure, step_ratios, table
from benchmarks.machine import machine
from benchmarks.records import write_record
from lipsformer._commands import documented_parser
from lipsformer._machine import commit

PREDICTIONS = Path(__file__).parent / "predictions"
REPORT = Path("gpu_report.json")

TINY = "swin_tiny_patch4_window7_224 lipsformer_swin_tiny lipsformer_tiny"
OTHERS = (
    "swin_small_patch4_window7_224 swin_base_patch4_window7_224 convnext_tiny "
    "vit_small_patch16_224 lipsformer_swin_small lipsformer_swin_base lipsformer_small "
    "lipsformer_base"
)
CUDA = "--device cuda --precision bf16"
RESULTS = "benchmarks/results"
STUDIES = ("cifar10_nano", "cifar10_tiny", "imagenette_nano", "imagenette_tiny")
COMMANDS = (
    f"python -m benchmarks.models {TINY} {CUDA} --modes eager regions compiled graphs "
    f"--batch-size 64 128 256 --rounds 21 --warmup 5 --output {RESULTS}/models_cuda.json",
    f"python -m benchmarks.models swin_tiny_patch4_window7_224 {OTHERS} {CUDA} "
    f"--modes eager compiled --batch-size 64 --output {RESULTS}/models_others_cuda.json",
    f"python -m benchmarks.models {TINY} {CUDA} --modes compiled --batch-size 1 8 32 512 "
    f"--output {RESULTS}/batch_cuda.json",
    f"python -m benchmarks.models {TINY} {CUDA} --modes compiled --batch-size 64 "
    f"--img-size 160 224 288 --output {RESULTS}/size_cuda.json",
    f"python -m benchmarks.models {TINY} {CUDA} --modes compiled --batch-size 64 "
    f"--depths 2,2,2,2 2,2,6,2 2,2,18,2 --output {RESULTS}/depth_cuda.json",
    f"python -m benchmarks.roofline lipsformer_swin_tiny {CUDA} --batch-size 128 "
    f"--output {RESULTS}/roofline_swin_tiny_cuda.json "
    "--plot docs/images/roofline_swin_tiny_cuda.png",
    f"python -m benchmarks.roofline lipsformer_tiny {CUDA} --batch-size 128 "
    f"--output {RESULTS}/roofline_tiny_cuda.json --plot docs/images/roofline_tiny_cuda.png",
    f"python -m benchmarks.graph_layers --graph medium --device cuda "
    f"--output {RESULTS}/graph/layers_medium_cuda.json",
    f"python -m benchmarks.graph_layers --graph large --device cuda "
    f"--output {RESULTS}/graph/layers_large_cuda.json",
    f"python -m benchmarks.scaling {CUDA} --processes {max(1, torch.cuda.device_count())} "
    f"--batch-size 128 --rounds 21 --warmup 5 --output {RESULTS}/scaling_cuda.json",
    *(f"python -m benchmarks.study benchmarks/studies/convergence_{name}.yaml" for name in STUDIES),
)


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--only", nargs="+", metavar="PART", help="commands with one of these words, or all"
    )
    parts.add_argument("--models", nargs="+", help="measure only these models, and run no tests")
    parser.add_argument("--list", action="store_true", help="print these commands instead")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="of the models, without --only"
    )
    parser.add_argument("--report", type=Path, default=REPORT, help="the file to send back")
    options = parser.parse_args()
    words = [""] if not options.only or "all" in options.only else options.only
    commands = [command for command in COMMANDS if any(word in command for word in words)]
    if not commands:
        parser.error(f"no command has one of {words}; --list shows all")
    if options.list:
        print("\n".join(commands))
        return
    known = sorted(path.stem for path in PREDICTIONS.glob("*.json") if path.stem != "triton")
    for name in options.models or ():
        if name not in known:
            parser.error(f"--models {name}: nothing is predicted for it; choose among {known}")
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here")
    if options.only:
        sys.exit(run_all(commands))
    measured = functools.partial(measure, modes=options.modes)
    tests = no_tests if options.models else run_tests
    sys.exit(verify(options.report, tests, measured, options.models))


def verify(
    path: Path,
    tests: Callable[[], dict[str, Any]],
    measured: Callable[[Record], dict[str, float]],
    names: Collection[str] | None = None,
) -> str | None:
    """Run the tests, measure what was predicted, and write the report.

    Args:
        path: The report.
        tests: Runs the tests.
        measured: Measures the figures of a prediction.
        names: The models that are measured; None for all of which a compiled step is predicted.

    Returns:
        What failed; None if nothing did.
    """
    outcome = tests()
    records = [json.loads(file.read_text()) for file in sorted(PREDICTIONS.glob("*.json"))]
    models = [
        record
        for record in records
        if ("compiled" in record if names is None else record.get("model") in names)
    ]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    # The limits of the H100 stand in for GPUs that have none; ratios of models still compare.
    gpu = next((known for known in ("A100", "H100", "B200") if known in name), "H100")
    rows, errors = compare(models, gpu, measured)
    rows += step_ratios(rows)
    report = {
        "machine": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "commit": commit(),
        "cuda": torch.version.cuda,
        "predicted_for": gpu,
        "tests": outcome,
        "errors": errors,
        "rows": [row._asdict() for row in rows],
    }
    write_record(path, report)
    print(table(rows))
    print(f"tests: {outcome['passed']} passed, {len(outcome['failed'])} failed; wrote {path}")
    failed = [*outcome["failed"], *(f"{name}: {error}" for name, error in errors.items())]
    return "\n".join(["failed:", *failed]) if failed else None


def no_tests() -> dict[str, Any]:
    """Return that no test ran."""
    return {"passed": 0, "failed": [], "skipped": ["all, because --models was given"]}


def run_tests() -> dict[str, Any]:
    """Run every test that needs a GPU; return how many passed, which failed and were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        arguments = ["-m", "pytest", "-m", "gpu", "tests", f"--junitxml={path}"]
        subprocess.run([sys.executable, *arguments], check=False)
        return read_outcome(path.read_text())


def read_outcome(xml: str) -> dict[str, Any]:
    """Read pytest's report: the number of tests that passed, and the names of the others."""
    outcome: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            outcome["failed"].append(name)
        elif "skipped" in kinds:
            outcome["skipped"].append(name)
        else:
            outcome["passed"] += 1
    return outcome


def run_all(commands: list[str]) -> str | None:
    """Run commands one after the other; return those that failed."""
    failed = []
    for command in commands:
        print(f"+ {command}", flush=True)
        arguments = shlex.split(command)[1:]
        if subprocess.run([sys.executable, *arguments], check=False).returncode != 0:
            failed.append(command)
    return "\n".join(["failed:", *failed]) if failed else None


if __name__ == "__main__":
    main()
