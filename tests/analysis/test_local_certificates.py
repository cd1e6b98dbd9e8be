"""Local certificates: no search inside a ball leaves the ball that was proved for the outputs."""

import copy
import itertools
import math
from typing import Any

import pytest
import timm
import torch
from timm.layers import LayerScale, Mlp
from torch import Tensor, nn

import lipsformer
from lipsformer.analysis import local_attention, local_layers
from lipsformer.analysis import local_certificates as local
from lipsformer.analysis.bounds import (
    Domain,
    UnknownModuleError,
    bound_rule,
    compose,
    core,
    lipschitz_bound,
    simple_bound,
)
from lipsformer.analysis.bounds.layers import GELU_BOUND, depthwise_sigma_bounds
from lipsformer.analysis.certificates import certified_radius, local_bounds, watch_norms
from lipsformer.analysis.local_attention import LocalAttention
from lipsformer.analysis.local_layers import attention_layer
from lipsformer.analysis.local_norms import probed_sigma_bound
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


def test_balls_and_losses_are_exact_for_a_chain_of_parabolas():
    """x -> n x + c x^2 / 2 of positive numbers, whose states are the centers of all bounds."""
    norms, curves = [1.5, 0.5, 3.0, 2.0, 0.25], [0.3, 2.0, 0.0, 0.7, 1.0]
    inf = torch.full((2,), math.inf, dtype=torch.float64)

    def layer(n: float, c: float) -> local_layers.Layer:
        return local_layers.Layer(
            nn.Identity(), inf, torch.full_like(inf, n), lambda r: 0.5 * c * r, inf
        )

    layers = [layer(n, c) for n, c in zip(norms, curves, strict=True)]
    x = torch.tensor([0.1, 0.4], dtype=torch.float64)
    states = [x]
    for n, c in zip(norms, curves, strict=True):
        states.append(n * states[-1] + 0.5 * c * states[-1] ** 2)
    remainders = [0.5 * c * y**2 for c, y in zip(curves, states, strict=False)]
    slopes = torch.tensor([math.prod(norms[k:]) for k in range(6)], dtype=torch.float64)
    lengths = 7.0 * slopes[:, None, None].expand(6, 2, 1)
    # Layers 2 and 3 are one segment, and the state between layers 3 and 4 is the second anchor.
    for cuts in ((0, 1, 3, 4, 5), (0, 2, 5), (0, 5)):
        for known in (False, True):  # whether the norms of several layers are known
            segments, first = [], 0
            for start, end in itertools.pairwise(cuts):
                anchor = start in (0, 3)
                first = start if anchor else first
                norm, prefix = (
                    torch.full_like(inf, math.prod(norms[a:end])) if known else inf
                    for a in (start, first)
                )
                segments.append(local.Segment(layers[start:end], norm, prefix, anchor))
            found, rest = local.balls(segments, x)
            torch.testing.assert_close(found, torch.stack(states))
            torch.testing.assert_close(rest, torch.stack(remainders))
            lost = local.losses(lengths, found, rest)
            torch.testing.assert_close(lost, 7.0 * states[-1][:, None].expand(6, 2, 1))


def test_the_search_for_a_radius_returns_one_that_holds():
    limits = torch.tensor([0.3, 1e-20, 0.0, 0.999, 7.0], dtype=torch.float64)
    high = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    found = local._largest(lambda radius: radius <= limits, high)
    assert (found <= limits).all()
    assert (found >= 0.98 * limits.minimum(high)).all()
    assert not local._largest(lambda radius: radius < 0.0, high).any()


