import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from timm.layers import SelectAdaptivePool2d
from torch import Tensor, nn

from data.evalsets import EvalSet
from lipsformer._errors import ConfigError
from lipsformer.analysis.bounds import Domain, image_domain, lipschitz_bound
from lipsformer.analysis.certificates import certified_radius, difference_errors, real_errors
from lipsformer.analysis.robustness import margins, pgd_attack, robust_mask, smallest_margins
from lipsformer.config import DataConfig
from scripts._certify import Certification, model_bound

# What a certification asks of Accelerate.
ON_ONE_CPU: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=1)


def linear_case(classes: int, seed: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A linear classifier, images well inside [0, 1], their classes, distances to the others."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(11, classes).double()
    with torch.no_grad():  # the classes meet in the middle of the box
        layer.weight.copy_(torch.randn(classes, 11, generator=generator))
        layer.bias.copy_(-0.5 * layer.weight.sum(1))
    images = 0.5 + 0.03 * torch.randn(23, 11, generator=generator, dtype=torch.float64)
    logits = layer(images).detach()
    labels = logits.argmax(1)
    distances = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        to_others = [
            ((row[label] - row[j]) / (layer.weight[label] - layer.weight[j]).norm()).item()
            for j in range(classes)
            if j != label
        ]
        distances.append(sorted(to_others))
    return layer, images, labels, torch.tensor(distances, dtype=torch.float64)


def test_margin_is_the_label_against_the_best_other():
    logits = torch.tensor([[3.0, 1.0, 2.5], [3.0, 1.0, 2.5], [0.0, 0.0, -1.0]])
    assert margins(logits, torch.tensor([0, 1, 1])).tolist() == [0.5, -2.0, 0.0]


@pytest.mark.parametrize("classes", [2, 3])
def test_the_attack_finds_the_distance_of_linear_classifiers(classes):
    layer, images, labels, exact = linear_case(classes, seed=classes)
    reachable = exact[:, -1] < 0.2  # so that the box of [0, 1] is out of reach
    assert 5 <= reachable.sum()
    for image, label, distances in zip(
        images[reachable], labels[reachable], exact[reachable].tolist(), strict=True
    ):
        at = (image[None], label[None])
        # the margin has a minimum towards each class, and the attack may end in any of them
        assert pgd_attack(layer, *at, 1.05 * distances[-1], steps=50).item()
        assert not pgd_attack(layer, *at, 0.999 * distances[0], steps=50).item()


def test_certificates_of_linear_classifiers_never_pass_the_exact_distance():
    for classes in (2, 3, 7):
        layer, images, labels, distances = linear_case(classes, seed=classes)
        exact = distances[:, 0]
        radius = certified_radius(layer(images), lipschitz_bound(layer, Domain(size=())))
        assert (radius <= exact * (1 + 1e-12)).all()
        eps = radius.median().item()
        certified, attacked = robust_mask(layer, images, labels, eps, radius)
        assert torch.equal(certified, radius > eps)
        assert certified.sum() == 11 and attacked.sum() >= (exact > eps).sum()
        wrong = (labels + 1) % classes
        assert not torch.stack(robust_mask(layer, images, wrong, eps, radius)).any()


def test_another_number_of_logits_is_refused():
    layer = nn.Linear(11, 5).double()
    message = "num_logits=3, but the bounded network has 5 logits: pass 5, or .* `outputs`"
    bound = lipschitz_bound(layer, Domain(size=(), norm=1.0, error=0.5))
    with pytest.raises(ValueError, match=message):
        certified_radius(torch.randn(2, 3), bound)
    with pytest.raises(ValueError, match=message):
        difference_errors(bound, num_logits=3)


def test_some_logits_of_a_network_without_a_last_linear_layer():
    bound = lipschitz_bound(nn.Identity(), Domain(size=(), norm=1.0, error=2.0**20))
    classes, logits = [4, 1, 2], torch.tensor([[7.0, 5.0, 2.0]])
    radius = certified_radius(logits, bound, real_errors(bound, 5), classes).item()
    error = 2.0**-28 * math.sqrt(2.0) * 2.0**20  # of a difference of two logits in float64
    assert radius == pytest.approx((7.0 - 5.0 - error) / math.sqrt(2.0), rel=1e-9)
    with pytest.raises(ValueError, match="outputs names 2 logits for 3 classes"):
        certified_radius(logits, bound, outputs=[4, 1])


def test_a_radius_is_not_rounded_up():
    """The constant of a network without a last linear layer was rounded to float32, and down."""
    identity = lipschitz_bound(nn.Identity(), Domain(size=()))
    assert certified_radius(torch.tensor([[3.0, 1.0]]), identity).item() <= math.sqrt(2.0)


def test_logits_that_are_not_finite_certify_nothing():
    """Such as those of a program in float16, whose largest number is 65504."""
    bound = lipschitz_bound(nn.Identity(), Domain(size=()))
    logits = torch.tensor([[math.inf, 0.0], [0.0, -math.inf], [math.nan, 0.0], [2.0, 1.0]])
    assert (certified_radius(logits, bound) > 0.0).tolist() == [False, False, False, True]


def test_a_wrong_radius_does_not_go_unnoticed():
    layer, images, labels, exact = linear_case(3, seed=0)
    near = exact[:, -1] < 0.2
    eps = 1.1 * exact[near].max().item()
    with pytest.raises(RuntimeError, match="broke a certificate"):
        robust_mask(layer, images[near], labels[near], eps, torch.full((int(near.sum()),), 9.0))


def test_the_attack_stays_in_the_ball_and_in_the_box():
    images = torch.rand(5, 3, 7, 2, dtype=torch.float64)
    images[0] = 1.0  # only larger values would help against this one
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(x.detach())
        total = x.flatten(1).sum(1)
        return torch.stack([images.flatten(1).sum(1) + 0.5 - total, torch.zeros(5)], dim=1)

    broken = pgd_attack(function, images, torch.zeros(5, dtype=torch.long), 0.4, steps=13)
    assert len(seen) == 15
    for x in seen:
        assert x.min() >= 0.0 and x.max() <= 1.0
        assert (x - images).flatten(1).norm(dim=1).max() <= 0.4 * (1 + 1e-12)
    # along the diagonal of 42 values, 0.4 in length adds 2.59 to the sum; but none beyond 1
    assert 0.4 * math.sqrt(42) > 0.5
    assert broken.tolist() == [False, True, True, True, True]


def test_the_attack_searches_the_inside_of_the_ball():
    image, eps = torch.full((1, 7), 0.5), 0.1
    lowest = image + 0.2 * eps * torch.eye(7)[:1]  # where the margin is 0

    def function(x):
        return torch.cat([(x - lowest).norm(dim=1, keepdim=True), torch.zeros(1, 1)], dim=1)

    found = smallest_margins(function, image, torch.tensor([0]), eps, steps=50)
    assert found.item() < 0.1 * eps


def test_a_tie_is_no_right_prediction():
    image = torch.full((1, 7), 0.5)
    assert pgd_attack(lambda x: 0.0 * x, image, torch.tensor([0]), 0.1).item()


def test_the_logits_of_a_certificate_are_those_of_the_decimal_mean_and_deviation(tmp_path):
    """Rounded to float32, these would move the logits by more than a real radius allows for."""
    torch.manual_seed(0)
    data = DataConfig(
        source="digits", img_size=5, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    network = nn.Sequential(nn.Conv2d(3, 2, 5), SelectAdaptivePool2d(1, "fast", flatten=True))
    bound = lipschitz_bound(network, image_domain((5, 5), data.mean, data.std))
    images = torch.randint(256, (3, 3, 5, 5)).float()
    batches = [(images, torch.zeros(3, dtype=torch.long))]
    proof = Certification(ON_ONE_CPU, network, data, tmp_path / "model.safetensors", [1e-3])
    proof.certify(EvalSet("images", cast(Any, None)), network, batches)
    _, rows, _ = proof.images["images"]
    weight, bias = (p.detach().double() for p in network[0].parameters())
    pixels = images.double() / 255.0
    for row, image in zip(rows, pixels, strict=True):
        normalized = [
            (channel - mean) / std
            for channel, mean, std in zip(image, data.mean, data.std, strict=True)
        ]
        exact = (weight * torch.stack(normalized)).sum((1, 2, 3)) + bias
        error = (torch.tensor(row["logits"], dtype=torch.float64) - exact).norm().item()
        assert error <= real_errors(bound, 2).max() < 1e-8


@pytest.mark.parametrize("part", ["matmul", "conv"])
def test_certificates_need_full_float32_in_every_kernel(part):
    data = DataConfig(source="digits", img_size=5, mean=(0.5,) * 3, std=(0.5,) * 3)
    settings: Any = getattr(torch.backends.mkldnn, part)
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        with pytest.raises(ConfigError, match="full float32"):
            model_bound(ON_ONE_CPU, nn.Conv2d(3, 2, 5), data)
    finally:
        settings.fp32_precision = before
    assert model_bound(ON_ONE_CPU, nn.Conv2d(3, 2, 5), data).value > 0.0


def test_certificates_need_onednn(monkeypatch):
    """Without it, PyTorch's 3x3 convolutions use Winograd's method, which rounds more."""
    data = DataConfig(source="digits", img_size=5, mean=(0.5,) * 3, std=(0.5,) * 3)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with pytest.raises(ConfigError, match="NNPACK"):
        model_bound(ON_ONE_CPU, nn.Conv2d(3, 2, 5), data)


def test_the_smallest_margin_on_the_way_counts_and_not_the_last():
    image = torch.full((1, 7), 0.5)

    def function(x):  # wrong for the image itself, and right for every other one
        away = (x - image).abs().sum(1, keepdim=True) > 0
        return torch.cat([away * 2.0 - 1.0, torch.zeros_like(x[:, :1])], 1) + 0.0 * x[:, :1]

    found = smallest_margins(function, image, torch.tensor([0]), 0.1, steps=5)
    assert found.tolist() == [-1.0]
