"""The records of a run of `train.py`, read once."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lipsformer._errors import ConfigError
from lipsformer.config import Config
from lipsformer.engine.run_files import CONFIG, ENVIRONMENT, METRICS
from lipsformer.engine.run_folder import RunFolder

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class RunLog:
    """The records of one run.

    Attributes:
        name: Its name in the report.
        position: Its position among the runs of the report, which decides its color.
        alone: Whether it is the only run.
        folder: Its folder.
        config: Its resolved config.
        starts: One entry of environment.json for each start of the process.
        records: The records of metrics.jsonl.
        summary: The summary of a run that has ended; None for others.
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
        """Return (completed updates, value) of the records of a kind that hold the key."""
        return [(r["update"], r[key]) for r in self.records if r["kind"] == kind and key in r]

    @cached_property
    def monitor(self) -> list[dict[str, Any]]:
        """The records of the Lipschitz monitor; see `lipsformer.analysis.instruments.Monitor`."""
        return [r for r in self.records if any(key.startswith("sigma/") for key in r)]

    @property
    def bounds(self) -> Points:
        """(completed updates, log10 of the proved bound of the weights as trained)."""
        return [
            (r["update"], r["bound_log10"])
            for r in self.records
            if "bound_log10" in r and r["kind"] != "ema"
        ]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluations of the kind of weights, raw or EMA, with the highest top-1."""
        best = self.best
        return [] if best is None else [r for r in self.records if r["kind"] == best["kind"]]

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation of the best weights, as `RunFolder.weights` chooses them.

        It is the first one with the highest top-1, and that of the EMA weights if it equals that of
        the raw weights of the same update.
        """
        evaluations = [r for r in self.records if r["kind"] in ("raw", "ema")]
        return max(
            evaluations,
            key=lambda r: (r["top1"], -r["update"], r["kind"] == "ema"),
            default=None,
        )

    def median(self, key: str) -> float | None:
        """Return the median over the training records that hold the key."""
        values = [value for _, value in self.points("train", key)]
        return statistics.median(values) if values else None

    @property
    def training_seconds(self) -> float:
        """Seconds spent in training updates, without evaluation and saving."""
        seconds, before = 0.0, 0
        for update, per_update in self.points("train", "seconds_per_update"):
            seconds += (update - before) * per_update
            before = update
        return seconds


def read_runs(folders: Sequence[Path]) -> list[RunLog]:
    """Read the runs in the folders; give them names that differ.

    Raises:
        ConfigError: If a folder is not that of a run, or one of its files is damaged.
    """
    names = _short_names(folders)
    alone = len(folders) == 1
    return [_read(f, names[i], position=i, alone=alone) for i, f in enumerate(folders)]


def _read(path: Path, name: str, *, position: int, alone: bool) -> RunLog:
    folder = RunFolder(path)
    for file in (CONFIG, METRICS, ENVIRONMENT):
        if not (path / file).is_file():
            raise ConfigError(f"{path} has no {file}: name the folder of a run of train.py")
    try:
        records = folder.metrics()
        if not records:
            raise ConfigError(f"{path / METRICS} has no record yet: train for a few updates first")
        return RunLog(
            name=name,
            position=position,
            alone=alone,
            folder=path,
            config=folder.config(),
            starts=folder.environment(),
            records=records,
            summary=folder.summary(),
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as a run: {error}") from None


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the folders with as many of their parents as they need to differ."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    raise AssertionError("different paths differ in some part")
