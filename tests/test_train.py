"""Training end to end: the files in `configs/`, the outputs of a run, and what ends it."""

from pathlib import Path

import pytest
import torch

from lipsformer.config import load_config
from train import build_model

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RUNS = sorted(
    p for p in CONFIGS.rglob("*.yaml") if not p.name.startswith("_") and "graph" not in p.parts
)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_config_builds_its_model(path: Path) -> None:
    config = load_config(path)
    with torch.device("meta"):
        model = build_model(config, [str(label) for label in range(7)])
    size = config.data.img_size
    assert model(torch.zeros(2, 3, size, size, device="meta")).shape == (2, 7)
    assert f"{path.relative_to(CONFIGS.parent)}" in path.read_text(), "its header lacks its command"
