"""The goals for the speed on a CPU, each with the lowest ratio of all committed records.

    python -m benchmarks.bars

A ratio is that of a LipsFormer to timm's Swin of its size in the same run. The lowest one of all
records counts, whatever the processor, those of earlier code too. The table names its record.
Folded models were measured again on the EPYC when they began to record their calls, and of their
records there only those count (`infer_*.json`).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.deployment import fastest_ratios
from benchmarks.records import markdown

RESULTS = Path(__file__).parent / "results"
TINY = ("lipsformer_swin_tiny", "lipsformer_tiny")
NANO = ("lipsformer_swin_nano",)
PROCESSORS = ("xeon", "epyc")
_WINDOWS = "_windows_of_5"  # Swin's and ours, which need no padding at 160 px


class Ratio(NamedTuple):
    """One measured ratio and what it is of."""

    what: str
    model: str
    speed: float
    memory: float | None
    record: str


# what is measured -> (lowest speed ratio, largest memory ratio)
GOALS: dict[str, tuple[float, float | None]] = {
    "training, fp32, 224 px, batch 1": (1.0, None),
    "training, fp32, 224 px, batch 8": (1.15, None),
    "training, fp32, 224 px, batch 32": (1.0, None),
    "training, fp32, 160 px, batch 4": (1.0, None),
    "training, fp32, 288 px, batch 4": (1.0, None),
    "training, bf16, 224 px, batch 8": (1.0, 1.0),
    "training, fp32, 32 px, batch 128": (1.25, None),
    "folded over eager, fp32, 224 px, batch 1": (1.1, None),
    "folded over eager, fp32, 224 px, batch 8": (1.1, None),
    "folded over eager, fp32, 224 px, batch 32": (1.1, None),
    "fastest over fastest, fp32, batch 1": (1.0, None),
    "fastest over fastest, fp32, batch 8": (1.0, None),
    "fastest over fastest, fp32, batch 32": (1.0, None),
    "fastest over fastest, bf16, batch 1": (1.0, None),
    "fastest over fastest, bf16, batch 8": (1.0, None),
    "fastest over fastest, bf16, batch 32": (1.0, None),
}


def ratios() -> Iterator[Ratio]:
    """Yield every ratio of the records."""
    for processor in PROCESSORS:
        again = sorted(RESULTS.glob(f"infer_*_{processor}.json"))
        for path in [*sorted(RESULTS.glob(f"models_*_{processor}*.json")), *again]:
            for ratio in _ratios_of_models(json.loads(path.read_text()), path.name):
                if path in again or not again or not ratio.what.startswith("folded"):
                    yield ratio
        for path in sorted(RESULTS.glob(f"deployment_{processor}.json")):
            for model, precision, batch, ratio, _ in fastest_ratios(json.loads(path.read_text())):
                what = f"fastest over fastest, {precision}, batch {batch}"
                yield Ratio(what, model, ratio, None, path.name)


def _ratios_of_models(record: dict[str, Any], name: str) -> Iterator[Ratio]:
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
                    yield Ratio(f"{kind}, {shape}", model, speed, memory, name)


def table() -> str:
    """Return the goals with the lowest speed ratio and the largest memory ratio, as Markdown."""
    found = list(ratios())
    rows = []
    for what, (speed, memory) in GOALS.items():
        for model in NANO if "32 px, batch 128" in what else TINY:
            own = [ratio for ratio in found if (ratio.what, ratio.model) == (what, model)]
            lowest = min(own, key=lambda ratio: ratio.speed)
            met = lowest.speed >= speed
            shown = f"{lowest.speed:.2f}"
            if memory is not None:
                largest = max(ratio.memory for ratio in own if ratio.memory is not None)
                met = met and largest <= memory
                shown += f", memory {largest:.2f}"
            verdict = "met" if met else "**missed**"
            rows.append((what, f"`{model}`", f"{speed:.2f}", shown, verdict, f"`{lowest.record}`"))
    return markdown(("what", "model", "goal", "lowest", "", "record"), rows)


if __name__ == "__main__":
    print(table())
