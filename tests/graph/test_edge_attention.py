import copy
import importlib
import itertools
import math
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch.nn.utils import parametrizations
from torch_geometric.nn import MessagePassing

from lipsformer.graph import (
    DeepGAT,
    LipschitzGATConv,
    LipschitzTransformerConv,
    ScaledCosineConv,
    SparseGCNConv,
    cosine_conv,
    gat_conv,
    transformer_conv,
)
from lipsformer.graph.edge_attention import cpu, operator
from lipsformer.graph.edge_attention.csr import EdgeCSR, SortedEdges
from lipsformer.graph.edge_attention.messages import changed_messages, why_messages
from lipsformer.graph.edge_attention.operator import (
    edge_attention,
    neighbor_max,
    with_squared_norm,
)
from lipsformer.graph.edge_attention.settings import Settings
from lipsformer.graph.edge_attention.trial import triton_passes
from lipsformer.kernels import verdict
from lipsformer.layers.lipschitz_norm import segment_max
from tests.conftest import ROOT
from tests.graph.edges import (
    CHANNELS,
    EDGES,
    FEATURES,
    HEADS,
    SOURCES,
    TARGETS,
    looped_attention,
    random_edges,
    random_inputs,
)

CONVS = [LipschitzGATConv, LipschitzTransformerConv, ScaledCosineConv]


@pytest.mark.parametrize("edges_per_pass", [EDGES, 2**20])
@pytest.mark.parametrize("size", [1.0, 40.0])  # small and large scores
@pytest.mark.parametrize(("slope", "dropout"), [(1.0, 0.0), (0.2, 0.0), (0.2, 0.37)])
def test_value_and_gradient_equal_a_loop(monkeypatch, edges_per_pass, size, slope, dropout):
    monkeypatch.setattr(cpu, "_EDGES_PER_PASS", edges_per_pass)
    edge_index, inputs = random_edges(), random_inputs(size)
    keep = torch.rand(HEADS, EDGES) >= dropout if dropout else None
    out = edge_attention(
        SortedEdges(edge_index, SOURCES, TARGETS).csr,
        *inputs,
        negative_slope=slope,
        dropout=dropout,
        keep=keep,
    )
    expected = looped_attention(edge_index, *inputs, slope, keep, dropout)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, weight)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs, weight))


def test_weights_of_large_equal_scores_are_shared_in_the_gradient_too():
    """At 2e10, the spacing of float32 is 2048: a sum with the log of the degree loses the log."""
    edge_index, value = random_edges(), random_inputs(dtype=torch.float)[2]
    query, key = torch.full((TARGETS, HEADS, 2), 1e5), torch.full((SOURCES, HEADS, 2), 1e5)
    out = edge_attention(SortedEdges(edge_index, SOURCES, TARGETS).csr, query, key, value)
    exact = value.detach().double().requires_grad_()
    expected = looped_attention(edge_index, query.double(), key.double(), exact, 1.0)
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, value, weight)
    (expected_grad,) = torch.autograd.grad(expected, exact, weight.double())
    torch.testing.assert_close((out, grad), (expected, expected_grad), check_dtype=False)


def test_more_edges_than_pairs_of_nodes():
    edge_index = torch.randint(3, (2, 41))
    conv = LipschitzGATConv(FEATURES, CHANNELS, HEADS, add_self_loops=False)
    x = torch.randn(3, FEATURES)
    torch.testing.assert_close(conv(x, edge_index), message_by_message(conv)(x, edge_index))


@pytest.mark.parametrize("dropout", [0.0, 0.37])
@pytest.mark.parametrize("differentiates", [True, False])
def test_trial_of_right_kernels_finds_no_fault(monkeypatch, dropout, differentiates):
    """The passes of the CPU stand in for the Triton kernels."""
    monkeypatch.setattr(verdict, "_VERDICTS", {})
    monkeypatch.setattr(verdict, "_milliseconds", lambda work: 1.0)  # as fast, so not used
    csr = SortedEdges(random_edges(), SOURCES, TARGETS).csr
    keep = torch.rand(HEADS, EDGES) >= dropout if dropout else None
    inputs = random_inputs(3.0, torch.float)
    with warnings.catch_warnings(), torch.set_grad_enabled(differentiates):
        warnings.simplefilter("error")
        used = triton_passes(
            inputs,
            csr,
            Settings(0.2, 1 / (1 - dropout), keep),
            kernel=operator._fused,
            plain=operator._reference,
        )
    (name,) = verdict._VERDICTS
    assert (
        not used and "3 heads, 2 and 5 channels" in name and f"gradients {differentiates}" in name
    )
    assert all(x.grad is None for x in inputs)


