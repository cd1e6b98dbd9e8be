"""Second derivatives, empty batches and tensors without values, in training mode on the CPU."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_geometric.nn import MessagePassing

from lipsformer import optimize_for_inference
from lipsformer.graph import LipsGAT, LipsGraphTransformer, ScaledCosineConv
from lipsformer.graph.gat_conv import LipschitzGATConv
from lipsformer.graph.models import DeepGAT, DeepGraphTransformer, ResidualGAT, ResidualGCN
from lipsformer.graph.transformer_conv import LipschitzTransformerConv
from lipsformer.layers import CenterNorm, Linear, ScaledCosineAttention, cosine_normalize

BODIES = ["lipsformer_nano", "lipsformer_swin_nano", "lipsformer_vit_tiny"]
EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 0, 0, 3]])
GRAPH = {
    "LipschitzGATConv": lambda: LipschitzGATConv(5, 4, 2),
    "LipschitzGATConv, plain": lambda: LipschitzGATConv(5, 4, 2, score_norm=None),
    "LipschitzGATConv, means": lambda: LipschitzGATConv(5, 4, 2, concat=False, residual=True),
    "LipschitzTransformerConv": lambda: LipschitzTransformerConv(5, 4, 2),
    "LipschitzTransformerConv, gated": lambda: LipschitzTransformerConv(5, 4, 2, beta=True),
    "ScaledCosineConv": lambda: ScaledCosineConv(5, 4, 2),
    "LipsGAT": lambda: LipsGAT(5, 4, 3, 2, heads=2),
    "LipsGraphTransformer": lambda: LipsGraphTransformer(5, 4, 3, 2, heads=2),
    "LipsGraphTransformer, checkpoints": lambda: LipsGraphTransformer(
        5, 4, 3, 2, heads=2, grad_checkpointing=True
    ),
    "ResidualGCN": lambda: ResidualGCN(5, 4, 3, 2),
    "ResidualGAT": lambda: ResidualGAT(5, 4, 3, 2, norm="lipschitznorm"),
    "DeepGAT": lambda: DeepGAT(5, 4, 3, 2, norm="lipschitznorm"),
    "DeepGraphTransformer": lambda: DeepGraphTransformer(5, 4, 3, 2, norm="lipschitznorm"),
}


def body(name, **kwargs):
    sizes = {"embed_dim": 8, "img_size": 16, "drop_path_rate": 0.0, **kwargs}
    if "vit" in name:
        sizes |= {"depth": 1, "num_heads": 2}
    else:
        sizes |= {"depths": (1, 1), "num_heads": (2, 2), "patch_size": 2}
    return timm.create_model(name, num_classes=3, **sizes)


def second_derivatives(module, inputs):
    """Return the derivatives of the squared gradients in the inputs and parameters."""
    tensors = [inputs.requires_grad_(), *module.parameters()]
    first = torch.autograd.grad(module(inputs).pow(3).sum(), tensors, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)


@pytest.mark.parametrize("offset", [0.5, 1e3])
@pytest.mark.parametrize("zero_gain", [False, True])
def test_second_derivatives_of_center_norm_in_training(offset, zero_gain):
    torch.manual_seed(0)
    norm = CenterNorm(6)
    with torch.no_grad():
        norm.bias.normal_().mul_(0.1)[0] = offset  # above 64 times the gain the input is kept
        norm.weight.normal_()[1] = 0.0 if zero_gain else 1.0
    x = torch.randn(2, 3, 6)
    fast = second_derivatives(norm.train(), x.clone())
    plain = second_derivatives(norm.double().eval(), x.double())
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max())


def test_second_derivatives_of_the_normalization_refuse_in_training():
    x = torch.randn(2, 3, 4, requires_grad=True)
    (first,) = torch.autograd.grad(cosine_normalize(x).sum(), x, create_graph=True)
    torch.autograd.grad(first.sum(), x)
    fast = cosine_normalize(x, training=True)
    if "NormalizeRows" in fast.grad_fn.name():  # where oneDNN is available
        torch.autograd.grad(fast.sum(), x, retain_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(fast.sum(), x, create_graph=True)


@pytest.mark.parametrize("model", [LipsGAT, LipsGraphTransformer])
def test_hessian_of_a_graph_model_is_right_or_refused(model):
    torch.manual_seed(0)
    net = model(5, 4, 3, 2, heads=2, dropout=0.0, attn_dropout=0.0, input_dropout=0.0)
    x = torch.randn(4, 5)
    plain = second_derivatives(Fixed(net.double().eval()), x.double())
    try:
        fast = second_derivatives(Fixed(net.float().train()), x.clone())
    except RuntimeError as error:
        assert "no second derivatives" in str(error)  # noqa: PT017
        return
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max())


@pytest.mark.parametrize("name", BODIES)
def test_hessian_of_a_vision_model_is_right_or_refused(name):
    torch.manual_seed(0)
    model = body(name)
    x = torch.randn(2, 3, 16, 16)
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused attention has no second derivatives
        plain = second_derivatives(model.double().eval(), x.double())
    try:
        fast = second_derivatives(model.float().train(), x.clone())
    except RuntimeError as error:
        assert "no second derivatives" in str(error)  # noqa: PT017
        return
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-2, atol=1e-3 * other.abs().max())


@pytest.mark.parametrize("attn", ["cosine", "lipschitznorm"])
@pytest.mark.parametrize("name", BODIES)
def test_torch_func_on_vision_models_in_training(name, attn):
    """Forward mode, vmap and both over reverse mode, against differences in double precision."""
    torch.manual_seed(0)
    model = body(name, attn=attn).train()
    plain = copy.deepcopy(model).double().eval()
    x, v = torch.randn(2, 2, 3, 16, 16)

    def cubes(function):
        return torch.func.grad(lambda images: function(images).pow(3).sum())

    def difference(function):
        exact, along = x.double(), 1e-6 * v.double()
        return (function(exact + along) - function(exact - along)) / 2e-6

    def check(value, expected):
        largest = expected.abs().max().item()
        torch.testing.assert_close(value.double(), expected, rtol=1e-2, atol=1e-3 * largest)

    tangent = difference(plain)
    check(torch.func.jvp(model, (x,), (v,))[1], tangent)
    check((torch.func.jacrev(model)(x) * v).sum((2, 3, 4, 5)), tangent)
    check(torch.func.jvp(cubes(model), (x,), (v,))[1], difference(cubes(plain)))
    check(torch.func.vmap(model)(torch.stack([x, v]))[1], plain(v.double()))
    with torch.autograd.forward_ad.dual_level():
        dual = model(torch.autograd.forward_ad.make_dual(x, v))
        check(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)


class Fixed(nn.Module):
    """A graph module on fixed edges."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x, EDGES)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", GRAPH)
