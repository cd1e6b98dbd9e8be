"""Operations on arrays against timm's on Pillow images, with the same random numbers."""

import numpy as np
import pytest
from PIL import Image
from timm.data import auto_augment as timms

from data.ops import ON_ARRAYS
from data.rng import preserve_rng, seed_all
from tests.data.photos import photo

HPARAMS = {
    "translate_const": 29,
    "img_mean": (124, 116, 104),
    "interpolation": Image.Resampling.BICUBIC,
    "magnitude_std": 4.0,
}
EXACT = ["AutoContrast", "Equalize", "Invert", "PosterizeOriginal", "SolarizeIncreasing"]
EXACT += ["SolarizeAdd", "ContrastIncreasing", "BrightnessIncreasing"]
SHIFTS = ["ShearX", "ShearY", "TranslateXRel", "TranslateYRel", "TranslateX", "TranslateY"]


def differences(name: str, image: Image.Image, magnitude: int = 6, **hparams) -> np.ndarray:
    """|array operation - timm's| for 20 random magnitudes and signs, [20, H, W, 3]."""
    hparams = {**HPARAMS, **hparams}
    timm_op, array_op = (timms.AugmentOp(name, 1.0, magnitude, hparams) for _ in range(2))
    array_op.aug_fn = ON_ARRAYS[timm_op.aug_fn]
    found = []
    for seed in range(20):
        with preserve_rng():
            seed_all(seed)
            expected = np.asarray(timm_op(image)).astype(int)
            seed_all(seed)
            found.append(np.abs(array_op(np.array(image)) - expected))
    return np.stack(found)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("size", [(83, 61), (37, 89)])
def test_tables_are_exact(name, size):
    assert differences(name, photo(*size)).max() == 0


@pytest.mark.parametrize("name", ["AutoContrast", "Equalize", "ContrastIncreasing"])
def test_tables_are_exact_for_flat_images(name):
    flat = Image.new("RGB", (13, 11), (7, 200, 7))
    assert differences(name, flat).max() == 0
    two = flat.copy()
    two.paste((8, 201, 255), (0, 0, 5, 11))
    assert differences(name, two).max() == 0


@pytest.mark.parametrize("name", ["ColorIncreasing", "SharpnessIncreasing"])
def test_blends_differ_by_one_level_at_most(name):
    assert differences(name, photo(83, 61)).max() <= 1


@pytest.mark.parametrize("resample", [Image.Resampling.BICUBIC, Image.Resampling.BILINEAR])
@pytest.mark.parametrize("name", SHIFTS)
def test_shears_and_translations_differ_by_one_level_at_most(name, resample):
    found = differences(name, photo(83, 61), interpolation=resample)
    assert found.max() <= 1
    assert found.mean() < 0.03


@pytest.mark.parametrize("name", ["TranslateX", "TranslateY"])
@pytest.mark.parametrize("pixels", [36, 37, 41, 97])
def test_translations_may_leave_little_or_nothing_of_the_image(name, pixels):
    settings = {"magnitude": 10, "translate_const": pixels, "magnitude_std": 0.0}
    assert differences(name, photo(37, 37), **settings).max() <= 1


def test_rotation_agrees_up_to_the_cubic_kernel():
    # On a ramp both cubic kernels are linear interpolation: what is left is OpenCV's 1/32 pixel.
    ramp = np.mgrid[:61, :83].transpose(1, 2, 0)[..., [0, 1, 1]] * 2
    found = differences("Rotate", Image.fromarray(ramp.astype(np.uint8)))
    assert np.median(found) <= 1
    assert (found > 1).mean() < 0.06  # along the border of what was outside the image
    assert differences("Rotate", photo(83, 61)).mean() < 3


def test_posterize_to_no_bits_or_fewer_is_black():
    posterize = ON_ARRAYS[timms.posterize]
    for bits in (0, -2):
        assert posterize(np.full((3, 5, 3), 255, np.uint8), bits).max() == 0
