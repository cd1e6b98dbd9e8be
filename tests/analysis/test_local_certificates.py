"""Local certificates: no search inside a ball leaves the ball that was proved for the outputs."""

import copy
import math
from typing import Any

import pytest
import timm
import torch
from timm.layers import LayerScale, Mlp
from torch import Tensor, nn

import lipsformer
from lipsformer.analysis import local_certificates as local
from lipsformer.analysis import local_layers, local_norms
from lipsformer.analysis.bounds import Domain, UnknownModuleError, lipschitz_bound
from lipsformer.analysis.certificates import certified_radius, local_bounds, watch_norms
from lipsformer.analysis.local_attention import LocalAttention
from lipsformer.analysis.local_layers import attention_layer
from lipsformer.analysis.local_norms import (
    gram_sigma_bound,
    jacobian_sigma_bound,
    largest_sigma_bound,
    missed_share,
    probed_sigma_bound,
)
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
    return model


def test_norms_are_bounded_from_above(monkeypatch):
    torch.manual_seed(0)
    flat = torch.linalg.qr(torch.randn(11, 11, dtype=torch.float64)).Q
    for matrices in (torch.randn(7, 5, 13, dtype=torch.float64), flat[None], torch.zeros(1, 3, 2)):
        exact = torch.linalg.matrix_norm(matrices.double(), 2)
        for limit in (64, 2):  # Gram iteration, and Cholesky
            monkeypatch.setattr(local_norms, "MAX_ITERATED", limit)
            found = gram_sigma_bound(matrices.double())
            assert (found >= exact * (1 - 1e-12)).all() and (found <= 1.04 * exact + 1e-9).all()


def test_the_largest_norm_needs_few_channels():
    """It is that of all channels, whichever of them the first bounds let pass."""
    torch.manual_seed(0)
    matrices = torch.randn(3, 11, 5, 7, dtype=torch.float64)
    all_norms, measured = gram_sigma_bound(matrices), []

    def channels(chosen: Tensor) -> Tensor:
        measured.append(chosen)
        return matrices[torch.arange(3), chosen]

    above = all_norms * (1.0 + 0.2 * torch.rand(3, 11, dtype=torch.float64))
    assert torch.equal(largest_sigma_bound(channels, above), all_norms.amax(1))
    assert len(measured) < 11


def test_probes_bound_jacobians_with_the_stated_probability(monkeypatch):
    """The bound fails as often as it may at the spectrum that is worst for it, and no more."""
    torch.manual_seed(0)
    size = 41
    for steps, least in ((1, 0.07), (3, 0.01)):
        monkeypatch.setattr(local_norms, "LANCZOS_STEPS", steps)
        share = missed_share(steps, size, 0.1)
        angles = (2 * torch.arange(size - 1) % (2 * steps) + 1) * math.pi / (4 * steps - 2)
        values = torch.cat((torch.ones(1), math.sqrt(1.0 - share) * angles.cos())).double()
        x = torch.zeros(4000, size, dtype=torch.float64)
        wrong = (probed_sigma_bound(lambda x, v=values: x * v, x, 0.1) < 1.0).double().mean()
        assert least < wrong < 0.12  # four standard deviations
    monkeypatch.undo()
    matrix = torch.randn(7, 5, dtype=torch.float64)
    found = probed_sigma_bound(lambda x: (x @ matrix.T).sin(), torch.zeros(1, 5).double(), 1e-9)
    exact = torch.linalg.matrix_norm(matrix, 2)
    torch.testing.assert_close(
        jacobian_sigma_bound(lambda x: (x @ matrix.T).sin(), 0 * x[:1, :1].expand(1, 5)),
        exact[None],
        rtol=0.04,
        atol=0.0,
    )
    assert exact < found < 1.3 * exact


