"""What a run tells: metrics.jsonl, which is the source of truth, trackers, and the console."""

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


class Tracking:
    """Records of one run, written by the main process alone.

    Args:
        accelerator: with the trackers' names.
        output_dir: of the run.
        run_id: what trackers call this run, the same after a resume.
        update: the update to continue after.
        next_record: the earliest update of which a record may still come.
        total_updates: of the run.
        metrics_bytes: length of metrics.jsonl at that update; what was written later by a process
            that died is cut off, because it will be written again.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        output_dir: Path,
        *,
        run_id: str,
        update: int,
        next_record: int,
        total_updates: int,
        metrics_bytes: int,
    ):
        self.accelerator = accelerator
        self.path = output_dir / METRICS
        self.is_main = accelerator.is_main_process
        if self.is_main:
            self.path.touch()
            if self.path.stat().st_size < metrics_bytes:
                raise RuntimeError(
                    f"{self.path} has {self.path.stat().st_size} bytes, but had {metrics_bytes} "
                    f"at update {update}: records are lost; restore it or start a new run"
                )
            os.truncate(self.path, metrics_bytes)
        accelerator.init_trackers(
            "lipsformer",
            init_kwargs={
                # Both continue the curve where the checkpoint is, on the same axis.
                "tensorboard": {"purge_step": next_record},
                "wandb": {"id": run_id, "resume": "allow", "dir": str(output_dir)},
            },
        )
        # Those that the trackers cut off although they stay, as averages over a window come later.
        for record in read_metrics(self.path) if self.is_main else ():
            if next_record <= record["update"]:
                kind, step, _, *values = record.items()
                self._show(kind[1], step[1], dict(values))
        terminal = self.is_main and sys.stderr.isatty()
        self._bar = tqdm(
            total=total_updates, initial=update, unit="update", disable=not terminal, smoothing=0.1
        )
        self._redirect = logging_redirect_tqdm([logging.getLogger("lipsformer")])
        if terminal:
            self._redirect.__enter__()
        self._terminal = terminal

    def record(self, kind: str, update: int, epoch: float, values: Mapping[str, float]) -> None:
        """Adds a record to metrics.jsonl and to the trackers.

        Args:
            kind: "train", "raw" or "ema" for an evaluation of those weights, or what an instrument
                calls its records.
            update: number of updates made.
            epoch: the same in passes over the data.
            values: the figures.
        """
        if self.is_main:
            line = json.dumps({"kind": kind, "update": update, "epoch": epoch, **values})
            with self.path.open("a") as file:
                file.write(line + "\n")
        self._show(kind, update, values)

    def _show(self, kind: str, update: int, values: Mapping[str, float]) -> None:
        self.accelerator.log({f"{kind}/{name}": v for name, v in values.items()}, step=update)

    def say(self, text: str) -> None:
        """A line for the reader."""
        if self.is_main:
            logger.info(text)

    def progress(self, update: int, figures: str) -> None:
        """Moves the bar on a terminal; elsewhere prints a line."""
        if self._terminal:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(update - self._bar.n)
        else:
            self.say(f"update {update}/{self._bar.total}  {figures}")

    def size(self) -> int:
        """Bytes of metrics.jsonl, all of them on the disk; 0 on other ranks."""
        if not self.is_main:
            return 0
        with self.path.open("a") as file:
            os.fsync(file.fileno())
            return file.tell()

    def close(self) -> None:
        """Ends the bar and the trackers."""
        self._bar.close()
        if self._terminal:
            self._redirect.__exit__(None, None, None)
        for tracker in self.accelerator.trackers:
            tracker.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics.jsonl; a last line that was cut off by a kill is left out."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
