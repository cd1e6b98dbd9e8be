"""What is put back is what was taken, bit for bit, and nothing fits by accident."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lipsformer.engine import train_state
from lipsformer.engine.checkpoint import CheckpointError, CheckpointFolder
from lipsformer.engine.steps import Learner
from tests.engine.test_steps import make_learner, make_model, make_samples, transform


def save(learner: Learner, folder: Path, update: int) -> Path:
    return CheckpointFolder(folder, keep=1).save(
        update,
        tensors=train_state.take(learner),
        texts={"state.json": json.dumps(train_state.numbers(learner))},
        best_update=None,
    )


def test_a_fresh_learner_continues_as_the_first(tmp_path: Path) -> None:
    samples = make_samples(6)
    first = make_learner(make_model(), ema_decay=0.8)
    for update in range(3):
        first.update([samples], 6, update, transform)
    folder = save(first, tmp_path, 3)
    model = make_model()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    second = make_learner(model, ema_decay=0.8)
    train_state.put_back(second, folder)
    for learner in (first, second):
        learner.update([samples], 6, 3, transform)
    taken, again = train_state.take(first), train_state.take(second)
    assert (
        taken.keys() == again.keys() == {train_state.MODEL, train_state.OPTIMIZER, train_state.EMA}
    )
    for name, tensors in taken.items():
        assert tensors.keys() == again[name].keys()
        for key, tensor in tensors.items():
            assert torch.equal(again[name][key], tensor)


def test_the_gradient_scaler_is_put_back(tmp_path: Path) -> None:
    learner = make_learner(make_model())
    learner.update([make_samples(6)], 6, 0, transform)
    learner.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=9)
    state = train_state.numbers(learner)["scaler"]
    folder = save(learner, tmp_path, 1)
    learner.accelerator.scaler = torch.amp.GradScaler("cpu")
    assert train_state.numbers(learner)["scaler"] != state
    train_state.put_back(learner, folder)
    assert train_state.numbers(learner)["scaler"] == state


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(30, 11), nn.GELU(), nn.Linear(11, 5)), "3.weight"),
        (nn.Sequential(nn.Flatten(), nn.Linear(30, 7)), "2 are unknown"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, other: nn.Module, reason: str) -> None:
    folder = save(make_learner(make_model()), tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"does not fit the model: .*{reason}"):
        train_state.put_back(make_learner(other), folder)
