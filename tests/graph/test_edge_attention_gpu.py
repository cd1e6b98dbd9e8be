"""The Triton kernels, on a GPU or, with TRITON_INTERPRET=1 set, in Triton's interpreter."""

import os
import random

import pytest
import torch

from lipsformer.graph import LipschitzGATConv, LipschitzTransformerConv, ScaledCosineConv
from lipsformer.graph.edge_attention.csr import SortedEdges
from lipsformer.graph.edge_attention.settings import Settings
from lipsformer.layers.lipschitz_norm import segment_max
from tests.graph.edges import (
    CHANNELS,
    FEATURES,
    HEADS,
    SOURCES,
    TARGETS,
    looped_attention,
    random_edges,
    random_inputs,
)

kernels = pytest.importorskip("lipsformer.graph.edge_attention.triton", exc_type=ImportError)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytestmark = [pytest.mark.gpu, *([] if INTERPRETED else [needs_cuda])]


TOLERANCES = {torch.double: 1e-9, torch.float: 1e-4, torch.bfloat16: 2e-2, torch.half: 4e-3}
# Primes, and the powers of two at which blocks are exactly full.
WIDTHS = (1, 2, 3, 5, 7, 11, 16, 17, 31, 32, 37, 61, 64, 67, 127)


def check_value_and_gradient(edge_index, inputs, slope, dropout=0.0):
    """Compare the kernels with a loop in float64; inputs have the shapes of `edge_attention`."""
    heads, dtype = inputs[2].size(1), inputs[2].dtype
    keep = torch.rand(heads, edge_index.size(1)) >= dropout if dropout else None
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    expected = looped_attention(edge_index, *exact, slope, keep, dropout)
    weight = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, exact, weight)

    graph = SortedEdges(edge_index.to(DEVICE), len(inputs[1]), len(inputs[0])).csr
    arguments = [graph, *(x.detach() for x in inputs)]
    settings = Settings(slope, 1 / (1 - dropout), None if keep is None else keep.to(DEVICE))
    out, *residuals = kernels.forward(*arguments, settings)
    weight = weight.to(DEVICE, out.dtype)
    grads = kernels.backward(*arguments, weight, settings, *residuals)
    assert all(grad.dtype is dtype for grad in grads)
    torch.testing.assert_close(
        [x.double().cpu() for x in (out, *grads)],
        [expected, *expected_grads],
        rtol=TOLERANCES[dtype],
        atol=TOLERANCES[dtype],
    )


@pytest.mark.parametrize(
    ("dtype", "size", "slope", "dropout"),
    [
        (torch.double, 1.0, 1.0, 0.0),
        (torch.double, 40.0, 0.2, 0.37),
        (torch.float, 3.0, 0.2, 0.0),
        (torch.bfloat16, 1.0, 0.2, 0.37),
    ],
)
def test_value_and_gradient_equal_a_loop(dtype, size, slope, dropout):
    check_value_and_gradient(random_edges(), random_inputs(size, dtype, DEVICE), slope, dropout)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(11))
def test_random_shapes_equal_a_loop(group):
    """231 shapes in all, with targets of no edge and of more edges than a block holds."""
    for seed in range(21 * group, 21 * (group + 1)):
        chance = random.Random(seed)
        torch.manual_seed(seed)
        sources, targets, heads = (chance.choice((1, 2, 3, 5)) for _ in range(3))
        width, channels = chance.choice(WIDTHS), chance.choice(WIDTHS)
        num_edges = chance.choice((1, 2, 7, 17, 31, 67))
        dtype = chance.choice(list(TOLERANCES))
        limits = torch.tensor([[sources], [max(1, targets - 1)]])
        edge_index = (torch.rand(2, num_edges) * limits).long()
        sizes = ((targets, width), (sources, width), (sources, channels))
        inputs = [
            (torch.randn(nodes, heads, size) * size**-0.5).to(DEVICE, dtype)
            for nodes, size in sizes
        ]
        slope, dropout = chance.choice((1.0, 0.2)), chance.choice((0.0, 0.37))
        check_value_and_gradient(edge_index, inputs, slope, dropout)


def test_weights_of_large_equal_scores_are_shared_in_the_gradient_too():
    edge_index, value = random_edges(), random_inputs(dtype=torch.float)[2]
    query, key = torch.full((TARGETS, HEADS, 2), 1e5), torch.full((SOURCES, HEADS, 2), 1e5)
    exact = value.detach().double().requires_grad_()
    expected = looped_attention(edge_index, query.double(), key.double(), exact, 1.0)
    weight = torch.randn_like(expected).float()
    (expected_grad,) = torch.autograd.grad(expected, exact, weight.double())
    graph = SortedEdges(edge_index.to(DEVICE), SOURCES, TARGETS).csr
    arguments = [graph, *(x.detach().to(DEVICE) for x in (query, key, value))]
    out, *residuals = kernels.forward(*arguments, Settings())
    grad = kernels.backward(*arguments, weight.to(DEVICE), Settings(), *residuals)[2]
    found = (out.cpu(), grad.cpu())
    torch.testing.assert_close(found, (expected, expected_grad), check_dtype=False)


def test_single_precision_scores_of_half_precision_values():
    query, key, value = (x.detach() for x in random_inputs(1.0, torch.float, DEVICE))
    value = value.bfloat16()
    graph = SortedEdges(random_edges().to(DEVICE), SOURCES, TARGETS).csr
    settings = Settings(negative_slope=0.2)
    out, *residuals = kernels.forward(graph, query, key, value, settings)
    same = kernels.forward(graph, query, key, value.float(), settings)[0]
    torch.testing.assert_close(out, same)
    grads = kernels.backward(graph, query, key, value, out, settings, *residuals)
    assert [grad.dtype for grad in grads] == [torch.float, torch.float, torch.bfloat16]


def test_maximum_shares_its_gradient_among_equals():
    edge_index = random_edges()
    values = torch.randint(3, (SOURCES, HEADS)).double().requires_grad_()
    expected = segment_max(values[edge_index[0]], edge_index[1], TARGETS)
    weight = torch.randn_like(expected)
    (expected_grad,) = torch.autograd.grad(expected, values, weight)
    graph = SortedEdges(edge_index.to(DEVICE), SOURCES, TARGETS).csr
    values = values.detach().to(DEVICE)
    largest = kernels.max_forward(graph, values)
    grad = kernels.max_backward(graph, values, largest, weight.to(DEVICE))
    torch.testing.assert_close((largest.cpu(), grad.cpu()), (expected, expected_grad))


@needs_cuda
@pytest.mark.parametrize("layer", [LipschitzGATConv, LipschitzTransformerConv, ScaledCosineConv])
@pytest.mark.parametrize("channels", [CHANNELS, 67])
def test_convolution_equals_that_on_the_cpu(layer, channels):
    conv = layer(FEATURES, channels, HEADS)
    x, edge_index = torch.randn(SOURCES, FEATURES), random_edges()
    results = []
    for device, dtype in (("cpu", torch.double), ("cuda", torch.float)):
        own = conv.to(device, dtype)
        own.zero_grad()
        nodes = x.to(device, dtype).requires_grad_()
        out = own(nodes, edge_index.to(device))
        out.square().sum().backward()
        grads = [p.grad for p in own.parameters()]
        results.append([t.detach().float().cpu().clone() for t in (out, nodes.grad, *grads)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