def test_second_derivative_equals_that_of_a_loop():
    edge_index, inputs = random_edges(), random_inputs()
    weights = [torch.randn_like(x) for x in inputs]
    results = []
    for out in (
        edge_attention(SortedEdges(edge_index, SOURCES, TARGETS).csr, *inputs, negative_slope=0.2),
        looped_attention(edge_index, *inputs, 0.2),
    ):
        grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        penalty = sum((g * w).sum() for g, w in zip(grads, weights, strict=True))
        results.append(torch.autograd.grad(penalty, inputs))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("frozen", range(3))
def test_second_derivative_with_a_frozen_input(frozen):
    """A layer whose queries, keys or values have no derivative."""
    edge_index, inputs = random_edges(), random_inputs()
    inputs[frozen].requires_grad_(False)
    needed = [x for x in inputs if x.requires_grad]
    results = []
    for out in (
        edge_attention(SortedEdges(edge_index, SOURCES, TARGETS).csr, *inputs),
        looped_attention(edge_index, *inputs, 1.0),
    ):
        grads = torch.autograd.grad(out.square().sum(), needed, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), needed))
    torch.testing.assert_close(*results)


def test_neighbor_max_equals_segment_max_with_equal_maxima():
    edge_index = random_edges()
    values = torch.randint(3, (SOURCES, HEADS)).double().requires_grad_()
    csr = SortedEdges(edge_index, SOURCES, TARGETS).csr
    out = neighbor_max(values, csr)
    expected = segment_max(values[edge_index[0]], edge_index[1], TARGETS)
    assert torch.equal(out, expected)
    weight = torch.randn_like(out)
    for create_graph in (False, True):
        (grad,) = torch.autograd.grad(out, values, weight, True, create_graph)
        (expected_grad,) = torch.autograd.grad(expected, values, weight, retain_graph=True)
        torch.testing.assert_close(grad, expected_grad)


def message_by_message(conv):
    """The same layer with a hook that changes nothing but needs the messages."""
    other = copy.deepcopy(conv)
    other.calls = []
    other.register_message_forward_hook(lambda module, *_: module.calls.append(1))
    return other


