"""Repeated augmentation, sizes by epoch and 3-Augment, each compared with timm's own class."""

from collections import Counter

import numpy as np
import pytest
import torch
from timm.data import create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.scheduled_sampler import ScheduledBatchSampler
from torch.utils.data import Dataset, SequentialSampler

from data import TrainBatches, build_datasets
from data.build import sizes_by_epoch
from data.rng import permutation, preserve_rng, seed_all
from data.transforms import TrainTransform
from lipsformer.config import AugmentConfig, DataConfig
from tests.data.photos import photo
from tests.data.test_transforms import picture


class Keys(Dataset):
    """Item = its key (epoch, index, repeat), as an "image"."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self):
        return self.length

    def __getitems__(self, keys):
        return [(torch.tensor(key).view(1, 1, 3), key[1]) for key in keys]


def keys_of(batches: TrainBatches, epoch: int, start: int = 0) -> list[list[tuple[int, ...]]]:
    """The keys of each update, in their order on one rank."""
    return [
        [tuple(key) for images, _ in update.micro_batches for key in images[:, :, 0, 0].tolist()]
        for update in batches.epoch(epoch, start)
    ]


def repeated(length: int, rank: int = 0, world_size: int = 1, **more) -> TrainBatches:
    settings = {"global_batch_size": 30, "batch_size_per_device": 5, "drop_last": True, **more}
    return TrainBatches(
        Keys(length),  # pyright: ignore[reportArgumentType]
        rank=rank,
        world_size=world_size,
        seed=5,
        num_workers=0,
        pin_memory=False,
        repeats=3,
        **settings,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("length", [101, 521])
def test_every_rank_gets_what_timms_sampler_gives_it(monkeypatch, length, world_size):
    order = torch.from_numpy(permutation(length, "order", 5, 4))
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: order)
    for rank in range(world_size):
        mine = [key for update in keys_of(repeated(length, rank, world_size), 4) for key in update]
        timms = list(RepeatAugSampler(range(length), world_size, rank))
        # timm cuts the last update of an epoch, too, where the run drops it
        assert len(mine) == (length // 256 * 256 or length) // 30 * 30 // world_size
        assert [index for _, index, _ in mine] == timms[: len(mine)]
        assert {epoch for epoch, _, _ in mine} == {4}


def test_repeats_are_numbered_resumed_and_named_by_their_images():
    whole = repeated(101, drop_last=False)
    updates = keys_of(whole, 2)
    seen = Counter(key for update in updates for key in update)
    assert len(seen) == 101  # no key twice
    order = permutation(101, "order", 5, 2).tolist()
    assert Counter(i for _, i, _ in seen) == Counter([i for i in order for _ in range(3)][:101])
    assert keys_of(repeated(101, drop_last=False), 2, start=2) == updates[2:]
    assert sorted(whole.indices(2, 3)) == sorted(index for _, index, _ in updates[3])
    # one update has the same keys however many ranks share it
    ranks = [keys_of(repeated(101, rank, 2), 2)[1] for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == sorted(updates[1])


def test_repeats_of_an_image_are_augmented_differently_and_reproducibly():
    data = DataConfig(source="digits", img_size=19)
    train, _ = build_datasets(data, AugmentConfig(), seed=3)
    first, second, again = (train[1, 7, repeat][0] for repeat in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("sizes", "epochs"), [([96], 3), ([16, 24, 40], 11), ([8, 12], 1)])
def test_sizes_follow_timms_progressive_schedule(sizes, epochs):
    if len(sizes) == 1:  # timm has no schedule of a single size
        assert sizes_by_epoch(sizes, epochs) == sizes * epochs
        return
    sampler = ScheduledBatchSampler(
        SequentialSampler(range(64)),
        [8] * len(sizes),
        choice_schedule="progressive",
        schedule_epochs=epochs,
        schedule_spread=0.0,
        schedule_random_mix=0.0,
    )
    timms = [sampler.choice_weights_for_epoch(epoch) for epoch in range(epochs)]
    # where two sizes are equally near, timm draws one of them and we take the first
    expected = [sizes[int((weights > 0).nonzero()[0])] for weights in timms]
    assert sizes_by_epoch(sizes, epochs) == expected
    data = DataConfig(source="digits", img_size=8)
    train, val = build_datasets(data, AugmentConfig(img_sizes=tuple(sizes)), seed=3, epochs=epochs)
    assert [train[epoch, 5][0].shape[0] for epoch in range(epochs)] == expected
    assert val[0][0].shape[0] == 8


@pytest.mark.parametrize("color_jitter", [0.0, 0.3])
def test_three_augment_is_timms(color_jitter):
    """A picture of the output's size and a crop of all of it: the crop changes nothing."""
    whole = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "hflip": 0.0}
    ours = TrainTransform(37, auto_augment="3a", color_jitter=color_jitter, **whole)
    timms = create_transform(
        37,
        is_training=True,
        auto_augment="3a",
        color_jitter=color_jitter or None,
        interpolation="bicubic",
        use_prefetcher=True,
        **whole,
    )
    worst = 0
    for draw in range(24):
        outputs = []
        for transform, image in ((ours, picture(37, 37)), (timms, photo(37, 37))):
            with preserve_rng():
                seed_all("test", draw)
                outputs.append(np.asarray(transform(image)))
        worst = max(worst, np.abs(outputs[0].transpose(2, 0, 1).astype(int) - outputs[1]).max())
    assert worst <= 2, worst
