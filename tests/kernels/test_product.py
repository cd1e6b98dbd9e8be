"""Our own product against float64, with the second matrix in each of its layouts."""

import threading
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lipsformer.kernels import linear, product
from lipsformer.kernels.product import (
    own_linear,
    own_transposed_product,
    pack_weight,
    packed_linear,
)
from lipsformer.layers import Linear
from lipsformer.models.folded_layers import FrozenLinear


@pytest.fixture(autouse=True)
def own_product(compiled_kernels, monkeypatch):
    """Our own product computes every layer, packed or not, whatever the processor."""
    monkeypatch.setattr(product, "USE_OWN_PACKED", True)
    monkeypatch.setattr(linear, "USE_OWN", True)


def exact_linear(x, weight, bias):
    """Return x W^T + b in float64 and how far rounding may move a sum of so many terms."""
    y = x.double() @ weight.double().T
    size = (x.double().abs() @ weight.double().abs().T).max().item()
    return y if bias is None else y + bias, 2**-22 * size + 1e-6


def drawn(rows, inputs, outputs):
    torch.manual_seed(0)
    return torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)


@torch.no_grad()  # with gradients the weight is packed for oneDNN
def packed_in_panels(x, weight, bias, act_after=False):
    """Return x W^T + b, or GELU of it, by our own product of a packed weight."""
    packed = pack_weight(weight)
    assert not packed.data.is_mkldnn
    return packed_linear(x, packed, bias, act_after)