@pytest.fixture
def fused_calls(monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return edge_attention(*args, **kwargs)

    for module in (gat_conv, transformer_conv, cosine_conv):
        monkeypatch.setattr(module, "edge_attention", counted)
    return calls


@pytest.mark.parametrize(
    ("layer", "kwargs", "bipartite"),
    [
        (LipschitzGATConv, {}, False),
        (LipschitzGATConv, {}, True),
        (LipschitzGATConv, {"add_self_loops": False, "residual": True}, False),
        (LipschitzGATConv, {"add_self_loops": False, "concat": False}, True),
        (LipschitzGATConv, {"att_norm": 1e-3, "scale_individually": False}, False),
        (LipschitzGATConv, {"min_att_norm": 0.3}, False),
        (LipschitzGATConv, {"negative_slope": -0.7, "add_self_loops": False}, False),
        (LipschitzGATConv, {"score_norm": None, "bias": False}, False),
        (LipschitzTransformerConv, {}, False),
        (LipschitzTransformerConv, {"concat": False, "beta": True}, True),
        (LipschitzTransformerConv, {"score_norm": None, "root_weight": False}, False),
        (ScaledCosineConv, {}, False),
        (ScaledCosineConv, {"share_projection": True, "value_scale": None}, False),
    ],
)
def test_convolution_equals_its_messages(fused_calls, layer, kwargs, bipartite):
    torch.manual_seed(2)
    conv = layer((FEATURES, 2) if bipartite else FEATURES, CHANNELS, HEADS, **kwargs).double()
    reference = message_by_message(conv)
    results = []
    for own in (conv, reference):
        source = torch.linspace(-1, 2, SOURCES * FEATURES, dtype=torch.double).sin()
        source = source.view(SOURCES, FEATURES).requires_grad_()
        target = source[:TARGETS, :2].square()
        out = own((source, target) if bipartite else source, random_edges())
        out.square().sum().backward()
        grads = {name: p.grad for name, p in own.named_parameters()}
        results.append((out, source.grad, grads))
    torch.testing.assert_close(*results)
    assert len(fused_calls) == 1 and len(reference.calls) == 1


@pytest.mark.parametrize("layer", CONVS)
def test_a_layer_drops_attention_weights_in_training_only(fused_calls, layer):
    torch.manual_seed(4)
    conv, edges = layer(FEATURES, CHANNELS, HEADS), SortedEdges(random_edges(), SOURCES)
    x, draws = torch.randn(SOURCES, FEATURES), 499
    expected = conv(x, edges)
    conv.dropout = 0.37
    torch.testing.assert_close(conv.eval()(x, edges), expected)
    outs = torch.stack([conv.train()(x, edges) for _ in range(draws)])
    error = outs.std(0) / math.sqrt(draws)
    assert error.amax() > 0
    assert ((outs.mean(0) - expected).abs() <= 5 * error + 1e-6).all()
    assert len(fused_calls) == draws + 2


@pytest.mark.parametrize("layer", CONVS)
@pytest.mark.parametrize("way", ["vectorize", "jacrev", "vmap"])
def test_batches_of_gradients_equal_single_ones(fused_calls, layer, way):
    torch.manual_seed(3)
    conv, edge_index = layer(FEATURES, CHANNELS, HEADS).double(), random_edges()
    x = torch.randn(SOURCES, FEATURES, dtype=torch.double, requires_grad=True)

    def apply(x):
        return conv(x, edge_index)[:2]

    expected = torch.autograd.functional.jacobian(apply, x)
    calls = len(fused_calls)
    if way == "jacrev":
        jacobian = torch.func.jacrev(apply)(x)
    elif way == "vectorize":
        jacobian = torch.autograd.functional.jacobian(apply, x, vectorize=True)
    else:
        out = apply(x)
        units = torch.eye(out.numel(), dtype=torch.double).view(-1, *out.shape)
        (jacobian,) = torch.vmap(lambda unit: torch.autograd.grad(out, x, unit))(units)
        jacobian = jacobian.view_as(expected)
    torch.testing.assert_close(jacobian, expected)
    assert len(fused_calls) == calls + (way != "jacrev")


@pytest.mark.parametrize("layer", CONVS)
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float, False), (torch.bfloat16, False), (torch.half, False), (torch.float, True)],
)
def test_other_types_equal_the_messages(layer, dtype, autocast):
    torch.manual_seed(0)
    conv = layer(FEATURES, CHANNELS, HEADS).to(dtype)
    x, edge_index = torch.randn(SOURCES, FEATURES, dtype=dtype), random_edges()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, expected = conv(x, edge_index), message_by_message(conv)(x, edge_index)
    if dtype is torch.float and not autocast:
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
    else:
        tolerance = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(out, expected, **tolerance)
    exact = copy.deepcopy(conv).double()(x.double(), edge_index)
    torch.testing.assert_close(out.double(), exact, **tolerance)


def test_half_precision_survives_sources_without_features():
    """LipschitzNorm's factor is 1e6 there, which times the queries has no number in float16."""
    conv = LipschitzTransformerConv(FEATURES, CHANNELS, HEADS, bias=False).half()
    nothing, x = torch.zeros(SOURCES, FEATURES).half(), torch.ones(TARGETS, FEATURES).half()
    nothing.requires_grad_()
    for options in ({}, {"return_attention_weights": True}):
        out = conv((nothing, x), random_edges(), **options)
        out = out[0] if options else out
        assert torch.equal(out, conv.lin_skip(x))  # equal weights of values that are 0
        (grad,) = torch.autograd.grad(out.sum(), nothing)
        assert grad.isfinite().all()


def test_the_gradient_of_a_squared_norm_may_leave_half_precision():
    x = torch.tensor([[0.01, -0.02]], dtype=torch.half, requires_grad=True)
    (grad,) = torch.autograd.grad(with_squared_norm(x)[1], x, torch.tensor([1e6]))
    torch.testing.assert_close(grad, (2e6 * x.detach().double()).half())


