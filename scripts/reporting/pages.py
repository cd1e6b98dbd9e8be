"""The report as one HTML page, or as Markdown with separate pictures."""

import itertools
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from lipsformer.engine.metrics import duration
from lipsformer.engine.run_files import REPLAY
from scripts.reporting import figures
from scripts.reporting.figures import Drawing
from scripts.reporting.pictures import InlineImage
from scripts.reporting.runs import RunLog
from scripts.reporting.theme import COLORS
from scripts.reporting.validation import Validation, validate

Rows = list[tuple[str, list[Any]]]

SECTIONS = {
    "training": "Training",
    "lipschitz": "Lipschitz constants",
    "certificates": "Certificates",
    "mistakes": "Mistakes",
    "attention": "Attention",
    "configuration": "Configuration",
    "environment": "Environment",
}


@dataclass(frozen=True)
class Report:
    """Everything that the pages show."""

    runs: Sequence[RunLog]
    validations: list[Validation | str]
    confusions: list[Drawing | None]
    training: list[Drawing]
    monitor: list[Drawing]
    seconds: float

    @property
    def certified(self) -> bool:
        """Whether a certificate lies beside the weights of a run."""
        return any(isinstance(v, Validation) and v.certificates for v in self.validations)

    def html(self) -> str:
        """Return a page that loads nothing from elsewhere."""
        return self._render("page.html.jinja", escaped=True)

    def markdown(self, folder: Path) -> None:
        """Write report.md into the folder, and its pictures into `images/` there."""
        images = folder / "images"
        images.mkdir(parents=True, exist_ok=True)
        numbers = itertools.count()

        def saved(item: Drawing | InlineImage) -> str:
            if isinstance(item, Drawing):
                name, content = f"{item.name}.png", item.png()
            else:
                name, content = f"{next(numbers):03}.{item.extension}", item.content
            (images / name).write_bytes(content)
            return f"images/{name}"

        text = self._render("page.md.jinja", escaped=False, saved=saved)
        (folder / "report.md").write_text(re.sub(r"\n{3,}", "\n\n", text), encoding="utf-8")

    def _render(self, template: str, *, escaped: bool, **filters: Any) -> str:
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=escaped,
            undefined=StrictUndefined,
        )
        environment.filters.update(
            figure=_figure, breakable=_breakable, inline=_inline, cell=_cell, **filters
        )
        names = ", ".join(run.name for run in self.runs)
        models = sorted({f"{r.config.model.name} on {_data(r)}" for r in self.runs})
        return environment.get_template(template).render(
            **vars(self),
            certified=self.certified,
            colors=COLORS,
            title=f"Run report: {names}" if len(self.runs) == 1 else f"{len(self.runs)} runs",
            subtitle="; ".join(models),
            sections={k: v for k, v in SECTIONS.items() if k != "certificates" or self.certified},
            tiles=_tiles(self.runs),
            outcome=_outcome(self.runs),
            settings=_settings(self.runs),
            differing=_differing(self.runs),
            environment=_environment(self.runs),
            no_monitor="Nothing was watched: lipschitz.monitor_every was null.",
            footer=f"Made by lipsformer report on {datetime.now():%Y-%m-%d %H:%M} in "
            f"{self.seconds:.1f} s on {platform.node()}.",
        )


def make_report(runs: Sequence[RunLog], images: int, weights: str = "best") -> Report:
    """Evaluate the models and draw the figures.

    Args:
        runs: Up to six runs, which is the number of colors.
        images: Largest number of validation images to evaluate, per run; 0 for none.
        weights: Which weights to evaluate, "best" or "last".
    """
    started = time.perf_counter()
    skipped = "the report was made with --images 0"
    validations = [validate(run, images, weights) if images else skipped for run in runs]
    confusions = [
        None
        if isinstance(found, str)
        else figures.confusion_figure(run, found.counts, found.classes)
        for run, found in zip(runs, validations, strict=True)
    ]
    return Report(
        runs=runs,
        validations=validations,
        confusions=confusions,
        training=figures.training_curves(runs),
        monitor=figures.monitor_curves(runs),
        seconds=time.perf_counter() - started,
    )


class Tile(NamedTuple):
    """A figure that the page shows in large type."""

    name: str
    value: str
    unit: str
    note: str


