"""Loaders: the samples of every update on every rank, and the processes that load them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from data.dataset import ImageDataset, TrainDataset
from data.errors import DataError
from data.rng import permutation

MicroBatch = tuple[Tensor, Tensor]
REPEATED_ROUND = 256  # timm's `selected_round`: epochs of repeated samples are a multiple of it


class Update(NamedTuple):
    """One rank's share of an optimizer update.

    Attributes:
        micro_batches: Pairs of uint8 images [b, 3, H, W] and labels [b]. Every rank has the same
            number of them.
        num_samples: Number of samples of the whole update, over all ranks and micro-batches.

    Example:
        >>> import torch
        >>> batch = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])
        >>> Update([batch], num_samples=2).num_samples
        2
    """

    micro_batches: list[MicroBatch]
    num_samples: int


class TrainBatches:
    """One rank's share of the updates of an epoch.

    Update u of an epoch consists of the samples permutation(seed, epoch)[u G : (u + 1) G], where G
    is the global batch size. They do not depend on the number of ranks. Consecutive micro-batches
    of an update go to the ranks 0, 1, ... in turn, so that every rank has the same number of them.
    A short last update has as few micro-batches as its size needs, of nearly equal size.

    With R repeats an epoch is the beginning of the order in which every sample comes R times in a
    row: N samples of it, or the largest multiple of 256 below N, as in timm's `RepeatAugSampler`.
    The samples of an update go to the ranks one by one in turn, so that the repeats of an image
    come to different ranks.

    Args:
        dataset: Data set with keys (epoch, index), or (epoch, index, repeat) with repeats.
        global_batch_size: Number of samples per update.
        batch_size_per_device: Largest number of samples per micro-batch. The global batch size is a
            multiple of it times `world_size`.
        rank: Rank of this process.
        world_size: Number of processes.
        seed: Seed of the order.
        num_workers: Number of worker processes, which live for the whole run. 0 loads in this
            process.
        drop_last: Leave out the last N mod G samples of each epoch's order.
        pin_memory: Put batches into page-locked memory.
        repeats: R, how often an epoch takes each image, differently augmented.

    Raises:
        DataError: If there are too few samples for one update, or for the short last update.

    Example:
        >>> from data.dataset import TrainDataset
        >>> from data.sources import digits
        >>> from data.transforms import TrainTransform
        >>> batches = TrainBatches(
        ...     TrainDataset(digits("train", img_size=16), TrainTransform(16), seed=0),
        ...     global_batch_size=96, batch_size_per_device=24, rank=0, world_size=2, seed=0,
        ...     num_workers=0, drop_last=True, pin_memory=False,
        ... )
        >>> update = next(batches.epoch(0))
        >>> len(update.micro_batches), tuple(update.micro_batches[0][0].shape)
        (2, (24, 3, 16, 16))
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
        repeats: int = 1,
    ):
        count = len(dataset)
        if repeats > 1 and count >= REPEATED_ROUND:
            count = count // REPEATED_ROUND * REPEATED_ROUND
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
        self.repeats = repeats
        self.samples_per_epoch = count
        self.dataset = dataset
        self.updates_per_epoch = full if drop_last or rest == 0 else full + 1
        if self.updates_per_epoch > full and rest < self._micro_steps(rest) * world_size:
            raise DataError(
                f"the last {rest} of {count} training images cannot be dealt to {world_size} "
                f"processes in micro-batches of at most {batch_size_per_device} without an empty "
                "one: set train.drop_last=true or change train.global_batch_size"
            )
        self.drop_last = drop_last
        self._keys = _Keys(repeats)
        self._loader = _loader(dataset, self._keys, num_workers, pin_memory)

    def smallest_micro_batch(self) -> int:
        """Return the number of samples of the smallest micro-batch of an epoch, over all ranks."""
        rest = self.samples_per_epoch % self.global_batch_size
        if self.drop_last or rest == 0:
            return self.batch_size_per_device
        return rest // (self._micro_steps(rest) * self.world_size)

    def of_rank(self, rank: int, world_size: int, batch_size_per_device: int) -> "TrainBatches":
        """Return the same updates as a rank of another number of processes gets them."""
        return TrainBatches(
            self.dataset,
            global_batch_size=self.global_batch_size,
            batch_size_per_device=batch_size_per_device,
            rank=rank,
            world_size=world_size,
            seed=self.seed,
            num_workers=0,
            drop_last=self.drop_last,
            pin_memory=False,
            repeats=self.repeats,
        )

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[Update]:
        """Yield the updates of an epoch from `start_update` on, without loading earlier ones."""
        dealt = self.deal(epoch, start_update)
        self._keys.epoch = epoch
        self._keys.batches = [micro_batch for update in dealt for micro_batch in update]
        loaded = _raising(self._loader)
        for update, micro_batches in enumerate(dealt, start_update):
            loaded_now = [next(loaded) for _ in micro_batches]
            yield Update(loaded_now, len(self.samples(epoch, update)))

    def indices(self, epoch: int, update: int) -> list[int]:
        """Return the indices of the images of one update of an epoch, over all ranks."""
        return (self.samples(epoch, update) // self.repeats).tolist()

    def samples(self, epoch: int, update: int) -> np.ndarray:
        """Return the samples of one update, over all ranks: R times an image plus the repeat."""
        order = _order(len(self.dataset), self.repeats, self.seed, epoch)[: self.samples_per_epoch]
        start = update * self.global_batch_size
        return order[start : start + self.global_batch_size]

    def deal(self, epoch: int, start_update: int = 0) -> list[list[np.ndarray]]:
        """Return, for each update of an epoch, the samples of each micro-batch of this rank."""
        updates = range(start_update, self.updates_per_epoch)
        return [self._deal(self.samples(epoch, update)) for update in updates]

    def _deal(self, group: np.ndarray) -> list[np.ndarray]:
        """Return this rank's micro-batches of a group.

        They are every `world_size`-th of the parts into which `np.array_split` splits a group. With
        repeats, neighbors in the group are views of one image, which go to different ranks.
        """
        steps = self._micro_steps(len(group))
        if self.repeats > 1:
            return np.array_split(group[self.rank :: self.world_size], steps)
        parts = steps * self.world_size
        size, larger = divmod(len(group), parts)
        return [
            group[part * size + min(part, larger) : (part + 1) * size + min(part + 1, larger)]
            for part in range(self.rank, parts, self.world_size)
        ]

    def _micro_steps(self, samples: int) -> int:
        return -(-samples // (self.batch_size_per_device * self.world_size))


@lru_cache(maxsize=1)
def _order(count: int, repeats: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the samples of an epoch, which many ranks of one process share."""
    order = permutation(count, "order", seed, epoch)
    order = np.add.outer(order * repeats, np.arange(repeats)).ravel()
    order.setflags(write=False)
    return order


class _Keys:
    """The keys of one epoch's micro-batches, as a batch sampler."""

    epoch = 0
    batches: Sequence[np.ndarray] = ()

    def __init__(self, repeats: int):
        self.repeats = repeats

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        for batch in self.batches:
            if self.repeats == 1:
                yield [(self.epoch, index) for index in batch.tolist()]
            else:
                yield [(self.epoch, *divmod(sample, self.repeats)) for sample in batch.tolist()]


def eval_loader(
    dataset: ImageDataset, *, batch_size: int, rank: int, world_size: int, num_workers: int
) -> "EvalBatches":
    """Load this rank's share of a data set. All ranks together load every image once.

    Args:
        dataset: Data set with integer keys.
        batch_size: Largest number of images per batch.
        rank: Rank of this process.
        world_size: Number of processes.
        num_workers: Number of worker processes; 0 loads in this process.
    """
    return EvalBatches(dataset, batch_size, range(rank, len(dataset), world_size), num_workers)


class EvalBatches:
    """Batches of the images with given indices, in that order. Ranks may have different numbers.

    A batch is a pair of uint8 images [b, 3, H, W] and labels [b].

    Args:
        dataset: Data set with integer keys.
        batch_size: Largest number of images per batch.
        indices: Indices of the images.
        num_workers: Number of worker processes; 0 loads in this process.

    Example:
        >>> from data.dataset import ImageDataset
        >>> from data.sources import digits
        >>> from data.transforms import EvalTransform
        >>> dataset = ImageDataset(digits("val", img_size=16), EvalTransform(16))
        >>> [len(labels) for _, labels in EvalBatches(dataset, 4, range(6), num_workers=0)]
        [4, 2]
    """

    def __init__(self, dataset: ImageDataset, batch_size: int, indices: range, num_workers: int):
        self.indices = indices
        starts = range(0, len(indices), batch_size)
        self._batches = [list(indices[start : start + batch_size]) for start in starts]
        pin_memory = torch.accelerator.is_available()
        self._loader = _loader(dataset, self._batches, num_workers, pin_memory)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return _raising(self._loader)


class _Fetched(Dataset):
    """Load a batch at a time, and return a `DataError` instead of raising it.

    torch would wrap an exception of a worker process in a text of many lines.
    """

    def __init__(self, dataset: ImageDataset):
        self.dataset = dataset

    def __getitems__(self, keys: list) -> list | DataError:
        try:
            return self.dataset.__getitems__(keys)
        except DataError as error:
            return error.with_traceback(None)


def collate(items: list[tuple[Tensor, Any]]) -> MicroBatch:
    """Make a batch of items.

    Args:
        items: Pairs of uint8 image [H, W, 3] and label.

    Returns:
        uint8 images [B, 3, H, W], in the memory format channels_last, and labels.
    """
    images, labels = default_collate(items)
    return images.permute(0, 3, 1, 2), labels


def _collate(items: list | DataError) -> MicroBatch | DataError:
    return items if isinstance(items, DataError) else collate(items)


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
        generator=torch.Generator(),  # without it, each epoch draws from the global generator
    )


def _ignore_signals(_: int) -> None:
    """Ignore all signals in a worker process but a SIGTERM from its main process.

    Schedulers and terminals signal every process of a job. If a worker died, the main process
    could not finish its checkpoint. If a worker ignored every SIGTERM, a main process that ends by
    an exception would wait for it forever.
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
