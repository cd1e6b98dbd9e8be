import json
import shutil
import zipfile
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, FashionMNIST, ImageFolder

from data import DataError, build_datasets, build_eval_dataset
from data.build import build_source
from data.sources import FolderSource, InMemory, digits, held_out, image_files, torchvision_set
from lipsformer.config import AugmentConfig, DataConfig
from tests.data.photos import encoded, photo
from tests.data.trees import write_tree


def folder_config(root, **settings) -> DataConfig:
    return DataConfig(source="folder", root=str(root), img_size=16, **settings)


def test_folder_equals_torchvisions_order(tmp_path):
    write_tree(tmp_path, {"2": 2, "10": 3, "b é": 2, "B": 1})
    nested = tmp_path / "10" / "deeper"
    nested.mkdir()
    Image.new("RGB", (5, 3)).save(nested / "a.JPG")
    (tmp_path / "B" / "linked").symlink_to(nested)
    (tmp_path / "2" / "notes.txt").write_text("no image")
    source, expected = FolderSource(tmp_path), ImageFolder(str(tmp_path))
    assert source.classes == tuple(expected.classes) == ("10", "2", "B", "b é")
    files = [(source.file(i), int(source.labels[i])) for i in range(len(source.labels))]
    assert files == expected.samples


def test_validation_labels_follow_the_training_classes_by_name(tmp_path):
    write_tree(tmp_path / "train", {"1": 1, "10": 1, "2": 1, "x": 1})
    write_tree(tmp_path / "val", {"10": 1, "x": 2})
    with pytest.warns(UserWarning, match=r"2 of 4 classes have no images: 1, 2"):
        train, val = build_datasets(folder_config(tmp_path), AugmentConfig(), seed=0)
    assert train.classes == val.classes == ("1", "10", "2", "x")
    assert [val[i][1] for i in range(3)] == [1, 3, 3]


def test_evaluation_labels_follow_the_checkpoints_classes(tmp_path):
    write_tree(tmp_path / "val", {"a": 1, "b": 1})
    dataset = build_eval_dataset(folder_config(tmp_path), classes=["b", "a"])
    assert dataset.classes == ("b", "a")
    assert [label for _, label in (dataset[0], dataset[1])] == [1, 0]
    with pytest.raises(DataError, match=r"1 unknown class\(es\) a: .* the 2 classes .* b, c$"):
        build_eval_dataset(folder_config(tmp_path), classes=["b", "c"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, r"no data folder .*/set/train: expected .*/set/train/<class name>/"),
        (lambda root: (root / "train").mkdir(parents=True), r"no class folders in .*/set/train"),
        (
            lambda root: (write_tree(root / "train", {"a": 1}) / "b").mkdir(),
            r"class folder .*/train/b holds no images",
        ),
        (lambda root: write_tree(root / "train", {"a": 1}), r"no data folder .*/set/val"),
        (
            lambda root: (
                write_tree(root / "train", {"a": 1}),
                write_tree(root / "val", {"a": 1, "z": 1}),
            ),
            r"1 unknown class\(es\) z",
        ),
    ],
)
def test_a_wrong_tree_is_one_clear_error(tmp_path, make, message):
    make(tmp_path / "set")
    with pytest.raises(DataError, match=message) as caught:
        build_datasets(folder_config(tmp_path, name="set"), AugmentConfig(), seed=0)
    assert "\n" not in str(caught.value)


def test_hidden_folders_are_no_classes_and_images_beside_the_classes_are_reported(tmp_path):
    write_tree(tmp_path, {"a": 2, ".ipynb_checkpoints": 1, "b": 1})
    write_tree(tmp_path / "other", {"c": 1})
    (tmp_path / "other" / "c" / "000.png").rename(tmp_path / "loose.PNG")
    shutil.rmtree(tmp_path / "other")
    with pytest.warns(UserWarning, match=r"1 images of .* left out, such as loose.PNG, because"):
        source = FolderSource(tmp_path)
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [0, 0, 1])


