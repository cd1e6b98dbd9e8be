"""How fast a run trains, and how long it waits for data."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator


class Stopwatch:
    """Measures images per second, and the share of the time spent waiting for data.

    On the CPU the share is the time in which the host waits for the loader. A CUDA device can be
    busy meanwhile. There the share is the time between two events around the wait, on the time line
    of the device: they are apart only if the device has run out of work.

    Args:
        accelerator: Accelerate's, for the device, and for the rank that waits longest.

    Example:
        >>> stopwatch = Stopwatch(Accelerator(cpu=True))
        >>> stopwatch.count(64)
        >>> stopwatch.read()["images_per_s"] > 0
        True
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.reset()

    def reset(self) -> None:
        """Start anew; call it after pauses that are not training, such as evaluation."""
        self.started = time.perf_counter()
        self.images = 0
        self.steps = 0
        self._waits: list[tuple[Any, Any]] = []

    def waiting(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items and measure how long each took to arrive."""
        iterator = iter(items)
        while True:
            before = self._now()
            item = next(iterator, None)
            self._waits.append((before, self._now()))
            if item is None:
                return
            yield item

    def count(self, images: int) -> None:
        """Count one update and its images."""
        self.images += images
        self.steps += 1

    def read(self) -> dict[str, float]:
        """Return the rates since the last reset, and reset. Every rank must call it.

        `data_wait` is the largest share over all ranks, because the others wait for that rank.
        """
        device = self.accelerator.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            waited = sum(before.elapsed_time(after) for before, after in self._waits) / 1000
        else:
            waited = sum(after - before for before, after in self._waits)
        seconds = time.perf_counter() - self.started
        share = self.accelerator.gather(torch.tensor(waited / seconds, device=device))
        rates = {
            "images_per_s": self.images / seconds,
            "data_wait": float(share.max()),  # pyright: ignore[reportAttributeAccessIssue]
            "seconds_per_update": seconds / max(self.steps, 1),
        }
        self.reset()
        return rates

    def _now(self) -> Any:
        if self.accelerator.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