def test_layers_without_attention_change_as_theorem_27_says(monkeypatch):
    """Term by term and with exact norms."""
    monkeypatch.setattr(local_layers, "gram_sigma_bound", spectral)
    block = trained("cswin").stages[0].blocks[0]
    x = torch.randn(1, 5, 5, 8, dtype=torch.float64)
    radius = torch.tensor([0.3], dtype=torch.float64)
    c, slope = math.sqrt(2.0 / math.pi), GELU_BOUND

    norm, alpha = block.norm2, block.mlp.residual_scale
    outer = torch.func.jacrev(norm)(x[0, 0, 0])
    first = block.mlp.branch.fc1.weight
    last = outer @ alpha.diag() @ block.mlp.branch.fc2.weight
    layer = local_layers.mlp_layer(block.mlp, norm, x)
    curved = 0.5 * c * radius * spectral(last @ first.norm(dim=1).diag()) * spectral(first)
    torch.testing.assert_close(layer.drift(radius), curved)
    most = (2 * slope - 1) * spectral(last) * spectral(first)
    torch.testing.assert_close(layer.drift(1e9 * radius), most[None])
    widest = spectral(outer) + slope * spectral(last) * spectral(first)
    torch.testing.assert_close(layer.widest, widest[None])
    tokens = torch.func.vmap(torch.func.jacrev(layer.function))(x.reshape(25, 8))
    torch.testing.assert_close(layer.norm, spectral(tokens).amax()[None])

    for residual in (block.conv1, block.conv2):
        residual.residual_scale.data[::2] *= -2.0
        branch, alpha = residual.branch, residual.residual_scale
        kernel = branch.depthwise.weight
        sigma, reach = depthwise_sigma_bounds(kernel, (5, 5)), kernel.flatten(1).norm(dim=1)
        exact = spectral(torch.func.jacrev(residual)(x).reshape(200, 200))
        layer = local_layers.conv_layer(residual, x)
        if branch.pointwise is None:
            curved = c * (alpha * reach * sigma).abs().max()
            widest = 1.0 + slope * (alpha * sigma).abs().max()
            torch.testing.assert_close(layer.norm, exact[None])  # channel by channel
        else:
            weight = branch.pointwise.weight
            scaled, rows = alpha.diag() @ weight, weight.norm(dim=1).diag()
            curved = slope * reach.max() * spectral(rows @ scaled @ sigma.diag())
            curved = c * slope * (curved + spectral(scaled @ (reach * sigma).diag()))
            widest = 1.0 + slope**2 * spectral(scaled @ sigma.diag())
            hidden = branch.depthwise(x).reshape(25, 8)
            tokens = torch.func.vmap(
                torch.func.jacrev(
                    lambda h, w=branch.pointwise: torch.nn.functional.gelu(
                        w(torch.nn.functional.gelu(h))
                    )
                )
            )(hidden)
            largest = spectral(alpha[:, None] * tokens * sigma).amax()
            torch.testing.assert_close(layer.norm, 1.0 + largest[None])
            assert exact <= layer.norm
        torch.testing.assert_close(layer.drift(radius), 0.5 * curved[None] * radius)
        torch.testing.assert_close(layer.widest, widest[None])


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


@pytest.mark.parametrize("raw", [False, True])
def test_the_curvature_of_attention_is_that_of_theorem_28(monkeypatch, raw):
    """Term by term and with exact norms, because a search rarely comes near the bound."""
    monkeypatch.setattr(local_attention, "gram_sigma_bound", spectral)
    torch.manual_seed(2)
    heads, count, dim = 2, 5, 3
    nu = None if raw else 1.75
    core = ScaledCosineAttention(heads, logit_scale=3.0, value_scale=nu).double()
    weight = torch.randn(3, heads, dim, 11, dtype=torch.float64)
    bias = torch.randn(1, heads, count, count, dtype=torch.float64)
    real = torch.ones(2, 1, count, dtype=torch.float64)
    real[1, 0, 3:] = 0.0  # the second window is padded
    qkv = 3.0 * torch.randn(3, 2, heads, count, dim, dtype=torch.float64) * real[..., None]
    qkv[:, 0, :, 0] *= 0.1  # a short token
    measured = LocalAttention(core, qkv, bias, real, weight)
    for w in range(2):
        mask = real[w, 0][:, None]

        def moved(x: Tensor, w=w, mask=mask) -> Tensor:
            shift = torch.einsum("phdc,nc->phnd", weight, x) * mask
            return core(*(qkv[:, w] + shift)[:, None], bias)[0] * mask

        jacobian = torch.func.jacrev(moved)(torch.zeros(count, 11, dtype=torch.float64))
        torch.testing.assert_close(measured.norm[w], spectral(jacobian.reshape(heads, 15, 55)))
    for radius in (0.0, 1e-3, 0.1, 3.0):
        found = measured.curvature(torch.full((2, 1), radius, dtype=torch.float64))
        for w in range(2):
            for h in range(heads):
                expected = theorem_28(
                    qkv[:, w, h], weight[:, h], bias[0, h], real[w, 0] > 0.0, 3.0, nu, radius
                )
                assert found[w, h].item() == pytest.approx(expected, rel=1e-9)
    if not raw:  # theorem 10, with column sums of at most N
        q, k, v = spectral(weight)
        widest = 1.75 * 1e-2**-0.5 * (3.0 * (q + (count / 2) ** 0.5 * k) + count**0.5 * v)
        torch.testing.assert_close(measured.widest(), widest)


def spectral(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices, 2)


