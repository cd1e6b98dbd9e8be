import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter
from timm.data import create_transform
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_pil_interp

from data import DataError
from data.dataset import TrainDataset
from data.images import ArrayPicture, EncodedPicture
from data.resize import resize
from data.rng import preserve_rng, seed_all
from data.sources import ArraySource
from data.transforms import EvalTransform, FastEvalTransform, TrainTransform, _crop
from tests.data.photos import encoded, photo


def picture(width: int, height: int) -> ArrayPicture:
    return ArrayPicture(np.array(photo(width, height)))


@pytest.mark.parametrize(("img_size", "crop_pct"), [(32, 0.875), (61, 0.9), (97, 1.0)])
@pytest.mark.parametrize("size", [(53, 41), (41, 131), (300, 37), (1, 50), (607, 907), (36, 47)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_evaluation_equals_timms_bit_for_bit(img_size, crop_pct, size, interpolation):
    transform = EvalTransform(img_size, crop_pct=crop_pct, interpolation=interpolation)
    timms = create_transform(
        img_size, interpolation=interpolation, crop_pct=crop_pct, use_prefetcher=True
    )
    expected = timms(photo(*size))
    assert torch.equal(transform(picture(*size)).permute(2, 0, 1), expected)
    content = encoded(photo(*size), quality=83)
    expected = timms(EncodedPicture(content, "a photo").image())
    output = transform(EncodedPicture(content, "a photo")).permute(2, 0, 1)
    assert torch.equal(output, expected)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    img_size=st.integers(1, 64),
    crop_pct=st.floats(0.5, 1),
)
def test_evaluation_equals_timms_at_every_size(width, height, img_size, crop_pct):
    height = min(height, 100 * width)
    width = min(width, 100 * height)
    transform = EvalTransform(img_size, crop_pct=crop_pct)
    timms = create_transform(
        img_size, interpolation="bicubic", crop_pct=crop_pct, use_prefetcher=True
    )
    expected = timms(photo(width, height))
    assert torch.equal(transform(picture(width, height)).permute(2, 0, 1), expected)


@pytest.mark.parametrize("size", [(53, 41), (41, 131), (300, 37), (61, 61), (907, 607)])
def test_fast_evaluation_differs_by_two_levels_at_most(size):
    expected = EvalTransform(53)(picture(*size)).int()
    difference = (FastEvalTransform(53)(picture(*size)).int() - expected).abs()
    assert difference.max() <= 2
    assert (difference > 0).float().mean() < 0.02


@pytest.mark.parametrize("transform", [EvalTransform, FastEvalTransform])
@pytest.mark.parametrize("size", [(7, 1201), (900, 3), (901, 5)])
def test_of_a_strip_the_middle_is_evaluated_as_timm_does(size, transform):
    timms = create_transform(29, interpolation="bicubic", use_prefetcher=True)
    expected = timms(photo(*size)).int()
    output = transform(29)(picture(*size)).permute(2, 0, 1).int()
    assert (output - expected).abs().float().mean() < 1


def same_seed_pairs(recipe, img_size, size, count=60):
    """(ours, timm's) outputs for equal seeds, as [count, 3, H, W] integers."""
    timms = create_transform(
        img_size,
        is_training=True,
        interpolation="bicubic",
        use_prefetcher=True,
        **{"color_jitter": None, **recipe},
    )
    mine = TrainTransform(img_size, **recipe)
    ours, theirs = [], []
    for index in range(count):
        with preserve_rng():
            seed_all(index)
            try:
                theirs.append(timms(photo(*size)))
            except ValueError:  # posterize to 0 bits, which Pillow 13 refuses
                continue
            seed_all(index)
            ours.append(mine(picture(*size)).permute(2, 0, 1))
    return torch.stack(ours).int(), torch.stack(theirs).int()


@pytest.mark.parametrize("size", [(83, 61), (211, 307), (41, 31)])
def test_crop_and_flip_equal_timms_up_to_rounding(size):
    recipe = {"scale": (0.2, 0.9), "ratio": (0.7, 1.5)}
    ours, theirs = same_seed_pairs(recipe, 47, size)
    difference = (ours - theirs).abs()
    assert difference.max() <= 2
    assert (difference > 0).float().mean() < 0.02


@pytest.mark.parametrize(
    ("recipe", "mean_difference"),
    [
        ({"color_jitter": 0.4}, 0.5),
        ({"auto_augment": "rand-m9-mstd0.5-inc1"}, 1.5),
        ({"auto_augment": "rand-m9-n3", "mean": (0.9, 0.1, 0.5)}, 4),
        ({"auto_augment": "rand-m7-n3-p0.9"}, 4),
        ({"auto_augment": "rand-m9-t3a", "color_jitter": 0.3}, 1),
        ({"auto_augment": "rand-m9-tweights"}, 2),
        ({"auto_augment": "original", "hflip": 0.0}, 2),
    ],
)
def test_the_whole_recipe_stays_near_timms_on_the_same_seeds(recipe, mean_difference):
    ours, theirs = same_seed_pairs(recipe, 47, (83, 61))
    per_image = (ours - theirs).abs().float().mean((1, 2, 3))
    assert per_image.mean() < mean_difference
    assert per_image.max() < 8  # a different crop, operation or sign would be far off


@pytest.mark.parametrize("recipe", ["rand-m9-n3-mstd0.5", "rand-m9-t3a", "original", None])
def test_an_image_does_not_depend_on_its_batch(recipe):
    sizes = [(41, 31), (83, 61), (29, 37), (211, 307), (19, 23)]
    source = ArraySource(np.zeros((5, 2, 2), np.uint8), np.arange(5), "abcde")
    source.load = lambda index: picture(*sizes[index])
    images = TrainDataset(source, TrainTransform(29, auto_augment=recipe), seed=3)
    keys = [(epoch, index) for epoch in range(4) for index in range(5)]
    for key, (image, label) in zip(keys, images.__getitems__(keys), strict=True):
        with preserve_rng():
            seed_all("augment", 3, *key)
            expected = images.train_transform(picture(*sizes[key[1]]))
        assert torch.equal(image, expected)
        assert label == key[1]


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(1, 2), (19, 31), (37, 48), (48, 48), (48, 49), (13, 89)])
def test_resizing_equals_pillows_up_to_rounding(size, interpolation):
    """Images of at most 48 pixels and larger ones are resized in different ways."""
    image = photo(*size)
    for side in (11, 32, 47, 53):
        expected = image.resize((side, side), str_to_pil_interp(interpolation))
        difference = np.abs(resize(np.array(image), side, interpolation).astype(int) - expected)
        assert difference.max() <= 2
        assert (difference > 0).mean() < 0.03