def test_a_dangling_link_can_be_skipped(tmp_path):
    write_tree(tmp_path / "train", {"a": 2})
    (tmp_path / "train" / "a" / "001.png").unlink()
    (tmp_path / "train" / "a" / "001.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "skip.txt").write_text("train/a/001.png\n")
    config = folder_config(tmp_path, skip_list=str(tmp_path / "skip.txt"), val_split="train")
    with pytest.warns(UserWarning, match="1 images of train are left out"):
        train, _ = build_datasets(config, AugmentConfig(), seed=0)
    assert len(train) == 1


def test_files_of_the_skip_list_are_left_out_and_counted(tmp_path):
    write_tree(tmp_path / "train", {"a": 3, "b": 2})
    write_tree(tmp_path / "val", {"a": 1, "b": 2})
    (tmp_path / "skip.txt").write_text("train/a/001.png\nval/b/000.png\ntrain/b/000.png\n")
    config = folder_config(tmp_path, skip_list=str(tmp_path / "skip.txt"))
    with pytest.warns(UserWarning, match=r"left out") as caught:
        train, val = build_datasets(config, AugmentConfig(), seed=0)
    assert [str(w.message).split(",")[0] for w in caught] == [
        "2 images of train are left out",
        "1 images of val are left out",
    ]
    files = [train.source.file(i)[len(str(tmp_path)) :] for i in range(len(train))]
    assert files == ["/train/a/000.png", "/train/a/002.png", "/train/b/001.png"]
    assert train.labels.tolist() == [0, 0, 1]
    assert val.labels.tolist() == [0, 1]


def test_a_share_that_leaves_a_class_without_images_is_named(tmp_path):
    write_tree(tmp_path / "train", {"a": 11, "b": 11, "c": 3})
    write_tree(tmp_path / "val", {"a": 1, "b": 1, "c": 1})
    with pytest.warns(UserWarning, match=r"data.train_share=0.1 is less than .* 1 classes, .* 'c'"):
        train, _ = build_datasets(folder_config(tmp_path, train_share=0.1), AugmentConfig(), seed=0)
    assert set(train.labels.tolist()) == {0, 1}
    with pytest.warns(UserWarning, match=r"data.holdout=0.1 is less than .* 1 classes, .* 'c'"):
        held = build_eval_dataset(folder_config(tmp_path, holdout=0.1), classes=None)
    assert held.labels.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"data.holdout=0.01 is less than one image of every class"):
        build_eval_dataset(folder_config(tmp_path, holdout=0.01), classes=None)


def test_images_in_memory_are_those_of_the_files_and_are_read_once(tmp_path):
    write_tree(tmp_path / "train", {"a": 3, "b": 2})
    write_tree(tmp_path / "val", {"a": 1, "b": 2})
    from_files, kept = (
        build_datasets(folder_config(tmp_path, in_memory=kept), AugmentConfig(), seed=0)
        for kept in (False, True)
    )
    expected = [from_files[0][2, index][0] for index in range(5)]
    for _ in range(2):
        assert all((kept[0][2, index][0] == expected[index]).all() for index in range(5))
        shutil.rmtree(tmp_path / "train", ignore_errors=True)


def test_gray_images_in_memory_are_those_of_the_files(tmp_path):
    for name, image in (("gray", photo(17, 13).convert("L")), ("color", photo(17, 13))):
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "1.png")
    source = FolderSource(tmp_path)
    kept = InMemory(source)
    assert [kept.load(index).channels for index in (0, 1)] == [3, 1]
    for index in (0, 1):
        expected = source.load(index).pixels()
        assert np.array_equal(kept.load(index).pixels(), expected)
        assert np.array_equal(np.asarray(kept.load(index).image()), expected)


def test_large_jpegs_in_memory_are_not_cropped_at_a_reduced_size(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "1.jpg").write_bytes(encoded(photo(211, 197)))
    augment = AugmentConfig(scale=(1, 1))
    (train, val), (kept_train, kept_val) = (
        build_datasets(folder_config(tmp_path, in_memory=kept), augment, seed=0)
        for kept in (False, True)
    )
    assert not torch.equal(train[0, 0][0], kept_train[0, 0][0]), "so a run must keep the setting"
    assert torch.equal(val[0][0], kept_val[0][0])


def test_a_skip_list_that_does_not_fit_is_one_clear_error(tmp_path):
    write_tree(tmp_path / "val", {"a": 1, "b": 2})
    (tmp_path / "skip.txt").write_text("val/c/001.png\n")
    config = folder_config(tmp_path, skip_list=str(tmp_path / "skip.txt"))
    with pytest.raises(DataError, match=r"names 1 paths .*, such as 'val/c/001"):
        build_eval_dataset(config, classes=None)
    (tmp_path / "skip.txt").write_text("a/000.png\n")  # as of `check_data DATA/val`
    with pytest.raises(DataError, match=r"names 1 paths .* relative to that folder, as val/"):
        build_eval_dataset(config, classes=None)
    for line in (str(tmp_path / "val/a/000.png"), "./val/a/000.png", "val/b/../a/000.png"):
        (tmp_path / "skip.txt").write_text(f"{line}\n")  # would match no image
        with pytest.raises(DataError, match=r"names 1 paths .* relative to that folder, as val/"):
            build_eval_dataset(config, classes=None)
    (tmp_path / "skip.txt").write_text("val/a/000.png\n")
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(DataError, match=r"class folder .*/val/a holds no images"),
    ):
        build_eval_dataset(config, classes=None)
    config = folder_config(tmp_path, skip_list=str(tmp_path / "no.txt"))
    with pytest.raises(DataError, match=r"data.skip_list='.*no.txt' cannot be read"):
        build_eval_dataset(config, classes=None)


