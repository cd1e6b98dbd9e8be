"""What a study trains, and what of it is done."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lipsformer._checks import require
from lipsformer._configfile import dump_config, read_config
from lipsformer.config import Config
from lipsformer.engine.resume import config_identity
from lipsformer.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Study:
    """The rows of a study.

    Args:
        title: Stands above the table.
        config: The base config, relative to the root of the repository.
        results: The JSONL file of the finished runs, relative to the root of the repository.
        overrides: Settings of all rows.
        rows: Name of a row and its settings, separated by blanks.
        seeds: Seeds of every row, unless `row_seeds` names others.
        row_seeds: Seeds of single rows.
    """

    title: str
    config: str
    results: str
    overrides: tuple[str, ...] = ()
    rows: dict[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    row_seeds: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(len(self.rows) > 0, "rows", self.rows, "name at least one")
        unknown = sorted(set(self.row_seeds) - set(self.rows))
        require(not unknown, "row_seeds", unknown, f"must name rows: {', '.join(self.rows)}")

    def runs(self) -> list[tuple[str, int]]:
        """Return (row, seed) of every run, the first seed of every row first."""
        seeds = {row: self.row_seeds.get(row, self.seeds) for row in self.rows}
        rounds = max(len(own) for own in seeds.values())
        return [(row, own[i]) for i in range(rounds) for row, own in seeds.items() if i < len(own)]

    def settings(self, row: str, seed: int) -> list[str]:
        """Return the `key=value` settings of a run."""
        return [*self.overrides, *self.rows[row].split(), f"train.seed={seed}"]

    def run_config(self, row: str, seed: int) -> Config:
        """Return the config of a run, without its folder.

        Raises:
            ConfigError: If the config is wrong, or the images and products of the run are not those
                of equal updates.
        """
        config = read_config(Config, ROOT / self.config, self.settings(row, seed))
        for key, value, plain in (
            ("train.drop_last", config.train.drop_last, True),
            ("augment.img_sizes", config.augment.img_sizes, ()),
            ("loss.teacher", config.loss.teacher, None),
        ):
            require(value == plain, key, value, f"a study counts costs only with {key}={plain}")
        return config

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the finished runs that the study names."""
        runs = self.runs()
        return [x for x in read_jsonl(ROOT / self.results) if (x["row"], x["seed"]) in runs]


def stale(study: Study) -> list[str]:
    """Return a sentence for every finished run that had other settings than the study has now.

    Settings that leave the training as it is do not count, nor do those that are newer than the
    line of the run.
    """
    sentences = []
    for line in study.lines():
        row, seed = line["row"], line["seed"]
        config = study.run_config(row, seed)
        then, now = yaml.safe_load(line["config"]), yaml.safe_load(dump_config(config))
        keys = [key.split(".") for key in config_identity(config)]
        changed = [
            f"{section}.{key}={then[section][key]!r}, and is now {now[section][key]!r}"
            for section, key in keys
            if key in then.get(section, {}) and then[section][key] != now[section][key]
        ]
        if changed:
            sentences.append(
                f"{row} seed {seed} was trained with {', '.join(changed)}: to train it again, "
                f"remove its line from {study.results} and the folder of the run"
            )
    return sentences
