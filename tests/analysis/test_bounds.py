# ruff: noqa: T201  (the slack of every bound is printed; see it with -s)
import math

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipsformer
from lipsformer.analysis.bounds import (
    Domain,
    UnknownModuleError,
    flatten_bound,
    image_domain,
    lipschitz_bound,
)
from lipsformer.analysis.bounds.attention import scaled_cosine_theorem
from lipsformer.analysis.bounds.layers import GELU_BOUND, center_norm_sigma_bound
from lipsformer.analysis.certificates import certified_radius
from lipsformer.analysis.estimate import adversarial_lipschitz, capture_inputs
from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    LipschitzNormAttention,
    ScaledCosineAttention,
)
from lipsformer.models.lipsformer_cswin import LipsFormerCSwin, StripeAttention
from lipsformer.models.lipsformer_swin import LipsFormerSwin, WindowAttention

ROUNDING = 1.0 + 1e-9


def exact_constant(function, x: Tensor) -> float:
    """Largest singular value of the exact Jacobian at one sample [1, ...]."""
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(function)(x)
    return torch.linalg.svdvals(jacobian.reshape(-1, x.numel()))[0].item()


def randomize(module: nn.Module) -> nn.Module:
    """Double precision, evaluation mode, and no parameter left at its tidy initial value."""
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def window_attention(value_scale=1.3, eps=1e-2, logit_scale=7.0) -> WindowAttention:
    attention = ScaledCosineAttention(
        3, logit_scale=logit_scale, value_scale=value_scale, eps=eps, learn_logit_scale=True
    )
    return randomize(WindowAttention(6, 3, (2, 3), attention))


def stripe_attention(value_scale=0.7, eps=1e-2, split_size: int | None = 2) -> StripeAttention:
    partitions = 1 if split_size is None else 2
    attention = nn.ModuleList(
        ScaledCosineAttention(4 // partitions, logit_scale=5.0, value_scale=value_scale, eps=eps)
        for _ in range(partitions)
    )
    return randomize(StripeAttention(8, 4, split_size, attention, official_compat=True))


@pytest.mark.parametrize("dim", [2, 3, 7, 31])
@pytest.mark.parametrize("gain", ["ones", "random", "tied", "one", "zero"])
def test_center_norm_sigma_bound_is_exact(dim, gain):
    weight = {
        "ones": torch.ones(dim),
        "random": torch.randn(dim),
        "tied": torch.cat([torch.full((2,), -3.0), torch.rand(dim - 2)]),
        "one": torch.cat([torch.ones(1), torch.zeros(dim - 1)]),
        "zero": torch.zeros(dim),
    }[gain].double()
    centring = torch.eye(dim, dtype=torch.float64) - 1.0 / dim
    exact = torch.linalg.svdvals(weight[:, None] * centring * dim / (dim - 1))[0].item()
    assert center_norm_sigma_bound(weight) == pytest.approx(exact, rel=1e-12, abs=1e-300)
    assert exact <= center_norm_sigma_bound(weight) * ROUNDING


def test_gelu_bound_is_the_supremum_of_the_derivative():
    x = torch.linspace(-6, 6, 1_000_001, dtype=torch.float64)
    x.requires_grad_()
    slope = torch.autograd.grad(nn.functional.gelu(x).sum(), x)[0].abs().max().item()
    assert slope == pytest.approx(GELU_BOUND, abs=1e-9)
    assert slope <= GELU_BOUND * ROUNDING


LAYERS = {
    "linear": (lambda: nn.Linear(5, 3), (5, 7), (5,), True),
    "center_norm": (lambda: CenterNorm(7), (3, 7), (3,), True),
    "depthwise on a small map": (lambda: DepthwiseConv2d(3, 7), (5, 2, 3), (5, 2), True),
    "depthwise on a large map": (lambda: DepthwiseConv2d(2, 3), (11, 13, 2), (11, 13), False),
    "patch convolution": (lambda: nn.Conv2d(3, 5, 2, 2), (3, 6, 4), (6, 4), True),
    "strided convolution": (lambda: nn.Conv2d(2, 3, 5, 3, padding=2), (2, 7, 11), (7, 11), False),
    "grouped convolution": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 7), (5, 7), False),
    "same convolution": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 5, 7), (5, 7), False),
    "gelu": (nn.GELU, (3, 5), (3,), False),
    "relu": (nn.ReLU, (3, 5), (3,), False),
    "identity": (nn.Identity, (3, 5), (3,), True),
    "dropout": (lambda: nn.Dropout(0.5), (3, 5), (3,), True),
    "average pooling": (
        lambda: timm.layers.SelectAdaptivePool2d(pool_type="avg", input_fmt="NHWC", flatten=True),
        (3, 5, 2),
        (3, 5),
        True,
    ),
    "mlp": (lambda: timm.layers.Mlp(5, 11), (3, 5), (3,), False),
    "sequential": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU()), (3, 5), (3,), False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_bound_against_exact_jacobians(name):
    make, shape, size, exact = LAYERS[name]
    module = randomize(make())
    if name == "linear":
        shape = (size[0], 5)
    radius = 2.0
    bound = lipschitz_bound(module, Domain(size=size, radius=radius))
    largest = 0.0
    for scale in (1e-3, 0.3, 1.0, 3.0):
        x = scale * torch.randn(1, *shape, dtype=torch.float64)
        largest = max(largest, exact_constant(module, x))
    print(f"{name}: bound {bound.value:.4f}, exact {largest:.4f}")
    assert largest <= bound.value * ROUNDING
    if exact:
        assert largest == pytest.approx(bound.value, rel=1e-7)
    channels_first = isinstance(module, nn.Conv2d)
    token_dim = 1 if channels_first else -1
    x = torch.randn(5, *shape, dtype=torch.float64)
    x = radius * x / x.norm(dim=token_dim, keepdim=True)
    longest = module(x).norm(dim=token_dim).max().item()
    assert longest <= bound.output.radius * ROUNDING