@pytest.mark.parametrize("layer", [LipschitzGATConv, LipschitzTransformerConv])
@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_score_norm_changes_no_type(layer, messages, autocast):
    dtype = torch.float if autocast else torch.bfloat16
    x, edge_index = torch.randn(SOURCES, FEATURES, dtype=dtype), random_edges()
    learned = {"min_att_norm": 0.3} if layer is LipschitzGATConv else {}
    plain = layer(FEATURES, CHANNELS, HEADS, score_norm=None).to(dtype)
    normalized = layer(FEATURES, CHANNELS, HEADS, **learned).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        types = []
        for conv in (plain, normalized):
            if messages:
                out, (_, attn) = conv(x, edge_index, return_attention_weights=True)
                types.append((out.dtype, attn.dtype))
            else:
                types.append(conv(x, edge_index).dtype)
    assert types[0] == types[1]


def test_dropout_scales_what_it_keeps():
    degree, rate = 1999, 0.3
    star = torch.stack([torch.arange(degree), torch.zeros(degree, dtype=torch.long)])
    graph = SortedEdges(star, degree, 1).csr
    query, key = torch.zeros(1, 2, 1), torch.zeros(degree, 2, 1)
    value = torch.eye(degree).unsqueeze(1).expand(-1, 2, -1)  # the output shows each weight
    weights = edge_attention(graph, query, key, value, dropout=rate)[0]
    kept = weights > 0
    torch.testing.assert_close(
        weights[kept], torch.full_like(weights[kept], 1 / degree / (1 - rate))
    )
    deviation = math.sqrt(rate * (1 - rate) / degree)
    assert (kept.float().mean(1) - (1 - rate)).abs().max() < 4 * deviation
    both = kept.all(0).float().mean() - (1 - rate) ** 2  # heads drop independently
    assert both.abs() < 4 * deviation
    full = edge_attention(graph, query, key, value, dropout=rate, training=False)
    torch.testing.assert_close(full, torch.full_like(full, 1 / degree))


def test_nothing_is_kept_per_edge_but_the_dropout_mask():
    def kept_bytes(num_edges, dropout):
        edge_index = torch.randint(SOURCES, (2, num_edges))
        conv = LipschitzGATConv(FEATURES, CHANNELS, HEADS, add_self_loops=False, dropout=dropout)
        sizes = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive: no address twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = conv(torch.randn(SOURCES, FEATURES), edge_index)
        assert out.grad_fn is not None
        return sum(size for size, _ in sizes.values())

    assert kept_bytes(101, 0.0) == kept_bytes(1009, 0.0)
    assert kept_bytes(1009, 0.5) - kept_bytes(101, 0.5) == (1009 - 101) * HEADS


class TestSortedEdges:
    def test_a_model_sorts_once_for_all_layers_and_not_at_all_if_edges_are_sorted(
        self, monkeypatch
    ):
        sorts = []
        build = EdgeCSR.build
        counted = lambda *args: sorts.append(1) or build(*args)  # noqa: E731
        monkeypatch.setattr(EdgeCSR, "build", staticmethod(counted))
        model = DeepGAT(FEATURES, CHANNELS, 3, num_layers=5, heads=HEADS).eval()
        x, edge_index = torch.randn(SOURCES, FEATURES), random_edges()
        expected = model(x, edge_index)
        assert len(sorts) == 1
        edges = SortedEdges(edge_index, SOURCES)
        assert torch.equal(model(x, edges), expected) and torch.equal(model(x, edges), expected)
        assert len(sorts) == 2

    @pytest.mark.parametrize("layer", CONVS)
    def test_sorted_edges_equal_plain_ones_in_either_way_of_computing(self, layer):
        conv = layer(FEATURES, CHANNELS, HEADS)
        x, edge_index = torch.randn(SOURCES, FEATURES), random_edges()
        for own in (conv, message_by_message(conv)):
            assert torch.equal(own(x, SortedEdges(edge_index, SOURCES)), own(x, edge_index))

    @pytest.mark.parametrize("layer", [*CONVS, SparseGCNConv])
    def test_copies_of_edges_that_were_sorted_give_the_same(self, layer):
        conv = layer(FEATURES, CHANNELS)
        x, edges = torch.randn(SOURCES, FEATURES), SortedEdges(random_edges(), SOURCES)
        expected = conv(x, edges)
        for other in (pickle.loads(pickle.dumps(edges)), copy.deepcopy(edges)):
            assert torch.equal(conv(x, other), expected)

    @pytest.mark.parametrize("layer", CONVS)
    def test_edges_sorted_in_inference_mode_can_be_trained_on(self, layer):
        conv, edge_index = layer(FEATURES, CHANNELS, HEADS).eval(), random_edges()
        x = torch.randn(SOURCES, FEATURES, requires_grad=True)
        edges = SortedEdges(edge_index, SOURCES)
        with torch.inference_mode():
            conv(x, edges)

        def penalty(edges):
            (grad,) = torch.autograd.grad(conv(x, edges).sin().sum(), x, create_graph=True)
            return torch.autograd.grad(grad.square().sum(), x)

        torch.testing.assert_close(penalty(edges), penalty(edge_index))

    def test_edges_sorted_for_another_graph_raise(self):
        conv = LipschitzGATConv(FEATURES, CHANNELS)
        message = "sorted for 13 sources and 7 targets, but the inputs have 13 and 13 rows"
        with pytest.raises(ValueError, match=message):
            conv(torch.randn(SOURCES, FEATURES), SortedEdges(random_edges(), SOURCES, TARGETS))

    def test_change_in_place_is_seen_even_behind_torchs_back(self):
        edge_index = random_edges()
        conv = LipschitzGATConv(FEATURES, CHANNELS, HEADS)
        x = torch.randn(SOURCES, FEATURES)
        before = conv(x, edge_index)
        edge_index.numpy()[0, 0] = (edge_index[0, 0] + 1) % SOURCES  # no version counts this
        after = conv(x, edge_index)
        torch.testing.assert_close(after, message_by_message(conv)(x, edge_index))
        assert not torch.allclose(after, before)

    @pytest.mark.parametrize(("row", "name"), [(0, "source"), (1, "target")])
    def test_index_out_of_range_raises(self, row, name):
        edge_index = random_edges()
        edge_index[row, 3] = SOURCES
        edge_index[row, 4] = 0
        message = f"holds {name}s 0..{SOURCES}, but there are {SOURCES} {name} nodes"
        with pytest.raises(IndexError, match=message):
            _ = SortedEdges(edge_index, SOURCES).csr


