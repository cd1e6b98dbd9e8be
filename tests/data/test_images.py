"""Each kind of input against Pillow, and the real odd and broken files against their manifests."""

import csv
import io
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageFilter

from data import UnreadableImageError, images
from data.images import EncodedPicture, read_picture
from tests.data.photos import encoded, photo

REFUSED = {
    "truncated_jpeg.jpg": "image file is truncated",
    "broken_data_stream.png": "unrecognized data stream",
    "truncated_image.png": "image file is truncated",
    "broken.png": "not an image of the formats",
    "decompression_bomb.gif": "4364696535 pixels",
    "png_decompression_dos.png": "Decompressed data too large",
    "zero_width.gif": "not an image",
    "truncated_half.JPEG": "image file is truncated",
    "truncated_tail.JPEG": "image file is truncated",
    "truncated_no_eoi.JPEG": "image file is truncated",
    "truncated_header.JPEG": "Truncated File Read",
    "zero_byte.JPEG": "not an image",
    "one_byte.JPEG": "not an image",
    "bad_marker_length.JPEG": "Truncated File Read",
    "bomb_header_65500x65500.JPEG": "4290250000 pixels",
    "zero_height.JPEG": "not an image",
    "text.JPEG": "not an image",
    "html_404.JPEG": "not an image",
    "all_zero_16k.JPEG": "not an image",
    "._good.JPEG": "not an image",
    "png_bad_crc.png": "broken data stream",
    "bomb_30000x30000_1bit.png": "900000000 pixels",
    "bomb_12000x12000_1bit.png": "12000x12000 pixels, at most 89478485 allowed",
    "float32.tiff": "mode F",
    "int32.tiff": "mode I",
}


def pillows(path: Path) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(Image.open(path).convert("RGB"))


def manifest(folder: Path) -> list[Path]:
    with open(folder / "MANIFEST.csv", encoding="utf-8", newline="") as file:
        return [folder / row["file"] for row in csv.DictReader(file)]


@pytest.mark.data
def test_each_odd_and_broken_file_has_its_documented_outcome(datasets):
    files = manifest(datasets / "imagenet-1k-odd") + manifest(datasets / "corrupt")
    assert len(files) == 94
    refused = set()
    for path in files:
        picture = read_picture(str(path))
        if path.name in REFUSED:
            refused.add(path.name)
            for use in (picture.image, picture.pixels):
                with pytest.raises(UnreadableImageError) as caught:
                    use()
                message = str(caught.value)
                assert message.startswith(f"cannot read image {path}: ")
                assert REFUSED[path.name] in message
                assert "\n" not in message
        elif path.name == "gray16.png":
            values = np.asarray(Image.open(path)).astype(np.float64)
            expected = np.repeat(np.rint(values / 257)[..., None], 3, axis=2)
            assert np.array_equal(np.asarray(picture.image()), expected)
            assert len(np.unique(expected)) == 256
        elif path.name == "big_9000x9000_1bit.png":
            assert picture.image().size == picture.size == (9000, 9000)
        else:
            expected = pillows(path)
            assert picture.size == expected.shape[1::-1], path
            assert np.array_equal(np.asarray(picture.image()), expected), path
            assert np.array_equal(picture.pixels(), expected), path
    assert refused == set(REFUSED)


