"""Kernels that pass over maps once, in float32 and bfloat16, against formulas in float64."""

import pytest
import torch

from lipsformer.kernels.linear import _scale_rows, _scale_rows_backward, gelu_backward_, sum_rows
from lipsformer.kernels.pointwise import (
    center,
    center_backward,
    gelu_residual_backward,
    gelu_residual_forward,
    residual,
)

SHAPE = (5, 67, 3, 37)  # enough for two threads and several parts, with a rest of 5 channels
KEPT = torch.tensor([0, 2, 3])
ROUNDING = 2.0**-8  # of bfloat16


def gelu(z):
    return 0.5 * z * (1 + torch.erf(z / 2**0.5))


def maps(dtype, *shapes):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@torch.no_grad()
def gradients(function, inputs, upstream):
    """Result and gradients in double precision."""
    inputs = [tensor.double().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        result = function(*inputs)
        return [result.detach(), *torch.autograd.grad(result, inputs, upstream.double())]


def check(actual, expected, atol=1e-5):
    """Maps in bfloat16 may differ by their rounding, and what is float32 by very little."""
    for tensor, reference in zip(actual, expected, strict=True):
        rtol = ROUNDING if tensor.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(tensor.double(), reference, rtol=rtol, atol=atol)


both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@torch.no_grad()
@both_types
def test_gelu_and_its_derivative_in_one_pass_equal_float64(path, dtype):
    z, grad = maps(dtype, SHAPE, SHAPE)
    z *= 3.0
    z.flatten()[:4] = torch.tensor([1e4, -1e4, 0.0, 12.0])
    expected = gradients(gelu, [z], grad)
    check([gelu_backward_(grad, z), grad], expected, atol=4e-6)


@torch.no_grad()
@both_types
@pytest.mark.parametrize("index", [None, KEPT])
@pytest.mark.parametrize("per_sample", [False, True])
def test_adding_gelu_equals_float64_in_value_and_gradient(path, index, per_sample, dtype):
    kept = 5 if index is None else 3
    x, z, grad = maps(dtype, SHAPE, (kept, *SHAPE[1:]), SHAPE)
    scale = torch.randn((kept, 1, 1, 37) if per_sample else (37,))
    samples = torch.arange(5) if index is None else index
    expected = gradients(
        lambda x, z, scale: x.index_add(0, samples, gelu(z) * scale), [x, z, scale], grad
    )
    y = gelu_residual_forward(x, z, scale, index)
    check([y, grad, *gelu_residual_backward(grad, z, scale, index)], expected, atol=2e-4)


@pytest.mark.usefixtures("compiled_kernels")
@both_types
@pytest.mark.parametrize("index", [None, KEPT])
def test_adding_a_masked_branch_equals_float64_in_value_and_gradient(index, dtype):
    kept = 5 if index is None else 3
    x, z, grad = maps(dtype, SHAPE, (kept, *SHAPE[1:]), SHAPE)
    mask = torch.rand(kept, 1, 1, 1)
    samples = torch.arange(5) if index is None else index
    expected = gradients(lambda x, z: x.index_add(0, samples, z * mask.double()), [x, z], grad)
    x.requires_grad_()
    z.requires_grad_()
    y = residual(x, z, mask, index)
    y.backward(grad)
    check([y.detach(), x.grad, z.grad], expected)


@torch.no_grad()
@both_types
@pytest.mark.parametrize("rows", [(5, 67, 3), ()])
def test_centring_equals_float64_in_value_and_gradient(path, rows, dtype):
    x, grad = maps(dtype, (*rows, 37), (*rows, 37))
    x += 7.0
    gain, shift = torch.randn(2, 37)
    expected = gradients(
        lambda x, gain, shift: gain * (x - x.mean(-1, keepdim=True)) + shift, [x, gain, shift], grad
    )
    y = center(x, gain, shift)
    check([y, center(x, gain, grad)], [expected[0], expected[0] - shift + grad])
    grad_x, offset, grad_shift = center_backward(grad, y, gain, shift)
    check([grad_x, grad_shift], [expected[1], expected[3]], atol=2e-4)
    # the sum is over the rounded result
    exact = (grad.double() * (y.double() - shift)).view(-1, 37).sum(0)
    check([offset], [exact], atol=2e-3)


@torch.no_grad()
@both_types
def test_sum_of_rows_equals_float64(path, dtype):
    (x,) = maps(dtype, SHAPE)
    expected = [x.double().sum((0, 1, 2)), x.double().sum((0, 1, 3))]
    check([sum_rows(x), sum_rows(x.mT)], expected, atol=1e-4)


@torch.no_grad()
@both_types
def test_kernels_give_the_same_bits_on_one_and_two_threads(dtype):
    x, grad, z = maps(dtype, SHAPE, SHAPE, (3, *SHAPE[1:]))
    scale, weight = torch.randn(3, 1, 1, 37), torch.randn(331, 101)
    gain, shift, row_scale = scale[0, 0, 0], scale[1, 0, 0], weight[:, 0].contiguous()
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        scaled = _scale_rows(weight, None, row_scale, dtype)[0]
        results.append(
            [
                gelu_backward_(grad.clone(), x),
                gelu_residual_forward(x, z, scale, KEPT),
                *gelu_residual_backward(grad, z, scale, KEPT),
                center(x, gain, shift),
                *center_backward(grad, x, gain, shift),
                sum_rows(x),
                scaled,
                *_scale_rows_backward(scaled, weight, row_scale),
            ]
        )
    torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@torch.no_grad()
def test_numbers_that_are_not_finite_stay_where_they_are(path):
    """NaN and infinity reach the results that depend on them and no other."""
    x, grad, scale = maps(torch.float32, (2, 11, 19), (2, 11, 19), 19)
    for bad in (float("nan"), float("inf")):
        z = x.clone()
        z[1, 3, 17] = bad
        results = [gelu_backward_(grad.clone(), z), gelu_residual_forward(x, z, scale), sum_rows(z)]
        results.append(gelu_residual_backward(grad, z, scale, None)[1])
        for result in results:
            finite = result.isfinite()
            assert not finite[..., 17].all()
            finite[..., 17] = True
            assert finite.all()
        lost = ~center(z, scale, scale).isfinite()
        assert lost[1, 3].all()
        assert lost.sum() == 19


@torch.no_grad()
def test_sizes_that_do_not_fit_are_refused_or_spread_as_pytorch_does(path):
    x, z, scale = maps(torch.float32, (2, 11, 19), (2, 11, 19), 19)
    mask = torch.tensor([0.0, 1.5])[:, None, None]
    torch.testing.assert_close(gelu_residual_forward(x, z, mask), x + mask * gelu(z))
    for call in (
        lambda: gelu_residual_forward(x, z[:, :7].contiguous(), scale),
        lambda: gelu_residual_forward(x, z, scale[:17]),
        lambda: center(x, scale[:17], scale[:17]),
        lambda: center(x, scale, z[:, :7].contiguous()),
    ):
        with pytest.raises(RuntimeError, match="size of tensor"):
            call()
