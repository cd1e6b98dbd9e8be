"""What is put back is what was taken, bit for bit, and nothing fits by accident."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lipsformer.engine.checkpoint import CheckpointFolder
from lipsformer.engine.evaluation import evaluate
from lipsformer.engine.run_files import EMA, MODEL, OPTIMIZER, CheckpointError
from lipsformer.engine.steps import train_step
from lipsformer.engine.train_state import TrainState
from tests.engine.test_steps import make_model, make_samples, make_state, transform
from tests.one_rank import sharded

MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW, for each parameter


def save(state: TrainState, folder: Path, step: int) -> Path:
    return CheckpointFolder(folder, keep=1).save(
        step,
        tensors=state.state_dict(),
        texts={"state.json": json.dumps(state.numbers())},
        best_step=None,
    )


def test_a_fresh_state_continues_as_the_first(tmp_path: Path) -> None:
    samples = make_samples(6)
    first = make_state(make_model(), ema_decay=0.8)
    for update in range(3):
        train_step(first, [samples], 6, update, transform)
    folder = save(first, tmp_path, 3)
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
    scaler = state.numbers()["scaler"]
    folder = save(state, tmp_path, 1)
    state.accelerator.scaler = torch.amp.GradScaler("cpu")
    assert state.numbers()["scaler"] != scaler
    state.load_checkpoint(folder)
    assert state.numbers()["scaler"] == scaler


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(30, 11), nn.GELU(), nn.Linear(11, 5)), "3.weight"),
        (nn.Sequential(nn.Flatten(), nn.Linear(30, 7)), "2 are unknown"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, other: nn.Module, reason: str) -> None:
    folder = save(make_state(make_model()), tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"does not fit the model: .*{reason}"):
        make_state(other).load_checkpoint(folder)


def test_a_parameter_without_a_gradient_has_no_state_and_continues(tmp_path: Path) -> None:
    def with_unused() -> nn.Module:
        model = make_model()
        model.register_parameter("unused", nn.Parameter(torch.ones(2)))
        return model

    samples = make_samples(6)
    first, second = make_state(with_unused()), make_state(with_unused())
    train_step(first, [samples], 6, 0, transform)
    second.load_checkpoint(save(first, tmp_path, 1))
    for state in (first, second):
        train_step(state, [samples], 6, 1, transform)
    taken, again = first.state_dict(), second.state_dict()
    assert "unused.exp_avg" not in taken[OPTIMIZER]
    for name, tensors in taken.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(again[name][key], tensor, rtol=0, atol=0)


def test_the_moments_of_a_sharded_model_are_saved_after_an_evaluation_too() -> None:
    """After a forward pass alone, FSDP2 shows other parameters of the root than the optimizer's."""
    model, samples = make_model(), make_samples(6)
    with sharded(model, model[1]):
        state = make_state(model)
        train_step(state, [samples], 6, 0, transform)
        kept = {name: moment.clone() for name, moment in state.state_dict()[OPTIMIZER].items()}
        evaluate(state.accelerator, model, [samples], normalize=Tensor.float, num_images=6)
        after, numbers = state.state_dict()[OPTIMIZER], state.numbers()
    moments = {f"{name}.{key}" for name in numbers["optimizer"]["parameters"] for key in MOMENTS}
    assert after.keys() == kept.keys() == moments
    assert all(torch.equal(after[name], moment) for name, moment in kept.items())