@pytest.mark.slow
@pytest.mark.data
def test_memory_stays_below_one_gigabyte(datasets):
    program = f"""
import resource
from data.images import read_picture
from data.errors import UnreadableImageError
from data.transforms import EvalTransform, TrainTransform
from tests.data.test_images import manifest
from pathlib import Path
transforms = EvalTransform(224), TrainTransform(224)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in ("imagenet-1k-odd", "corrupt"):
    for path in manifest(Path({str(datasets)!r}) / folder):
        for transform in transforms:
            try:
                transform(read_picture(str(path)))
            except UnreadableImageError:
                pass
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    before, after = (int(word) * 1024 for word in run.stdout.split())
    assert after - before < 1e9


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("settings", [{}, {"progressive": True}, {"subsampling": 0}])
def test_pixels_of_a_jpeg_are_pillows(mode, settings):
    content = encoded(photo(53, 41).convert(mode), quality=91, **settings)
    picture = EncodedPicture(content, "a photo")
    assert np.array_equal(picture.pixels(), np.asarray(picture.image()))


@pytest.mark.parametrize("reduction", [2, 4, 8])
def test_reduced_pixels_are_a_smaller_image(reduction):
    image = photo(208, 136).filter(ImageFilter.GaussianBlur(5))
    reduced = EncodedPicture(encoded(image, quality=95), "a photo").pixels(reduction)
    assert reduced.shape == (136 // reduction, 208 // reduction, 3)
    expected = image.resize(reduced.shape[1::-1], Image.Resampling.BOX)
    assert np.abs(reduced.astype(int) - np.asarray(expected)).mean() < 4
    unreduced = EncodedPicture(encoded(image, "PNG"), "a drawing").pixels(reduction)
    assert np.array_equal(unreduced, np.asarray(image))


@pytest.mark.parametrize(
    ("mode", "kind", "channels"),
    [
        *(("1", "PNG", 1), ("L", "PNG", 1), ("LA", "PNG", 1), ("I;16", "PNG", 1)),
        *(("L", "JPEG", 1), ("I;16B", "TIFF", 1), ("L", "PPM", 1)),
        *(("RGB", "PNG", 3), ("RGBA", "PNG", 3), ("P", "PNG", 3), ("RGB", "JPEG", 3)),
        *(("CMYK", "JPEG", 3),),
    ],
)
def test_a_gray_file_has_one_channel_and_others_have_three(mode, kind, channels):
    picture = EncodedPicture(encoded(Image.new(mode, (5, 3)), kind), "a picture")
    assert picture.channels == channels


def test_pixels_of_an_image_that_is_copied_in_bands_are_its_own():
    array = np.arange(2063 * 2053 * 3).astype(np.uint8).reshape(2063, 2053, 3)
    picture = EncodedPicture(encoded(Image.fromarray(array), "BMP"), "a large image")
    assert np.array_equal(picture.pixels(), array)


def test_a_sound_jpeg_with_too_many_pixels_is_refused(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 53 * 41 - 1)
    for use in ("size", "pixels", "image"):
        picture = EncodedPicture(encoded(photo(53, 41)), "a photo")
        with pytest.raises(UnreadableImageError, match="53x41 pixels, at most 2172 allowed"):
            getattr(picture, use)()


def test_a_missing_file_is_named():
    with pytest.raises(UnreadableImageError, match=r"cannot read image /nowhere/a.png: .*No such"):
        read_picture("/nowhere/a.png")


def test_only_formats_of_pictures_are_opened(monkeypatch):
    """EPS would start Ghostscript, whatever the file is called."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "EPS")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("was started"))
    with pytest.raises(UnreadableImageError, match="not an image of the formats JPEG, PNG"):
        EncodedPicture(buffer.getvalue(), "x.jpg").pixels()


def gray16(ramp: np.ndarray, **tags) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(ramp.astype(np.uint16)).save(buffer, "TIFF", tiffinfo=tags.get("tiffinfo", {}))
    return buffer.getvalue()


def test_gray_values_of_16_bits_have_the_range_of_their_file():
    ramp = np.linspace(0, 65535, 61 * 7).reshape(7, 61).astype(np.uint16)
    expected = np.round(ramp / 257)[..., None].repeat(3, 2)
    pgm = b"P5\n61 7\n65535\n" + ramp.astype(">u2").tobytes()
    for content in (gray16(ramp), pgm):
        picture = EncodedPicture(content, "x", "")
        assert picture.channels == 1
        np.testing.assert_array_equal(picture.pixels(), expected)
    white_is_zero = gray16(ramp, tiffinfo={262: 0})
    assert Image.open(io.BytesIO(white_is_zero)).tag_v2[262] == 0
    pixels = EncodedPicture(white_is_zero, "x", "").pixels()
    np.testing.assert_array_equal(pixels, np.round((65535 - ramp) / 257)[..., None].repeat(3, 2))


def test_gray_values_of_12_bits_are_refused():
    content = bytearray(gray16(np.full((2, 3), 4095)))
    entry = content.index(b"\x02\x01\x03\x00\x01\x00\x00\x00\x10\x00")  # BitsPerSample is 16
    content[entry + 8] = 12
    with pytest.raises(UnreadableImageError, match="gray values of 12 bits are not read"):
        EncodedPicture(bytes(content), "x", "").pixels()