def _tiles(runs: Sequence[RunLog]) -> list[Tile]:
    """Return the best accuracy of each run; for a single run also loss, speed and time."""
    tiles = []
    for run in runs:
        name = "best accuracy" if len(runs) == 1 else run.name
        if run.best is None:
            tiles.append(Tile(name, "–", "", "not evaluated yet"))
            continue
        note = f"after epoch {run.best['epoch']} of {run.config.train.epochs}"
        if run.config.train.ema_decay:
            note += f" ({run.best['kind']} weights)"
        last = run.evaluations[-1]["top1"]
        note += f", {last:.2f} % at the end; {run.best['images']} images"
        tiles.append(Tile(name, f"{run.best['top1']:.2f}", "% top-1", note))
    if len(runs) == 1:
        (run,) = runs
        figures = {name: _figure(values[0]) for name, values in _outcome(runs)}
        waiting, memory = figures["waiting for data, median (%)"], figures["peak memory (GiB)"]
        tiles += [
            Tile(
                "validation loss",
                figures["last validation loss"],
                "cross entropy",
                f"in training {figures['last training loss']}; both at the end",
            ),
            Tile(
                "throughput",
                figures["images per second, median"],
                "images/s",
                f"{waiting} % of the time waiting for data; memory up to {memory} GiB",
            ),
            Tile(
                "training time",
                figures["training time, evaluation left out"],
                "h:m:s",
                f"{figures['completed updates']} updates, evaluation left out; {figures['state']}",
            ),
        ]
    return tiles


def _outcome(runs: Sequence[RunLog]) -> Rows:
    last = [run.evaluations[-1] if run.evaluations else {} for run in runs]
    return [
        ("state", [_state(run) for run in runs]),
        ("completed updates", [run.records[-1]["update"] for run in runs]),
        ("last top-1 (%)", [record.get("top1") for record in last]),
        ("last top-5 (%)", [record.get("top5") for record in last]),
        ("last validation loss", [record.get("loss") for record in last]),
        ("last training loss", [_last(run.points("train", "loss")) for run in runs]),
        ("training time, evaluation left out", [duration(run.training_seconds) for run in runs]),
        ("images per second, median", [run.median("images_per_s") for run in runs]),
        ("waiting for data, median (%)", [_percent(run.median("data_wait")) for run in runs]),
        ("peak memory (GiB)", [_last(run.points("train", "memory_gib")) for run in runs]),
    ]


def _state(run: RunLog) -> str:
    if run.summary is not None:
        return "finished"
    if (run.folder / REPLAY).exists():
        return "ended by a loss or gradient that was not finite"
    return "not finished"


def _settings(runs: Sequence[RunLog]) -> dict[str, Rows]:
    """Return section of the config -> its settings."""
    sections = [asdict(run.config) for run in runs]
    return {
        name: [(key, [own[name][key] for own in sections]) for key in section]
        for name, section in sections[0].items()
    }


def _differing(runs: Sequence[RunLog]) -> Rows:
    return [
        (f"{name}.{key}", values)
        for name, rows in _settings(runs).items()
        for key, values in rows
        if values.count(values[0]) < len(values) and (name, key) != ("run", "output_dir")
    ]


def _environment(runs: Sequence[RunLog]) -> Rows:
    flat = []
    for run in runs:
        start = dict(run.starts[-1])
        start["command"] = " ".join(start["command"])
        for name, version in start.pop("packages").items():
            start[name] = version
        flat.append({"starts of the process": len(run.starts), **start})
    keys = dict.fromkeys(key for start in flat for key in start)
    return [(key.replace("_", " "), [start.get(key) for start in flat]) for key in keys]


def _data(run: RunLog) -> str:
    data = run.config.data
    return f"{data.name or data.source} at {data.img_size} px"


def _last(points: list[tuple[int, float]]) -> float | None:
    return points[-1][1] if points else None


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _figure(value: Any) -> str:
    """Format a value: four digits of a measured number, a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_figure(item) for item in value) or "–"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_figure(item)}" for key, item in value.items()) or "–"
    return str(value)


def _breakable(name: str) -> Markup:
    """Allow a line break after each dot of a name that a word follows."""
    return Markup(".<wbr>").join(re.split(r"\.(?=[a-z])", name))


def _inline(svg: str, text: str) -> Markup:
    """Mark the SVG as one picture with a text for screen readers."""
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{escape(text)}" ', 1))


def _cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table, which may hold HTML."""
    return str(text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
