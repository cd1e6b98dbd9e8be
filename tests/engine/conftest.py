"""Accelerate keeps its state in the process; each test starts without one."""

import signal
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState

from lipsformer.engine.signals import STOP_SIGNALS


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for number, handler in handlers.items():
        signal.signal(number, handler)