class TestWhatNeedsTheMessagesGetsThem:
    def test_overridden_message(self):
        class Doubled(LipschitzGATConv):
            def message(self, x_j, alpha):
                return 2 * super().message(x_j, alpha)

        conv = LipschitzGATConv(FEATURES, CHANNELS, HEADS, bias=False)
        doubled = Doubled(FEATURES, CHANNELS, HEADS, bias=False)
        doubled.load_state_dict(conv.state_dict())
        x, edge_index = torch.randn(SOURCES, FEATURES), random_edges()
        torch.testing.assert_close(doubled(x, edge_index), 2 * conv(x, edge_index))

    @pytest.mark.parametrize("step", ["update", "propagate"])
    def test_overridden_update_or_propagate(self, step):
        class DoubledUpdate(LipschitzGATConv):
            def update(self, inputs):
                return 2 * inputs

        class DoubledPropagate(LipschitzGATConv):
            def propagate(self, edge_index, size=None, **kwargs):
                return 2 * MessagePassing.propagate(self, edge_index, size, **kwargs)

        kind = DoubledUpdate if step == "update" else DoubledPropagate
        conv, doubled = (k(FEATURES, CHANNELS, HEADS, bias=False) for k in (LipschitzGATConv, kind))
        doubled.load_state_dict(conv.state_dict())
        x, edge_index = torch.randn(SOURCES, FEATURES), random_edges()
        torch.testing.assert_close(doubled(x, edge_index), 2 * conv(x, edge_index))
        assert changed_messages(doubled, LipschitzGATConv) == f"{kind.__name__} overrides {step}"

    @pytest.mark.parametrize("layer", [*CONVS, SparseGCNConv])
    def test_message_set_on_the_instance(self, layer):
        x, edge_index = torch.randn(SOURCES, FEATURES), random_edges()
        sums_only = {LipschitzTransformerConv: {"root_weight": False}, ScaledCosineConv: {}}
        conv = layer(FEATURES, CHANNELS, **sums_only.get(layer, {"bias": False}))
        expected = 2 * conv(x, edge_index)
        original = conv.message
        conv.message = lambda *args, **kwargs: 2 * original(*args, **kwargs)
        torch.testing.assert_close(conv(x, edge_index), expected)

    def test_a_parametrization_leaves_the_messages_as_they_are(self, fused_calls):
        """PyTorch gives a layer with a parametrization of its own a class of its own."""
        conv = LipschitzGATConv(FEATURES, CHANNELS, HEADS)
        parametrizations.weight_norm(conv, "att_src")
        conv(torch.randn(SOURCES, FEATURES), random_edges())
        assert len(fused_calls) == 1

    @pytest.mark.parametrize("kwargs", [{"aggr": "max"}, {"flow": "target_to_source"}])
    def test_other_aggregation_or_flow(self, fused_calls, kwargs):
        conv = LipschitzGATConv(FEATURES, CHANNELS, HEADS, **kwargs)
        assert isinstance(conv, MessagePassing)
        conv(torch.randn(SOURCES, FEATURES), random_edges())
        assert not fused_calls

    def test_every_reason_is_named(self):
        x, edge_index = torch.randn(SOURCES, FEATURES), random_edges()

        class Overridden(LipschitzGATConv):
            def message(self, x_j, alpha):
                return super().message(x_j, alpha)

        def reason(conv, edges=edge_index, target=x, **kwargs):
            return why_messages(conv, LipschitzGATConv, edges, x, target, **kwargs)

        def make(kind=LipschitzGATConv, **kwargs):
            return kind(FEATURES, CHANNELS, **kwargs)

        assert reason(make()) is None
        assert reason(make(Overridden)) == "Overridden overrides message"
        assert reason(message_by_message(make())) == "a hook watches message"
        assert reason(make(aggr="max")) == "the messages are not summed"
        assert "from target to source" in reason(make(flow="target_to_source"))
        assert "every attention weight is dropped" in reason(make(dropout=1.0))
        assert "released_code" in reason(make(released_code=True))
        assert "not a dense tensor" in reason(make(), torch.eye(SOURCES).to_sparse())
        assert "int64" in reason(make(), edge_index.int())
        assert reason(make(), edge_index[:, :0]) == "there are 0 edges"
        assert "no representations" in reason(make(), target=None)
        assert "size=(2, 3)" in reason(make(), size=(2, 3))
        assert "edge features" in reason(make(), edge_features=True)
        assert "weights are returned" in reason(make(), attention_weights=True)

    def test_forward_mode(self):
        conv = LipschitzGATConv(FEATURES, CHANNELS, HEADS, score_norm=None).double()
        x, direction = torch.randn(2, SOURCES, FEATURES, dtype=torch.double)
        edge_index = random_edges()
        _, pushed = torch.func.jvp(lambda v: conv(v, edge_index), (x,), (direction,))
        step = 1e-6 * direction
        expected = (conv(x + step, edge_index) - conv(x - step, edge_index)) / 2e-6
        torch.testing.assert_close(pushed, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "passed"), [("gpu and not slow", 7), ("gpu and slow", 11)])