def test_the_root_defaults_to_the_environment(tmp_path, monkeypatch):
    write_tree(tmp_path / "val", {"a": 1})
    monkeypatch.setenv("LIPSFORMER_DATA", str(tmp_path))
    assert len(build_eval_dataset(DataConfig(source="folder", img_size=16), classes=None)) == 1


def test_digits_are_the_embedded_ones_split_by_class():
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    train, val = (digits(split, img_size=8, interpolation="bicubic") for split in ("train", "val"))
    values, labels = load_digits(return_X_y=True)
    expected = {(v.tobytes(), int(y)) for v, y in zip(values, labels, strict=True)}
    given = [
        ((np.asarray(s.load(i).pixels())[..., 0] / 255 * 16).ravel().tobytes(), int(s.labels[i]))
        for s in (train, val)
        for i in range(len(s.labels))
    ]
    rounded = {(np.frombuffer(v).round().tobytes(), y) for v, y in given}
    assert len(given) == 1797
    assert rounded == expected
    fractions = np.bincount(val.labels) / np.bincount(labels)
    np.testing.assert_allclose(fractions, 0.2, atol=0.006)


def test_digits_are_enlarged_by_pillow():
    pytest.importorskip("sklearn")
    small = digits("val", img_size=8, interpolation="bicubic").load(7).pixels()
    large = digits("val", img_size=29, interpolation="bicubic").load(7).pixels()
    expected = Image.fromarray(small[..., 0]).resize((29, 29), Image.Resampling.BICUBIC)
    assert np.array_equal(large, np.repeat(np.asarray(expected)[..., None], 3, axis=2))


@pytest.mark.parametrize("source", ["cifar10", "cifar100", "fashion_mnist"])
def test_an_absent_torchvision_set_is_one_clear_error(tmp_path, source):
    with pytest.raises(DataError, match=r"is not in .* set data.download=true"):
        torchvision_set(source, "train", root=tmp_path, download=False)


@pytest.mark.parametrize("reason", [URLError("no route"), EOFError(), zipfile.BadZipFile("cut")])
def test_a_download_that_fails_is_one_clear_error(tmp_path, monkeypatch, reason):
    def fail(self):
        raise reason

    monkeypatch.setattr(CIFAR10, "download", fail)
    with pytest.raises(DataError, match=r"data.download=true: CIFAR10 cannot be fetched") as caught:
        torchvision_set("cifar10", "train", root=tmp_path, download=True)
    assert "\n" not in str(caught.value)


def test_a_folder_may_be_the_working_folder(tmp_path, monkeypatch):
    write_tree(tmp_path, {"a": 1, "b": 1})
    (tmp_path / "top.png").touch()
    monkeypatch.chdir(tmp_path)
    assert image_files(Path(".")) == ["top.png", "a/000.png", "b/000.png"]
    with pytest.warns(UserWarning, match=r"1 images of \. are left out"):
        source = FolderSource(Path("."))
    assert [Path(source.file(i)) for i in (0, 1)] == [Path("a/000.png"), Path("b/000.png")]


def test_an_unknown_split_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"no split 'test' in this source: data.train_split"):
        torchvision_set("cifar10", "test", root=tmp_path, download=False)


@pytest.mark.parametrize(
    ("source", "kind", "shape"),
    [("cifar10", CIFAR10, (32, 32, 3)), ("fashion_mnist", FashionMNIST, (28, 28))],
)
def test_torchvision_sets_pass_through(tmp_path, monkeypatch, source, kind, shape):
    rng = np.random.default_rng(0)

    def loaded(self, root, *, train, download):
        assert (root, download) == (str(tmp_path), True)
        count = 7 if train else 3
        pixels = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        self.data = torch.from_numpy(pixels) if kind is FashionMNIST else pixels
        self.targets = list(range(count))
        self.classes = [f"class {i}" for i in range(10)]

    monkeypatch.setattr(kind, "__init__", loaded)
    train = torchvision_set(source, "train", root=tmp_path, download=True)
    val = torchvision_set(source, "val", root=tmp_path, download=True)
    assert (len(train.labels), len(val.labels)) == (7, 3)
    assert list(train.labels) == list(range(7))
    expected = train.images[5] if len(shape) == 3 else np.stack([train.images[5]] * 3, -1)
    assert np.array_equal(train.load(5).pixels(), expected)
    assert np.array_equal(np.asarray(train.load(5).image()), expected)


