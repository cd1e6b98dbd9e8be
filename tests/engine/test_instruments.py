"""Caps, limit and monitor in a run: they hold what they state, and survive being killed."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lipsformer._configfile import read_config
from lipsformer.analysis.bounds import image_domain, lipschitz_bound
from lipsformer.config import Config
from lipsformer.engine.build import bound_domain, build_model
from lipsformer.engine.exits import EXIT_BOUND
from tests.launch import Event, launch
from tests.runs import DIGITS, outcome, write_config

CAPS = {"sigma_cap": 0.9, "residual_scale_cap": 0.35, "gain_cap": 0.97}
HELD = {
    **DIGITS,
    "model": {**DIGITS["model"], "name": "lipsformer_vit_tiny"},
    "lipschitz": {**CAPS, "update_limit": 0.05, "monitor_every": 3},
    "run": {**DIGITS["run"], "save_every_updates": 5},
}
DATA = DIGITS["data"]
# between two checkpoints; and in the evaluation after the first epoch
KILLS = [Event("torch.optim", "AdamW.step", 8)]


def run(
    folder: Path,
    kills: list[Event],
    *,
    world_size: int = 1,
    sharded: bool = False,
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    folder.mkdir()
    config = write_config(
        folder, {**HELD, "lipschitz": {**HELD["lipschitz"], **(changes or {})}}, folder / "out"
    )
    overrides = [f"train.batch_size_per_device={48 // world_size}", "run.trackers=[tensorboard]"]
    arguments = ["--config", str(config), *overrides]
    settings: Any = {"world_size": world_size, "sharded": sharded}
    for event in kills:
        assert (
            launch(arguments, folder / "log", **settings, event=event)
            == [-signal.SIGKILL] * world_size
        )
    codes = launch(arguments, folder / "log", **settings)
    assert codes == [0] * world_size, (folder / "log.0").read_text()
    return outcome(folder / "out")


def last_checkpoint(folder: Path) -> Path:
    return max((folder / "out" / "checkpoints").iterdir())


def check_held(folder: Path, records: list[dict[str, Any]]) -> None:
    """Caps hold on the weights that were saved, and the recorded bound is theirs."""
    domain = image_domain((16, 16), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for kind, file in (("raw", "model.safetensors"), ("ema", "ema.safetensors")):
        weights = load_file(last_checkpoint(folder) / file)
        capped = [name for name, weight in weights.items() if weight.ndim in (2, 4)]
        assert len(capped) == 10  # patches, head, and four matrices in each of two blocks
        for name in capped:
            sigma = torch.linalg.svdvals(weights[name].double().flatten(1))[0].item()
            assert sigma <= 0.9 + (1e-5 if kind == "raw" else 1e-3), (kind, name)
        gains = [w for name, w in weights.items() if "norm" in name and name.endswith("weight")]
        scales = [w for name, w in weights.items() if name.endswith("gamma")]
        assert len(gains) == 5 and len(scales) == 4
        assert max(w.abs().max().item() for w in gains) <= 0.97 + 1e-6
        assert max(w.abs().max().item() for w in scales) <= 0.35 + 1e-6
        model = timm.create_model(f"local-dir:{last_checkpoint(folder)}", pretrained=False)
        model.load_state_dict(weights)
        bound = [r for r in records if r["kind"] == kind][-1]["bound_log10"]
        assert bound == pytest.approx(lipschitz_bound(model, domain).log10, abs=1e-9)


def check_watched(folder: Path, records: list[dict[str, Any]]) -> None:
    """The monitor's records stand in the JSON lines, in TensorBoard without a gap, in a picture."""
    watched = [r for r in records if r["kind"] == "monitor"]
    assert [r["update"] for r in watched] == list(range(1, 29, 3))
    events = EventAccumulator(str(folder / "out" / "tensorboard" / "lipsformer")).Reload()
    for key in ("sigma/head.weight", "update_ratio/blocks.1.mlp.fc1.weight"):
        points = events.Scalars(f"monitor/{key}")
        assert [point.step for point in points] == [r["update"] for r in watched]
        assert [point.value for point in points] == pytest.approx([r[key] for r in watched])
        assert max(r[key] for r in watched) <= (0.9 + 1e-3 if "sigma" in key else 0.0505)
    assert [r["update"] for r in watched if "bound_log10" in r] == [1]  # every tenth
    assert {"grad_norm/head", "attn_entropy/blocks.0.attn.attention"} <= watched[0].keys()
    assert (folder / "out" / "plots" / "monitor.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("held") / "whole"
    return folder, run(folder, [])


def test_caps_hold_and_records_are_kept(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, found = whole
    check_held(folder, found["records"])
    check_watched(folder, found["records"])


@pytest.mark.slow
def test_killed_and_continued_it_is_the_same_run(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    killed = run(tmp_path / "killed", KILLS)
    assert "instruments.safetensors" in killed["tensors"]
    assert killed == whole[1]
    check_watched(tmp_path / "killed", killed["records"])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes(tmp_path: Path, sharded: bool) -> None:
    whole = run(tmp_path / "whole", [], world_size=2, sharded=sharded)
    environment = json.loads((tmp_path / "whole" / "out" / "environment.json").read_text())
    assert environment[-1]["distributed"] == ("FSDP" if sharded else "MULTI_CPU")
    check_held(tmp_path / "whole", whole["records"])
    check_watched(tmp_path / "whole", whole["records"])
    killed = run(tmp_path / "killed", KILLS, world_size=2, sharded=sharded)
    assert killed == whole


@pytest.mark.slow
def test_a_soft_cap_is_exact_where_weights_are_judged(tmp_path: Path) -> None:
    run(tmp_path / "soft", [], changes={"cap_mode": "soft", "cap_strength": 0.01})
    weights = load_file(last_checkpoint(tmp_path / "soft") / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim in (2, 4):
            assert torch.linalg.svdvals(weight.double().flatten(1))[0] <= 0.9 + 1e-5, name


@pytest.mark.parametrize(
    ("option", "recorded"),
    [([], False), (["lipschitz.monitor_every=3"], True), (["lipschitz.orthogonal=true"], True)],
)
def test_any_instrument_makes_a_run_record_the_bound(
    tmp_path: Path, option: list[str], recorded: bool
) -> None:
    """An orthogonal model is trained for its bound."""
    path = write_config(tmp_path, DIGITS, tmp_path / "out")
    config = read_config(Config, path, ["model.name=lipsformer_vit_tiny", *option])
    domain = bound_domain(config, build_model(config, "abc"))
    assert (domain is not None) == recorded


def test_a_bound_above_the_stated_one_stops_the_run(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    bounds = [r["bound_log10"] for r in whole[1]["records"] if "top1" in r]
    (tmp_path / "held").mkdir()
    settings = {**HELD, "run": {**HELD["run"], "save_every_updates": None}}
    config = write_config(tmp_path / "held", settings, tmp_path / "held" / "out")
    arguments = ["--config", str(config), "train.batch_size_per_device=48"]
    limit = 0.9 * 10.0 ** max(bounds[0], bounds[1])
    assert launch([*arguments, f"lipschitz.bound_limit={limit}"], tmp_path / "log") == [EXIT_BOUND]
    assert f"above the limit {limit:g}" in (tmp_path / "log.0").read_text()
    assert not (tmp_path / "held" / "out" / "checkpoints").exists()
    limit = 1.1 * 10.0 ** max(bounds)  # not part of what a run is: it may be raised
    assert launch([*arguments, f"lipschitz.bound_limit={limit}"], tmp_path / "log") == [0]
    assert all(math.log10(limit) > bound for bound in bounds)
    assert outcome(tmp_path / "held" / "out")["tensors"] == whole[1]["tensors"]