@pytest.mark.parametrize("name", ["linear", "center_norm", "mlp", "depthwise on a small map"])
def test_bound_with_a_scale_is_that_of_the_scaled_map(name):
    make, shape, size, exact = LAYERS[name]
    module = randomize(make())
    x = torch.randn(1, size[0], 5, dtype=torch.float64)
    if name != "linear":
        x = torch.randn(1, *shape, dtype=torch.float64)
    alpha = torch.randn(module(x).shape[-1], dtype=torch.float64)
    bound = lipschitz_bound(module, Domain(size=size), alpha).value
    largest = exact_constant(lambda x: alpha * module(x), x)
    assert largest <= bound * ROUNDING
    assert bound <= alpha.abs().max() * lipschitz_bound(module, Domain(size=size)).value * ROUNDING
    if exact:
        assert largest == pytest.approx(bound, rel=1e-7)


@pytest.mark.parametrize(
    ("module", "size"),
    [
        (window_attention, (2, 3)),
        (lambda: window_attention(eps=1e-6, logit_scale=0.2), (3, 2)),
        (lambda: window_attention(eps=1.0), (1, 1)),
        pytest.param(stripe_attention, (3, 2), marks=pytest.mark.slow),
        (lambda: stripe_attention(eps=1e-6, split_size=None), (2, 2)),
    ],
    ids=["window", "padded window, flat scores", "one token", "stripes", "full"],
)
def test_attention_bound_against_exact_jacobians_and_ascent(module, size):
    torch.manual_seed(0)
    module = module()
    eps = (module.attention if isinstance(module, WindowAttention) else module.attention[0]).eps
    bound = lipschitz_bound(module, Domain(size=size))
    # biases keep zero tokens away from zero queries: undo them, there the worst case lives
    module.qkv.bias.data.zero_()
    x = torch.randn(24, *size, module.dim, dtype=torch.float64)
    x[:8] *= math.sqrt(eps)
    x[8:16] *= 0.1 * math.sqrt(eps)
    x[:16, 0, 0] *= 1e3
    x[16:20, 0, 0] = 0.0
    found, worst = adversarial_lipschitz(module, x, steps=15)
    index = int(found.argmax())
    exact = exact_constant(module, worst[index : index + 1])
    assert found.max().item() == pytest.approx(exact, rel=0.05)
    print(
        f"{size}: bound {bound.value:.4g}, largest constant found {exact:.4g}, "
        f"paper's theorem {10**bound.paper_log10:.4g}"
    )
    assert exact <= bound.value * ROUNDING
    assert bound.log10 <= bound.paper_log10


