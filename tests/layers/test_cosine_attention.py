import math

import pytest
import torch
from torch.autograd import gradcheck

from lipsformer.layers import (
    DepthwiseConv2d,
    LipschitzNormAttention,
    ScaledCosineAttention,
    attend_in_windows,
    cosine_normalize,
)
from tests.oracles import cosine_attention, smooth_unit

B, H, N, D = 2, 3, 5, 7


def heads(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, H, N, D, generator=generator, dtype=torch.float64).to(dtype) for _ in "qkv"
    ]


def test_cosine_normalize_equals_the_loop():
    x = heads()[0]
    expected = torch.tensor([smooth_unit(row, 1e-2) for row in x.reshape(-1, D)]).double()
    actual = cosine_normalize(x, 1e-2).reshape(-1, D)
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("eps", [1e-6, 1e-2, 1.0])
def test_cosine_normalize_constant_is_reached_at_zero(eps):
    jacobian = torch.func.jacrev(lambda x: cosine_normalize(x, eps))
    at_zero = torch.linalg.matrix_norm(jacobian(torch.zeros(D, dtype=torch.float64)), 2)
    assert at_zero.item() == pytest.approx(eps**-0.5, rel=1e-9)
    for length in (1e-4, 1e-2, 1.0):
        x = torch.full((D,), length, dtype=torch.float64)
        assert torch.linalg.matrix_norm(jacobian(x), 2) <= eps**-0.5 * (1 + 1e-12)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value_scale", [None, 1.0, 2.5])
@pytest.mark.parametrize("with_bias", [True, False])
def test_attention_equals_the_loop_one_head_at_a_time(fused, value_scale, with_bias):
    q, k, v = heads()
    bias = torch.randn(1, H, N, N, dtype=torch.float64) if with_bias else None
    layer = ScaledCosineAttention(H, logit_scale=10.0, value_scale=value_scale, eps=1e-3).double()
    layer.fused_attn = fused
    out = layer(q, k, v, bias)
    for b in range(B):
        for h in range(H):
            one_bias = None if bias is None else bias[0, h]
            expected = cosine_attention(
                q[b, h], k[b, h], v[b, h], one_bias, 10.0, value_scale, 1e-3
            )
            torch.testing.assert_close(out[b, h], expected)


def test_learned_logit_scale_is_per_head_logarithmic_and_clamped():
    q, k, v = heads()
    layer = ScaledCosineAttention(H, logit_scale=12.0, learn_logit_scale=True).double()
    torch.testing.assert_close(layer(q, k, v), ScaledCosineAttention(H, 12.0).double()(q, k, v))
    with torch.no_grad():
        layer.log_logit_scale.copy_(torch.tensor([2.0, 30.0, 1e3]).log().view(H, 1, 1))
    out = layer(q, k, v)
    for h, tau in enumerate((2.0, 30.0, 100.0)):
        expected = cosine_attention(q[1, h], k[1, h], v[1, h], None, tau, 1.0, 1e-2)
        torch.testing.assert_close(out[1, h], expected)
    out.sum().backward()
    gradients = layer.log_logit_scale.grad.flatten()
    assert gradients[0] != 0
    assert gradients[2] == 0  # beyond the ceiling


def test_gradients_equal_differences():
    q, k, v = (x[:1, :, :3, :2].clone().requires_grad_() for x in heads())
    bias = torch.randn(1, H, 3, 3, dtype=torch.float64, requires_grad=True)
    layer = ScaledCosineAttention(H, eps=1e-2).double()
    assert gradcheck(layer, (q, k, v, bias))


@pytest.mark.parametrize("value_scale", [None, 2.5])
@pytest.mark.parametrize("with_bias", [True, False])
def test_float32_training_gradients_equal_float64(value_scale, with_bias):
    inputs = [*heads(), torch.randn(1, H, N, N, dtype=torch.float64)][: 4 if with_bias else 3]
    layer = ScaledCosineAttention(H, value_scale=value_scale, eps=1e-2)
    upstream = torch.randn(B, H, N, D, dtype=torch.float64)
    gradients = []
    for dtype, training in ((torch.float64, False), (torch.float32, True)):
        copies = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = layer.to(dtype).train(training)(*copies)
        out.backward(upstream.to(dtype))
        gradients.append([out.detach(), *(x.grad for x in copies)])
    for exact, fast in zip(*gradients, strict=True):
        torch.testing.assert_close(fast.double(), exact, rtol=1e-4, atol=1e-5)


def test_dropout_leaves_the_mean():
    torch.manual_seed(0)
    q, k, v = heads(dtype=torch.float32)
    layer = ScaledCosineAttention(H, attn_drop=0.3).train()
    with torch.no_grad():
        mean = torch.stack([layer(q, k, v) for _ in range(3000)]).mean(0)
        expected = layer.eval()(q, k, v)
    # a weight of at most 1 has a standard error of at most sqrt(0.3 / 0.7 / 3000) = 0.012
    assert (mean - expected).abs().max().item() < 0.06