@pytest.mark.parametrize(("scale", "reduction"), [((0.9, 1.0), 8), ((0.1, 0.12), 4)])
def test_a_large_jpeg_decodes_at_a_reduced_size_with_the_same_crop(scale, reduction):
    transform = TrainTransform(37, scale=scale, hflip=0)
    image = photo(801, 603).filter(ImageFilter.GaussianBlur(6))
    used = []

    class Watched(EncodedPicture):
        def pixels(self, reduction=1):
            used.append(reduction)
            return super().pixels(reduction)

    picture = Watched(encoded(image, quality=95), "a photo")
    for index in range(10):
        with preserve_rng():
            seed_all(index)
            output = transform(picture)
            seed_all(index)
            top, left, height, width = RandomResizedCropAndInterpolation.get_params(
                image, scale, (3 / 4, 4 / 3)
            )
        box = (left, top, min(left + width, 797), min(top + height, 599))
        box = tuple(round(side / reduction) * reduction for side in box)
        expected = np.asarray(image.resize((37, 37), Image.Resampling.BICUBIC, box=box))
        assert np.abs(output.numpy().astype(int) - expected).mean() < 1.5
    assert used == [reduction] * 10


def test_the_short_side_of_a_crop_decides_at_which_size_a_jpeg_decodes(monkeypatch):
    used, pixels = [], EncodedPicture.pixels
    monkeypatch.setattr(
        EncodedPicture, "pixels", lambda *args: used.append(args[1]) or pixels(*args)
    )
    _crop(EncodedPicture(encoded(photo(801, 603)), "a photo"), (11, 7, 79, 613), 37, "bicubic")
    assert used == [2]


def test_contradicting_recipes_are_one_clear_error():
    with pytest.raises(DataError, match=r"color_jitter=0.4 has no effect with .*'rand-m9'"):
        TrainTransform(224, auto_augment="rand-m9", color_jitter=0.4)


@pytest.mark.parametrize(
    "recipe",
    ["rand-m9-xyz", "rand-m9-n", "rand-m9-m8", "rand-m9-tweight", "rand-", "randm9", "v0-m9", "v1"],
)
def test_a_recipe_of_which_timm_would_drop_a_part_is_refused(recipe):
    with pytest.raises(DataError, match=rf"auto_augment='{recipe}' is not in timm's notation"):
        TrainTransform(224, auto_augment=recipe)


@pytest.mark.parametrize(
    "recipe",
    ["rand-m9-mstd0.5-inc1", "rand-m15-n3-p0.4-mmax20-tweights", "augmix-m5-w4-d2", "3a", "v0r"],
)
def test_the_recipes_of_timms_documentation_are_taken(recipe):
    assert TrainTransform(32, auto_augment=recipe).color


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (1, 50), (300, 2)])
def test_tiny_and_narrow_images_train(size):
    picture = ArrayPicture(np.full((size[1], size[0], 3), 77, np.uint8))
    transform = TrainTransform(19)
    with preserve_rng():
        for seed in range(40):
            seed_all(seed)
            assert torch.equal(transform(picture), torch.full((19, 19, 3), 77, dtype=torch.uint8))
