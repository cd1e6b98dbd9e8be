import numpy as np
import pytest
import torch
from scipy import stats
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing

from data import Normalize, TrainBatchTransform
from data.rng import preserve_rng, seed_all

MEAN, STD = (0.1, 0.5, 0.7), (0.2, 0.3, 0.5)
AT = {"update": 3, "micro_step": 1, "rank": 2}


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    images = torch.randint(0, 256, (size, 3, 19, 23), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 7, (size,), generator=generator)


def normalized(images: torch.Tensor) -> torch.Tensor:
    mean = torch.tensor(MEAN, dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor(STD, dtype=torch.float64).view(3, 1, 1)
    return ((images.double() / 255 - mean) / std).float()


def transform(seed: int = 0, **recipe) -> TrainBatchTransform:
    return TrainBatchTransform(Normalize(MEAN, STD), num_classes=7, seed=seed, **recipe)


def test_normalize_is_its_formula():
    images, _ = batch(5)
    torch.testing.assert_close(Normalize(MEAN, STD)(images), normalized(images))
    floats = images.float()
    torch.testing.assert_close(Normalize(MEAN, STD)(floats), normalized(images))
    assert torch.equal(floats, images.float())  # the caller's tensor stays as it was


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_without_mixing_targets_are_smoothed_one_hot(smoothing):
    images, labels = batch(5)
    output, targets = transform(label_smoothing=smoothing)(images, labels, **AT)
    torch.testing.assert_close(output, normalized(images))
    expected = torch.eye(7)[labels] * (1 - smoothing) + smoothing / 7
    torch.testing.assert_close(targets, expected)


@pytest.mark.parametrize("size", [6, 5, 1])
@pytest.mark.parametrize("recipe", [{"mixup": 0.8}, {"cutmix": 1.0}])
def test_mixing_is_with_the_reversed_batch_at_the_share_of_the_targets(size, recipe):
    images, labels = batch(size)
    plain = normalized(images)
    other, shares = plain.flip(0), []
    for update in range(8):
        output, targets = transform(**recipe)(images, labels, update=update, micro_step=0, rank=0)
        if "mixup" in recipe:
            share = ((output - plain) * (other - plain)).sum() / ((other - plain) ** 2).sum()
            share = share if size > 1 else torch.zeros(())
            expected = plain + share * (other - plain)
        else:
            cut = (output[0] != plain[0]).any(0)
            share = cut.float().mean()
            expected = torch.where(cut, other, plain)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        one_hot = torch.eye(7)[labels]
        expected = one_hot + share * (one_hot.flip(0) - one_hot)
        torch.testing.assert_close(targets, expected, rtol=1e-4, atol=1e-4)
        shares.append(share.item())
    assert size == 1 or max(shares) > 0.1  # otherwise nothing was mixed


def test_mixing_has_the_same_distribution_however_an_update_is_dealt():
    """But one share per micro-batch, so an update of two micro-batches has two shares."""
    images, labels = batch(12)[0], torch.arange(12)
    mix = TrainBatchTransform(Normalize(MEAN, STD), num_classes=12, seed=0, mixup=0.4)
    for size in (12, 6):
        micro_batches = list(zip(images.split(size), labels.split(size), strict=True))
        shares = torch.stack(
            [
                torch.cat([mix(*m, update=u, micro_step=i, rank=0)[1] for i, m in micro]).diagonal()
                for u in range(300)
                for micro in [enumerate(micro_batches)]
            ]
        )
        for image in (0, 11):
            assert stats.kstest(shares[:, image], stats.beta(0.4, 0.4).cdf).pvalue > 1e-3
        assert {len(update.unique()) for update in shares} == {12 // size}


@pytest.mark.parametrize(
    "recipe",
    [
        {"reprob": 0.6, "remode": "pixel", "mixup": 0.8, "cutmix": 1.0},
        {"reprob": 0.2, "remode": "const", "cutmix": 1.0, "mixup_prob": 0.3},
        {"reprob": 0.2, "remode": "rand", "mixup": 0.8, "cutmix": 1.0, "mixup_switch_prob": 0.9},
    ],
)
def test_erasing_and_mixing_equal_timms_on_the_same_seed(recipe):
    images, labels = batch(6)
    ours = transform(label_smoothing=0.1, **recipe)
    mix = Mixup(
        mixup_alpha=recipe.get("mixup", 0.0),
        cutmix_alpha=recipe["cutmix"],
        prob=recipe.get("mixup_prob", 1.0),
        switch_prob=recipe.get("mixup_switch_prob", 0.5),
        label_smoothing=0.1,
        num_classes=7,
    )
    for update in range(12):
        output, targets = ours(images, labels, update=update, micro_step=1, rank=2)
        with preserve_rng():
            seed_all("batch", 0, update, 1, 2)
            erase = RandomErasing(recipe["reprob"], mode=recipe["remode"], device="cpu")
            expected, expected_targets = mix(erase(normalized(images)), labels)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(targets, expected_targets)


def test_randomness_is_a_function_of_seed_update_micro_step_and_rank():
    images, labels = batch(6)
    recipe = {"reprob": 0.5, "mixup": 0.8}
    outputs = [
        transform(seed, **recipe)(images, labels, update=update, micro_step=micro_step, rank=rank)
        for seed, update, micro_step, rank in np.vstack(
            [np.zeros((1, 4), int), np.eye(4, dtype=int)]
        )
    ]
    again, _ = transform(**recipe)(images, labels, update=0, micro_step=0, rank=0)
    assert torch.equal(outputs[0][0], again)
    for i, (first, _) in enumerate(outputs):
        for second, _ in outputs[i + 1 :]:
            assert not torch.equal(first, second)


@pytest.mark.gpu
def test_the_device_generator_is_seeded_and_restored():
    images, labels = (tensor.cuda() for tensor in batch(6))
    torch.cuda.manual_seed(1)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(1)
    first, _ = transform(reprob=1.0)(images, labels, **AT)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    second, _ = transform(reprob=1.0)(images, labels, **AT)
    assert torch.equal(first, second)
