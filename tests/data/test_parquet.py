"""Parquet files as Hugging Face writes them, against the folder that they were made from."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.data import ImageNetInfo

from data import DataError, UnreadableImageError, build_datasets, build_eval_dataset
from data.build import build_source
from data.parquet import ParquetSource
from data.shards import ShardSource
from data.sources import FolderSource
from lipsformer.config import AugmentConfig, DataConfig
from scripts import check_data
from scripts.make_shards import main
from tests.data.photos import encoded, photo
from tests.data.test_shards import assert_exact_epochs, contents
from tests.data.trees import write_tree

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CLASSES = ["b é", "a", "10"]  # in no alphabetical order
FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": CLASSES, "_type": "ClassLabel"},
    "caption": {"dtype": "string", "_type": "Value"},
    "tags": [{"dtype": "string", "_type": "Value"}],  # a column of lists
}


def write(
    file: Path,
    images: list[Any],
    labels: list[int | None],
    features: dict[str, Any] | None = FEATURES,
    rows: int = 4,
) -> None:
    """A file with `rows` rows in a group, as `datasets.Dataset.to_parquet` lays it out."""
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "caption": ["a caption"] * len(images),
            "tags": [["a tag", "another"]] * len(images),
            "image": pa.array(images, struct),
            "label": pa.array(labels, pa.int64()),
        }
    )
    metadata = (
        {} if features is None else {"huggingface": json.dumps({"info": {"features": features}})}
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), file, row_group_size=rows)


def shuffled(source: FolderSource, classes: list[str]) -> list[tuple[dict, int]]:
    """The (image, label) rows of a folder in a random order."""
    order = np.random.default_rng(3).permutation(len(source.labels)).tolist()
    return [
        (
            {"bytes": source.load(index).content, "path": Path(source.file(index)).name},
            classes.index(source.classes[source.labels[index]]),
        )
        for index in order
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, parquet) of 24 images in 2 files and 7 row groups."""
    root = tmp_path_factory.mktemp("parquet")
    write_tree(root / "folder" / "train", {"a": 11, "b é": 7, "10": 5})
    (root / "folder" / "train" / "a" / "photo.JPG").write_bytes(encoded(photo(31, 29)))
    rows = shuffled(FolderSource(root / "folder" / "train"), CLASSES)
    for number, part in enumerate((rows[:13], rows[13:])):
        name = f"train-{number:05d}-of-00002-abc.parquet"
        write(root / "hub" / "data" / name, *map(list, zip(*part, strict=True)))
    write(root / "hub" / "validation" / "0000.parquet", *map(list, zip(*rows, strict=True)))
    return root / "folder" / "train", root / "hub"


def test_parquet_holds_what_the_folder_holds(made):
    folder, hub = made
    source = ParquetSource(hub, "train")
    assert source.classes == tuple(CLASSES)
    assert len(source.labels) == 24
    assert contents(source) == contents(FolderSource(folder))
    assert contents(ParquetSource(hub, "validation")) == contents(source)


def test_any_order_any_process_and_one_row_group_at_a_time(made, monkeypatch):
    _, hub = made
    source = ParquetSource(hub, "train")
    expected = [source.load(index).content for index in range(24)]
    copy = pickle.loads(pickle.dumps(source))  # as a worker process gets it
    read, original = [], pq.ParquetFile.read_row_group

    def counted(self, group, *args, **kwargs):
        read.append(group)
        return original(self, group, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    for index in np.random.default_rng(0).permutation(24).tolist():
        assert copy.load(index).content == expected[index]
    read.clear()
    for index in range(24):
        copy.load(index)
    assert read == [0, 1, 2, 3, 0, 1, 2]
    assert len(copy._held[1]) == 3  # rows of the last group: nothing else is kept


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), (3, 0)])
def test_epochs_are_exact_and_resume_in_the_middle_of_a_row_group(made, world_size, num_workers):
    _, hub = made
    data = DataConfig(source="parquet", root=str(hub), val_split="validation", img_size=16)
    train, val = build_datasets(data, AugmentConfig(auto_augment="rand-m9-inc1"), seed=3)
    assert len(val) == 24
    assert_exact_epochs(train, ParquetSource(hub, "train").labels, world_size, num_workers)