@pytest.mark.parametrize("zeros", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_tokens_are_finite_in_value_and_gradient(zeros, fused, dtype):
    q, k, v = heads(dtype=dtype)
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if name in zeros:
            tensor[:, :, 1:3] = 0
        tensor.requires_grad_()
    layer = ScaledCosineAttention(H).to(dtype)
    layer.fused_attn = fused
    out = layer(q, k, v)
    assert out.dtype == dtype
    reference = layer.float()(q.float(), k.float(), v.float())
    resolution = torch.finfo(dtype).resolution
    torch.testing.assert_close(out.float(), reference, rtol=0, atol=20 * resolution)
    out.float().sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zero_tokens_are_finite_under_autocast(dtype):
    torch.manual_seed(0)
    projection = torch.nn.Linear(H * D, 3 * H * D, bias=False)
    layer = ScaledCosineAttention(H)
    x = torch.randn(B, N, H * D)
    x[:, 2] = 0
    x.requires_grad_()

    def attend() -> torch.Tensor:
        q, k, v = projection(x).view(B, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        return layer(q, k, v)

    with torch.autocast("cpu", dtype=dtype):
        out = attend()
    torch.testing.assert_close(
        out.float(), attend(), rtol=0, atol=30 * torch.finfo(dtype).resolution
    )
    out.float().sum().backward()
    assert x.grad.isfinite().all()
    assert projection.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads=0 must be at least 1"),
        ({"logit_scale": 0.0}, r"logit_scale=0.0 must be in \(0, 100\]"),
        ({"logit_scale": 101.0}, r"logit_scale=101.0 must be in \(0, 100\]"),
        ({"value_scale": -1.0}, "value_scale=-1.0 must be > 0 and finite"),
        ({"value_scale": math.nan}, "value_scale=nan must be > 0 and finite"),
        ({"eps": 0.0}, "eps=0.0 must be > 0 and finite"),
        ({"eps": math.nan}, "eps=nan must be > 0 and finite"),
        ({"attn_drop": -0.1}, r"attn_drop=-0.1 must be in \[0, 1\]"),
        ({"attn_drop": math.nan}, r"attn_drop=nan must be in \[0, 1\]"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ScaledCosineAttention(**{"num_heads": H, **arguments})


@torch.no_grad()
def test_sizes_that_do_not_fit_raise_in_place_of_reading_elsewhere():
    torch.manual_seed(0)
    qkv = torch.randn(1, 4, 4, 3, 1, 8)
    with pytest.raises((RuntimeError, ValueError)):  # three heads do not divide eight channels
        attend_in_windows(qkv, [(4, 4)], [ScaledCosineAttention(3)])
    with pytest.raises((RuntimeError, ValueError)):
        attend_in_windows(qkv, [(4, 4)], [ScaledCosineAttention(2)], torch.randn(1, 2, 4, 4))
    shared = torch.randn(1, 1, 16, 16)  # broadcasts over the heads
    actual = attend_in_windows(qkv, [(4, 4)], [ScaledCosineAttention(2)], shared)
    expected = attend_in_windows(
        qkv, [(4, 4)], [ScaledCosineAttention(2)], shared.expand(-1, 2, -1, -1).contiguous()
    )
    torch.testing.assert_close(actual, expected)


@torch.no_grad()
def test_parts_of_another_class_compute_their_own_function():
    class Zero(ScaledCosineAttention):
        def forward(self, q, k, v, bias=None):
            return torch.zeros_like(v)

    qkv = torch.randn(1, 4, 4, 3, 1, 8)
    assert not attend_in_windows(qkv, [(4, 4)], [Zero(2).eval()]).any()
    core, wide = ScaledCosineAttention(2).eval(), DepthwiseConv2d(8, 5)
    actual = attend_in_windows(qkv, [(4, 4)], [core], None, [wide])
    local = wide(qkv[..., 2, 0, :])
    torch.testing.assert_close(actual, attend_in_windows(qkv, [(4, 4)], [core]) + local)


def test_the_default_type_of_torch_does_not_matter():
    qkv, core = torch.randn(1, 4, 4, 3, 1, 8), ScaledCosineAttention(2)
    expected = attend_in_windows(qkv, [(4, 4)], [core])
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(attend_in_windows(qkv, [(4, 4)], [core]), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("core", [ScaledCosineAttention(2), LipschitzNormAttention(2)])
def test_a_boolean_bias_is_a_mask_in_every_mode(core, path):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 2, 5, 7).unbind(0)
    mask = torch.rand(3, 2, 5, 5) > 0.3
    mask |= torch.eye(5, dtype=torch.bool)
    mask[1, 0, 3] = False  # a query without a key gets 0
    scores = torch.zeros(3, 2, 5, 5).masked_fill(~mask, -math.inf)
    scores[1, 0, 3] = 0.0
    expected = core.eval()(q, k, v, scores)
    expected[1, 0, 3] = 0.0
    for training in (False, True):
        for needs in (False, True):
            core.train(training)
            query = q.clone().requires_grad_(needs)
            found = core(query, k, v, mask)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            if needs:
                found.sum().backward()
                assert query.grad.isfinite().all()
