"""Train LipsFormer, Swin and a plain ViT of equal cost with the same budget and no warmup.

    python -m benchmarks.convergence                                  # all rows, on the GPU
    python -m benchmarks.convergence cifar10-nano --lrs 2e-3 data.download=true
    python -m benchmarks.convergence imagenette-nano train.precision=fp32 train.epochs=1

Every run is one call of train.py with a config of configs/ and the model of the row; a run that is
there already is not repeated, one that was stopped continues. Trailing `key=value` overrides hold
for all runs. At the end: benchmarks/results/convergence.json, its table, and one picture of curves
per row in docs/images.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.curves import plot_runs
from lipsformer._configfile import read_config
from lipsformer.config import Config
from lipsformer.engine.distributed import EXIT_NONFINITE
from lipsformer.engine.run_folder import RunFolder

NANO_SWIN = {"embed_dim": 32, "depths": [1, 2, 5, 1], "num_heads": [2, 4, 8, 16], "window_size": 4}
NANO_VIT = {"embed_dim": 160, "depth": 6, "num_heads": 4}
SWIN, VIT, VIT_SMALL = (
    "swin_tiny_patch4_window7_224",
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
)
# row -> config, pixels, and the models with their arguments: M parameters and GMACs in the comments
ROWS: dict[str, tuple[str, int, dict[str, dict[str, Any]]]] = {
    "cifar10-nano": (
        "configs/cifar10/lipsformer_nano.yaml",
        32,
        {
            "lipsformer_nano": {"patch_size": 2},  # 2.12, 0.032
            SWIN: {"patch_size": 2, **NANO_SWIN},  # 2.07, 0.031
            VIT: {"patch_size": 8, **NANO_VIT},  # 1.89, 0.032
        },
    ),
    "cifar10-tiny": (
        "configs/cifar10/lipsformer_nano.yaml",
        32,
        {
            "lipsformer_tiny": {"patch_size": 2},  # 23.26, 0.364
            SWIN: {"patch_size": 2, "window_size": 4},  # 27.51, 0.358
            VIT_SMALL: {"patch_size": 8},  # 21.38, 0.365
        },
    ),
    "imagenette-nano": (
        "configs/imagenette/lipsformer_nano.yaml",
        64,
        {
            "lipsformer_nano": {"patch_size": 4},  # 2.12, 0.033
            SWIN: {"patch_size": 4, **NANO_SWIN},  # 2.07, 0.031
            VIT: {"patch_size": 16, **NANO_VIT},  # 1.98, 0.034
        },
    ),
    "imagenette-tiny": (
        "configs/imagenette/lipsformer_nano.yaml",
        160,
        {
            "lipsformer_tiny": {"patch_size": 4},  # 23.26, 2.326
            SWIN: {"patch_size": 4},  # 27.52, 2.679
            VIT_SMALL: {"patch_size": 16},  # 21.63, 2.268
        },
    ),
}


def overrides(row: str, model: str, lr: float, output_dir: Path) -> list[str]:
    """What a run changes in the config of its row."""
    _, img_size, models = ROWS[row]
    return [
        f"model.name={model}",
        "model.kwargs.drop_path_rate=0.05",
        *(f"model.kwargs.{key}={value}" for key, value in models[model].items()),
        f"data.img_size={img_size}",
        f"optim.lr={lr}",
        "train.precision=bf16",
        "data.num_workers=8",
        "lipschitz.monitor_every=null",
        f"run.output_dir={output_dir}",
    ]


def table(records: list[dict[str, Any]]) -> str:
    """The runs as Markdown."""
    lines = ["| row | model | lr | epochs | last top-1 | best top-1 |", "|" + 6 * "---|"]
    lines += [
        f"| {r['row']} | {r['model']} | {r['lr']:g} | {r['epochs']} | {r['last_top1']:.2f} | "
        f"{r['best_top1']:.2f} |"
        if r["code"] == 0
        else f"| {r['row']} | {r['model']} | {r['lr']:g} | | not finite | |"
        for r in records
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arguments", nargs="*", help="rows and key=value overrides")
    parser.add_argument("--lrs", type=float, nargs="+", default=[5e-4, 2e-3, 1e-2])
    parser.add_argument("--runs", type=Path, default=Path("outputs/convergence"))
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/convergence.json"), help="JSON file"
    )
    parser.add_argument("--images", type=Path, default=Path("docs/images"), help="folder of curves")
    options = parser.parse_intermixed_args()
    extra = [argument for argument in options.arguments if "=" in argument]
    rows = [argument for argument in options.arguments if "=" not in argument] or list(ROWS)
    if unknown := set(rows) - set(ROWS):
        parser.error(f"rows {sorted(unknown)} are not known; choose from {list(ROWS)}")
    records = []
    for row in rows:
        folders = []
        for model in ROWS[row][2]:
            for lr in options.lrs:
                folder = options.runs / row / f"{model}_lr{lr:g}"
                command = ["train.py", "--config", ROWS[row][0]]
                command += [*overrides(row, model, lr, folder), *extra]
                code = subprocess.run([sys.executable, *command], check=False).returncode
                if code not in (0, EXIT_NONFINITE):
                    sys.exit(code)
                record: dict[str, Any] = {"row": row, "model": model, "lr": lr, "code": code}
                if code == 0:
                    top1 = [r["top1"] for r in RunFolder(folder).metrics() if r["kind"] == "raw"]
                    epochs = read_config(Config, folder / "config.yaml").train.epochs
                    record |= {"epochs": epochs, "last_top1": top1[-1], "best_top1": max(top1)}
                    folders.append(folder)
                records.append(record)
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(records, indent=2) + "\n")
        plot_runs(folders, options.images / f"convergence_{row}.png")
    print(table(records))


if __name__ == "__main__":
    main()