def test_shards_of_parquet_files_hold_the_same_images(made, tmp_path):
    _, hub = made
    arguments = [str(hub), str(tmp_path / "train"), "--parquet", "train", "--images-per-shard"]
    assert main([*arguments, "7"]) == 0
    shards, source = ShardSource(tmp_path / "train"), ParquetSource(hub, "train")
    assert shards.classes == source.classes
    assert shards.labels.tolist() == source.labels.tolist()
    assert contents(shards) == contents(source)


def test_large_row_groups_are_slow_or_refused(made, monkeypatch):
    _, hub = made
    data = DataConfig(source="parquet", root=str(hub), val_split="validation", img_size=16)
    size = ParquetSource(hub, "train").group_bytes
    monkeypatch.setattr("data.build.SLOW_GROUP_BYTES", size - 1)
    with pytest.warns(UserWarning, match=r"a row group .*lipsformer make-shards --parquet SPLIT"):
        build_datasets(data, AugmentConfig(), seed=0)
    monkeypatch.setattr("data.parquet.MAX_GROUP_BYTES", size - 1)
    with pytest.raises(DataError, match=r"a row group of .* GiB, .* row_group_size=100"):
        ParquetSource(hub, "train")


def test_an_unreadable_image_is_named_by_its_file_and_row(tmp_path):
    write(tmp_path / "val" / "0.parquet", [{"bytes": b"no image", "path": "x.png"}] * 3, [0, 1, 2])
    dataset = build_eval_dataset(DataConfig(source="parquet", root=str(tmp_path)), classes=None)
    with pytest.raises(UnreadableImageError, match=r"image .*/val/0.parquet/2/x.png: not an image"):
        dataset[2]


def image(number: int = 0) -> dict:
    return {"bytes": encoded(photo(9 + number, 7), "PNG"), "path": None}


TWO_LABELS = {**FEATURES, "coarse": {"names": ["x"], "_type": "ClassLabel"}}
TWINS = {**FEATURES, "label": {"names": ["a", "a", "b"], "_type": "ClassLabel"}}
OTHER = {**FEATURES, "label": {"names": CLASSES[::-1], "_type": "ClassLabel"}}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no parquet files of split 'val' in .*: expected val-\*.parquet, data/val-"),
        ({"val-0-of-00003": {}}, r"1 files of val-0-of-00003.parquet's set are there"),
        ({"val-0": {"features": None}}, r"0 columns of Hugging Face's feature Image, expected 1"),
        ({"val-0": {"features": TWO_LABELS}}, r"2 columns .* ClassLabel \(label, coarse\), expec"),
        ({"val-0": {"features": TWINS}}, r"two classes of column label have the same name"),
        ({"val-0": {}, "val-1": {"features": OTHER}}, r"val-1.parquet: other columns or classes"),
        ({"val-0": {"labels": [0, -1]}}, r"image 1 of val has the label -1; expected 0 to 2"),
        ({"val-0": {"labels": [0, None]}}, r"image 1 of val has the label -1; expected 0 to 2"),
        ({"val-0": {"labels": [3, 0]}}, r"image 0 of val has the label 3; expected 0 to 2"),
        ({"val-0": {"images": [{"bytes": None, "path": "/a.png"}] * 2}}, r"not in the file: /a.pn"),
        ({"val-0": {"images": [], "labels": []}}, r"val has no images"),
        ({"val-0": None}, r"cannot read parquet file .*/val-0.parquet: "),
    ],
)
def test_mistakes_are_one_clear_error(tmp_path, files, message):
    for name, change in files.items():
        file = tmp_path / f"{name}.parquet"
        if change is None:
            file.write_bytes(b"PAR1 no such file PAR1")
        else:
            write(file, **{"images": [image(), image(1)], "labels": [0, 1], **change})
    with pytest.raises(DataError, match=message) as caught:
        ParquetSource(tmp_path, "val").load(1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "null", "[]", '{"info": null}', '{"info": {}}'])
