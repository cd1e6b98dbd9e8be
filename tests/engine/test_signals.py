"""Where stop signals are heard."""

import signal
from concurrent.futures import ThreadPoolExecutor

from lipsformer.engine.signals import STOP_SIGNALS, StopRequest


def test_the_main_thread_hears_and_another_one_leaves_the_handlers_alone():
    """Ray Train runs the training function beside the main thread, where handlers are refused."""
    heard = StopRequest()
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    with ThreadPoolExecutor() as threads:
        beside = threads.submit(StopRequest).result()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    signal.raise_signal(signal.SIGUSR1)
    assert (heard.stop_signal(), beside.stop_signal()) == (signal.SIGUSR1, 0)
