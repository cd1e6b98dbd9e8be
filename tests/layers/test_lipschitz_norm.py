import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from lipsformer.analysis.bounds.attention import lipschitz_norm_theorem
from lipsformer.layers.lipschitz_norm import (
    LipschitzNormAttention,
    dense_max,
    dense_quadratic_scale,
    linear_scale,
    quadratic_scale,
    released_linear_scale,
    segment_max,
    squared_norm,
)

EPS = 1e-30  # far below every squared norm drawn here, so that closed forms need none


def load_case(path, case: str) -> dict[str, Tensor]:
    with np.load(path / "lipschitznorm.npz") as arrays:
        prefix = case + "__"
        return {
            name.removeprefix(prefix): torch.from_numpy(arrays[name])
            for name in arrays.files
            if name.startswith(prefix)
        }


@pytest.mark.data
@pytest.mark.parametrize("case", ["gat0", "gat1", "gat2", "gat3", "gat_f32", "gat_big"])
@pytest.mark.parametrize("variant", ["lin_si", "lin_all"])
def test_linear_released_code_matches_reference_tensors(oracles, case, variant):
    ref = load_case(oracles, case)
    inputs = {name: ref[name].clone().requires_grad_() for name in ("x", "alpha", "att_l", "att_r")}
    scale = released_linear_scale(
        squared_norm(inputs["x"]),
        torch.cat([inputs["att_l"], inputs["att_r"]], dim=-1).squeeze(0),
        ref["index"],
        ref["h"].size(0),
        scale_individually=variant == "lin_si",
        eps=EPS,
    )
    out = inputs["alpha"] * scale
    torch.testing.assert_close(out, ref[f"{variant}_out"], rtol=1e-6, atol=1e-6)
    out.backward(ref["upstream"])
    for name, tensor in inputs.items():
        expected = ref[f"{variant}_grad_{name}"]
        torch.testing.assert_close(tensor.grad, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.data
@pytest.mark.parametrize("case", ["gt0", "gt1", "gt2", "gt3", "gt_f32"])
def test_quadratic_matches_reference_tensors_with_queries_counted_per_edge(oracles, case):
    ref = load_case(oracles, case)
    inputs = {name: ref[name].clone().requires_grad_() for name in ("Q", "K", "V", "alpha")}
    scale = quadratic_scale(
        squared_norm(inputs["Q"]).sum(0),
        squared_norm(inputs["K"]),
        squared_norm(inputs["V"]),
        reduce=partial(segment_max, index=ref["index"], num_segments=ref["q"].size(0)),
        eps=EPS,
    )
    out = inputs["alpha"] * scale[ref["index"]]
    torch.testing.assert_close(out, ref["out"], rtol=1e-6, atol=1e-6)
    out.backward(ref["upstream"])
    for name, tensor in inputs.items():
        torch.testing.assert_close(tensor.grad, ref[f"grad_{name}"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale_individually", [True, False])
def test_linear_scale_equals_a_loop_over_heads_and_targets(scale_individually):
    torch.manual_seed(0)
    num_nodes, heads, channels, num_edges = 7, 3, 5, 29
    h = torch.randn(num_nodes, heads, channels, dtype=torch.double)
    weight = torch.randn(heads, 2 * channels, dtype=torch.double)
    source, target = torch.randint(num_nodes, (2, num_edges))
    scale = linear_scale(
        squared_norm(h)[source],
        squared_norm(h),
        weight,
        reduce=partial(segment_max, index=target, num_segments=num_nodes),
        scale_individually=scale_individually,
        eps=EPS,
    )
    for i in range(num_nodes):
        for head in range(heads):
            norms = [h[j, head].norm().item() for j in source[target == i].tolist()]
            a = weight[head] if scale_individually else weight
            root = math.hypot(max(norms, default=0.0), h[i, head].norm().item())
            assert scale[i, head].item() == pytest.approx(1 / (4 * a.norm().item() * root))


def test_dense_quadratic_scale_equals_a_loop_and_the_edge_form():
    torch.manual_seed(1)
    batch, heads, num_queries, num_keys, dim = 2, 3, 5, 7, 11
    q = torch.randn(batch, heads, num_queries, dim, dtype=torch.double)
    k = torch.randn(batch, heads, num_keys, dim, dtype=torch.double)
    v = 3 * torch.randn(batch, heads, num_keys, dim, dtype=torch.double)
    scale = dense_quadratic_scale(q, k, v, eps=EPS)
    for b in range(batch):
        for head in range(heads):
            u = math.sqrt(sum(row.norm().item() ** 2 for row in q[b, head]))
            x, y = (max(row.norm().item() for row in t[b, head]) for t in (k, v))
            assert scale[b, head, 0, 0].item() == pytest.approx(1 / max(u * x, u * y, x * y))
    # the same window written as a graph whose edges all share one target
    by_edge = quadratic_scale(
        squared_norm(q[0]).sum(-1),
        squared_norm(k[0]).T,
        squared_norm(v[0]).T,
        reduce=partial(segment_max, index=torch.zeros(num_keys).long(), num_segments=1),
        eps=EPS,
    )
    torch.testing.assert_close(by_edge[0], scale[0, :, 0, 0])


def test_scores_ignore_the_size_of_inputs_and_weights():
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 2, 3, 5, 7).unbind()
    scores = q @ k.mT * dense_quadratic_scale(q, k, v)
    q, k, v = 1e3 * q, 1e3 * k, 1e3 * v
    torch.testing.assert_close(q @ k.mT * dense_quadratic_scale(q, k, v), scores)


def test_zero_inputs_give_zero_scores_and_finite_gradients():
    q, k, v = (torch.zeros(1, 2, 3, 5, requires_grad=True) for _ in range(3))
    scores = q @ k.mT * dense_quadratic_scale(q, k, v)
    h = torch.zeros(3, 2, 5, requires_grad=True)
    weight = torch.zeros(2, 10, requires_grad=True)
    scale = linear_scale(
        squared_norm(h),
        squared_norm(h),
        weight,
        reduce=partial(segment_max, index=torch.arange(3), num_segments=3),
    )
    linear = torch.cat([h, h], dim=-1).mul(weight).sum(-1) * scale
    assert not scores.any() and not linear.any()
    grads = torch.autograd.grad(scores.sum() + linear.sum(), (q, k, v, h, weight))
    assert all(grad.isfinite().all() for grad in grads)


def test_half_precision_norms_do_not_overflow():
    torch.manual_seed(3)
    q, k, v = (400 * torch.randn(3, 1, 2, 5, 7)).half().unbind()
    scale = dense_quadratic_scale(q, k, v)
    assert scale.dtype == torch.float32
    expected = dense_quadratic_scale(q.double(), k.double(), v.double()).float()
    torch.testing.assert_close(scale, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_half_precision_attends_to_keys_and_values_of_zero(fused):
    torch.manual_seed(3)
    attention = LipschitzNormAttention(2)
    attention.fused_attn = fused
    q, zero = torch.randn(1, 2, 5, 7).half(), torch.zeros(1, 2, 5, 7).half()
    inputs = [x.requires_grad_() for x in (q, zero, zero.clone())]
    out = attention(*inputs)
    assert torch.equal(out, zero)
    q_grad, k_grad, v_grad = torch.autograd.grad(out.sum(), inputs)
    assert not q_grad.any() and not k_grad.any()
    torch.testing.assert_close(v_grad, torch.ones_like(zero), rtol=2e-3, atol=0.0)


def test_gradcheck_of_both_scales():
    torch.manual_seed(4)
    index = torch.tensor([0, 0, 1, 2, 2, 2, 1])
    reduce = partial(segment_max, index=index, num_segments=3)

    def linear(x, target, weight):
        return linear_scale(squared_norm(x), squared_norm(target), weight, reduce=reduce)

    def quadratic(q, k, v):
        return quadratic_scale(squared_norm(q).sum(0), squared_norm(k), squared_norm(v),
                               reduce=reduce)  # fmt: skip

    x, k, v = (torch.randn(7, 2, 3, dtype=torch.double, requires_grad=True) for _ in range(3))
    target, q = (torch.randn(3, 2, 3, dtype=torch.double, requires_grad=True) for _ in range(2))
    weight = torch.randn(2, 6, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(linear, (x, target, weight))
    assert torch.autograd.gradcheck(quadratic, (q, k, v))


def attend_linear(x: Tensor, query: Tensor) -> Tensor:
    """X softmax(Q^T X / (|Q|_F max_j |x_j|))^T with columns as vectors, x [d, n], query [d, m]."""
    scale = linear_scale(squared_norm(x.T), 0.0, query.reshape(1, -1), reduce=dense_max, att_norm=1)
    return x @ (query.T @ x * scale).softmax(-1).T


def attend_quadratic(qkv: Tensor, num_queries: int) -> Tensor:
    """V softmax(Q^T K times its factor)^T, qkv [m + 2 n, d]."""
    q, k, v = qkv.split([num_queries, *2 * [(len(qkv) - num_queries) // 2]])
    scale = dense_quadratic_scale(q[None, None], k[None, None], v[None, None])[0, 0]
    return (q @ k.T * scale).softmax(-1) @ v


def worst_constant(function, start: Tensor, steps: int) -> float:
    """Largest exact operator norm of the Jacobian met while climbing it from `start`."""
    worst, x = 0.0, start.clone().requires_grad_()
    for _ in range(steps):
        jacobian = torch.autograd.functional.jacobian(function, x, create_graph=True)
        sigma = torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2)
        worst = max(worst, sigma.item())
        (grad,) = torch.autograd.grad(sigma, x)
        x = (x + 0.1 * x.norm() * grad / grad.norm().clamp_min(1e-12)).detach().requires_grad_()
    return worst


@pytest.mark.parametrize(("m", "n"), [(1, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize("size", [1e-2, 1.0, 1e2])
def test_exact_lipschitz_constant_stays_below_the_bounds(m, n, size):
    torch.manual_seed(5)
    d = 3
    for _ in range(3):
        query = torch.randn(d, m, dtype=torch.double)
        x = size * torch.randn(d, n, dtype=torch.double)
        worst = worst_constant(partial(attend_linear, query=query), x, steps=12)
        proved = math.cosh(1.0) * math.sqrt(m / n) + 2.0  # docs/graph.md
        assert worst <= proved < lipschitz_norm_theorem(m, n)
        qkv = size * torch.randn(m + 2 * n, d, dtype=torch.double)
        worst = worst_constant(partial(attend_quadratic, num_queries=m), qkv, steps=12)
        proved = math.cosh(1.0) * math.sqrt(m / n) + math.sqrt(8.0)
        assert worst <= proved < lipschitz_norm_theorem(m, n, math.sqrt(3))


def test_plain_scores_exceed_the_bound_at_inputs_where_normalized_ones_do_not():
    x = torch.tensor([[0.0, 0.0], [30.0, -30.0]], dtype=torch.double)
    query = torch.tensor([[1.0], [0.0]], dtype=torch.double)

    def plain(x):
        return x @ (query.T @ x).softmax(-1).T

    assert worst_constant(plain, x, steps=1) > lipschitz_norm_theorem(1, 2)
    assert worst_constant(partial(attend_linear, query=query), x, steps=1) < lipschitz_norm_theorem(
        1, 2
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads=0 must be at least 1"),
        ({"num_heads": 2, "attn_drop": 1.5}, r"attn_drop=1.5 must be in \[0, 1\]"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LipschitzNormAttention(**arguments)