def test_metadata_that_are_not_hugging_faces_describe_no_columns(tmp_path, text):
    file = tmp_path / "val-0.parquet"
    write(file, [image()], [0])
    table = pq.read_table(file).replace_schema_metadata({"huggingface": text})
    pq.write_table(table, file)
    with pytest.raises(DataError, match=r"val-0.parquet: 0 columns of Hugging Face's feature Im"):
        ParquetSource(tmp_path, "val")


def test_without_pyarrow_it_says_what_to_install(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'lipsformer\[parquet\]'"):
        ParquetSource(made[1], "train")


@pytest.mark.data
def test_class_order_is_the_standard_imagenet_index(datasets, tmp_path):
    folder = FolderSource(datasets / "imagenet-1k-sample" / "val")
    names = ImageNetInfo("imagenet-1k").label_names()
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    rows = shuffled(folder, names)
    write(tmp_path / "val-0.parquet", *map(list, zip(*rows, strict=True)), features, rows=100)
    data = DataConfig(source="parquet", root=str(tmp_path), img_size=32)
    dataset = build_eval_dataset(data, classes=None)
    assert dataset.classes == tuple(names)
    assert sorted(dataset.labels) == list(range(1000))
    by_label = build_eval_dataset(
        DataConfig(source="folder", root=str(folder.path.parent), img_size=32), classes=None
    )
    for index in range(0, 1000, 97):
        pixels, label = dataset[index]
        assert torch.equal(pixels, by_label[label][0])


def test_broken_images_are_listed_and_left_out(tmp_path, capsys):
    write_tree(tmp_path / "folder", {"a": 11, "b é": 7, "10": 5})
    rows = shuffled(FolderSource(tmp_path / "folder"), CLASSES)
    for number in (4, 17):
        rows[number][0]["bytes"] = rows[number][0]["bytes"][:60]
    for number, part in enumerate((rows[:13], rows[13:])):
        name = f"train-{number:05d}-of-00002.parquet"
        write(tmp_path / "hub" / name, *map(list, zip(*part, strict=True)))
    bad = tmp_path / "bad.txt"
    arguments = [str(tmp_path / "hub"), "--parquet", "train", "--workers", "1", "--list", str(bad)]
    assert check_data.main(arguments) == 1
    assert "23 images, 2 unreadable" in capsys.readouterr().out
    assert bad.read_text() == "train/4\ntrain/17\n"
    data = DataConfig(
        source="parquet", root=str(tmp_path / "hub"), val_split="train", skip_list=str(bad)
    )
    with pytest.warns(UserWarning, match="2 images of train are left out"):
        source = build_source(data, "train")
    kept = [row for number, row in enumerate(rows) if number not in (4, 17)]
    assert [source.load(i).content for i in range(21)] == [image["bytes"] for image, _ in kept]
    assert source.labels.tolist() == [label for _, label in kept]
    for line, message in (("train/23", "image 23 of train"), ("train/a.png", "by their numbers")):
        bad.write_text(line)
        with (
            pytest.raises(DataError, match=message),
            pytest.warns(UserWarning, match="1 images of train"),
        ):
            build_source(data, "train")
    for split in ("trian", "", "[t]rain", "a/b"):
        bad.write_text(f"train/4\n{split}/4\n" if split else "train/4\n4\n")
        with pytest.raises(DataError) as caught:
            build_source(data, "train")
        assert f"names images of the split {split!r}, of which" in str(caught.value)


def test_a_split_that_is_not_there_is_one_clear_line(tmp_path, capsys):
    assert check_data.main([str(tmp_path), "--parquet", "train"]) == 2
    assert "no parquet files of split 'train'" in capsys.readouterr().err
