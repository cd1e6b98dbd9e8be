"""Local certificates: no search inside a ball leaves the ball that was proved for the outputs."""

import math
from typing import Any

import pytest
import timm
import torch
from torch import nn

from lipsformer.analysis import local_certificates as local
from lipsformer.analysis.bounds import Domain, UnknownModuleError, lipschitz_bound
from lipsformer.analysis.certificates import certified_radius
from lipsformer.analysis.local_attention import LocalAttention, norm_above, positive_norm_above
from lipsformer.layers import ScaledCosineAttention

BODIES = {
    "swin": ("lipsformer_swin_nano", {"num_heads": (1, 2), "window_size": 3}),
    "swin, raw values": (
        "lipsformer_swin_nano",
        {"num_heads": (2, 4), "window_size": 2, "official_compat": True},
    ),
    "cswin": ("lipsformer_nano", {"num_heads": (2, 4), "split_sizes": (2, None)}),
}


def trained(name: str, size: int = 20) -> Any:
    """Return a small float64 model with weights of several magnitudes, as after training."""
    torch.manual_seed(len(name))
    arch, options = BODIES[name]
    options = {"embed_dim": 8, "depths": (1, 1), "patch_size": 4, "num_classes": 5, **options}
    model = timm.create_model(arch, img_size=size, **options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + 0.5 * torch.randn_like(parameter))
            parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, ScaledCosineAttention):
            module.fused_attn = False
    return model


def test_norms_are_bounded_from_above():
    torch.manual_seed(0)
    flat = torch.linalg.qr(torch.randn(11, 11, dtype=torch.float64)).Q
    for matrices in (torch.randn(7, 5, 13, dtype=torch.float64), flat[None], torch.zeros(1, 3, 2)):
        exact = torch.linalg.matrix_norm(matrices.double(), 2)
        found = norm_above(matrices.double())
        assert (found >= exact * (1 - 1e-12)).all() and (found <= 1.04 * exact + 1e-9).all()
        positive = matrices.double().abs()
        exact = torch.linalg.matrix_norm(positive, 2)
        found = positive_norm_above(positive)
        assert (found >= exact * (1 - 1e-12)).all() and (found <= 1.2 * exact + 1e-9).all()


def farthest(f, x: torch.Tensor, radius: float, steps: int = 6) -> float:
    """Search for the point of a ball whose image is farthest from that of the center."""
    center, best = f(x), 0.0
    for start in (torch.randn_like(x), -x, x):
        move = radius * start / start.norm()
        for _ in range(steps):
            move.requires_grad_(True)
            distance = (f(x + move) - center).norm()
            best = max(best, distance.item())
            (gradient,) = torch.autograd.grad(distance, move)
            gradient = gradient / gradient.norm().clamp_min(1e-30)
            move = (move + 0.7 * radius * gradient).detach()
            move = move * min(1.0, radius / move.norm().item())
    return best


@pytest.mark.parametrize("name", BODIES)
def test_no_layer_leaves_its_ball(name):
    """Every layer, at radii from the smallest to beyond the lengths of the tokens."""
    model = trained(name)
    x = torch.randn(1, 3, 20, 20, dtype=torch.float64)
    with torch.no_grad():
        x = model.patch_embed(x)
    ratios = []
    for stage in model.stages:
        layers = (
            []
            if isinstance(stage.downsample, nn.Identity)
            else [lambda x, stage=stage: local._merging(stage.downsample, x)]
        )
        for block in stage.blocks:
            layers += [
                lambda x, block=block: local._conv(block.conv1, x),
                lambda x, block=block: local._conv(block.conv2, x),
                lambda x, block=block: local._attention(block.attn, block.norm1, x),
                lambda x, block=block: local._mlp(block.mlp, block.norm2, x),
            ]
        for layer in layers:
            with torch.no_grad():
                output, growth = layer(x)
            for radius in (1e-2, 1.0):
                with torch.no_grad():
                    proved = growth(torch.tensor([radius], dtype=torch.float64)).item()
                found = farthest(lambda y, layer=layer: layer(y)[0], x, radius)
                assert found <= proved * (1 + 1e-9)
                ratios.append(found / proved)
            x = output
    assert max(ratios) > 0.5  # some layers reach half of what is proved


