"""Updates, ranks and workers against plain lists; most samples here are just their own key."""

import random
import signal
import subprocess
import sys
import textwrap
from collections import Counter

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

from data import (
    DataError,
    TrainBatches,
    UnreadableImageError,
    build_datasets,
    build_eval_dataset,
    eval_loader,
)
from data.rng import permutation
from lipsformer.config import AugmentConfig, DataConfig
from tests.data.trees import write_tree


class Keys(Dataset):
    """Item = its key, as an "image" of (epoch, index), labeled by the index."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, key):
        epoch, index = key if isinstance(key, tuple) else (-1, key)
        return torch.tensor([epoch, index]).view(1, 1, 2), index

    def __getitems__(self, keys):
        return [self[key] for key in keys]


def batches(length=101, *, rank=0, world_size=1, drop_last=True, **settings) -> TrainBatches:
    defaults = {"global_batch_size": 12, "batch_size_per_device": 2, "seed": 5, "num_workers": 0}
    return TrainBatches(
        Keys(length),
        rank=rank,
        world_size=world_size,
        drop_last=drop_last,
        pin_memory=False,
        **{**defaults, **settings},
    )


def as_lists(train_batches, epoch, start_update=0):
    return [
        ([labels.tolist() for _, labels in micro_batches], num_samples)
        for micro_batches, num_samples in train_batches.epoch(epoch, start_update)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_updates_are_slices_of_the_permutation_dealt_in_turn(world_size, drop_last):
    order = permutation(101, "order", 5, 4).tolist()
    ranks = [
        batches(rank=rank, world_size=world_size, drop_last=drop_last) for rank in range(world_size)
    ]
    updates = [as_lists(rank, 4) for rank in ranks]
    assert {rank.updates_per_epoch for rank in ranks} == {8 if drop_last else 9}
    for update in range(8):
        dealt = [updates[rank][update] for rank in range(world_size)]
        # 12 = world_size ranks x micro-batches of 2: micro-step 0 of all ranks, then 1, ...
        chunks = [order[12 * update + 2 * i :][:2] for i in range(6)]
        for rank, (micro_batches, num_samples) in enumerate(dealt):
            assert num_samples == 12
            assert micro_batches == chunks[rank::world_size]
    # 5 samples are left: 3 micro-batches for one rank, 2 for each of two, 1 for each of three
    if not drop_last:
        last = [updates[rank][8] for rank in range(world_size)]
        assert [num_samples for _, num_samples in last] == [5] * world_size
        sizes = {1: [[2, 2, 1]], 2: [[2, 1], [1, 1]], 3: [[2], [2], [1]]}[world_size]
        assert [[len(m) for m in micro_batches] for micro_batches, _ in last] == sizes
        seen = [i for micro_batches, _ in last for m in micro_batches for i in m]
        assert sorted(seen) == sorted(order[96:])
    found = [len(m) for rank in updates for micro_batches, _ in rank for m in micro_batches]
    assert {rank.smallest_micro_batch() for rank in ranks} == {min(found)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_is_exactly_the_data_sets_multiset(world_size, num_workers):
    seen = Counter()
    for rank in range(world_size):
        mine = batches(rank=rank, world_size=world_size, num_workers=num_workers, drop_last=False)
        for micro_batches, _ in mine.epoch(1):
            for images, labels in micro_batches:
                assert (images[:, 0] == 1).all()
                assert torch.equal(images[:, 1, 0, 0], labels)
                seen.update(labels.tolist())
    assert seen == Counter(range(101))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_starting_in_the_middle_gives_the_rest_of_the_epoch(num_workers):
    whole = as_lists(batches(drop_last=False), 2)
    resumed = batches(drop_last=False, num_workers=num_workers)
    assert as_lists(resumed, 2, start_update=6) == whole[6:]
    assert as_lists(resumed, 2, start_update=9) == []
    # The same object goes on with whole epochs, also after one that was broken off.
    next(iter(resumed.epoch(3)))
    assert as_lists(resumed, 3) == as_lists(batches(drop_last=False), 3)


def test_what_cannot_be_dealt_is_one_clear_error():
    with pytest.raises(DataError, match=r"11 training images make no update of 12: .*drop_last"):
        batches(11)
    assert [n for _, n in as_lists(batches(11, drop_last=False), 0)] == [11]
    # 13 = 12 + 1: one sample for three ranks.
    with pytest.raises(DataError, match=r"last 1 of 13 .* cannot be dealt to 3 processes"):
        batches(13, world_size=3, drop_last=False)
    # 4 samples, two at a time: micro-step 2 would leave one rank without any.
    with pytest.raises(DataError, match=r"last 4 of 10 .* cannot be dealt to 3 processes"):
        batches(10, world_size=3, drop_last=False, global_batch_size=6, batch_size_per_device=1)


@pytest.mark.parametrize(("length", "world_size"), [(101, 1), (101, 2), (101, 3), (2, 3)])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_evaluation_visits_every_image_once(length, world_size, num_workers):
    loaders = [
        eval_loader(
            Keys(length), batch_size=7, rank=rank, world_size=world_size, num_workers=num_workers
        )
        for rank in range(world_size)
    ]
    for _ in range(2):
        seen = [[labels.tolist() for _, labels in loader] for loader in loaders]
        assert sorted(i for rank in seen for m in rank for i in m) == list(range(length))
        assert [len(loader) for loader in loaders] == [len(rank) for rank in seen]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    write_tree(root / "train", {"a": 13, "b": 16})
    write_tree(root / "val", {"a": 5, "b": 2})
    data = DataConfig(source="folder", root=str(root), img_size=24)
    augment = AugmentConfig(auto_augment="rand-m9-mstd0.5-inc1")
    return build_datasets(data, augment, seed=3)


def test_augmentation_is_a_function_of_seed_epoch_and_index(photos):
    train, _ = photos
    expected = {(e, i): train[e, i][0] for e in (1, 0) for i in range(29)}
    assert not torch.equal(expected[0, 3], expected[1, 3])
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    for num_workers in (2, 0):
        loader = TrainBatches(
            train,
            global_batch_size=4,
            batch_size_per_device=4,
            rank=0,
            world_size=1,
            seed=3,
            num_workers=num_workers,
            drop_last=False,
            pin_memory=False,
        )
        for epoch, start_update in ((1, 5), (0, 0)):
            order = permutation(29, "order", 3, epoch)[4 * start_update :]
            images = [i for update in loader.epoch(epoch, start_update) for i in update[0][0][0]]
            assert len(images) == len(order)
            for index, image in zip(order.tolist(), images, strict=True):
                assert torch.equal(image, expected[epoch, index].permute(2, 0, 1))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_unreadable_image_is_named_in_one_line(photos, tmp_path, num_workers):
    write_tree(tmp_path / "val", {"a": 2, "b": 2})
    broken = tmp_path / "val" / "b" / "000.png"
    broken.write_bytes(broken.read_bytes()[:200])
    data = DataConfig(source="folder", root=str(tmp_path), img_size=24)
    loader = eval_loader(
        build_eval_dataset(data, classes=None),
        batch_size=3,
        rank=0,
        world_size=1,
        num_workers=num_workers,
    )
    with pytest.raises(UnreadableImageError, match=r"cannot read image .*/val/b/000.png: ") as info:
        list(loader)
    assert "\n" not in str(info.value)


PROGRAM = """
import os, signal, sys, time
import psutil
from tests.data.test_loader import batches

train = batches(num_workers=2, drop_last=False)
updates = train.epoch(0)
next(updates)
workers = [p for p in psutil.Process().children(recursive=True)]
print(*[p.pid for p in workers], flush=True)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    for worker in workers:
        os.system(f"kill -{int(number)} {worker.pid}")  # from another process than its parent
time.sleep(0.5)
assert sum(1 for _ in updates) == 8
assert sum(1 for _ in train.epoch(1)) == 9
next(train.epoch(2))
raise ValueError("the end")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="cannot tell who sent a signal")
def test_workers_survive_signals_and_end_with_the_main_process():
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stderr.strip().endswith("ValueError: the end"), run.stderr
    pids = [int(word) for word in run.stdout.split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
