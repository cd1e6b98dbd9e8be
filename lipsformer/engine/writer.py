"""Writes checkpoints in a thread, while the training goes on."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipsformer.engine.checkpoint import CheckpointFolder
from lipsformer.engine.metrics import NonFiniteError
from lipsformer.engine.run_files import MODEL

logger = logging.getLogger(__name__)

Files = Mapping[str, Mapping[str, Tensor]]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CheckpointWriter:
    """Writes checkpoints one after the other, in a thread that first copies their tensors.

    Weights, moments and averages change in the optimizer step only. So the thread copies them
    during the forward and backward pass that follows, and `wait_for_copy` holds back the optimizer
    until the copy is complete. The memory of the copies is kept for the next checkpoint: filling
    new memory takes three times as long, because the system clears every page first. numpy copies
    on the CPU, because the OpenMP threads of torch would compete with those that train.

    Args:
        checkpoints: Where to write.
        before_write: Called in the thread before anything is written. What it raises ends the save.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = CheckpointFolder(Path(tempfile.mkdtemp()))
        >>> writer = CheckpointWriter(folder, before_write=lambda: None)
        >>> weights = {"model.safetensors": {"w": torch.ones(3)}}
        >>> writer.save(7, tensors=weights, texts={"state.json": "{}"}, best_step=None)
        >>> writer.close()
        >>> folder.newest().name
        'update-000000007'
    """

    def __init__(self, checkpoints: CheckpointFolder, *, before_write: Callable[[], None]):
        self.checkpoints = checkpoints
        self.before_write = before_write
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._copies: dict[tuple[str, str], Tensor] = {}

    def save(self, step: int, *, tensors: Files, **content: Any) -> None:
        """Begin to write a checkpoint and return; arguments as for `CheckpointFolder.save`.

        Args:
            step: Number of completed steps.
            tensors: File name -> tensors, which must not change before `wait_for_copy` returns.
            **content: `texts` and `best_step`.

        Raises:
            Exception: What `wait` raises about the checkpoint before this one.
        """
        self.wait()
        self._copied.clear()
        stream = None
        device = next(iter(tensors[MODEL].values())).device
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
        self._saving = self._pool.submit(self._save, step, tensors, stream, content)

    @property
    def failed(self) -> bool:
        """Whether the last save has ended with an error, which `wait` would raise."""
        saving = self._saving
        return saving is not None and saving.done() and saving.exception() is not None

    def wait_for_copy(self) -> None:
        """Wait until the tensors may change again."""
        self._copied.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            CheckpointError: If it cannot be written.
            NonFiniteError: If a weight is not finite; nothing was saved then.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Wait until the checkpoint is complete, and end the thread; an error is only logged."""
        try:
            self.wait()
        except Exception as error:  # another error ends the run already
            logger.warning("%s", error)
        self._pool.shutdown()

    def _save(
        self, step: int, tensors: Files, stream: torch.cuda.Stream | None, content: dict[str, Any]
    ) -> None:
        try:
            copies = self._copy(tensors, stream)
        finally:
            self._copied.set()
        for name, tensor in copies[MODEL].items():
            if tensor.is_floating_point() and not np.isfinite(tensor.float().numpy()).all():
                raise NonFiniteError(f"{name} is not finite after update {step}; nothing was saved")
        self.before_write()
        self.checkpoints.save(step, tensors=copies, **content)

    @torch.no_grad()
    def _copy(
        self, tensors: Files, stream: torch.cuda.Stream | None
    ) -> dict[str, dict[str, Tensor]]:
        copies: dict[str, dict[str, Tensor]] = {}
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            for file, content in tensors.items():
                copies[file] = {n: self._copy_one((file, n), t) for n, t in content.items()}
        if stream is not None:
            stream.synchronize()
        return copies

    def _copy_one(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        copy = self._copies.get(key)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[key] = copy
        if tensor.is_cuda:
            return copy.copy_(tensor, non_blocking=True)
        bits = _BITS[tensor.element_size()]  # numpy has no bfloat16
        np.copyto(copy.view(bits).numpy(), tensor.detach().view(bits).numpy())
        return copy
