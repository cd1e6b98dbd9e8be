"""The product with a packed weight against float64."""

import pytest
import torch

from lipsformer.kernels import packed
from lipsformer.kernels.packed import pack_weight, packed_linear


@pytest.fixture(autouse=True)
def own_product(compiled_kernels, monkeypatch):
    monkeypatch.setattr(packed, "_OWN", True)


# One tile and less; panels, blocks of rows and parts of the inputs with a rest; one panel of many.
SIZES = [(1, 1, 1), (5, 3, 2), (6, 7, 16), (13, 401, 37), (211, 1201, 17), (97, 769, 101)]


@pytest.mark.parametrize("act", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_the_packed_product_equals_float64(rows, inputs, outputs, biased, act):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    z = x.double() @ weight.double().T
    if biased:
        z += bias
    expected = z * (1 + torch.erf(z / 2**0.5)) / 2 if act else z
    y = packed_linear(x, pack_weight(weight), bias if biased else None, act)
    # the rounding of a sum of so many terms, and of GELU
    atol = 2**-22 * (weight.abs().double() @ x.abs().double().T).max().item() + 1e-6
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1009, 401, 37), (53, 401, 1009)])
def test_the_packed_product_has_the_same_bits_for_any_number_of_threads(rows, inputs, outputs):
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    weight, before = pack_weight(torch.randn(outputs, inputs)), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(packed_linear(x, weight, bias, False))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, results[0]) for y in results)


def test_what_is_not_finite_stays_in_its_row_or_column():
    x, weight = torch.randn(13, 401), torch.randn(37, 401)
    expected = packed_linear(x, pack_weight(weight), None, False)
    x[7, 400] = float("inf")
    weight[36, 3] = float("nan")
    y = packed_linear(x, pack_weight(weight), None, False)
    touched = torch.zeros(13, 37, dtype=torch.bool)
    touched[7], touched[:, 36] = True, True
    assert torch.equal(~y.isfinite(), touched)
    assert torch.equal(y[~touched], expected[~touched])


def test_a_map_that_is_not_contiguous():
    x, weight = torch.randn(11, 5, 7, 37).transpose(1, 2), torch.randn(23, 37)
    y = packed_linear(x, pack_weight(weight), None, False)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_onednns():
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN computes no bfloat16 here")
    assert pack_weight(torch.randn(5, 7, dtype=torch.bfloat16)).data.is_mkldnn
