"""Shards against the folder they were made from, and against tarfile."""

import json
import os
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.data import ImageNetInfo

from data import DataError, TrainBatches, UnreadableImageError, build_datasets
from data.shards import ShardSource
from data.sources import FolderSource
from lipsformer.config import AugmentConfig, DataConfig
from scripts.make_shards import main
from tests.data.photos import encoded, photo
from tests.data.trees import write_tree
from tests.full_disk import full_disk

COUNTS = {"a": 11, "b é": 7, "10": 5}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, shards) of 24 images, 5 per shard."""
    root = tmp_path_factory.mktemp("shards")
    write_tree(root / "folder" / "train", COUNTS)
    (root / "folder" / "train" / "a" / "photo.JPG").write_bytes(encoded(photo(31, 29)))
    shutil.copytree(root / "folder" / "train", root / "folder" / "val")
    for split in ("train", "val"):
        arguments = [str(root / "folder" / split), str(root / "shards" / split)]
        assert main([*arguments, "--images-per-shard", "5"]) == 0
    return root / "folder", root / "shards"


def contents(source) -> Counter:
    """How often each content of a file comes with each class."""
    return Counter(
        (source.load(index).content, source.classes[label])
        for index, label in enumerate(source.labels)
    )


def test_shards_hold_every_file_unchanged_in_webdatasets_layout(made):
    folder, shards = made
    source = FolderSource(folder / "train")
    expected = Counter(
        (Path(source.file(i)).read_bytes(), int(source.labels[i])) for i in range(24)
    )
    found = Counter()
    tars = sorted((shards / "train").glob("*.tar"))
    assert [tar.name for tar in tars] == [f"shard-0000{i}.tar" for i in range(5)]
    for tar in tars:
        with tarfile.open(tar) as opened:
            members = opened.getmembers()
            for image, label in zip(members[::2], members[1::2], strict=True):
                assert image.name.split(".")[0] + ".cls" == label.name
                content = [opened.extractfile(member).read() for member in (image, label)]
                found[content[0], int(content[1])] += 1
    assert found == expected


def test_the_source_reads_what_the_folder_holds(made):
    folder, shards = made
    from_folder, from_shards = FolderSource(folder / "train"), ShardSource(shards / "train")
    assert from_shards.classes == from_folder.classes == ("10", "a", "b é")
    assert contents(from_shards) == contents(from_folder)
    assert from_shards.labels.tolist() != sorted(from_shards.labels.tolist())


@pytest.mark.parametrize("place", ["/dev/null/shards", "/proc/below/shards", "x" * 300])
def test_a_folder_that_cannot_be_written_is_named(made, capsys, place):
    assert main([str(made[0] / "train"), place]) == 2
    error = capsys.readouterr().err
    assert f"error: the shards in {place} cannot be written: " in error
    assert error.count("\n") == 1


def test_the_same_command_continues_after_a_full_disk(made, tmp_path, capsys):
    folder, shards = made
    arguments = [str(folder / "train"), str(tmp_path / "train"), "--images-per-shard", "5"]
    sizes = [file.stat().st_size for file in sorted((shards / "train").glob("*.tar"))]
    with full_disk(min(sizes)):
        code = main(arguments)
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert "cannot be written: " in error and "File too large" in error
    assert main(arguments) == 0
    for file in (shards / "train").glob("*.tar"):
        assert (tmp_path / "train" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), (2, 1), (3, 4)])
def test_epochs_are_the_multiset_and_resume_in_the_middle_of_a_shard(made, world_size, num_workers):
    folder, shards = made
    data = DataConfig(source="shards", root=str(shards), img_size=16)
    train, val = build_datasets(data, AugmentConfig(auto_augment="rand-m9-inc1"), seed=3)
    assert len(val) == 24
    assert_exact_epochs(train, FolderSource(folder / "train").labels, world_size, num_workers)


def assert_exact_epochs(train, labels_of_all, world_size, num_workers):
    """An epoch holds every sample once over all ranks, and a loader can start in its middle."""
    labels, whole, resumed = Counter(), [], []
    for rank in range(world_size):
        loader = TrainBatches(
            train,
            global_batch_size=6,
            batch_size_per_device=2,
            rank=rank,
            world_size=world_size,
            seed=3,
            num_workers=num_workers,
            drop_last=False,
            pin_memory=False,
        )
        whole.append([batch for update in loader.epoch(1) for batch in update.micro_batches])
        resumed.append([batch for update in loader.epoch(1, 2) for batch in update.micro_batches])
        labels.update(int(label) for _, batch in whole[-1] for label in batch)
    assert labels == Counter(labels_of_all.tolist())
    for all_batches, rest in zip(whole, resumed, strict=True):
        assert len(rest) == len(all_batches) // 2
        for (image, label), (again, same) in zip(all_batches[-len(rest) :], rest, strict=True):
            assert torch.equal(image, again)
            assert torch.equal(label, same)


def test_interrupted_making_goes_on_with_equal_bytes(made, tmp_path, capsys):
    folder, shards = made
    half = tmp_path / "half"
    shutil.copytree(shards / "train", half)
    kept = {name: (half / name).stat().st_mtime_ns for name in ("shard-00001.tar", "plan.json")}
    for name in ("index.json", "shard-00003.tar", "shard-00004.tar", "shard-00004.npz"):
        (half / name).unlink()
    (half / "shard-00003.part").write_bytes(b"half a shard")
    with pytest.raises(DataError, match=r"no index.json in .*half: make it"):
        ShardSource(half)
    arguments = [str(folder / "train"), str(half), "--images-per-shard"]
    assert main([*arguments, "4"]) == 2
    assert "differ in images_per_shard" in capsys.readouterr().err
    assert main([*arguments, "5"]) == 0
    assert {name: (half / name).stat().st_mtime_ns for name in kept} == kept
    for file in (shards / "train").iterdir():
        assert (half / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_start_that_ended_in_its_plan_is_repeated(made, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / ".plan.json").touch()  # as a full disk or a killed process leaves it
    assert main([str(made[0] / "train"), str(tmp_path / "shards")]) == 0
    assert main(["--verify", str(tmp_path / "shards")]) == 0


def test_files_of_the_skip_list_are_left_out(made, tmp_path):
    folder, _ = made
    (tmp_path / "skip.txt").write_text("train/a/001.png\nval/a/002.png\n")
    arguments = [str(folder / "train"), str(tmp_path / "train"), "--skip-list"]
    with pytest.warns(UserWarning, match="1 images of train are left out"):
        assert main([*arguments, str(tmp_path / "skip.txt")]) == 0
    source = ShardSource(tmp_path / "train")
    contents = {source.load(index).content for index in range(len(source.labels))}
    assert len(contents) == 23
    assert (folder / "train" / "a" / "001.png").read_bytes() not in contents


def test_the_bar_moves_whenever_a_shard_was_checked(made, monkeypatch):
    events = []
    monkeypatch.setattr(
        "scripts.make_shards.tqdm", lambda items, **_: (events.append("bar") or i for i in items)
    )
    monkeypatch.setattr("data.shards.checksum", lambda shard: events.append("read"))
    main(["--verify", str(made[1] / "train")])
    assert events == ["bar", "read"] * 5


def test_damage_is_found(made, tmp_path, capsys):
    _, shards = made
    copy = tmp_path / "copy"
    shutil.copytree(shards / "train", copy)
    assert main(["--verify", str(copy)]) == 0
    content = bytearray((copy / "shard-00002.tar").read_bytes())
    content[700] ^= 1
    (copy / "shard-00002.tar").write_bytes(content)
    assert main(["--verify", str(copy)]) == 1
    assert capsys.readouterr().out == "all shards are intact\ndamaged: shard-00002.tar\n"
    source = ShardSource(copy)
    first = int(np.flatnonzero(source.shard == 2)[0])
    with open(copy / "shard-00002.tar", "r+b") as file:
        file.seek(source.offsets[first])
        file.write(bytes(16))
        file.flush()
        with pytest.raises(UnreadableImageError, match=r"; `lipsformer make-shards --verify`"):
            source.load(first).pixels()
        file.truncate(1000)
    cut = int(np.flatnonzero(source.shard == 2)[-1])
    with pytest.raises(UnreadableImageError, match=r"at byte \d+ of .*shard-00002.tar: .*trunc"):
        source.load(cut)
    message = r"shard-00002.tar: expected \d+ bytes, found 1000; write the shards again"
    with pytest.raises(DataError, match=message):
        ShardSource(copy)


def cut_index(split):
    text = (split / "index.json").read_text()
    (split / "index.json").write_text(text[: len(text) // 2])


def edit_index(split, **changes):
    index = json.loads((split / "index.json").read_text())
    (split / "index.json").write_text(json.dumps(index | changes))


def edit_places(split, **changes):
    with np.load(split / "shard-00001.npz") as places:
        np.savez(split / "shard-00001.npz", **{**places, **changes})


def leave_the_folder(split):
    text = (split / "index.json").read_text()
    (split / "index.json").write_text(text.replace("shard-00001.tar", "../other/shard-00001.tar"))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut_index, r"index.json is damaged: write it again"),
        (lambda split: (split / "index.json").write_text("{}"), r"index.json is damaged"),
        (lambda split: (split / "index.json").write_text("[1]"), r"index.json is damaged"),
        (lambda split: edit_index(split, images=7), r"24 images, 7 in index.json; remove the"),
        (lambda split: edit_index(split, classes=["a", "b"]), r"outside of the 2 classes; remove"),
        (lambda split: edit_places(split, labels=np.full(5, -1)), r"outside of the 3 classes"),
        (lambda split: edit_places(split, sizes=np.ones(3)), r"1.npz is damaged: .* differ in len"),
        (leave_the_folder, r"'../other/shard-00001.tar' is not the bare name of a file"),
        (lambda split: (split / "shard-00001.npz").unlink(), r"shard-00001.npz is missing"),
        (lambda split: (split / "shard-00001.npz").write_bytes(b"PK"), r"1.npz is damaged: .*; `"),
        (lambda split: (split / "shard-00001.npz").write_bytes(b""), r"1.npz is damaged: .*; `"),
    ],
)
def test_a_damaged_split_is_one_clear_error(made, tmp_path, harm, message):
    copy = tmp_path / "copy"
    shutil.copytree(made[1] / "train", copy)
    harm(copy)
    with pytest.raises(DataError, match=message) as caught:
        ShardSource(copy)
    assert "\n" not in str(caught.value)


def test_mistakes_are_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "none"), str(tmp_path / "shards")]) == 2
    assert "no data folder" in capsys.readouterr().err
    assert main(["--verify", str(tmp_path)]) == 2
    assert "holds no complete shards" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(tmp_path / "shards"), "--images-per-shard", "0"])
    assert "--images-per-shard 0 must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "shards").exists()


def test_checking_shards_takes_no_option_of_making_them(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--verify", str(tmp_path), "--skip-list", "bad.txt"])
    assert "--verify reads the shards alone: leave --skip-list out" in capsys.readouterr().err


@pytest.mark.data
def test_class_order_is_the_standard_imagenet_index(datasets, tmp_path):
    folder = datasets / "imagenet-1k-sample" / "val"
    info = ImageNetInfo("imagenet-1k")
    expected = tuple(info.index_to_label_name(index) for index in range(1000))
    source = FolderSource(folder)
    assert source.classes == expected
    assert source.labels.tolist() == list(range(1000))
    assert main([str(folder), str(tmp_path / "val")]) == 0
    shards = ShardSource(tmp_path / "val")
    assert shards.classes == expected
    assert np.array_equal(np.sort(shards.labels), np.arange(1000))
    for index in range(0, 1000, 97):
        wnid = expected[shards.labels[index]]
        (file,) = (folder / wnid).iterdir()
        picture = shards.load(index)
        assert picture.content == file.read_bytes()


def test_shards_of_other_images_are_not_continued(tmp_path, capsys):
    tree = write_tree(tmp_path / "train", {"b": 4, "c": 4})
    skip = tmp_path / "skip.txt"
    skip.write_text("train/b/000.png\n")
    command = [str(tree), str(tmp_path / "shards"), "--images-per-shard", "4"]
    with pytest.warns(UserWarning, match="1 images of train are left out"):
        assert main([*command, "--skip-list", str(skip)]) == 0
    skip.write_text("train/c/000.png\n")
    with pytest.warns(UserWarning, match="1 images of train are left out"):
        assert main([*command, "--skip-list", str(skip)]) == 2
    (tmp_path / "other").mkdir()
    command[1] = str(tmp_path / "other")
    assert main(command) == 0
    (tree / "a").mkdir()
    (tree / "c" / "003.png").rename(tree / "a" / "000.png")
    assert main(command) == 2  # with the same number of images
    assert "differ in contents" in capsys.readouterr().err


@pytest.mark.parametrize("kept", ["size", "time"])
def test_images_that_were_replaced_under_their_names_are_noticed(tmp_path, capsys, kept):
    tree = write_tree(tmp_path / "train", {"b": 4, "c": 4})
    command = [str(tree), str(tmp_path / "shards"), "--images-per-shard", "4"]
    assert main(command) == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "shards").iterdir()}
    assert main(command) == 0
    image = tree / "b" / "002.png"
    found = image.stat()
    image.write_bytes(image.read_bytes()[::-1] + b"\0" * (kept == "time"))
    second = 10**9 * (kept == "size")
    os.utime(image, ns=(found.st_atime_ns, found.st_mtime_ns + second))
    assert main(command) == 2
    assert "differ in sizes and times of its files; " in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in (tmp_path / "shards").iterdir()} == before


@pytest.mark.parametrize("harm", ["flip", "offsets", "cut"])
def test_the_same_command_writes_damaged_shards_again(made, tmp_path, harm):
    folder, _ = made
    command = [str(folder / "train"), str(tmp_path / "shards"), "--images-per-shard", "5"]
    assert main(command) == 0
    shard = tmp_path / "shards" / "shard-00002.tar"
    before = {file.name: file.read_bytes() for file in shard.parent.iterdir()}
    if harm == "flip":
        shard.write_bytes(shard.read_bytes()[:-600] + b"\1" * 600)
    elif harm == "offsets":
        shard.with_suffix(".npz").unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:2000])
    assert main(["--verify", str(shard.parent)]) == 1
    if harm == "cut":  # the sums of the index are lost too
        (shard.parent / "index.json").write_bytes(b"")
    assert main(command) == 0
    assert main(["--verify", str(shard.parent)]) == 0
    for name, content in before.items():
        if not name.endswith(".npz"):
            assert (shard.parent / name).read_bytes() == content


def test_a_shard_that_vanishes_is_named(made, tmp_path):
    shutil.copytree(made[1] / "train", tmp_path / "train")
    source = ShardSource(tmp_path / "train")
    (tmp_path / "train" / "shard-00000.tar").unlink()
    with pytest.raises(UnreadableImageError, match=r"cannot read image at byte .*No such file"):
        source.load(0)


def test_shards_of_an_earlier_version_are_continued(tmp_path):
    tree = write_tree(tmp_path / "train", {"b": 4, "c": 4})
    command = [str(tree), str(tmp_path / "shards"), "--images-per-shard", "4"]
    assert main(command) == 0
    plan = json.loads((tmp_path / "shards" / "plan.json").read_text())
    del plan["contents"], plan["sizes and times of its files"]
    (tmp_path / "shards" / "plan.json").write_text(json.dumps(plan))
    assert main(command) == 0
