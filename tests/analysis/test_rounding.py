"""Bounds against balls of 200 bits, and the error of the float32 program against its bound."""

import math

import pytest
import timm
import torch
from flint import acb_mat, arb, arb_mat, ctx
from torch import nn

from lipsformer.analysis.bounds import Domain, image_domain, lipschitz_bound, rounding
from lipsformer.analysis.bounds.attention import EXP_ERROR, core_rounding
from lipsformer.analysis.bounds.layers import (
    GELU_BOUND,
    GELU_ERROR,
    center_norm_sigma_bound,
    conv_bound,
    depthwise_sigma_bounds,
)
from lipsformer.analysis.bounds.rounding import abs_sigma_bound, eigenvalue_bound, sigma_bound
from lipsformer.kernels.pointwise import gelu_residual_forward
from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    ScaledCosineAttention,
    WeightedResidual,
    largest_singular_value,
)
from lipsformer.models.lipsformer import Mlp
from lipsformer.models.lipsformer_swin import WindowAttention


@pytest.fixture(autouse=True)
def _precision():
    ctx.prec = 200
    yield
    ctx.prec = 53


def largest_sigma(rows: list[list]):
    """The largest singular value of a matrix of exact numbers, in 200 bits."""
    matrix = arb_mat(rows)
    tall = matrix.nrows() > matrix.ncols()
    gram = matrix.transpose() * matrix if tall else matrix * matrix.transpose()
    return max((v.real for v in acb_mat(gram).eig(multiple=True)), key=float).sqrt()


def ball_sigma(matrix: torch.Tensor):
    """An enclosure of the largest singular value of a float64 matrix, all of whose bits count."""
    scale = 2.0 ** round(math.log2(matrix.abs().max().item()))  # exact
    return largest_sigma((matrix.double() / scale).tolist()) * scale


def matrices() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    wide = torch.randn(7, 11).double()
    left, _, right = torch.linalg.svd(wide, full_matrices=False)
    return {
        "random": wide,
        "tall": torch.randn(13, 5).double(),
        "equal values": left @ right,
        "one third": torch.full((3, 5), 1.0 / 3.0).double(),
        "huge": 1e160 * wide,
        "tiny": 1e-160 * wide,
        "graded": left * 10.0 ** torch.arange(0.0, -7.0, -1.0).double() @ right,
        "rank one": wide[:, :1] @ wide[:1],
        "float32": torch.randn(6, 6),
    }


@pytest.mark.parametrize("name", matrices())
def test_sigma_bound_is_above_the_ball_and_next_to_it(name):
    matrix = matrices()[name]
    exact = ball_sigma(matrix)
    bound = sigma_bound(matrix.double()).item()
    assert arb(bound) >= exact
    assert arb(bound) <= exact * (1 + arb("1e-11"))
    assert arb(abs_sigma_bound(matrix.double())) >= ball_sigma(matrix.abs())
    assert sigma_bound(torch.zeros(3, 5).double()) == 0.0


def test_what_eigvalsh_alone_returns_is_sometimes_below_the_ball():
    torch.manual_seed(0)
    below = 0
    for _ in range(40):
        matrix = torch.randn(5, 7).double()
        exact = ball_sigma(matrix)
        below += bool(arb(largest_singular_value(matrix).item()) < exact)
        assert arb(sigma_bound(matrix).item()) >= exact
    assert below >= 5


def test_a_proposal_that_is_too_small_is_not_proved(monkeypatch):
    matrix = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).double()
    exact = ball_sigma(matrix)
    true = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda gram: 0.5 * true(gram))
    assert arb(sigma_bound(matrix).item()) >= exact


@pytest.mark.parametrize("gains", [[1.0, 1.0, 1.0], [3.0, -1.0, 0.5, 0.1, 2.9], [0.3] * 7])
def test_center_norm_is_above_the_ball(gains):
    dim = len(gains)
    centering = [
        [arb(g) * (arb(int(i == j)) - arb(1) / dim) * dim / (dim - 1) for j in range(dim)]
        for i, g in enumerate(gains)
    ]
    exact = largest_sigma(centering)
    bound = center_norm_sigma_bound(torch.tensor(gains, dtype=torch.float64))
    # Equal eigenvalues have no isolating balls, so this compares with 200 bits without enclosures.
    assert exact * (1 - arb("1e-40")) <= arb(bound) <= exact * (1 + arb("1e-11"))


