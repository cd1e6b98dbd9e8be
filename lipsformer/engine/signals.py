"""Stopping on request: a signal sets a flag, and all ranks act on it after the same step."""

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Remembers whether any rank received a stop signal.

    The ranks exchange the flag through a separate group of CPU tensors, so that asking after every
    step does not make the host wait for the device. Python delivers signals to the main thread
    only: in another thread, such as a worker of Ray Train, no signal is received. A second SIGINT,
    which is Ctrl-C, has its usual effect. A process whose torchrun was killed counts as signaled,
    because nobody would signal it any more.

    Example:
        >>> StopRequest(signals=()).stop_signal()
        0
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS):
        self.received = 0
        self._group: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in signals}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])

    def close(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def stop_signal(self) -> int:
        """Return the signal to obey, the same on every rank; 0 for none. All ranks must call it."""
        if self._parent not in (None, os.getppid()):
            self.received = signal.SIGTERM
        if self._group is None:
            return self.received
        flag = torch.tensor(self.received)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return int(flag)