def farthest(f, x: Tensor, radius: float, steps: int = 4) -> float:
    """Search for the point of a ball where |f| is largest."""
    best = 0.0
    for start in (torch.randn_like(x), -x):
        move = radius * start / start.norm()
        for _ in range(steps):
            move.requires_grad_(True)
            length = f(x + move).norm()
            best = max(best, length.item())
            (gradient,) = torch.autograd.grad(length, move)
            gradient = gradient / gradient.norm().clamp_min(1e-30)
            move = (move + 0.7 * radius * gradient).detach()
            move = move * min(1.0, radius / move.norm().item())
    return best


@pytest.mark.parametrize("name", BODIES)
def test_no_layer_leaves_its_ball_or_its_linear_approximation(name):
    """Every layer, at radii from the smallest to beyond the lengths of the tokens."""
    model = trained(name)
    images = torch.randn(1, 3, 20, 20, dtype=torch.float64)
    with torch.no_grad():
        segments = local.segments(model, images, 0.0)
    x, motions, remainders = images, [], []
    for layer in [layer for segment in segments for layer in segment.layers]:
        center = layer.function(x)
        torch.testing.assert_close(center, layer.output)
        for radius in (1e-2, 1.0):
            with torch.no_grad():
                drift = layer.drift(torch.tensor([radius], dtype=torch.float64))
                steep = torch.minimum(layer.norm + drift, layer.widest).item() * radius
                apart = torch.minimum(layer.norm + layer.widest, drift).item() * radius
            moved = farthest(lambda y, f=layer.function, c=center: f(y) - c, x, radius)
            bent = farthest(
                lambda y, f=layer.function, x=x: f(y) - sum(torch.func.jvp(f, (x,), (y - x,))),
                x,
                radius,
            )
            assert moved <= steep * (1 + 1e-9) and bent <= apart * (1 + 1e-9) + 1e-12
            motions.append(moved / steep)
            remainders.append(bent / max(apart, 1e-12))
        x = layer.output
    assert max(motions) > 0.7 and max(remainders) > 0.05


@pytest.mark.parametrize("failure", [0.0, 1e-12])
def test_no_state_of_the_model_leaves_its_ball(failure, monkeypatch):
    monkeypatch.setattr(local, "MAX_WRITTEN_OUT_NUMBERS", 100 if failure else 2048)
    model = trained("cswin")
    images = torch.randn(1, 3, 20, 20, dtype=torch.float64)
    with torch.no_grad():
        segments = local.segments(model, images, failure)
        assert any(segment.norm.isfinite() for segment in segments)
        assert any(segment.prefix.isfinite() for segment in segments) == (failure > 0.0)
        layers = [layer for segment in segments for layer in segment.layers]
    for radius in (1e-5, 1e-2):
        radii = local.balls(segments, torch.tensor([radius], dtype=torch.float64))[0].detach()

        def states(y: Tensor, radii=radii) -> Tensor:
            shares = []
            for layer, ball in zip(layers, radii[1:], strict=True):
                y = layer.function(y)
                shares.append((y - layer.output).norm() / ball)
            return torch.cat(shares).max()

        assert farthest(states, images, radius) <= 1 + 1e-9


def head(core: ScaledCosineAttention, weight: Tensor, bias: Tensor, lepe: Tensor | None) -> Any:
    """Return an attention of tokens [6, C] in a window of 3 x 2, head by head."""

    def function(x: Tensor) -> Tensor:
        qkv = torch.einsum("phdc,nc->phnd", weight, x)
        out = core(*qkv[:, None], bias)[0]
        if lepe is not None:
            values = qkv[2].mT.reshape(1, -1, 3, 2)
            local = torch.nn.functional.conv2d(values, lepe, padding=1, groups=len(lepe))
            out = out + local.reshape(len(out), -1, 6).mT
        return out

    return function


