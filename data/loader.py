"""Which samples make up which update on which rank, and the worker processes that load them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from data.dataset import ImageDataset, TrainDataset
from data.errors import DataError
from data.rng import permutation

MicroBatch = tuple[Tensor, Tensor]


class Update(NamedTuple):
    """One rank's share of an optimizer update.

    Attributes:
        micro_batches: (uint8 images [b, 3, H, W], labels [b]); every rank has the same number.
        num_samples: of the whole update, over all ranks and micro-batches.
    """

    micro_batches: list[MicroBatch]
    num_samples: int


class TrainBatches:
    """The updates of an epoch, as they fall to one rank.

    Update u of an epoch consists of permutation(seed, epoch)[u G : (u + 1) G], G the global batch
    size, whatever the number of ranks. Within it, consecutive micro-batches go to ranks 0, 1, ...
    in turn, so that every rank has the same number of them. A short last group is dealt into as
    many micro-batches as its size needs, of nearly equal size.

    Args:
        dataset: addressed by (epoch, index).
        global_batch_size: samples per update.
        batch_size_per_device: samples per micro-batch at most; the global batch size is a multiple
            of it times `world_size`.
        rank: of this process.
        world_size: number of processes.
        seed: of the order.
        num_workers: worker processes, kept from epoch to epoch; 0 loads in this process.
        drop_last: leave out the last N mod G samples of each epoch's order.
        pin_memory: give batches in page-locked memory.

    Raises:
        DataError: if no update, or the short last group, can be dealt to the ranks.
    """

    def __init__(
        self,
        dataset: TrainDataset,
        *,
        global_batch_size: int,
        batch_size_per_device: int,
        rank: int,
        world_size: int,
        seed: int,
        num_workers: int,
        drop_last: bool,
        pin_memory: bool,
    ):
        count = len(dataset)
        full, rest = divmod(count, global_batch_size)
        if drop_last and full == 0:
            raise DataError(
                f"{count} training images make no update of {global_batch_size}: "
                "lower train.global_batch_size or set train.drop_last=false"
            )
        self.global_batch_size = global_batch_size
        self.batch_size_per_device = batch_size_per_device
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.dataset = dataset
        self.updates_per_epoch = full if drop_last or rest == 0 else full + 1
        if self.updates_per_epoch > full and rest < self._micro_steps(rest) * world_size:
            raise DataError(
                f"the last {rest} of {count} training images cannot be dealt to {world_size} "
                f"processes in micro-batches of at most {batch_size_per_device} without an empty "
                "one: set train.drop_last=true or change train.global_batch_size"
            )
        self._keys = _Keys()
        self._loader = _loader(dataset, self._keys, num_workers, pin_memory)

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[Update]:
        """The updates of an epoch from `start_update` on; what is skipped is not loaded."""
        order = permutation(len(self.dataset), "order", self.seed, epoch)
        updates = range(start_update, self.updates_per_epoch)
        dealt = [self._deal(order, update) for update in updates]
        self._keys.epoch = epoch
        self._keys.batches = [micro_batch for update in dealt for micro_batch in update]
        loaded = _raising(self._loader)
        for update, micro_batches in zip(updates, dealt, strict=True):
            loaded_now = [next(loaded) for _ in micro_batches]
            yield Update(loaded_now, len(self._group(order, update)))

    def indices(self, epoch: int, update: int) -> list[int]:
        """The samples of one update of an epoch, over all ranks."""
        order = permutation(len(self.dataset), "order", self.seed, epoch)
        return self._group(order, update).tolist()

    def _group(self, order: np.ndarray, update: int) -> np.ndarray:
        start = update * self.global_batch_size
        return order[start : start + self.global_batch_size]

    def _deal(self, order: np.ndarray, update: int) -> list[np.ndarray]:
        group = self._group(order, update)
        parts = self._micro_steps(len(group)) * self.world_size
        return np.array_split(group, parts)[self.rank :: self.world_size]

    def _micro_steps(self, samples: int) -> int:
        return -(-samples // (self.batch_size_per_device * self.world_size))


class _Keys:
    """The (epoch, index) keys of one epoch's micro-batches, as a batch sampler."""

    epoch = 0
    batches: Sequence[np.ndarray] = ()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self.batches:
            yield [(self.epoch, index) for index in batch.tolist()]


def eval_loader(
    dataset: ImageDataset, *, batch_size: int, rank: int, world_size: int, num_workers: int
) -> "EvalBatches":
    """This rank's share of a data set: every image once over all ranks, none repeated."""
    return EvalBatches(dataset, batch_size, range(rank, len(dataset), world_size), num_workers)


class EvalBatches:
    """(uint8 images [b, 3, H, W], labels [b]) of given indices, in order.

    Ranks may differ in their number of batches.
    """

    def __init__(self, dataset: ImageDataset, batch_size: int, indices: range, num_workers: int):
        starts = range(0, len(indices), batch_size)
        self._batches = [list(indices[start : start + batch_size]) for start in starts]
        pin_memory = torch.accelerator.is_available()
        self._loader = _loader(dataset, self._batches, num_workers, pin_memory)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return _raising(self._loader)


class _Fetched(Dataset):
    """Gives a batch at a time; a `DataError` of a worker travels as a value, with its one line."""

    def __init__(self, dataset: ImageDataset):
        self.dataset = dataset

    def __getitems__(self, keys: list) -> list | DataError:
        try:
            return self.dataset.__getitems__(keys)
        except DataError as error:
            return error.with_traceback(None)


def _collate(items: list | DataError) -> list[Tensor] | DataError:
    if isinstance(items, DataError):
        return items
    # Images lie in memory as [H, W, 3]; so does their batch, which then is one plain copy.
    images, labels = default_collate([(image.permute(1, 2, 0), label) for image, label in items])
    return [images.permute(0, 3, 1, 2), labels]


def _raising(loader: DataLoader) -> Iterator[MicroBatch]:
    for batch in loader:
        if isinstance(batch, DataError):
            raise batch
        images, labels = batch
        yield images, labels


def _loader(
    dataset: ImageDataset, batches: Iterable[list], num_workers: int, pin_memory: bool
) -> DataLoader:
    return DataLoader(
        _Fetched(dataset),
        batch_sampler=batches,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=_collate,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # else each epoch draws from torch's global generator
    )


def _ignore_signals(_: int) -> None:
    """Leave what a signal means to the main process; obey its own SIGTERM alone.

    Schedulers and terminals signal every process of a job, and a dead worker would hide the
    checkpoint that the main process wants to write. Ignoring SIGTERM altogether would make the
    main process wait forever for its workers when it ends by an exception.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS cannot tell who sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_main_process, daemon=True).start()


def _end_with_main_process() -> None:
    main_process = multiprocessing.parent_process()
    assert main_process is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main_process.pid:
        pass
    os._exit(0)
