"""How the devices share an optimizer step."""

from typing import NamedTuple

from lipsformer._errors import ConfigError
from lipsformer.config import TrainConfig


class StepShare(NamedTuple):
    """The share of one device in an optimizer step.

    Attributes:
        samples: Number of samples of a micro-batch.
        micro_batches: Number of micro-batches.

    Example:
        >>> share = StepShare(samples=24, micro_batches=2)
        >>> share.samples * share.micro_batches
        48
    """

    samples: int
    micro_batches: int


def share_of_step(train: TrainConfig, world_size: int) -> StepShare:
    """Return the share of each device in an optimizer step.

    Raises:
        ConfigError: Unless global batch = processes x samples x micro-batches.
    """
    share, rest = divmod(train.global_batch_size, world_size)
    if rest:
        near = [share * world_size, (share + 1) * world_size]
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size} cannot be shared by {world_size} "
            f"processes; {' or '.join(str(n) for n in near if n)} would fit"
        )
    samples = train.batch_size_per_device or share
    if share % samples:
        fitting = [n for n in range(1, share + 1) if share % n == 0]
        raise ConfigError(
            f"train.batch_size_per_device={samples} does not divide the {share} samples that each "
            f"of {world_size} processes gets of train.global_batch_size="
            f"{train.global_batch_size}; {', '.join(map(str, fitting))} would fit"
        )
    return StepShare(samples, share // samples)