@pytest.mark.parametrize("raw", [False, True])
def test_attention_matches_exact_first_and_second_derivatives(raw):
    """The norm is that of the exact Jacobian; no exact Hessian in the ball exceeds its bound."""
    torch.manual_seed(1)
    value_scale = None if raw else 1.7
    core = ScaledCosineAttention(2, logit_scale=7.0, value_scale=value_scale).double()
    weight = torch.randn(3, 2, 3, 4, dtype=torch.float64)
    lepe = torch.randn(6, 1, 3, 3, dtype=torch.float64) if raw else None
    bias = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    x = torch.randn(6, 4, dtype=torch.float64)
    x[1] *= 0.05  # a short token, near which the normalization is steep
    function = head(core, weight, bias, lepe)
    qkv = torch.einsum("phdc,nc->phnd", weight, x)[:, None]
    real = torch.ones(1, 1, 6, dtype=torch.float64)
    measured = LocalAttention(core, qkv, bias, real, weight, lepe, (3, 2))
    exact = torch.func.jacrev(function)(x).reshape(2, 18, 24)
    torch.testing.assert_close(
        measured.norm[0], torch.linalg.matrix_norm(exact, 2), rtol=0.04, atol=0.0
    )
    for radius in (0.0, 0.02, 0.2):
        bound = measured.curvature(torch.tensor([[radius]], dtype=torch.float64))[0]
        for trial in range(2):
            move = torch.randn_like(x) if trial else -x
            inside = x + radius * move / move.norm()
            hessian = torch.func.jacrev(torch.func.jacrev(function))(inside)
            for tensor, limit in zip(hessian.reshape(2, 18, 24, 24), bound, strict=True):
                assert trilinear_norm(tensor) <= limit * (1 + 1e-9)


def trilinear_norm(tensor: Tensor) -> float:
    """Search for the largest value of a trilinear form at unit vectors."""
    best = 0.0
    for row in tensor.flatten(1).norm(dim=1).topk(3).indices:
        u = torch.linalg.eigh(tensor[row]).eigenvectors[:, -1]
        for _ in range(15):
            left, _, right = torch.linalg.svd(tensor @ u)
            best = max(best, (left[:, 0] @ (tensor @ u) @ right[0]).abs().item())
            u = right[0]
    return best


@pytest.mark.parametrize(
    ("name", "failure"), [("swin", 0.0), pytest.param("cswin", 1e-12, marks=pytest.mark.slow)]
)
def test_certificates_beat_the_global_ones_and_no_image_falls(name, failure):
    model = trained(name).float()
    images = torch.randn(3, 3, 20, 20)
    logits, radii = local.local_certificates(model, images, failure)
    torch.testing.assert_close(logits, model(images).double(), atol=1e-4, rtol=1e-4)
    domain = Domain(size=(20, 20), radius=float(images.norm(dim=1).max()))
    assert (radii > 100.0 * certified_radius(logits, lipschitz_bound(model, domain))).all()
    double = model.double()
    for image, radius, logit in zip(images.double(), radii, logits, strict=True):
        label = logit.argmax()
        margins = (logit[label] - logit)[logit.argsort()[:-1]]
        for other, margin in zip(logit.argsort()[:-1], margins, strict=True):
            change = lambda x, i=label, j=other, z=logit: (  # noqa: E731
                (double(x)[:, i] - double(x)[:, j]) - (z[i] - z[j])
            )
            assert farthest(change, image[None], radius.item()) < margin


def test_the_units_of_the_logits_do_not_change_a_distance():
    model, images = trained("swin"), torch.randn(1, 3, 20, 20)
    distance = local.local_certificates(model, images)[1]
    for parameter in model.head.fc.parameters():
        parameter.data.mul_(2.0**-40)  # exactly, like all margins and gradients
    assert local.local_certificates(model, images)[1] == distance > 2.0**-30