def test_second_derivatives_of_graph_layers_equal_differences_of_the_first(name, training):
    """Along one direction of the inputs and all parameters, in double precision."""
    torch.manual_seed(0)
    layer = Fixed(GRAPH[name]()).double().train(training)
    for module in layer.modules():
        module.__dict__.update({"p": 0.0} if isinstance(module, nn.Dropout) else {})
        if isinstance(module, MessagePassing):
            module.dropout = 0.0
    x = torch.randn(4, 5, dtype=torch.float64)
    tensors = [x.requires_grad_(), *layer.parameters()]
    direction = [torch.randn_like(tensor) for tensor in tensors]

    def first(create_graph=False):
        total = layer(x).pow(3).sum()
        return torch.autograd.grad(
            total, tensors, create_graph=create_graph, materialize_grads=True
        )

    along = sum((g * v).sum() for g, v in zip(first(create_graph=True), direction, strict=True))
    second = torch.autograd.grad(along, tensors, materialize_grads=True)
    sides = []
    for step in (1e-6, -2e-6):  # to one side, and from there to the other
        with torch.no_grad():
            for tensor, v in zip(tensors, direction, strict=True):
                tensor.add_(step * v)
        sides.append(first())
    largest = max(one.abs().max().item() for one in second)
    for one, plus, minus in zip(second, *sides, strict=True):
        torch.testing.assert_close(one, (plus - minus) / 2e-6, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("name", GRAPH)
def test_jacobians_of_graph_layers_by_torch_func(name):
    torch.manual_seed(0)
    layer = Fixed(GRAPH[name]()).double().eval()
    x, v = torch.randn(2, 4, 5, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(torch.func.jacrev(layer)(x), jacobian)
    torch.testing.assert_close(torch.func.jacfwd(layer)(x), jacobian)
    tangent = torch.func.jvp(layer, (x,), (v,))[1]
    torch.testing.assert_close(tangent, (jacobian * v).sum((-1, -2)))
    torch.testing.assert_close(torch.func.vmap(layer)(torch.stack([x, v]))[1], layer(v))
    with torch.autograd.forward_ad.dual_level():
        dual = layer(torch.autograd.forward_ad.make_dual(x, v))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", GRAPH)
def test_graph_layers_on_an_empty_graph(name, training):
    layer = GRAPH[name]().train(training)
    edges = torch.zeros(2, 0, dtype=torch.long)
    x = torch.zeros(0, 5, requires_grad=True)
    out = layer(x, edges)
    assert out.shape == (0, layer(torch.zeros(4, 5), EDGES).shape[1])
    out.sum().backward()
    with torch.no_grad():
        assert len(layer(x, edges)) == 0


@pytest.mark.parametrize("mode", ["training", "gradients", "no gradients"])
@pytest.mark.parametrize("name", BODIES)
def test_vision_models_on_an_empty_batch(name, mode):
    model = body(name).train(mode == "training")
    with torch.set_grad_enabled(mode != "no gradients"):
        logits = model(torch.zeros(0, 3, 16, 16))
    assert logits.shape == (0, 3)
    if mode != "no gradients":
        logits.sum().backward()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_layers_on_an_empty_batch():
    for layer in (Linear(4, 6), CenterNorm(4)):
        assert layer.train()(torch.zeros(0, 5, 4)).shape[:2] == (0, 5)
    assert ScaledCosineAttention(2)(*torch.zeros(3, 0, 2, 5, 4)).shape == (0, 2, 5, 4)


@pytest.mark.parametrize("name", BODIES)
def test_training_on_tensors_without_values(name):
    model = body(name).train()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        images = mode.from_tensor(torch.zeros(2, 3, 16, 16))
        loss = model(images).sum()
        loss.backward()
        assert loss.shape == ()
    folded = optimize_for_inference(body(name).eval())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        assert folded(mode.from_tensor(torch.zeros(2, 3, 16, 16))).shape == (2, 3)


@pytest.mark.parametrize("name", GRAPH)
def test_training_of_graph_layers_on_tensors_without_values(name):
    layer = GRAPH[name]().train()
    # PyG's GCNConv asks for the number of self loops, which only a mode with symbols can answer.
    symbols = ShapeEnv(allow_dynamic_output_shape_ops=True) if name == "ResidualGCN" else None
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols) as mode:
        x = mode.from_tensor(torch.zeros(4, 5)).requires_grad_()
        out = layer(x, mode.from_tensor(EDGES))
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.shape == x.shape
    assert out.shape == layer(torch.zeros(4, 5), EDGES).shape