@pytest.mark.parametrize("make", [window_attention, stripe_attention])
def test_raw_values_are_bounded_on_bounded_inputs_only(make):
    torch.manual_seed(0)
    module = make(value_scale=None)
    size = (2, 3)
    assert lipschitz_bound(module, Domain(size=size)).value == math.inf
    for radius in (0.05, 1.0, 20.0):
        bound = lipschitz_bound(module, Domain(size=size, radius=radius))
        x = torch.randn(12, *size, module.dim, dtype=torch.float64)
        x = radius * x / x.norm(dim=-1, keepdim=True)
        exact = max(exact_constant(module, sample[None]) for sample in x)
        print(f"raw values, radius {radius}: bound {bound.value:.4g}, exact {exact:.4g}")
        assert exact <= bound.value * ROUNDING
        assert module(x).norm(dim=-1).max().item() <= bound.output.radius * ROUNDING


def refined_theorem(num_tokens, nu, tau, eps, norms) -> Tensor:
    """Theorem 1 of the paper with the softmax's own constant 1/2 (Nair 2025), per head."""
    query, key, value = norms
    n = num_tokens
    return nu * eps**-0.5 * (n * tau * (query + n * key) + 2 * n * value)


@pytest.mark.parametrize("name", ["radius", "norm", "error", "ball"])
def test_a_negative_length_of_a_domain_is_refused(name):
    """A negative radius lowered the bound of attention on raw values."""
    with pytest.raises(ValueError, match=f"{name}=-1.0 is a length: use at least 0"):
        Domain(size=(3,), **{name: -1.0})


def test_theorem_of_the_paper():
    norms = [torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([5.0])]
    tau = torch.tensor([7.0])
    n, nu, eps = 11, 13.0, 0.25
    paper = nu * 2.0 * (2 * n * (n - 1) * 7 * 3 + 2 * (n - 1) * 7 * 2 + 2 * n * 5)
    assert scaled_cosine_theorem(n, nu, tau, eps, norms).item() == pytest.approx(paper)


@pytest.mark.parametrize("num_tokens", [2, 3, 5, 49])
def test_one_head_bound_is_never_looser_than_either_theorem(num_tokens):
    attention = ScaledCosineAttention(1, logit_scale=9.0, value_scale=1.7, eps=1e-3)
    module = randomize(WindowAttention(5, 1, (1, num_tokens), attention))
    nn.init.eye_(module.proj.weight)
    weights = module.qkv.weight.detach().chunk(3)
    norms = [torch.linalg.svdvals(w)[:1] for w in weights]
    tau = torch.tensor([9.0], dtype=torch.float64)
    ours = lipschitz_bound(module, Domain(size=(1, num_tokens)))
    paper = scaled_cosine_theorem(num_tokens, 1.7, tau, 1e-3, norms).item()
    refined = refined_theorem(num_tokens, 1.7, tau, 1e-3, norms).item()
    print(f"N={num_tokens}: ours {ours.value:.4g}, refined {refined:.4g}, paper {paper:.4g}")
    assert 10**ours.paper_log10 == pytest.approx(paper)
    assert ours.value <= min(paper, refined)


def converted(name: str, **kwargs) -> nn.Module:
    return lipsformer.convert(timm.create_model(name, num_classes=3, in_chans=2, **kwargs))


def converted_vit(**kwargs) -> nn.Module:
    return converted(
        "vit_tiny_patch16_224", img_size=(10, 6), patch_size=2, embed_dim=6, depth=2, **kwargs
    )


