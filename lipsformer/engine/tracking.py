"""The records of a run: metrics.jsonl, which is the source of truth, trackers and the console."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping

from accelerate import Accelerator
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lipsformer.engine.run_files import METRICS
from lipsformer.engine.run_folder import RunFolder

logger = logging.getLogger(__name__)


class Tracking:
    """Writes the records of one run, on the main process only.

    Args:
        accelerator: Accelerate's, with the names of the trackers.
        folder: Folder of the run.
        run_id: Name of the run for trackers, the same after a resume.
        step: Number of completed steps.
        next_record: The earliest step of which a record may still come; TensorBoard drops its
            records from this step on.
        total_steps: Number of steps of the whole run.
        metrics_bytes: Length of metrics.jsonl after `step` steps. What a process that died wrote
            behind that is cut off, because it will be written again.

    Example:
        >>> import tempfile
        >>> folder = RunFolder(tempfile.mkdtemp())
        >>> tracking = Tracking(
        ...     Accelerator(cpu=True), folder, run_id="a", step=0, next_record=1, total_steps=9,
        ...     metrics_bytes=0,
        ... )
        >>> tracking.record("train", 1, 0.1, {"loss": 2.3})
        >>> folder.metrics()
        [{'kind': 'train', 'update': 1, 'epoch': 0.1, 'loss': 2.3}]
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: RunFolder,
        *,
        run_id: str,
        step: int,
        next_record: int,
        total_steps: int,
        metrics_bytes: int,
    ):
        self.accelerator = accelerator
        self.path = folder.path / METRICS
        self.is_main = accelerator.is_main_process
        if self.is_main:
            self.path.touch()
            os.truncate(self.path, metrics_bytes)
        accelerator.init_trackers(
            "lipsformer",
            init_kwargs={
                # Both continue the curve where the checkpoint is, on the same axis.
                "tensorboard": {"purge_step": next_record},
                "wandb": {"id": run_id, "resume": "allow", "dir": str(folder.path)},
            },
        )
        # purge_step also removed records that are still valid: evaluations and monitor records
        # newer than the pending training average. Send them again.
        for record in folder.metrics() if self.is_main else ():
            kind, completed, _ = record.pop("kind"), record.pop("update"), record.pop("epoch")
            if completed >= next_record:
                self._send(kind, completed, record)
        terminal = self.is_main and sys.stderr.isatty()
        self._bar = tqdm(
            total=total_steps, initial=step, unit="update", disable=not terminal, smoothing=0.1
        )
        self._redirect = contextlib.ExitStack()  # empty without a terminal
        if terminal:
            self._redirect.enter_context(logging_redirect_tqdm())
        self._terminal = terminal

    def record(self, kind: str, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Add a record to metrics.jsonl and to the trackers.

        Args:
            kind: "train", "raw" or "ema" for an evaluation of those weights, or "monitor".
            step: Number of completed steps; metrics.jsonl calls it "update".
            epoch: The same in passes over the data.
            values: The figures.
        """
        if self.is_main:
            line = json.dumps({"kind": kind, "update": step, "epoch": epoch, **values})
            with self.path.open("a") as file:
                file.write(line + "\n")
        self._send(kind, step, values)

    def _send(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self.accelerator.log({f"{kind}/{name}": v for name, v in values.items()}, step=step)

    def log(self, text: str) -> None:
        """Print a line, on the main process only."""
        if self.is_main:
            logger.info(text)

    def progress(self, step: int, figures: str) -> None:
        """Move the bar on a terminal; print a line elsewhere."""
        if self._terminal:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self.log(f"update {step}/{self._bar.total}  {figures}")

    def size(self) -> int:
        """Return the length of metrics.jsonl in bytes."""
        return self.path.stat().st_size

    def flush(self) -> None:
        """Wait until metrics.jsonl is on the disk."""
        with self.path.open("a") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the bar and the trackers."""
        self._bar.close()
        self._redirect.close()
        for tracker in self.accelerator.trackers:
            try:
                tracker.finish()
            except OSError as error:  # a full disk, which the run's own error reports
                logger.warning("the tracker %s lost its last records: %s", tracker.name, error)
