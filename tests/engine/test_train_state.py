"""What is put back is what was taken, bit for bit, and nothing fits by accident."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lipsformer.engine.checkpoint import EMA, MODEL, OPTIMIZER, CheckpointError, CheckpointFolder
from lipsformer.engine.steps import train_step
from tests.engine.test_steps import make_model, make_samples, make_state, transform


def test_a_fresh_state_continues_as_the_first(tmp_path: Path) -> None:
    samples = make_samples(6)
    first = make_state(make_model(), ema_decay=0.8)
    for update in range(3):
        train_step(first, [samples], 6, update, transform)
    folder = CheckpointFolder(tmp_path, keep=1).save(
        3, tensors=first.state_dict(), texts={}, best_step=None
    )
    model = make_model()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    second = make_state(model, ema_decay=0.8)
    second.load_checkpoint(folder)
    for state in (first, second):
        train_step(state, [samples], 6, 3, transform)
    taken, again = first.state_dict(), second.state_dict()
    assert taken.keys() == again.keys() == {MODEL, OPTIMIZER, EMA}
    for name, tensors in taken.items():
        assert tensors.keys() == again[name].keys()
        for key, tensor in tensors.items():
            assert torch.equal(again[name][key], tensor)


def test_the_gradient_scaler_is_put_back(tmp_path: Path) -> None:
    state = make_state(make_model())
    train_step(state, [make_samples(6)], 6, 0, transform)
    state.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=9)
    scaler = state.scaler_state()
    folder = CheckpointFolder(tmp_path, keep=1).save(
        1,
        tensors=state.state_dict(),
        texts={"state.json": json.dumps({"scaler": scaler})},
        best_step=None,
    )
    state.accelerator.scaler = torch.amp.GradScaler("cpu")
    assert state.scaler_state() != scaler
    state.load_checkpoint(folder)
    assert state.scaler_state() == scaler


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(30, 11), nn.GELU(), nn.Linear(11, 5)), "3.weight"),
        (nn.Sequential(nn.Flatten(), nn.Linear(30, 7)), "2 are unknown"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, other: nn.Module, reason: str) -> None:
    tensors = make_state(make_model()).state_dict()
    folder = CheckpointFolder(tmp_path, keep=1).save(1, tensors=tensors, texts={}, best_step=None)
    with pytest.raises(CheckpointError, match=f"does not fit the model: .*{reason}"):
        make_state(other).load_checkpoint(folder)
