"""The objects of a run, as they are built from its config, and what the data must offer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from lipsformer._renamed import renamed
from lipsformer.engine.step_share import StepShare
from lipsformer.engine.train_state import TrainState

MicroBatch = tuple[Tensor, Tensor]


class SizedBatches(Protocol):
    """Micro-batches, and their number.

    Example:
        >>> import torch
        >>> batches: SizedBatches = [(torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]))]
        >>> len(batches)
        1
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[MicroBatch]: ...


class BatchTransform(Protocol):
    """Turns raw images and labels into inputs and target probabilities, on the device.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> def one_hot(images, labels, *, update, micro_step, rank):
        ...     return images / 255.0, F.one_hot(labels, 3).float()
        >>> transform: BatchTransform = one_hot
        >>> images, labels = torch.zeros(1, 3, 4, 4), torch.tensor([1])
        >>> transform(images, labels, update=0, micro_step=0, rank=0)[1]
        tensor([[0., 1., 0.]])
    """

    def __call__(
        self, images: Tensor, labels: Tensor, *, update: int, micro_step: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Transform a micro-batch; all randomness is a function of (update, micro_step, rank)."""
        ...


class TrainBatches(Protocol):
    """The training data, dealt into optimizer steps."""

    updates_per_epoch: int

    def epoch(self, epoch: int, start_update: int = 0) -> Iterable[tuple[list[MicroBatch], int]]:
        """Yield the batches of an epoch from one of its steps on."""
        ...

    def indices(self, epoch: int, update: int) -> list[int]:
        """Return the samples of one step of an epoch."""
        ...


class PendingRecords:
    """The records of the monitor that are not written yet.

    Example:
        >>> pending = PendingRecords()
        >>> pending.add(20, {"sigma/head.fc.weight": 1.5})
        >>> pending.take(), pending.take()
        ([(20, {'sigma/head.fc.weight': 1.5})], [])
    """

    def __init__(self) -> None:
        self._records: list[tuple[int, Mapping[str, float]]] = []

    def add(self, step: int, record: Mapping[str, float]) -> None:
        """Add the record after `step` completed steps."""
        self._records.append((step, record))

    def take(self) -> list[tuple[int, Mapping[str, float]]]:
        """Return the records in their order, each with its number of steps, and forget them."""
        taken, self._records = self._records, []
        return taken


class DataFacts(NamedTuple):
    """What a run must find again in its data to be continued, under the names in `state.json`.

    Attributes:
        classes: Names of the classes in the order of the labels.
        num_train_images, num_eval_images: Lengths of the training and the validation set.
        train_labels_sha256, eval_labels_sha256: Sums of their labels.

    Example:
        >>> DataFacts(["cat", "dog"], 7, 3, "c0ffee", "decaf").num_eval_images
        3
    """

    classes: list[str]
    num_train_images: int
    num_eval_images: int
    train_labels_sha256: str
    eval_labels_sha256: str


@dataclass(frozen=True)
class TrainingParts:
    """The objects built from a config: data, model, optimizer.

    Attributes:
        state: The model and all that trains it.
        train_batches: The training data.
        transform: Turns training batches into inputs and targets, on the device.
        eval_batches: This rank's share of the validation data.
        normalize: Turns validation images into inputs.
        facts: What a run must find again in its data to be continued.
        timm_config: timm's description of the model, as JSON.
        step_share: The share of each device in an optimizer step.
        pending: Receives the records of the monitor, which the trainer writes after each step.

    Example:
        >>> TrainingParts.__dataclass_fields__["step_share"].type.__name__
        'StepShare'
    """

    state: TrainState
    train_batches: TrainBatches
    transform: BatchTransform
    eval_batches: SizedBatches
    normalize: Callable[[Tensor], Tensor]
    facts: DataFacts
    timm_config: str
    step_share: StepShare
    pending: PendingRecords


__getattr__ = renamed(__name__)