def theorem_28(
    qkv: Tensor,
    weight: Tensor,
    bias: Tensor,
    real: Tensor,
    tau: float,
    nu: float | None,
    rho: float,
) -> float:
    """Return the bound of the second derivative of one head in one window, with its letters.

    Args:
        qkv: Queries, keys and values before their normalization, [3, N, d]; zero for padding.
        weight: The projections, [3, d, C].
        bias: [N, N].
        real: False for padding, [N].
        tau: Factor of the cosines.
        nu: Length of the values; None leaves them as they are.
        rho: Radius of the ball.
    """
    tokens = [i for i, is_real in enumerate(real.tolist()) if is_real]
    unit, steep, turn, moved, maps = [], [], [], [], []
    for x, w, length in zip(qkv, weight, (1.0, 1.0, nu), strict=True):
        norm = spectral(w).item()
        maps.append({})
        if length is None:
            unit.append(x)
            maps[-1] = dict.fromkeys(tokens, w)
            turn.append(dict.fromkeys(tokens, 0.0))
            moved.append(rho * norm)
        else:
            roots = (x.square().sum(1) + 1e-2).sqrt()
            unit.append(length * x / roots[:, None])
            nearest = {}
            for i in tokens:
                eye = torch.eye(len(x[i]), dtype=x.dtype)
                maps[-1][i] = length * (eye / roots[i] - x[i].outer(x[i]) / roots[i] ** 3) @ w
                nearest[i] = math.hypot(max(x[i].norm().item() - rho * norm, 0.0), 0.1)
            turn.append({i: 2 / 3**0.5 * norm**2 * length / nearest[i] ** 2 for i in tokens})
            moved.append(min(2.0 * length, length * rho * norm / min(nearest.values())))
        steep.append({i: spectral(maps[-1][i]).item() + rho * turn[-1][i] for i in tokens})
    (q, k, v), (turn_q, turn_k, turn_v) = unit, turn
    (steep_q, steep_k, steep_v), (m_q, m_k, m_v) = steep, moved
    a = (tau * q @ k.T + bias).softmax(1)
    grown = math.exp(tau * (m_q + m_k))
    spread_k, spread_v, by_query = {}, {}, []
    for i in tokens:
        at_center = a[i].sqrt()[:, None] * (k - a[i] @ k)
        deviation = spectral(at_center).item()
        spread_k[i] = min(1.0, grown * deviation + m_k)
        values = spectral(a[i].sqrt()[:, None] * (v - a[i] @ v)).item()
        spread_v[i] = min(nu or math.inf, grown * values + m_v)
        own = spectral(at_center @ maps[0][i]).item() + deviation * rho * turn_q[i]
        by_query.append(grown * own + m_k * steep_q[i])
    by_key = torch.stack([(q @ maps[1][j]).norm(dim=1) for j in tokens], 1)  # at the center
    more = torch.tensor([m_q * steep_k[j] + rho * turn_k[j] for j in tokens], dtype=q.dtype)
    a = a[tokens][:, tokens]
    by_key = a.sqrt() * by_key[tokens]
    diameter = max((v[i] - v[j]).norm().item() for i in range(len(v)) for j in range(len(v)))
    steep_k_of, steep_v_of, turn_k_of, turn_v_of = (
        torch.tensor([of[j] for j in tokens], dtype=q.dtype)
        for of in (steep_k, steep_v, turn_k, turn_v)
    )
    largest, column, square = a.amax(0).sqrt(), a.sum(0).sqrt(), a.norm(dim=0)
    V = diameter + 2.0 * m_v
    A = tau * max(by_query)
    B = tau * grown * (by_key.max() + (largest * more).max()).item()
    B_ = tau * grown * (by_key.norm(dim=0).max() + (column * more).max()).item()
    E = tau * max(spread_v[i] * steep_q[i] for i in tokens)
    E *= grown * (largest * steep_k_of).max().item()
    F = grown * (largest * steep_v_of).max().item()
    F_ = grown * (column * steep_v_of).max().item()
    T = tau * max(spread_v[i] * spread_k[i] * turn_q[i] for i in tokens)
    T += tau * V * grown**2 * (square * turn_k_of).max().item()
    T += grown**2 * (square * turn_v_of).max().item()
    return V * (A**2 + 2 * A * B + B * B_) + 2 * (E + A * F + min(F * B_, F_ * B)) + T


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


@pytest.mark.parametrize(
    "path",
    [
        "",
        "patch_embed",
        "stages",
        "stages.0",
        "stages.0.downsample",
        "stages.0.blocks",
        "stages.0.blocks.0",
        "stages.1.downsample",
        "head",
        "head.global_pool",
        "head.fc",
    ],
)
def test_a_subclass_with_a_rule_of_its_own_is_not_taken_for_its_base(path, monkeypatch):
    """A user may register the bound of a subclass that computes something else."""
    model = trained("swin")
    part = model.get_submodule(path)
    base = type(part)

    class Tripled(base):
        def forward(self, x):
            return 3.0 * super().forward(x)

    def bound_of_tripled(module, domain, scale):
        bound = core.registration_of(base).bound(module, domain, scale)
        return compose(bound, simple_bound(3.0, bound.output, radius=3.0 * bound.output.radius))

    monkeypatch.setattr(core, "_REGISTERED", dict(core._REGISTERED))
    bound_rule(Tripled)(bound_of_tripled)
    part.__class__ = Tripled
    lipschitz_bound(model, Domain(size=(20, 20)))
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