def converted_swin() -> nn.Module:
    return converted(
        "swin_tiny_patch4_window7_224",
        **{"img_size": (10, 6), "patch_size": 1, "embed_dim": 4, "depths": (2, 1)},
        **{"num_heads": (1, 2), "window_size": 2},
    )


MODELS = {
    "converted vit": (converted_vit, {"num_heads": 3}),
    "converted deit with registers": (
        converted_vit,
        {"num_heads": 2, "reg_tokens": 2, "no_embed_class": True, "global_pool": "avg"},
    ),
    "converted swin": (converted_swin, {}),
    "swin, lipschitznorm": (
        LipsFormerSwin,
        {"num_heads": (1, 2), "window_size": 2, "attn": "lipschitznorm"},
    ),
    "cswin, lipschitznorm": (
        LipsFormerCSwin,
        {"num_heads": (2, 2), "split_sizes": (1, None), "attn": "lipschitznorm"},
    ),
    "swin": (LipsFormerSwin, {"num_heads": (1, 2), "window_size": 2}),
    "swin, released": (
        LipsFormerSwin,
        {"num_heads": (1, 2), "window_size": 2, "official_compat": True},
    ),
    "cswin": (LipsFormerCSwin, {"num_heads": (2, 2), "split_sizes": (1, None)}),
    "cswin, released": (
        LipsFormerCSwin,
        {"num_heads": (2, 2), "split_sizes": (1, None), "official_compat": True},
    ),
}


@pytest.mark.parametrize(
    ("size", "std", "message"),
    [
        ((10,), (0.2,), r"size=\(10,\) must be \(H, W\)"),
        ((10, 6), (0.0,), r"std=\(0.0,\) must be > 0"),
    ],
)
def test_a_domain_that_no_images_have_is_refused(size, std, message):
    with pytest.raises(ValueError, match=message):
        image_domain(size, (0.5,), std)


@pytest.mark.parametrize("name", MODELS)
def test_model_and_part_bounds_against_exact_jacobians(name):
    torch.manual_seed(0)
    make, kwargs = MODELS[name]
    if not name.startswith("converted"):
        kwargs = {"img_size": 10, "patch_size": 2, "in_chans": 2, "num_classes": 3, **kwargs}
        kwargs = {"embed_dim": 4, "depths": (1, 2), **kwargs}
    model = randomize(make(**kwargs))
    domain = image_domain((10, 6), (0.5, 0.3), (0.2, 0.4))
    bound = lipschitz_bound(model, domain)
    images = torch.rand(3, 2, 10, 6, dtype=torch.float64)
    mean = torch.tensor([0.5, 0.3], dtype=torch.float64).reshape(2, 1, 1)
    std = torch.tensor([0.2, 0.4], dtype=torch.float64).reshape(2, 1, 1)
    images = (images - mean) / std

    parts = dict(flatten_bound(bound))
    inputs = capture_inputs(model, parts, images)
    for part, its in parts.items():
        x = inputs[part]
        channels_first = part in ("", "patch_embed", "patch_embed.proj") or part.endswith(".conv")
        token_dim = 1 if channels_first else -1
        size = x.shape[2:] if channels_first else x.shape[1:-1]
        if its.kind != "CosineWindowAttention":  # which is called on windows
            assert math.prod(size) == its.input.tokens, part
        assert x.norm(dim=token_dim).max().item() <= its.input.radius * ROUNDING, part
        exact = exact_constant(model.get_submodule(part), x[:1])
        if part.count(".") <= 3:
            print(f"{part or 'model'}: 10^{its.log10:.2f}, exact {exact:.3g}")
        assert exact <= its.value * ROUNDING, part
        assert its.log10 <= its.paper_log10 + 1e-9, part
    assert bound.log10 < 60


