"""The line of a finished run: its config, its cost, its machine and its evaluations."""

import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.study.plan import Study
from lipsformer._configfile import dump_config
from lipsformer.analysis.cost import count_parameters, part_costs
from lipsformer.config import Config
from lipsformer.engine.build import build_model
from lipsformer.engine.run_files import read_state
from lipsformer.engine.run_folder import RunFolder

MACHINE = ("cpu", "threads", "world_size", "device")  # as the last start of a run found them
LOGS = "logs"  # in the folder of a run: one file for each start


def record(study: Study, row: str, seed: int, folder: Path, code: int) -> dict[str, Any]:
    """Return the line of a finished run, with everything that a table of the study needs."""
    config, run = study.run_config(row, seed), RunFolder(folder)
    lines, starts = run.metrics(), run.environment()
    trained = [line for line in lines if line["kind"] == "train" and "images_per_s" in line]
    evaluations = [
        {key: line[key] for key in ("kind", "epoch", "update", "top1", "loss", "images")}
        for line in lines
        if line["kind"] in ("raw", "ema")
    ]
    images = (lines[-1]["update"] if lines else 0) * config.train.global_batch_size
    logs = (folder / LOGS).iterdir()
    return {
        "row": row,
        "seed": seed,
        "exit_code": code,
        "settings": study.settings(row, seed),
        "config": dump_config(config),
        # A run that diverged may have no checkpoint, which tells the number of classes.
        **(costs(config, run, images) if code == 0 else {}),
        "images": images,
        "images_per_s": statistics.median(line["images_per_s"] for line in trained)
        if trained
        else None,
        "wall_seconds": round(sum(log.stat().st_mtime - float(log.stem) for log in logs), 1),
        "starts": len(starts),
        "commit": starts[-1]["git_commit"],
        "machine": machine(torch.device("cpu"))
        | {key: starts[-1][key] for key in MACHINE if key in starts[-1]},  # earlier runs lack some
        "evaluations": evaluations,
    }


def costs(config: Config, run: RunFolder, images: int) -> dict[str, float]:
    """Return what the model of a run costs, for one image and for all images of the training."""
    model = build_model(config, read_state(run.weights("last").folder)["classes"])
    image = torch.zeros(1, 3, config.data.img_size, config.data.img_size)
    macs = sum(part.macs for part in part_costs(model, image))
    return {
        "parameters": count_parameters(model),
        "gmacs": macs / 1e9,
        "pflop": 6 * macs * images / 1e15,  # forward, twice that backward; 2 FLOP a MAC
    }
