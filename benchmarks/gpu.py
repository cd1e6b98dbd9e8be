"""Everything that needs a GPU, one after the other: tests, speed, rooflines, scaling, convergence.

    python -m benchmarks.gpu                       # all of it, in the order below
    python -m benchmarks.gpu --only models graph_layers
    python -m benchmarks.gpu --list

Results are written to benchmarks/results and docs/images. A command that fails does not stop the
others; the exit code tells.
"""

import shlex
import subprocess
import sys

import torch

from lipsformer._commands import documented_parser

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
    "python -m pytest -m gpu tests",
    f"python -m benchmarks.models {TINY} {CUDA} --modes eager compiled graphs "
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
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="commands with one of these words"
    )
    parser.add_argument("--list", action="store_true", help="print the commands instead")
    options = parser.parse_args()
    words = options.only or [""]
    commands = [command for command in COMMANDS if any(word in command for word in words)]
    if not commands:
        parser.error(f"no command has one of {words}; --list shows all")
    if options.list:
        print("\n".join(commands))
        return
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here")
    failed = []
    for command in commands:
        print(f"+ {command}", flush=True)
        arguments = shlex.split(command)[1:]
        if subprocess.run([sys.executable, *arguments], check=False).returncode != 0:
            failed.append(command)
    sys.exit("\n".join(["failed:", *failed]) if failed else 0)


if __name__ == "__main__":
    main()