def test_lipschitz_norm_attention_against_exact_jacobians_and_ascent():
    torch.manual_seed(0)
    module = randomize(WindowAttention(6, 3, (2, 3), LipschitzNormAttention(3)))
    module.qkv.bias.data.zero_()
    for spread in (0.0, 3.0):  # of the position bias, which lets the values' columns concentrate
        nn.init.normal_(module.relative_position_bias_table, std=spread)
        bound = lipschitz_bound(module, Domain(size=(2, 3)))
        x = torch.randn(12, 2, 3, 6, dtype=torch.float64)
        x[:6, 0, 0] *= 30.0
        found, worst = adversarial_lipschitz(module, x, steps=15)
        index = int(found.argmax())
        exact = exact_constant(module, worst[index : index + 1])
        print(f"LipschitzNorm, bias {spread}: bound {bound.value:.4g}, found {exact:.4g}")
        assert exact <= bound.value * ROUNDING


def test_unknown_modules_are_named():
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2.0 * super().forward(input)

    for module in (Doubled(3, 5), nn.Sequential(nn.Linear(3, 5), nn.Softplus())):
        with pytest.raises(UnknownModuleError, match=r"Doubled|Softplus"):
            lipschitz_bound(module, Domain(size=(7,)))
    with pytest.raises(UnknownModuleError, match="tanh"):
        lipschitz_bound(nn.GELU(approximate="tanh"), Domain(size=(7,)))
    with pytest.raises(UnknownModuleError, match="dilation"):
        lipschitz_bound(nn.Conv2d(2, 3, 3, dilation=2), Domain(size=(7, 7)))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_plain_residuals_of_timm_count_as_one(name):
    small = {"embed_dim": 6, "num_heads": 3, "depth": 2, "patch_size": 4, "img_size": 8}
    if "swin" in name:
        small = {"embed_dim": 6, "num_heads": (3,), "depths": (2,), "img_size": 16}
    domain = Domain(size=(small["img_size"],) * 2)
    plain = timm.create_model(name, **small)
    with pytest.raises(UnknownModuleError, match="LayerNorm"):
        lipschitz_bound(plain, domain)
    model = lipsformer.convert(plain, residual_scale=1.0)
    weighted = lipschitz_bound(model, domain).log10
    for block in model.layers[0].blocks if "swin" in name else model.blocks:
        for index in (1, 2):
            setattr(block, f"drop_path{index}" if "swin" in name else f"ls{index}", nn.Identity())
    assert lipschitz_bound(model, domain).log10 == weighted > 0.0


def test_a_subclass_that_keeps_forward_keeps_the_bound():
    class Named(nn.Linear):
        pass

    module = Named(3, 5)
    exact = torch.linalg.svdvals(module.weight.detach().double())[0].item()
    assert lipschitz_bound(module, Domain(size=(7,))).value == pytest.approx(exact)


def test_certified_radius_is_reached_by_a_linear_classifier_and_never_passed():
    module = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():  # two logits along opposite directions: the certificate is tight
        module.weight.copy_(torch.tensor([[0.5, 0.0, 0.0], [-0.5, 0.0, 0.0]]))
    bound = lipschitz_bound(module, Domain(size=()))
    x = torch.tensor([[3.0, 1.0, 7.0], [-0.2, 5.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    distance_to_boundary = x[:, 0].abs()
    torch.testing.assert_close(certified_radius(module(x), bound), distance_to_boundary)
    module = randomize(nn.Sequential(nn.Linear(5, 11), nn.GELU(), nn.Linear(11, 3)))
    bound = lipschitz_bound(module, Domain(size=()))
    x = torch.randn(257, 5, dtype=torch.float64)
    move = torch.randn_like(x)
    move = move / move.norm(dim=1, keepdim=True) * certified_radius(module(x), bound)[:, None]
    assert (module(x + move).argmax(1) == module(x).argmax(1)).all()


def test_a_bound_stays_that_of_the_weights_it_was_computed_from():
    """Training goes on, or averaged weights are swapped out, between the bound and its use."""
    torch.manual_seed(0)
    module, x = nn.Linear(3, 2), torch.randn(7, 3)
    logits, bound = module(x), lipschitz_bound(module, Domain(size=()))
    before = certified_radius(logits, bound)
    with torch.no_grad():
        module.weight.mul_(0.1)
    assert certified_radius(logits, bound).equal(before)
