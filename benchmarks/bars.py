"""The goals for the speed on a CPU, each with the lowest ratio of all committed records.

    python -m benchmarks.bars

A ratio is that of a LipsFormer to timm's Swin of its size in the same run. The lowest one counts,
whatever the processor, and the table names it and the record.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.deployment import fastest_ratios
from benchmarks.records import markdown

RESULTS = Path(__file__).parent / "results"
TINY = ("lipsformer_swin_tiny", "lipsformer_tiny")
# Records of the present code. The others in the folder are of earlier code.
MODELS = (
    *("models_batch1_xeon_dropped.json", "models_batch1_xeon_dropped_again.json"),
    *("models_batch8_xeon_dropped.json", "models_block_xeon.json", "models_size_xeon.json"),
    *("models_bf16_xeon_block.json", "models_nano_xeon_block.json", "models_avx2_train_xeon.json"),
    *("models_avx2_batch32_xeon.json", "models_batch1_epyc.json", "models_batch_epyc.json"),
    *("models_batch32_epyc.json", "models_size_epyc.json", "models_bf16_epyc.json"),
    "models_nano_epyc.json",
)
DEPLOYMENT = ("deployment_xeon.json",)


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
    for name in MODELS:
        record = json.loads((RESULTS / name).read_text())
        yield from _ratios_of_models(record, name)
    for name in DEPLOYMENT:
        record = json.loads((RESULTS / name).read_text())
        for model, precision, batch, ratio, _ in fastest_ratios(record):
            what = f"fastest over fastest, {precision}, batch {batch}"
            yield Ratio(what, model, ratio, None, name)


def _ratios_of_models(record: dict[str, Any], name: str) -> Iterator[Ratio]:
    precision = record["options"]["precision"]
    for setting in record["settings"]:
        shape = f"{precision}, {setting['img_size']} px, batch {setting['batch_size']}"
        for model, own in setting["models"].items():
            for task, mode, what in (
                ("train", "eager", "training"),
                ("infer", "folded eager", "folded over eager"),
            ):
                if mode in own.get(task, {}):
                    values = own[task][mode]
                    what = f"{what}, {shape}"
                    yield Ratio(what, model, values["speed_ratio"], values["memory_ratio"], name)


def table() -> str:
    """Return the goals with the lowest speed ratio and the largest memory ratio, as Markdown."""
    found = list(ratios())
    rows = []
    for what, (speed, memory) in GOALS.items():
        for model in TINY if "32 px, batch 128" not in what else ("lipsformer_swin_nano",):
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