LAYOUTS = {
    "packed": packed_in_panels,
    "transposed": own_linear,
    "plain": lambda x, weight, bias: own_linear(x, weight.T.contiguous().T, bias),
}
# One tile and less; panels, blocks of rows and parts of the inputs with a rest; one panel of many.
SIZES = [(1, 1, 1), (5, 3, 2), (6, 7, 16), (13, 401, 37), (211, 1201, 17), (97, 769, 101)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_linear_layer_equals_float64(layout, rows, inputs, outputs, biased):
    x, weight, bias = drawn(rows, inputs, outputs)
    bias = bias if biased else None
    expected, atol = exact_linear(x, weight, bias)
    y = LAYOUTS[layout](x, weight, bias)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_gelu_behind_a_packed_layer_equals_float64(rows, inputs, outputs):
    x, weight, bias = drawn(rows, inputs, outputs)
    z, atol = exact_linear(x, weight, bias)
    y = packed_in_panels(x, weight, bias, act_after=True)
    expected = z * (1 + torch.erf(z / 2**0.5)) / 2
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("layout", ["transposed", "plain"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_gelu_before_a_layer_equals_float64(rows, inputs, outputs, layout):
    x, weight, bias = drawn(rows, inputs, outputs)
    activated = x.double() * (1 + torch.erf(x.double() / 2**0.5)) / 2
    expected, atol = exact_linear(activated, weight, bias)
    weight = weight if layout == "transposed" else weight.T.contiguous().T
    y = own_linear(x, weight, bias, act_before=True)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=2 * atol)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_the_product_of_two_maps_equals_float64(rows, inputs, outputs):
    torch.manual_seed(0)
    a, b = torch.randn(1, inputs, rows), torch.randn(inputs, outputs)
    expected, atol = exact_linear(a[0].T, b.T, None)
    y = own_transposed_product(a, b)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize(("rows", "outputs"), [(29, 37), (211, 13)])
def test_threads_that_share_a_long_sum_equal_float64(rows, outputs, threads):
    torch.manual_seed(0)
    a, b = torch.randn(1, 5003, rows), torch.randn(5003, outputs)
    expected, atol = exact_linear(a[0].T, b.T, None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = own_transposed_product(a, b)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1009, 401, 37), (53, 401, 1009)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_has_the_same_bits_for_any_number_of_threads(layout, rows, inputs, outputs):
    x, weight, bias = drawn(rows, inputs, outputs)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(LAYOUTS[layout](x, weight, bias))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_finite_stays_in_its_row_or_column(layout):
    x, weight = torch.randn(13, 401), torch.randn(37, 401)
    expected = LAYOUTS[layout](x, weight, None)
    x[7, 400] = float("inf")
    weight[36, 3] = float("nan")
    y = LAYOUTS[layout](x, weight, None)
    touched = torch.zeros(13, 37, dtype=torch.bool)
    touched[7], touched[:, 36] = True, True
    assert torch.equal(~y.isfinite(), touched)
    assert torch.equal(y[~touched], expected[~touched])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_map_that_is_not_contiguous(layout):
    x, weight = torch.randn(11, 5, 7, 37).transpose(1, 2), torch.randn(23, 37)
    y = LAYOUTS[layout](x, weight, None)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def biases():
    torch.manual_seed(0)
    return {
        "a column of a table": torch.randn(23, 7)[:, 2],
        "one number, expanded": torch.randn(1).expand(23),
        "one number": torch.randn(1),
    }


@pytest.mark.parametrize("kind", biases())
def test_a_bias_of_any_layout(kind):
    bias, x, weight = biases()[kind], torch.randn(3, 5, 37), torch.randn(23, 37)
    layer = nn.Linear(37, 23)
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    expected = x.double() @ weight.double().T + bias.double()
    with torch.no_grad():
        frozen = FrozenLinear(layer)(x)
    for y in (own_linear(x, weight, bias), linear.fused_linear(x, weight, bias), frozen):
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


class Wrapped(torch.Tensor):
    """A tensor that computes with another one and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [arg.inner if isinstance(arg, cls) else arg for arg in args]
        return function(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("act_before", [False, True])
def test_a_bias_without_memory_of_its_own_is_added(act_before):
    x, weight = torch.zeros(2, 5, 37), torch.randn(23, 37)
    y = linear.fused_linear(x, weight, Wrapped(torch.ones(23)), act_before)
    assert torch.equal(y, torch.ones(2, 5, 23))


class WithoutOneDnn(Wrapped):
    """It knows PyTorch's operators only, as quantized and distributed tensors do."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.namespace == "mkldnn":
            raise NotImplementedError(function)
        if function is torch.ops.aten.detach.default:  # a parameter is made of it
            return cls(args[0].inner)
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.mark.parametrize("kind", ["training", "evaluation", "frozen"])
def test_weights_of_a_subclass_meet_no_operator_of_onednn(kind):
    layer, x = Linear(37, 23), torch.randn(2, 5, 37)
    expected = x.double() @ layer.weight.double().T + layer.bias.double()
    layer.weight = nn.Parameter(WithoutOneDnn(layer.weight.detach()), requires_grad=False)
    layer = FrozenLinear(layer) if kind == "frozen" else layer
    with torch.set_grad_enabled(kind == "training"):
        y = layer(x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("which", ["x", "weight", "bias"])
def test_views_with_the_opposite_sign_are_read_with_it(which):
    tensors = {"x": torch.randn(3, 5, 37), "weight": torch.randn(23, 37), "bias": torch.randn(23)}
    tensors[which] = torch._neg_view(tensors[which])
    y = linear.fused_linear(*tensors.values())
    expected = tensors["x"].double() @ tensors["weight"].double().T + tensors["bias"].double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [31, 41])
def test_an_input_of_another_width_is_refused(channels):
    x, layer = torch.randn(3, 5, channels), nn.Linear(37, 23)
    frozen = FrozenLinear(layer)
    with torch.no_grad(), pytest.raises(RuntimeError, match="takes 37 channels"):
        frozen(x)
    for apply in (own_linear, linear.fused_linear):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            apply(x, layer.weight, layer.bias)


@pytest.mark.parametrize("length", [3, 41])
def test_an_output_scale_of_another_length_is_refused(length):
    x, weight = torch.randn(2, 64, 37), torch.randn(23, 37)
    with pytest.raises(RuntimeError, match="must match"):
        linear.fused_linear(x, weight, None, output_scale=torch.randn(length))


def test_gradients_of_a_layer_whose_products_are_all_our_own(monkeypatch):
    names = ("own_linear", "own_transposed_product")
    spies = {name: Mock(side_effect=getattr(product, name)) for name in names}
    for name, spy in spies.items():
        monkeypatch.setattr(linear, name, spy)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 7, 53), torch.randn(31, 53), torch.randn(31)
    scale, grad = torch.rand(31) + 0.5, torch.randn(3, 7, 31)
    tensors = [tensor.requires_grad_() for tensor in (x, weight, bias, scale)]
    own = torch.autograd.grad(linear.fused_linear(x, weight, bias, True, scale), tensors, grad)
    assert [spies[name].call_count for name in names] == [2, 1]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    z = exact[0] * (1 + torch.erf(exact[0] / 2**0.5)) / 2
    y = (z @ exact[1].T + exact[2]) * exact[3]
    for ours, theirs in zip(own, torch.autograd.grad(y, exact, grad.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


def test_bfloat16_is_onednns():
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN computes no bfloat16 here")
    assert pack_weight(torch.randn(5, 7, dtype=torch.bfloat16)).data.is_mkldnn


def test_a_thread_with_a_small_stack():
    torch.manual_seed(0)
    x, weight = torch.randn(211, 401), torch.randn(53, 401)
    found = []
    before = threading.stack_size(128 << 10)
    try:
        thread = threading.Thread(target=lambda: found.append(own_linear(x, weight, None)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    expected, atol = exact_linear(x, weight, None)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=atol)