def test_convolutions_are_above_the_balls():
    torch.manual_seed(0)
    kernel = torch.randn(3, 1, 3, 3).double()
    grid = conv_bound(kernel, groups=3, oversampling=4)
    dense = depthwise_sigma_bounds(kernel, (2, 3))
    for channel in range(3):
        taps = kernel[channel, 0].tolist()
        peak = arb(0)
        for f in range(12):  # the same grid of 12 x 12 frequencies
            for g in range(12):
                angles = [[arb(2 * (f * y + g * x)) / 12 for x in range(3)] for y in range(3)]
                pairs = [(taps[y][x], angles[y][x]) for y in range(3) for x in range(3)]
                real = sum((arb(w) * a.cos_pi() for w, a in pairs), arb(0))
                imag = sum((arb(w) * a.sin_pi() for w, a in pairs), arb(0))
                peak = peak.max((real * real + imag * imag).sqrt())
        excess = (arb(1) / (arb(2) / 24).cos_pi()) ** 2
        assert peak * excess <= arb(grid[channel].item()) <= peak * excess * (1 + arb("1e-11"))
        operator = [
            [
                arb(taps[v - y + 1][w - x + 1]) if abs(v - y) <= 1 and abs(w - x) <= 1 else arb(0)
                for v in range(2)
                for w in range(3)
            ]
            for y in range(2)
            for x in range(3)
        ]
        assert arb(dense[channel].item()) >= largest_sigma(operator)


def test_scalars_are_rounded_up():
    slope = (1 + arb(1).erf()) / 2 + (-arb(1)).exp() / arb.pi().sqrt()
    assert slope <= arb(GELU_BOUND) <= slope * (1 + arb("1e-12"))
    for value in (1e-300, 0.1, 1.0, 3.7, 1e200):
        assert arb(rounding.log10_of(value)) >= arb(value).log() / arb(10).log()
        assert arb(rounding.power_of_ten(rounding.log10_of(value))) >= arb(value)
    assert rounding.power_of_ten(-400.0) > rounding.power_of_ten(-math.inf) == 0.0
    for log10 in (-400.0, -17.0, -0.3, 0.0, 0.7, 40.0):
        exact = (1 + arb(10) ** arb(log10)).log() / arb(10).log()
        assert arb(rounding.log10_one_plus(log10)) >= exact
    logs = [0.1, -7.3, 80.1]
    assert arb(rounding.log10_product(logs)) >= sum((arb(log) for log in logs), arb(0))


def small(name: str, **kwargs) -> nn.Module:
    """A model with 5 classes and large random parameters."""
    model = timm.create_model(name, num_classes=5, **kwargs).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


