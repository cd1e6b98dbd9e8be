"""Training end to end: the files in `configs/`, the outputs of a run, and what ends it."""

from pathlib import Path

import pytest
import torch

from lipsformer.config import load_config
from scripts import check_data
from tests.data.trees import write_tree
from tests.launch import launch
from tests.runs import DIGITS, write_config
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


def test_a_broken_image_ends_the_run_unless_it_is_listed(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_tree(tmp_path / "set" / split, {"a": 5, "b": 4}, size=(19, 17))
    broken = tmp_path / "set" / "train" / "b" / "001.png"
    broken.write_bytes(broken.read_bytes()[:99])
    output = tmp_path / "out"
    settings = {
        **DIGITS,
        "data": {**DIGITS["data"], "source": "folder", "root": str(tmp_path / "set")},
        "train": {**DIGITS["train"], "global_batch_size": 3, "batch_size_per_device": 3},
    }
    arguments = ["--config", str(write_config(tmp_path, settings, output)), "train.epochs=1"]
    assert launch([*arguments, "train.drop_last=false"], tmp_path / "log") == [2]
    (line,) = [s for s in (tmp_path / "log.0").read_text().splitlines() if s.startswith("error: ")]
    assert f"cannot read image {broken}: " in line

    assert check_data.main([str(tmp_path / "set"), "--list", str(tmp_path / "bad")]) == 1
    more = [f"data.skip_list={tmp_path / 'bad'}", f"run.output_dir={output}2"]
    assert launch([*arguments, *more], tmp_path / "again") == [0]
    assert "1 images of train are left out" in (tmp_path / "again.0").read_text()
    assert (tmp_path / "out2" / "skipped.txt").read_text() == "train/b/001.png\n"
    assert "1 epochs x 2 updates" in (tmp_path / "again.0").read_text()  # of 8 images, not 9