def test_gradients_are_those_of_the_margins():
    model = trained("cswin")
    images = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    segments = local.segments(model, images, 0.0)
    layers = [layer for segment in segments for layer in segment.layers]
    logits, lengths = local.gradients(layers, images, model.head.fc)
    weight = model.head.fc.weight
    for b, i in enumerate(logits.argmax(1)):
        torch.testing.assert_close(lengths[-1, b], (weight[i] - weight).norm(dim=1))
        jacobian = torch.func.jacrev(model)(images[b : b + 1]).reshape(5, -1)
        torch.testing.assert_close(lengths[0, b], (jacobian[i] - jacobian).norm(dim=1))


def test_what_the_proof_does_not_cover_is_refused():
    images = torch.zeros(1, 3, 32, 32)
    for name, options in [
        ("lipsformer_vit_tiny", {"img_size": 32}),
        ("lipsformer_nano", {"attn": "lipschitznorm"}),
        ("lipsformer_nano", {"global_pool": "max"}),
        ("lipsformer_nano", {"stem": "conv"}),
    ]:
        model = timm.create_model(name, **options)
        with pytest.raises(UnknownModuleError, match="local bound"):
            local.local_certificates(model, images)


def scaled(**values):
    core = ScaledCosineAttention(1)
    core.value_scale.fill_(values.get("nu", 1.0))
    core.init_logit_scale = values.get("tau", 1.0)
    return core


# Parts that have a global bound, and where they are put into the model.
REPLACED: dict[str, tuple[str, Any]] = {
    "a norm that stretches": ("stages.0.blocks.0.norm2", lambda: LayerScale(8, 5.0)),
    "the last norm": ("norm", lambda: LayerScale(16, 5.0)),
    "a step before the classifier": ("head.drop", torch.nn.ReLU),
    "patches that overlap": ("patch_embed.proj", lambda: torch.nn.Conv2d(3, 8, 4, 2, 1)),
    "another MLP": ("stages.0.blocks.0.mlp.branch", lambda: Mlp(8, 32, act_layer=torch.nn.ReLU)),
    "tau < 0": ("stages.0.blocks.0.attn.branch.attention", lambda: scaled(tau=-9.0)),
    "nu < 0": ("stages.0.blocks.0.attn.branch.attention", lambda: scaled(nu=-1.0)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_parts_are_refused(name):
    model, (path, make) = trained("swin"), REPLACED[name]
    model.set_submodule(path, make())
    lipschitz_bound(model.double().eval(), Domain(size=(20, 20)))
    with pytest.raises(UnknownModuleError):
        local.local_certificates(model, torch.zeros(1, 3, 20, 20))


def test_a_negative_factor_of_the_stripes_counts_by_its_size():
    x = torch.randn(1, 3, 3, 8, dtype=torch.float64)
    block = trained("cswin").stages[0].blocks[0]
    layer = attention_layer(block.attn, block.norm1, x)
    block.attn.branch.attn_factor = -1.0
    assert attention_layer(block.attn, block.norm1, x).norm == layer.norm > 0.0


def test_a_factor_that_the_attention_does_not_read_changes_no_certificate():
    model, images = trained("swin"), torch.zeros(1, 3, 20, 20)
    before = local.local_certificates(model, images)[1].item()
    for block in (block for stage in model.stages for block in stage.blocks):
        block.attn.branch.attn_factor = 1e-6
    assert local.local_certificates(model, images)[1].item() == before > 0.0


def test_the_squares_of_tiny_entries_do_not_vanish():
    assert (
        2e-200
        <= gram_sigma_bound(torch.full((1, 2, 2), 1e-200, dtype=torch.float64)).item()
        < 2.1e-200
    )


def test_a_tie_has_no_certificate():
    model = trained("swin")
    with torch.no_grad():
        model.head.fc.weight[1] = model.head.fc.weight[0]
        model.head.fc.bias[:] = torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0])
    assert math.isclose(local.local_certificates(model, torch.zeros(1, 3, 20, 20))[1].item(), 0.0)