SWIN = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 3)}
MODELS = {
    "swin": lambda: small("lipsformer_swin_nano", **SWIN, window_size=3, logit_scale=3.0),
    "swin, released": lambda: small("lipsformer_swin_nano", **SWIN, official_compat=True),
    "cswin": lambda: small(
        "lipsformer_nano", **SWIN | {"num_heads": (2, 4)}, split_sizes=(1, None)
    ),
    "LipschitzNorm": lambda: small("lipsformer_swin_nano", **SWIN, attn="lipschitznorm"),
    "vit": lambda: small("lipsformer_vit_tiny", img_size=16, patch_size=4, embed_dim=12, depth=1),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_float32_program_stays_within_its_error(name, path):
    torch.manual_seed(0)
    model = MODELS[name]()
    mean, std = (0.4, 0.5, 0.6), (0.5, 0.25, 0.3)
    bound = lipschitz_bound(model, image_domain((16, 16), mean, std))
    pixels = torch.rand(7, 3, 16, 16)
    pixels[:3] = pixels[:3].round()  # the longest inputs
    m, s = (torch.tensor(x)[:, None, None] for x in (mean, std))
    with torch.no_grad():
        computed = model((pixels * 255.0 - m * 255.0) / (s * 255.0)).double()
        m, s = (torch.tensor(x).double()[:, None, None] for x in (mean, std))
        exact = model.double()((pixels.double() - m) / s)
    error = (computed - exact).norm(dim=1).max().item()
    assert 0.0 < error <= bound.output.error < math.inf
    assert exact.norm(dim=1).max().item() <= bound.output.norm


@pytest.mark.parametrize("order", ["positive", "canceling"])
def test_sums_reach_a_good_part_of_their_error(order):
    """All roundings of a sum of equal terms point in one direction."""
    terms = 4096
    layer = Linear(terms, 1)
    with torch.no_grad():
        layer.weight.fill_(1.0 + 2.0**-23)
        layer.bias.fill_(0.0)
        if order == "canceling":
            layer.weight[0, ::2] *= -1.0
    x = torch.full((1, 1, terms), 1.0 + 2.0**-23)
    bound = lipschitz_bound(layer, Domain(size=(1,), radius=70.0, norm=70.0, error=0.0))
    sequential = torch.zeros(())
    for weight, value in zip(layer.weight[0], x[0, 0], strict=True):
        sequential = sequential + weight.detach() * value
    exact = (layer.weight[0].double() * x[0, 0].double()).sum()
    for computed in (layer(x).flatten(), sequential):
        assert abs(computed.item() - exact.item()) <= bound.output.error


def test_errors_that_nothing_bounds_are_infinite():
    assert lipschitz_bound(nn.GELU(), Domain(size=(7,))).output.error == math.inf
    known = Domain(size=(4, 4), radius=1.0, norm=4.0, error=0.0)
    for layer in (nn.GELU(), CenterNorm(5), DepthwiseConv2d(5, 3), Linear(5, 7)):
        assert 0.0 < lipschitz_bound(layer, known).output.error < 1e-4
    assert core_rounding(1e6, 49, 32, 0.0) == math.inf


def overflowing(name: str) -> nn.Module:
    """A module that overflows in float32, though its exact outputs are finite."""
    if name == "head":
        layer: nn.Module = Linear(8, 8)
        layer.weight.data.fill_(1e38)
        return layer
    branch = Mlp(8, 8)
    branch.fc1.weight.data.fill_(1e38)
    branch.fc2.weight.data.mul_(1e-38)
    if name == "attention":
        branch = WindowAttention(8, 2, 2, ScaledCosineAttention(2))
        branch.qkv.weight.data.fill_(1e38)
    return WeightedResidual(branch, 8, 0.0 if name == "alpha 0" else 1e-38)


@pytest.mark.parametrize("name", ["head", "alpha 0", "mlp", "attention"])
def test_where_float32_overflows_nothing_bounds_the_error(name):
    module = overflowing(name).eval()
    assert not module(torch.full((1, 2, 2, 8), 9.0)).isfinite().all()
    domain = Domain(size=(2, 2), radius=30.0, norm=60.0, error=0.0, channels=8)
    assert lipschitz_bound(module, domain).output.error == math.inf


def floats(step: int, first: int = -127, last: int = 101):
    """Every step-th float32 from 2^first to 2^last, and their negatives, in pieces."""
    for start in range((first + 127) * 2**23, (last + 127) * 2**23, 2**21):
        bits = torch.arange(start, start + 2**21, step, dtype=torch.int32)
        positive = bits.view(torch.float32)
        yield torch.cat([positive, -positive])


def check_functions(*drawn: int) -> None:
    one = torch.ones(16)
    for x in floats(*drawn):
        x = torch.cat([x, x.new_zeros(-len(x) % 16)])
        wide = x.double()
        gelu = 0.5 * wide * torch.special.erfc(-wide / math.sqrt(2.0))
        kernel = gelu_residual_forward(
            torch.zeros(1, len(x) // 16, 16), x.view(1, -1, 16), one
        ).flatten()
        for computed in (nn.functional.gelu(x), kernel):
            assert ((computed.double() - gelu).abs() <= GELU_ERROR * wide.abs() + 1e-37).all()
        below = x[(x <= 0.0) & (x > -87.0)]
        exact = below.double().exp()
        assert ((below.exp().double() - exact).abs() <= EXP_ERROR * exact).all()
        scores = torch.stack([torch.zeros_like(below), below], dim=1)
        attn = scores.softmax(1)[:, 1].double()
        assert ((attn - exact / (1.0 + exact)).abs() <= 2.0 * EXP_ERROR * exact).all()


def test_elementary_functions_of_some_floats():
    check_functions(4099)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_elementary_functions_of_all_floats_between_tiny_and_saturated():
    """Below, both functions are linear to 2^-24. Above, they are constant or the identity."""
    check_functions(1, -24, 7)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 8e307])
def test_convolutions_of_every_scale_have_a_bound(scale):
    weight = torch.full((2, 2, 3, 3), scale, dtype=torch.float64)
    bound = conv_bound(weight).item()  # the supremum is at frequency 0: the sum of 18 numbers
    exact = 18 * scale
    assert bound == pytest.approx(exact, rel=0.05) if exact < math.inf else bound == math.inf
    assert bound >= exact
    assert conv_bound(weight[:, :1], groups=2).max().item() >= 9 * scale


def test_a_gram_matrix_that_is_not_finite_has_an_infinite_bound():
    gram = torch.stack([torch.eye(3), torch.full((3, 3), math.nan)]).double()
    assert eigenvalue_bound(gram, 3).tolist() == [pytest.approx(1.0), math.inf]
