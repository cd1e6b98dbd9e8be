"""AutoAttack finds the exact distance of linear classifiers, and the page shows its results."""

import json

import pytest
import torch
from torch import Tensor, nn

from benchmarks.autoattack import (
    ATTACKS,
    OWN,
    accuracy,
    attack_own_radii,
    auto_attack,
    table,
)
from lipsformer.analysis.bounds import Domain, lipschitz_bound
from lipsformer.analysis.certificates import certified_radius
from tests.conftest import ROOT

RESULTS = json.loads((ROOT / "benchmarks/results/autoattack_digits.json").read_text())
CERTIFIED = json.loads((ROOT / "benchmarks/results/certified_digits.json").read_text())


def test_the_page_shows_the_results_and_no_certified_image_fell():
    assert table(RESULTS) in (ROOT / "docs/certified.md").read_text()
    assert RESULTS["weights_sha256"] == CERTIFIED["weights_sha256"]
    for at in CERTIFIED["robustness"]:
        rows = zip(RESULTS["right"], RESULTS["radius"], strict=True)
        certified = sum(right and radius > at["eps"] for right, radius in rows)
        assert 100.0 * certified / CERTIFIED["images"] == pytest.approx(at["certified"])
    own = [at for at in RESULTS["attacks"] if at["within"] == OWN]
    assert own and all(all(at["kept"]) for at in own)


def test_accuracy_counts_the_certified_images_and_waits_for_all_attacks():
    """Of five images one is wrong, one certified, and the first attack breaks one image."""
    right, radius = [True, True, False, True, True], [0.3, 0.0, 0.0, 0.1, 0.0]
    first = {"within": "0.2", "images": [1, 3]}
    attacks = [first | {"attack": name, "kept": [True, True]} for name in ATTACKS]
    attacks[0]["kept"] = [True, False]
    for at in attacks[1:]:  # which leave the image in peace that has fallen
        at |= {"images": [1], "kept": [True]}
    last = {"within": "0.2", "images": [4], "kept": [True]}
    attacks += [last | {"attack": name} for name in ATTACKS]
    assert accuracy({"right": right, "radius": radius, "attacks": attacks}, "0.2") == 60.0
    assert accuracy({"right": right, "radius": radius, "attacks": attacks[:-1]}, "0.2") is None


@pytest.mark.slow
def test_right_radii_withstand_the_attack_and_wrong_ones_fall():
    """The certified radius of a linear layer is the exact distance to the next class."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(35, 11)
    with torch.no_grad():  # the classes meet in the middle of the box
        layer.weight.copy_(torch.randn(11, 35, generator=generator))
        layer.bias.copy_(-0.5 * layer.weight.sum(1))
    images = 0.5 + 0.05 * torch.randn(17, 1, 5, 7, generator=generator)

    def function(x: Tensor) -> Tensor:
        weight, bias = (p.to(x.dtype) for p in layer.parameters())
        return nn.functional.linear(x.flatten(1), weight, bias)

    logits = function(images).detach()
    labels, radii = (
        logits.argmax(1),
        certified_radius(logits, lipschitz_bound(layer, Domain(size=()))),
    )
    assert attack_own_radii(function, images, labels, 0.999 * radii).all()
    assert not attack_own_radii(function, images, labels, 1.01 * radii).any()
    one, label, radius = images[:1], labels[:1], 1e-6 * radii[:1]  # float32 images miss such a ball
    enlarged = lambda x: function(one + (x - one.double()) * 1e6)  # noqa: E731
    assert attack_own_radii(enlarged, one, label, 0.999 * radius).all()
    assert not attack_own_radii(enlarged, one, label, 1.01 * radius).any()
    eps = radii.median().item()
    assert torch.equal(auto_attack(function, images, labels, 1.001 * eps), radii > 1.001 * eps)
    with pytest.raises(ValueError, match="two images are at most"):
        attack_own_radii(function, images, labels, 20.0 * radii)
