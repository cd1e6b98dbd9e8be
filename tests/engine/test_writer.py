"""What a thread writes is what the step had, its errors end the run, and the loop hardly waits."""

import threading
import time
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from lipsformer.engine import writer
from lipsformer.engine.checkpoint import CheckpointFolder
from lipsformer.engine.metrics import NonFiniteError
from lipsformer.engine.run_files import EMA, MODEL, OPTIMIZER, STATE, CheckpointError
from lipsformer.engine.steps import train_step
from lipsformer.engine.stopwatch import Stopwatch
from lipsformer.engine.writer import CheckpointWriter
from tests.engine.test_steps import make_model, make_samples, make_state, transform
from tests.launch import launch
from tests.runs import DIGITS, write_config

CONTENT = {"texts": {STATE: "{}"}, "best_step": None}


def test_a_slow_copy_holds_the_step_that_the_training_goes_on_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, copyto = make_samples(6), np.copyto

    def slowly(copy: np.ndarray, array: np.ndarray) -> None:
        time.sleep(0.02)
        copyto(copy, array)

    monkeypatch.setattr(writer.np, "copyto", slowly)
    model = make_model()
    # A buffer that the forward pass changes, and a weight in another memory format.
    model.register_buffer("seen", torch.zeros(3, dtype=torch.bfloat16))

    def count(*_: object) -> None:
        model.get_buffer("seen").add_(1)

    model.register_forward_hook(count)
    nhwc = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    model.register_parameter("nhwc", torch.nn.Parameter(nhwc))
    state = make_state(model, ema_decay=0.8)
    folder = CheckpointFolder(tmp_path, keep=9)
    saver = CheckpointWriter(folder, before_write=lambda: None)
    state.before_change = saver.wait_for_copy
    expected = {}
    for step in range(3):
        train_step(state, [samples], 6, step, transform)
        tensors = state.state_dict()
        expected[step] = {f: {n: t.clone() for n, t in c.items()} for f, c in tensors.items()}
        saver.save(step, tensors=tensors, **CONTENT)
    train_step(state, [samples], 6, 3, transform)
    saver.close()
    for step, files in expected.items():
        assert files.keys() == {MODEL, OPTIMIZER, EMA}
        for name, content in files.items():
            found = load_file(folder.path_of(step) / name)
            assert found.keys() == content.keys()
            assert all(torch.equal(found[key], tensor) for key, tensor in content.items())


def test_saves_take_turns_and_their_errors_come_with_the_next_call(tmp_path: Path) -> None:
    inside, at_once = threading.Semaphore(1), []

    def before_write() -> None:
        at_once.append(inside.acquire(blocking=False))
        time.sleep(0.05)
        inside.release()

    folder = CheckpointFolder(tmp_path)
    saver = CheckpointWriter(folder, before_write=before_write)
    weights = {MODEL: {"a": torch.ones(3), "b": torch.tensor([1.0, torch.nan])}}
    for step in (2, 3, 5):
        saver.save(step, tensors={MODEL: {"a": torch.full((7,), step)}}, **CONTENT)
    saver.wait()
    assert at_once == [True, True, True]
    saver.save(7, tensors=weights, **CONTENT)
    while not saver.failed:
        time.sleep(0.01)
    with pytest.raises(NonFiniteError, match="b is not finite after update 7; nothing was saved"):
        saver.save(8, tensors=weights, **CONTENT)
    (tmp_path / ".update-000000011").touch()  # in the way
    weights[MODEL].pop("b")
    saver.save(11, tensors=weights, **CONTENT)
    with pytest.raises(CheckpointError, match=f"the last good one is {folder.path_of(5)}"):
        saver.wait()
    assert not saver.failed
    saver.close()


@pytest.mark.dist
def test_a_failed_save_ends_all_ranks(tmp_path: Path) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / ".update-000000006").touch()  # in the way
    arguments = ["--config", str(config), "run.log_every=1"]
    assert launch(arguments, tmp_path / "log", world_size=2) == [4, 4]
    texts = [(tmp_path / f"log.{rank}").read_text() for rank in (0, 1)]
    (line,) = [line for text in texts for line in text.splitlines() if line.startswith("error: ")]
    assert "cannot write checkpoint" in line
    assert line.endswith("update-000000003")
    assert "update 13/" not in texts[0], "the run went on without checkpoints"


class FakeDevice:
    """A device that works through its queue on the same clock as the host."""

    def __init__(self) -> None:
        self.type, self.clock, self.idle_at = "cuda", 0.0, 0.0

    def event(self, enable_timing: bool) -> "FakeDevice.Event":
        return self.Event(self)

    class Event:
        def __init__(self, device: "FakeDevice"):
            self.device = device

        def record(self) -> None:
            self.at = max(self.device.clock, self.device.idle_at)

        def elapsed_time(self, end: "FakeDevice.Event") -> float:
            return 1000 * (end.at - self.at)


@pytest.mark.parametrize(
    ("step", "other", "share"),
    [(0.5, 0.0, 0.0), (0.125, 0.0, 0.0625 / 0.1875), (0.125, 0.75, 0.75)],
)
def test_a_device_that_is_busy_does_not_wait_for_data(
    monkeypatch: pytest.MonkeyPatch, step: float, other: float, share: float
) -> None:
    """The host waits 0.1875 s for each batch, in which the device works for `step` seconds."""
    device = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda d: None)
    monkeypatch.setattr(time, "perf_counter", lambda: max(device.clock, device.idle_at))
    monkeypatch.setattr(torch, "tensor", lambda value, device=None: torch.as_tensor(value))

    class Ranks:
        def __init__(self) -> None:
            self.device = device

        def gather(self, own: torch.Tensor) -> torch.Tensor:
            return torch.stack([own, torch.tensor(other)])

    stopwatch = Stopwatch(cast(Accelerator, Ranks()))

    def batches():
        for _ in range(64):
            device.clock += 0.1875
            yield 0

    for _ in stopwatch.waiting(batches()):
        device.idle_at = max(device.idle_at, device.clock) + step
    assert stopwatch.read()["data_wait"] == pytest.approx(share, abs=0.02)
