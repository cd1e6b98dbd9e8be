"""What the folder of a run of `train.py` tells, read once."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lipsformer._configfile import ConfigError, read_config
from lipsformer.config import Config
from lipsformer.engine.tracking import METRICS, read_metrics
from lipsformer.engine.trainer import CONFIG

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class RunLog:
    """The records of one run.

    Attributes:
        name: what the report calls it.
        position: among the runs of the report, which is its colour.
        alone: whether there are no others.
        folder: where it lies.
        config: as it was resolved.
        starts: one entry of environment.json for each start of the process.
        records: of metrics.jsonl.
        summary: of a run that has ended, else None.
    """

    name: str
    position: int
    alone: bool
    folder: Path
    config: Config
    starts: list[dict[str, Any]]
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None

    def points(self, kind: str, key: str) -> Points:
        """(updates made, value) of the records of a kind that hold the key."""
        return [(r["update"], r[key]) for r in self.records if r["kind"] == kind and key in r]

    @cached_property
    def monitor(self) -> list[dict[str, Any]]:
        """The records of the Lipschitz monitor; see `lipsformer.analysis.instruments.Monitor`."""
        return [r for r in self.records if any(key.startswith("sigma/") for key in r)]

    @property
    def bounds(self) -> Points:
        """(updates made, log10 of the proved bound of the weights as trained)."""
        return [
            (r["update"], r["bound_log10"])
            for r in self.records
            if "bound_log10" in r and r["kind"] != "ema"
        ]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluations; those of the EMA weights where there are any."""
        kind = "ema" if self.config.train.ema_decay else "raw"
        return [r for r in self.records if r["kind"] == kind]

    @property
    def best(self) -> dict[str, Any] | None:
        """The first evaluation with the highest top-1."""
        return max(self.evaluations, key=lambda r: r["top1"], default=None)

    def median(self, key: str) -> float | None:
        """Median over the training records that hold the key."""
        values = [value for _, value in self.points("train", key)]
        return statistics.median(values) if values else None

    @property
    def training_seconds(self) -> float:
        """Time spent in training updates, evaluation and saving left out."""
        seconds, before = 0.0, 0
        for update, per_update in self.points("train", "seconds_per_update"):
            seconds += (update - before) * per_update
            before = update
        return seconds


def read_runs(folders: Sequence[Path]) -> list[RunLog]:
    """The runs in the folders, with names that tell them apart.

    Raises:
        ConfigError: if one of them is not the folder of a run, or a file of it is damaged.
    """
    names = _short_names(folders)
    alone = len(folders) == 1
    return [_read(f, names[i], position=i, alone=alone) for i, f in enumerate(folders)]


def _read(folder: Path, name: str, *, position: int, alone: bool) -> RunLog:
    for file in (CONFIG, METRICS):
        if not (folder / file).is_file():
            raise ConfigError(f"{folder} has no {file}: name the folder of a run of train.py")
    try:
        records = read_metrics(folder / METRICS)
        starts = json.loads((folder / "environment.json").read_text())
        summary = folder / "summary.json"
        return RunLog(
            name=name,
            position=position,
            alone=alone,
            folder=folder,
            config=read_config(Config, folder / CONFIG),
            starts=starts,
            records=records,
            summary=json.loads(summary.read_text()) if summary.exists() else None,
        )
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder} cannot be read as a run: {error}") from None


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names with as many of their parents as are needed to differ."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    raise AssertionError("different paths differ in some part")
