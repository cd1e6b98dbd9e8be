"""State in every ImageNet config how many images fit on a GPU, from the predicted memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_predictions.table import STATE_BYTES

CONFIGS = Path(__file__).parents[2] / "configs" / "imagenet"
GIGABYTES = (40, 80)
START = "# Batch per device: "
# Of the memory of the GPU; the rest is for the CUDA context, workspaces and fragmentation.
USABLE = 0.85


def eager_gigabytes(record: Mapping[str, Any], batch: int) -> float:
    """Return the memory of a step without compilation: parameters and saved activations.

    A compiled step saves less.
    """
    per_image = record["eager"]["saved_bytes"] / record["batch_size"]
    return (STATE_BYTES * record["parameters"] + per_image * batch) / 1e9


def batch_that_fits(record: Mapping[str, Any], gigabytes: float) -> int:
    """Return the largest power of two of images whose step fits on a GPU of this memory."""
    batch = 1024
    while batch > 1 and eager_gigabytes(record, batch) > USABLE * gigabytes:
        batch //= 2
    return batch


def line(record: Mapping[str, Any]) -> str:
    """Return the line of a config that states its batches."""
    small, large = (batch_that_fits(record, gigabytes) for gigabytes in GIGABYTES)
    return f"{START}at most {small} images on 40 GB and {large} on 80 GB (predicted: docs/gpu.md)."


def model_configs() -> dict[Path, str]:
    """Return the name of the model of every config of a model."""
    named = {path: yaml.safe_load(path.read_text()).get("model") for path in CONFIGS.glob("*.yaml")}
    return {path: model["name"] for path, model in sorted(named.items()) if model}


def write(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the line of each config after its line of costs; records are by name of the model."""
    for path, name in model_configs().items():
        lines = [text for text in path.read_text().splitlines() if not text.startswith(START)]
        place = next(i for i, text in enumerate(lines) if text.startswith("# Cost:"))
        lines.insert(place + 1, line(records[name]))
        path.write_text("\n".join(lines) + "\n")