@pytest.mark.parametrize("failure", [-1e-12, 1.0, math.nan])
def test_a_failure_outside_its_range_is_refused(failure):
    with pytest.raises(ValueError, match=rf"failure={failure} must be in \[0, 1\)"):
        local.local_certificates(trained("swin", size=8), torch.randn(1, 3, 8, 8), failure)


def test_autocast_takes_no_precision_from_the_probes(monkeypatch):
    norms: list[Tensor] = []

    def probe(*args: Any) -> Tensor:
        norms.append(probed_sigma_bound(*args))
        return norms[-1]

    monkeypatch.setattr(local, "probed_sigma_bound", probe)
    model, images = trained("swin", size=8), torch.randn(2, 3, 8, 8)
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            local.local_certificates(model, images, failure=1e-6)
    plain, cast = torch.stack(norms).chunk(2)
    torch.testing.assert_close(cast, plain, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scale", [1e-25, 1e-22, 1e22])
def test_probes_of_tiny_and_huge_jacobians(scale):
    torch.manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(128, 128))
    values = torch.full((128,), 0.1)
    values[0] = 1.0
    matrix = (basis * values) @ basis.T * scale
    bound = probed_sigma_bound(lambda x: x @ matrix, torch.randn(3, 128), 1e-12)
    assert (bound >= scale).all()
    assert (bound <= 1.3 * scale).all()


def test_the_ball_of_a_converted_block_reaches_its_second_branch():
    """x + f(x) moves by up to (1 + Lip f) times as much as x, and its MLP sees that."""
    torch.manual_seed(0)
    small = {"img_size": 4, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
    small |= {"num_classes": 3, "class_token": False, "global_pool": "avg", "mlp_ratio": 1}
    model = timm.create_model("vit_tiny_patch16_224", **small)
    model = lipsformer.convert(model, residual_scale=1.0).eval().double()
    block, radius = model.blocks[0], 1e-3
    around = {"ball": radius, "centers": {block.mlp.fc1: 0.0}}
    domain = Domain(size=(1,), radius=1.0, norm=1.0, error=0.0, channels=8, **around)
    bound = lipschitz_bound(block, domain).parts["mlp"].parts["fc1"].input.norm

    def before_fc1(x):
        return block.norm2(x + block.attn(block.norm1(x)))

    jacobian = torch.func.jacrev(before_fc1)(torch.zeros(1, 1, 8).double()).reshape(8, 8)
    direction = torch.linalg.svd(jacobian)[2][0].reshape(1, 1, 8)
    moved = before_fc1(radius * direction) - before_fc1(torch.zeros(1, 1, 8).double())
    assert radius * 2 < moved.norm().item() <= bound


def test_a_module_that_is_called_twice_is_bounded_without_its_norms():
    torch.manual_seed(0)
    shared = nn.Linear(7, 7)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), shared, nn.ReLU(), shared, nn.Linear(7, 3))
    bound = lipschitz_bound(net, Domain(size=(), radius=9.0, norm=9.0, error=0.0))
    exact = copy.deepcopy(net).double()
    norms = watch_norms(exact)
    exact(torch.randn(3, 5).double())
    largest, _, bounds = local_bounds(net, bound, norms, torch.full((3,), 0.1))
    assert set(largest) == {"", "0", "5"}
    assert all(b.value <= bound.value * (1 + 1e-9) for b in bounds.values())


def test_the_probabilities_of_all_probes_add_up_to_the_stated_one(monkeypatch):
    failures = []

    def probed(function, x, failure):
        failures.append(failure)
        return probed_sigma_bound(function, x, failure)

    for module in (local, local_layers):
        monkeypatch.setattr(module, "probed_sigma_bound", probed)
    local.local_certificates(trained("swin"), torch.randn(2, 3, 20, 20), 1e-6)
    assert len(failures) > 3
    assert sum(failures) <= 1e-6 * (1 + 1e-9)
