"""Where stop signals are heard."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from lipsformer.engine.signals import STOP_SIGNALS, StopRequest


def test_the_main_thread_hears_and_another_one_leaves_the_handlers_alone():
    """Ray Train trains in another thread than the main one, where Python allows no handlers."""
    heard = StopRequest()
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    with ThreadPoolExecutor() as threads:
        beside = threads.submit(StopRequest).result()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    signal.raise_signal(signal.SIGUSR1)
    assert (heard.stop_signal(), beside.stop_signal()) == (signal.SIGUSR1, 0)


def test_the_handlers_of_before_come_back_and_a_second_interrupt_has_its_usual_effect() -> None:
    # a shell starts background processes with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    heard = StopRequest()
    signal.raise_signal(signal.SIGINT)
    assert heard.stop_signal() == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    heard.close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    signal.signal(signal.SIGINT, before)


def test_a_process_whose_torchrun_was_killed_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = StopRequest(signals=())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    child = StopRequest(signals=())
    assert child.stop_signal() == 0
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert (alone.stop_signal(), child.stop_signal()) == (0, signal.SIGTERM)
