import contextlib
import os
import warnings

import pytest

from data import build_eval_dataset
from data.check import check_file
from data.sources import image_files
from lipsformer.config import DataConfig
from scripts.check_data import main
from tests.data.photos import encoded, photo
from tests.data.test_images import REFUSED
from tests.data.trees import write_tree


@pytest.fixture
def tree(tmp_path):
    root = write_tree(tmp_path / "set" / "val", {"a": 2, "b é": 3})
    turned = photo(29, 23)
    turned.getexif()[0x0112] = 6
    (root / "a" / "turned.jpg").write_bytes(encoded(turned, exif=turned.getexif()))
    (root / "a" / "gray.jpg").write_bytes(encoded(photo(61, 7).convert("L")))
    (root / "b é" / "misnamed.jpg").write_bytes(encoded(photo(5, 3), "PNG"))
    frames = [photo(17, 13), photo(13, 17).resize((17, 13))]
    frames[0].save(root / "b é" / "moving.webp", save_all=True, append_images=frames[1:])
    broken = root / "b é" / "001.png"
    broken.write_bytes(broken.read_bytes()[:300])
    (root / "a" / "empty.JPEG").write_bytes(b"")
    (root / "a" / "notes.txt").write_text("no image")
    return tmp_path / "set"


def test_the_report_names_what_is_wrong_and_what_is_unusual(tree, capsys):
    assert main([str(tree), "--workers", "2", "--list", str(tree / "bad.txt")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("unreadable: val/a/empty.JPEG: not an image of the formats")
    assert lines[1].startswith("unreadable: val/b é/001.png: ")
    assert lines[2] == "10 images, 2 unreadable"
    assert [line.split(maxsplit=1) for line in lines[3:]] == [
        ["5", "PNG RGB"],
        ["1", "JPEG L"],
        ["1", "JPEG RGB"],
        ["1", "WEBP RGB"],
        ["1", "with an EXIF orientation, which is not applied"],
        ["1", "animated, of which the first frame is used"],
        ["1", "named as another format than their content"],
        ["smallest:", "5x3 val/b é/misnamed.jpg"],
        ["largest:", "53x41 val/b é/002.png"],
    ]


def test_pipes_and_devices_are_no_images_and_nobody_waits_for_them(tmp_path, capsys):
    root = write_tree(tmp_path / "set", {"a": 1})
    os.mkfifo(root / "a" / "pipe.png")
    (root / "a" / "endless.png").symlink_to("/dev/zero")
    assert main([str(root), "--workers", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    refused = "it is a pipe or a device, not a file"
    assert lines[:2] == [f"unreadable: a/{name}.png: {refused}" for name in ("endless", "pipe")]
    assert lines[2] == "3 images, 2 unreadable"


def test_the_list_makes_a_tree_usable(tree):
    main([str(tree), "--workers", "1", "--list", str(tree / "bad.txt")])
    data = DataConfig(source="folder", root=str(tree), img_size=16, skip_list=str(tree / "bad.txt"))
    with pytest.warns(UserWarning, match="2 images of val are left out"):
        dataset = build_eval_dataset(data, classes=None)
    assert [dataset[i][1] for i in range(len(dataset))] == [0] * 4 + [1] * 4


def test_a_sound_tree_and_an_empty_one(tmp_path, capsys):
    write_tree(tmp_path / "set", {"a": 2})
    assert main([str(tmp_path / "set"), "--workers", "1"]) == 0
    assert "2 images, 0 unreadable" in capsys.readouterr().out
    assert main([str(tmp_path / "nothing")]) == 2
    assert "no image files in" in capsys.readouterr().err


@pytest.mark.data
@pytest.mark.parametrize("name", ["imagenet-1k-odd", "corrupt"])
def test_real_odd_and_broken_files_are_told_apart(datasets, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        findings = [check_file(str(datasets / name), file) for file in image_files(datasets / name)]
    bad = {finding.file.split("/")[-1] for finding in findings if finding.error}
    assert bad == {file for file in REFUSED if any(f.file.endswith(file) for f in findings)}
    by_name = {finding.file.split("/")[-1]: finding for finding in findings}
    if name == "corrupt":
        assert {n for n, f in by_name.items() if f.animated} == {
            "animated_gif_named.JPEG",
            "animated_webp_named.JPEG",
            "apng.png",
        }
        assert by_name["webp_named.JPEG"].misnamed
        assert not by_name["good.JPEG"].misnamed
    else:
        turned = {n for n, f in by_name.items() if f.rotated}
        expected = {f"exif_orientation_{i}.JPEG" for i in range(2, 9)}
        assert turned == expected | {"n02951585_can_opener.JPEG", "hopper_orientation_6.jpg"}


@pytest.mark.parametrize(
    ("option", "value"), [("--workers", "0"), ("--list", "/nowhere/at/all"), ("--list", "/")]
)
def test_wrong_options_end_before_the_work(tree, capsys, option, value):
    assert main([str(tree), option, value]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {option} ")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("name", ["two\nlines.png", "two\rlines.png"])
def test_a_name_that_a_list_cannot_hold_is_refused(tmp_path, capsys, name):
    root = write_tree(tmp_path / "set", {"a": 1})
    (root / "a" / name).write_bytes(b"no image")
    assert main([str(root), "--list", str(tmp_path / "bad")]) == 2
    error = capsys.readouterr().err
    assert f"cannot hold {'a/' + name!r}, whose name has a line break" in error
    assert error.count("\n") == 1 and not (tmp_path / "bad").exists()


def test_the_list_is_written_before_the_report_and_holds_any_name(tmp_path, monkeypatch):
    root = write_tree(tmp_path / "set" / "val", {"a": 2})
    (root / "a" / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"no image")
    (root / "a" / "two\u2028lines\x85.jpg").write_bytes(b"no image")
    listed = tmp_path / "bad.txt"

    def closed(*args, **kwargs):
        raise BrokenPipeError

    with monkeypatch.context() as patch, contextlib.suppress(BrokenPipeError):
        patch.setattr("builtins.print", closed)
        main([str(tmp_path / "set"), "--workers", "1", "--list", str(listed)])
    assert listed.read_bytes() == b"val/a/caf\xe9.jpg\nval/a/two\xe2\x80\xa8lines\xc2\x85.jpg\n"
    data = DataConfig(source="folder", root=str(tmp_path / "set"), skip_list=str(listed))
    with pytest.warns(UserWarning, match="2 images of val are left out"):
        assert len(build_eval_dataset(data, classes=None)) == 2


def test_jpegs_of_phones_with_several_pictures_are_jpegs(tmp_path):
    photo(17, 13).save(tmp_path / "1.jpg", "MPO", save_all=True, append_images=[photo(13, 11)])
    found = check_file(str(tmp_path), "1.jpg")
    assert (found.kind, found.animated, found.misnamed) == ("JPEG RGB", False, False)
