"""The goals for speed and memory on a CPU, each with the worst of the newest ratios.

    python -m benchmarks.bars

A ratio is that of a LipsFormer to timm's Swin of its size in the same run. The worst one of all
processors counts. If something was measured on several days on a processor, its last day counts,
with all of its records. The table names the record, and rounds ratios to their worse side, so that
a goal that was just missed does not look met. The last table has unfolded inference, which has no
goal.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.deployment import eager_ratios, fastest_ratios
from benchmarks.records import markdown

RESULTS = Path(__file__).parent / "results"
TINY = ("lipsformer_swin_tiny", "lipsformer_tiny")
NANO = ("lipsformer_swin_nano",)
PROCESSORS = {
    "xeon": "Xeon",
    "milan": "EPYC, third generation",
    "genoa": "EPYC, fourth generation",
    "turin": "EPYC, fifth generation",
}
_WINDOWS = "_windows_of_5"  # Swin's and ours, which need no padding at 160 px


class Ratio(NamedTuple):
    """One measured ratio and what it is of."""

    what: str
    model: str
    speed: float
    memory: float | None
    date: str
    record: str


# what is measured -> lowest speed ratio
SPEED_GOALS = {
    "training, fp32, 224 px, batch 1": 1.0,
    "training, fp32, 224 px, batch 8": 1.15,
    "training, fp32, 224 px, batch 32": 1.0,
    "training, fp32, 160 px, batch 4": 1.0,
    "training, fp32, 288 px, batch 4": 1.0,
    "training, bf16, 224 px, batch 8": 1.0,
    "training, fp32, 32 px, batch 128": 1.25,
    "folded over eager, fp32, 224 px, batch 1": 1.1,
    "folded over eager, fp32, 224 px, batch 8": 1.1,
    "folded over eager, fp32, 224 px, batch 32": 1.1,
    "fastest over fastest, fp32, batch 1": 1.0,
    "fastest over fastest, fp32, batch 8": 1.0,
    "fastest over fastest, fp32, batch 32": 1.0,
    "fastest over fastest, bf16, batch 1": 1.0,
    "fastest over fastest, bf16, batch 8": 1.0,
    "fastest over fastest, bf16, batch 32": 1.0,
}
MEMORY_GOALS = {"training, bf16, 224 px, batch 8": 1.0}  # largest ratio of the peaks


def ratios() -> Iterator[Ratio]:
    """Yield the ratios of every measurement on its last day on each processor."""
    for processor in PROCESSORS:
        found = list(_ratios_of_processor(processor))
        days: dict[tuple[str, str], str] = {}
        for ratio in found:
            key = ratio.what, ratio.model
            days[key] = max(days.get(key, ""), ratio.date)
        yield from (ratio for ratio in found if ratio.date == days[ratio.what, ratio.model])


def _ratios_of_processor(processor: str) -> Iterator[Ratio]:
    for kind in ("models", "infer"):
        for path in sorted(RESULTS.glob(f"{kind}_*_{processor}*.json")):
            if "_avx2_" not in path.name:  # on a processor whose AVX-512 was switched off
                yield from _ratios_of_models(json.loads(path.read_text()), path.name)
    for path in sorted(RESULTS.glob(f"deployment_{processor}.json")):
        record = json.loads(path.read_text())
        for model, precision, batch, ratio, _ in fastest_ratios(record):
            what = f"fastest over fastest, {precision}, batch {batch}"
            yield Ratio(what, model, ratio, None, record["machine"]["date"], path.name)


def _ratios_of_models(record: dict[str, Any], name: str) -> Iterator[Ratio]:
    date = record["machine"]["date"]
    precision = record["options"]["precision"]
    for setting in record["settings"]:
        shape = f"{precision}, {setting['img_size']} px, batch {setting['batch_size']}"
        for name_in_record, own in setting["models"].items():
            model = name_in_record.removeprefix("benchmarks.peers:").removesuffix(_WINDOWS)
            for task, mode, kind in (
                ("train", "eager", "training"),
                ("infer", "folded eager", "folded over eager"),
            ):
                if mode in own.get(task, {}):
                    speed, memory = own[task][mode]["speed_ratio"], own[task][mode]["memory_ratio"]
                    yield Ratio(f"{kind}, {shape}", model, speed, memory, date, name)


def speed_row(goal: float, own: Sequence[Ratio]) -> tuple[str, ...]:
    """Return the row of a goal for the speed: its lowest ratio, rounded down."""
    lowest = min(own, key=lambda ratio: ratio.speed)
    shown = math.floor(1000 * lowest.speed) / 1000
    return _row(lowest.what, f"{goal:.2f}", shown, lowest.speed >= goal, lowest)


def memory_row(goal: float, own: Sequence[Ratio]) -> tuple[str, ...]:
    """Return the row of a goal for the peak memory: its largest ratio, rounded up."""
    memory, largest = max((ratio.memory, ratio) for ratio in own if ratio.memory is not None)
    shown = math.ceil(1000 * memory) / 1000
    return _row(f"memory of {largest.what}", f"at most {goal:.2f}", shown, memory <= goal, largest)


def _row(what: str, goal: str, shown: float, met: bool, worst: Ratio) -> tuple[str, ...]:
    verdict = "met" if met else "**missed**"
    return what, f"`{worst.model}`", goal, f"{shown:.3f}", verdict, f"`{worst.record}`"


def table() -> str:
    """Return every goal with its worst ratio, as Markdown."""
    found = list(ratios())
    rows = [
        row(goal, [ratio for ratio in found if (ratio.what, ratio.model) == (what, model)])
        for row, goals in ((speed_row, SPEED_GOALS), (memory_row, MEMORY_GOALS))
        for what, goal in goals.items()
        for model in (NANO if "32 px, batch 128" in what else TINY)
    ]
    return markdown(("what", "model", "goal", "worst", "", "record"), rows)


def summary() -> str:
    """Return the lowest and the highest speed ratio of the tiny models, as Markdown."""
    speeds: dict[tuple[str, str], list[float]] = {}
    for ratio in ratios():
        speeds.setdefault((ratio.what, ratio.model), []).append(ratio.speed)
    rows = [
        (what, *(_range(speeds[what, model]) for model in TINY))
        for what in SPEED_GOALS
        if (what, TINY[0]) in speeds
    ]
    return markdown(("what", *(f"`{model}`" for model in TINY)), rows)


def unfolded() -> str:
    """Return the lowest and the highest speed ratio of unfolded inference, as Markdown.

    Both tiny models count, on images of 224 px, in all records of a processor.
    """
    shapes = [(precision, batch) for precision in ("fp32", "bf16") for batch in (1, 8, 32)]
    rows = []
    for processor, name in PROCESSORS.items():
        speeds: dict[tuple[str, int], list[float]] = {}
        for precision, batch, speed in _unfolded_ratios(processor):
            speeds.setdefault((precision, batch), []).append(speed)
        cells = (_range(speeds[s]) if s in speeds else f"no {s[0]}" for s in shapes)
        rows.append((name, *cells))
    header = (f"{precision}, batch {batch}" for precision, batch in shapes)
    return markdown(("processor", *header), rows)


def _unfolded_ratios(processor: str) -> Iterator[tuple[str, int, float]]:
    """Yield precision, batch size and ratio of both tiny models."""
    for path in sorted(RESULTS.glob(f"*_{processor}*.json")):
        record = json.loads(path.read_text())
        if path.name.startswith("deployment_"):
            for model, precision, batch, speed in eager_ratios(record):
                if model in TINY:
                    yield precision, batch, speed
        elif path.name.startswith(("models_", "infer_")) and "_avx2_" not in path.name:
            for setting in record["settings"]:
                for model in TINY:
                    own = setting["models"].get(model, {}).get("infer", {}).get("eager")
                    if own and setting["img_size"] == 224:
                        precision = record["options"]["precision"]
                        yield precision, setting["batch_size"], own["speed_ratio"]


def _range(speeds: Sequence[float]) -> str:
    low, high = f"{min(speeds):.2f}", f"{max(speeds):.2f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    print(table(), summary(), unfolded(), sep="\n\n")
