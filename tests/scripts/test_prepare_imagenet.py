"""Archives in ImageNet's layout, with one or two tiny images per class."""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from timm.data import ImageNetInfo
from torchvision.datasets import imagenet

from data.sources import FolderSource
from scripts import prepare_imagenet
from tests.data.photos import encoded, photo
from tests.full_disk import full_disk

IMAGE = encoded(photo(5, 3))
INFO = ImageNetInfo("imagenet-1k")
WNIDS = [INFO.index_to_label_name(index) for index in range(1000)]


def archive(members: dict[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def devkit(order: np.ndarray, val_labels: np.ndarray) -> bytes:
    """The development kit; its own class numbers 1..1000 are WNIDS[order]."""
    scipy_io = pytest.importorskip("scipy.io")
    synsets = np.zeros(
        1000,
        [(name, object) for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")],
    )
    for number, label in enumerate(order):
        synsets[number] = (number + 1, WNIDS[label], f"class {label}", "", 0)
    mat = io.BytesIO()
    scipy_io.savemat(mat, {"synsets": synsets})
    number_of = np.argsort(order) + 1
    truth = "".join(f"{number_of[label]}\n" for label in val_labels)
    prefix = "ILSVRC2012_devkit_t12/data"
    return archive(
        {
            f"{prefix}/meta.mat": mat.getvalue(),
            f"{prefix}/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
        },
        "w:gz",
    )


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The three archives, with their true checksums as the expected ones."""
    rng = np.random.default_rng(0)
    order, val_labels = rng.permutation(1000), rng.permutation(np.repeat(np.arange(1000), 2))
    contents = {
        "train": archive(
            {f"{w}.tar": archive({f"{w}_1.JPEG": IMAGE + w.encode()}) for w in reversed(WNIDS)}
        ),
        "val": archive(
            {
                f"ILSVRC2012_val_{number:08d}.JPEG": IMAGE + WNIDS[label].encode()
                for number, label in enumerate(val_labels, start=1)
            }
        ),
        "devkit": devkit(order, val_labels),
    }
    for name, content in contents.items():
        file = imagenet.ARCHIVE_META[name][0]
        (tmp_path / file).write_bytes(content)
        checksum = hashlib.md5(content).hexdigest()
        monkeypatch.setitem(imagenet.ARCHIVE_META, name, (file, checksum))
    monkeypatch.setattr(prepare_imagenet, "IMAGES", {"train": 1000, "val": 2000})
    return tmp_path


def test_archives_become_folders_in_the_standard_order(folder, capsys):
    (folder / "val.part").mkdir()  # left by an interruption
    (folder / "val.part" / "half.JPEG").touch()
    assert prepare_imagenet.main([str(folder)]) == 0
    assert capsys.readouterr().out.count("in the standard order of 1,000 classes") == 2
    for split, count in (("train", 1), ("val", 2)):
        source = FolderSource(folder / split)
        assert source.classes == tuple(WNIDS)
        assert source.labels.tolist() == np.repeat(np.arange(1000), count).tolist()
        for index in range(0, len(source.labels), 71):
            content = Path(source.file(index)).read_bytes()
            assert content == IMAGE + WNIDS[source.labels[index]].encode()
    assert not (folder / "val.part").exists()
    assert prepare_imagenet.main([str(folder)]) == 0

    (folder / "train" / WNIDS[3] / f"{WNIDS[3]}_1.JPEG").rename(folder / "elsewhere.JPEG")
    (folder / "train" / WNIDS[3]).rmdir()
    assert prepare_imagenet.main([str(folder)]) == 2
    assert f"1 unexpected or missing classes, such as {WNIDS[3]}" in capsys.readouterr().err


@pytest.mark.parametrize("size", [len(IMAGE) - 1, 20_000])
def test_a_full_disk_is_one_line_and_the_same_command_continues(folder, capsys, size):
    with full_disk(size):
        assert prepare_imagenet.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert "cannot be written: " in error and "File too large" in error
    assert error.count("\n") == 1
    assert prepare_imagenet.main([str(folder)]) == 0


def test_missing_and_damaged_archives_are_one_line(folder, capsys):
    file = folder / imagenet.ARCHIVE_META["val"][0]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"x")
    assert prepare_imagenet.main([str(folder)]) == 2
    message = capsys.readouterr().err
    assert "ILSVRC2012_img_val.tar is not present in the root directory or is corrupted" in message
    assert message.count("\n") == 1
    assert not (folder / "val").exists()


def test_a_wrong_number_of_images_is_one_line(folder, capsys, monkeypatch):
    monkeypatch.setattr(prepare_imagenet, "IMAGES", {"train": 1000, "val": 50_000})
    assert prepare_imagenet.main([str(folder)]) == 2
    assert "2000 images, 2 to 2 per class; expected 50000" in capsys.readouterr().err