def test_triton_kernels_equal_a_loop_in_the_interpreter(which, passed):
    """In a process of its own: the interpreter takes the kernels' place where they are defined."""
    pytest.importorskip("triton", reason="the kernels are Triton's")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            which,
            "tests/graph/test_edge_attention_gpu.py",
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and f"{passed} passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_triton_kernels_compile_for_a_gpu_that_is_not_there(architecture, monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="the kernels are Triton's")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    workbench = importlib.import_module("benchmarks.gpu_predictions.triton_kernels")
    # how many rows of 8 floats each kernel must load 128 bits at a time
    rows = {"_forward": 3, "_backward_by_target": 4, "_backward_by_source": 4}
    rows |= {"_max_forward": 1, "_max_share": 3, "_max_backward": 3}
    assert set(workbench.KERNELS) == set(rows)
    for name, wide in rows.items():
        found = workbench.resources(name, architecture)
        assert found["spilled_bytes"] == 0, name
        assert found["loads_by_bits"].get(128, 0) >= wide, name
    unaligned = workbench.resources("_forward", architecture, aligned=False)
    assert max(unaligned["loads_by_bits"]) == 32


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_triton_kernels_compile_for_other_sizes_in_half_precision(
    architecture, monkeypatch, tmp_path
):
    pytest.importorskip("triton", reason="the kernels are Triton's")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    workbench = importlib.import_module("benchmarks.gpu_predictions.triton_kernels")
    for name, (heads, channels) in itertools.product(workbench.KERNELS, ((3, 5), (8, 64))):
        size = {"heads": heads, "channels": channels}
        found = workbench.resources(name, architecture, dtype="bf16", **size)
        assert found["spilled_bytes"] == 0, (name, channels)
