"""Kill runs at random moments, again and again, and compare them with runs that were not.

    OMP_NUM_THREADS=1 python -m tests.engine.kill /tmp/kills --trials 100

Each trial trains LipsFormer nano on two processes with two workers each, with mixup, EMA, drop path
and a checkpoint after every second update; even trials use AdamW, odd ones Muon. One process is
killed at a random moment and the other one soon after, up to three times; then the run may end.
Every tensor of its last checkpoint and all its records must be those of the run that was not
killed, bit for bit. FOLDER/trials.jsonl has a line for each trial. The same command continues.
"""

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tests.data.trees import write_tree
from tests.launch import running
from tests.runs import DIGITS, outcome, write_config

SETTINGS: dict[str, Any] = {
    **DIGITS,
    "model": {"name": "lipsformer_nano", "kwargs": {"drop_path_rate": 0.2}},
    "train": {
        **DIGITS["train"],
        "epochs": 2,
        "global_batch_size": 20,
        "batch_size_per_device": 5,
        "eval_batch_size": 7,
    },
    "run": {**DIGITS["run"], "save_every_updates": 2},
}
OPTIMIZERS = {"adamw": 1e-2, "muon": 5e-3}


def start(folder: Path, optimizer: str, kill: random.Random | None, seconds: float) -> float:
    """Run to the end, or to a random moment of so many seconds; return the time that it took."""
    optim = {**SETTINGS["optim"], "name": optimizer, "lr": OPTIMIZERS[optimizer]}
    data = {"source": "folder", "root": str(folder.parent / "images"), "img_size": 32}
    data |= {"num_workers": 2, "crop_pct": 1.0}
    settings = {**SETTINGS, "optim": optim, "data": data}
    config = write_config(folder, settings, folder / "out")
    before = time.monotonic()
    with running(["--config", str(config)], folder / "log", world_size=2) as ranks:
        if kill is None:
            for rank in ranks:
                rank.join()
            assert [rank.exitcode for rank in ranks] == [0, 0], (folder / "log.0").read_text()
        else:
            victim = kill.choice(ranks)
            victim.join(kill.uniform(0.25, 1) * seconds)  # the first quarter is the start
            victim.kill()
            time.sleep(kill.choice([0, 0.01, 0.3]))
    return time.monotonic() - before


def trial(number: int, folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Kill a run up to three times, let it end, and return what differs."""
    draw = random.Random(number)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    optimizer, reached = list(OPTIMIZERS)[number % 2], []
    for _ in range(draw.choice([1, 1, 2, 3])):
        start(folder, optimizer, draw, expected["seconds"])
        reached += [max((p.name for p in folder.glob("out/checkpoints/update-*")), default="")]
    start(folder, optimizer, None, 0)
    found, reference = outcome(folder / "out"), expected["outcome"]
    differs = [key for key in reference if key != "tensors" and found[key] != reference[key]]
    names = found["tensors"].keys() | reference["tensors"].keys()
    differs += [n for n in names if found["tensors"].get(n) != reference["tensors"].get(n)]
    if not differs:
        shutil.rmtree(folder)
    return {
        "trial": number,
        "optimizer": optimizer,
        "killed_after": [int(name[-3:] or 0) for name in reached],
        "identical": not differs,
        "differs": differs,
    }


def reference(folder: Path, optimizer: str) -> dict[str, Any]:
    """Return the outcome of a run that is not killed; it is made only once."""
    timing = folder / "seconds.json"
    if not timing.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        timing.write_text(json.dumps(start(folder, optimizer, None, 0)))
    return {"outcome": outcome(folder / "out"), "seconds": json.loads(timing.read_text())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=100)
    options = parser.parse_args()
    if not (images := options.folder / "images").exists():
        for split, count in (("train", 31), ("val", 7)):
            write_tree(images / split, dict.fromkeys("abcd", count), size=(41, 37))
    expected = {name: reference(options.folder / name, name) for name in OPTIMIZERS}
    log = options.folder / "trials.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for number in range(len(done), options.trials):
        optimizer = list(OPTIMIZERS)[number % 2]
        done.append(trial(number, options.folder / f"trial-{number}", expected[optimizer]))
        with log.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
    identical = sum(entry["identical"] for entry in done)
    print(f"{identical} of {len(done)} runs are identical to the ones that were not killed")  # noqa: T201
    return int(identical < len(done))


if __name__ == "__main__":
    sys.exit(main())