def test_held_out_images_are_the_same_share_of_every_class_and_never_trained_on():
    labels = np.array([0] * 7 + [1] * 23 + [2] * 11)[np.random.default_rng(0).permutation(41)]
    chosen = held_out(labels, 0.3)
    assert [int(chosen[labels == label].sum()) for label in range(3)] == [2, 6, 3]
    source = digits("train", img_size=8, interpolation="bicubic")
    data = DataConfig(source="digits", img_size=8, holdout=0.2)
    train, val = build_datasets(data, AugmentConfig(), seed=0)
    seen, kept = train.source.indices, val.source.indices
    assert sorted([*seen, *kept]) == list(range(len(source.labels)))
    assert np.array_equal(val.labels, source.labels[kept])
    pixels = [np.asarray(s.load(i).image()) for s, i in ((val.source, 5), (source, int(kept[5])))]
    assert np.array_equal(*pixels)


def test_the_number_of_held_out_images_is_that_of_the_decimal_share():
    for thousandths in range(1, 1000):
        for count in (100, 1300, 6000):
            chosen = held_out(np.zeros(count, np.int64), thousandths / 1000)
            assert chosen.sum() == count * thousandths // 1000


@pytest.mark.parametrize("share", [0.03, 0.7])
def test_a_share_of_the_training_images_comes_as_often_as_the_epoch_is_long(share):
    data = DataConfig(source="digits", img_size=8, holdout=0.2, train_share=share)
    train, val = build_datasets(data, AugmentConfig(), seed=0)
    rest = train.source.source  # 80 % of the training images
    kept, times = np.unique(train.source.indices, return_counts=True)
    assert times.sum() == len(rest.labels)
    assert times.max() - times.min() <= 1
    for label in range(10):
        count = (rest.labels == label).sum()
        assert (rest.labels[kept] == label).sum() == count * round(100 * share) // 100
    assert not set(rest.indices[kept]) & set(val.source.indices)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.7])
def test_an_epoch_of_a_share_keeps_the_shares_of_the_classes(tmp_path, share):
    write_tree(tmp_path / "train", dict.fromkeys("abcde", 10))
    write_tree(tmp_path / "val", dict.fromkeys("abcde", 1))
    data = folder_config(tmp_path, train_share=share)
    train, _ = build_datasets(data, AugmentConfig(), seed=0)
    assert len(train) == 50
    counts = np.bincount(train.source.labels)
    assert counts.max() - counts.min() <= 1


def test_a_class_map_renames_the_classes_of_the_data(tmp_path):
    """Two classes of the data may be one of the model, and names that agree need no entry."""
    write_tree(tmp_path / "val", {"Katze": 3, "dog": 2, "kitten": 1})
    names, file = ("bird", "cat", "dog"), tmp_path / "map.json"
    config = folder_config(tmp_path)
    with pytest.raises(DataError, match="2 unknown"):
        build_eval_dataset(config, classes=names)
    file.write_text(json.dumps({"Katze": "cat", "kitten": "cat"}))
    with pytest.warns(UserWarning, match="1 of 3 classes have no images"):
        images = build_eval_dataset(config, classes=names, class_map=str(file))
    assert images.labels.tolist() == [1, 1, 1, 2, 2, 1]
    for text, message in (
        ('{"Hund": "dog"}', "'Hund'"),
        ('["dog"]', "must hold one JSON object"),
        ("{", "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            build_eval_dataset(config, classes=names, class_map=str(file))


def test_a_skip_list_of_folders_or_other_files_is_refused(tmp_path):
    write_tree(tmp_path / "train", {"a": 3})
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    for line in ("train/a", "train/a/notes.txt"):
        (tmp_path / "skip.txt").write_text(f"{line}\n")
        data = folder_config(tmp_path, skip_list=str(tmp_path / "skip.txt"))
        with pytest.raises(DataError, match="names 1 paths that are no image files in"):
            build_source(data, "train")


def test_files_of_other_formats_are_reported(tmp_path):
    write_tree(tmp_path, {"a": 3})
    for name in ("1.gif", "2.HEIC", "3.heic", "README", ".DS_Store", "notes.txt"):
        (tmp_path / "a" / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"3 files of .* because their names end in .gif, .heic: "):
        assert len(FolderSource(tmp_path).labels) == 3