def test_factors_of_attention_hold_for_exact_jacobians_in_the_ball():
    torch.manual_seed(1)
    core = ScaledCosineAttention(2, logit_scale=7.0, value_scale=1.7).double()
    core.fused_attn = False
    qkv = torch.randn(3, 1, 2, 5, 3, dtype=torch.float64)
    qkv[:, :, :, 1] *= 0.05  # a short token, near which the normalization is steep
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    real = torch.ones(1, 1, 5, dtype=torch.float64)
    measured = LocalAttention(core, qkv, bias, real)
    for radius in (1e-9, 0.02, 0.5):
        radii = torch.full((1, 2), radius, dtype=torch.float64)
        factors = measured.factors((radii, radii, radii))
        for trial in range(6):
            move = torch.randn_like(qkv) if trial % 2 else -qkv
            inside = qkv + radius * move / move.flatten(3).norm(dim=-1)[..., None, None]
            jacobian = torch.func.jacrev(lambda x: core(x[0], x[1], x[2], bias))(inside)
            for head in range(2):
                for part, factor in enumerate(factors):
                    exact = jacobian[0, head, :, :, part, 0, head].reshape(15, 15)
                    assert torch.linalg.matrix_norm(exact, 2) <= factor[0, head] * (1 + 1e-9)


@pytest.mark.parametrize("name", ["swin", "cswin"])
def test_certificates_beat_the_global_ones_and_no_image_falls(name):
    model = trained(name).float()
    images = torch.randn(3, 3, 20, 20)
    logits, radii = local.local_certificates(model, images)
    torch.testing.assert_close(logits, model(images).double(), atol=1e-4, rtol=1e-4)
    domain = Domain(size=(20, 20), radius=float(images.norm(dim=1).max()))
    assert (radii > 10.0 * certified_radius(logits, lipschitz_bound(model, domain))).all()
    double = model.double()
    for image, radius, label in zip(images.double(), radii, logits.argmax(1), strict=True):
        margin = lambda x, label=label: double(x)[:, label] - double(x)  # noqa: E731
        center = margin(image[None])
        moved = farthest(margin, image[None], radius.item())
        assert moved < center.sort(1).values[0, 1] * math.sqrt(5)
        assert double((image + radius * torch.randn_like(image) / 40)[None]).argmax() == label


def test_allowed_motion_is_where_the_nearest_class_takes_over():
    torch.manual_seed(0)
    weight, features = torch.randn(5, 7).double(), torch.randn(3, 7).double()
    logits = features @ weight.T
    allowed = local.allowed_motion(logits, weight)
    for row, (z, distance) in enumerate(zip(logits, allowed, strict=True)):
        best = z.argmax()
        directions = weight - weight[best]
        directions = directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-9)
        before = (features[row] + 0.999 * distance * directions) @ weight.T
        after = (features[row] + 1.001 * distance * directions) @ weight.T
        assert (before.argmax(1) == best).all() and not (after.argmax(1) == best).all()
    assert local.allowed_motion(torch.tensor([[1.0, 1.0]]), torch.eye(2)).item() == 0.0


def test_what_the_proof_does_not_cover_is_refused():
    images = torch.zeros(1, 3, 32, 32)
    for name, options in [
        ("lipsformer_vit_tiny", {"img_size": 32}),
        ("lipsformer_nano", {"attn": "lipschitznorm"}),
        ("lipsformer_nano", {"global_pool": "max"}),
    ]:
        if name in timm.list_models(name):
            model = timm.create_model(name, **options)
            with pytest.raises(UnknownModuleError, match="local bound"):
                local.local_certificates(model, images)
