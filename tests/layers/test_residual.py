import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from lipsformer.layers import Linear, WeightedResidual


class LinearEnd(nn.Module):
    """A branch whose last linear layer can take the residual scale."""

    ends_in = "linear"
    treats_samples_alone = True

    def __init__(self):
        super().__init__()
        self.last = Linear(3, 3)
        self.seen = []

    def forward(self, x, output_scale=None):
        self.seen.append(len(x))
        return self.last(x, output_scale=output_scale)


class GeluEnd(LinearEnd):
    """A branch whose last GELU the residual can apply."""

    ends_in = "gelu"
    treats_samples_alone = True

    def forward(self, x, last_gelu=True):
        z = super().forward(x)
        return F.gelu(z) if last_gelu else z


class PlainEnd(LinearEnd):
    """A branch that says nothing about its end."""

    ends_in = None
    treats_samples_alone = True

    def forward(self, x):
        return super().forward(x)


BRANCHES = [PlainEnd, LinearEnd, GeluEnd]


def formula(branch, x, mask, scale, weight, bias):
    """x + mask * scale * f(x) in double precision."""
    z = x @ weight.T + bias
    value = 0.5 * z * (1 + torch.erf(z / 2**0.5)) if branch is GeluEnd else z
    return x + mask * scale * value


def test_weighted_residual_equals_the_formula_per_channel():
    torch.manual_seed(0)
    residual = WeightedResidual(nn.Tanh(), 5, 0.25).double()
    torch.nn.init.normal_(residual.residual_scale)
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    expected = torch.empty_like(x)
    for channel in range(5):
        scale = residual.residual_scale[channel].item()
        expected[..., channel] = x[..., channel] + scale * x[..., channel].tanh()
    torch.testing.assert_close(residual(x), expected)


@pytest.mark.parametrize("first", [0.0, 0.9])
@pytest.mark.parametrize("compiled", [False, True])
def test_drop_path_drops_whole_samples_keeps_the_mean_and_can_be_set(first, compiled):
    torch.manual_seed(0)
    residual = WeightedResidual(nn.Identity(), 3, 1.0, drop_path=first).train()
    apply = torch.compile(residual, backend="eager") if compiled else residual
    x = torch.ones(4000, 2, 3)
    for rate in (first, 0.4, 0.0):
        residual.drop_path = rate
        with torch.no_grad():
            added = apply(x) - x
        kept = added[:, 0, 0] > 0
        torch.testing.assert_close(added, (kept / (1.0 - rate))[:, None, None].expand_as(added))
        # five standard deviations of the share of kept samples
        deviation = 5 * (rate * (1.0 - rate) / len(x)) ** 0.5
        assert kept.double().mean().item() == pytest.approx(1.0 - rate, abs=deviation)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_drop_path_out_of_range_is_refused_at_the_start_and_later(rate):
    residual = WeightedResidual(nn.Identity(), 3, 1.0, drop_path=0.1)
    with pytest.raises(ValueError, match=rf"drop_path={rate} must be in \[0, 1\)"):
        residual.drop_path = rate
    assert residual.drop_path == 0.1
    with pytest.raises(ValueError, match=rf"drop_path={rate} must be in \[0, 1\)"):
        WeightedResidual(nn.Identity(), 3, 1.0, drop_path=rate)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_initial_weight_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match=f"init_value={value} must be finite"):
        WeightedResidual(nn.Identity(), 3, value)


@pytest.mark.parametrize("kept", [[1, 3, 4], [], [0, 1, 2, 3, 4], None])
@pytest.mark.parametrize("branch", BRANCHES)
def test_values_and_gradients_equal_float64_on_all_samples(path, kept, branch, monkeypatch):
    """Only the kept samples may be computed; the result is that of the masked formula."""
    torch.manual_seed(0)
    x, upstream = torch.randn(2, 5, 2, 7, 3).unbind(0)
    mask = torch.ones(5, 1, 1, 1)
    residual = WeightedResidual(branch(), 3, 0.3, drop_path=0.0 if kept is None else 0.4).train()
    torch.nn.init.normal_(residual.residual_scale)
    if kept is not None:
        mask = torch.zeros(5, 1, 1, 1)
        mask[kept] = 1 / 0.6
        monkeypatch.setattr(residual, "draw_mask", lambda x: mask)
    last = residual.branch.last
    inputs = [x.requires_grad_(), residual.residual_scale, last.weight, last.bias]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out = residual(x)
    computed = 5 if path == "off" or not kept else len(kept)
    assert residual.branch.seen == [computed]
    expected = formula(branch, exact[0], mask.double(), *exact[1:])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    out.backward(upstream)
    expected.backward(upstream.double())
    for tensor, reference in zip(inputs, exact, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("branch", BRANCHES)
def test_evaluation_with_and_without_gradients_equals_float64(branch):
    torch.manual_seed(0)
    residual = WeightedResidual(branch(), 3, 0.3, drop_path=0.4).eval()
    x = torch.randn(5, 2, 7, 3)
    last = residual.branch.last
    exact = [t.detach().double() for t in (residual.residual_scale, last.weight, last.bias)]
    expected = formula(branch, x.double(), 1.0, *exact)
    torch.testing.assert_close(residual(x).double(), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(residual(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_further_arguments_reach_the_branch():
    class Scaled(nn.Module):
        def forward(self, x, factor):
            return factor * x

    residual = WeightedResidual(Scaled(), 3, 0.5)
    x = torch.ones(2, 3)
    torch.testing.assert_close(residual(x, 4.0), 3 * x)


@pytest.mark.usefixtures("compiled_kernels")
def test_bfloat16_branch_of_a_float32_map_in_training(monkeypatch):
    class Rounded(nn.Module):
        ends_in = "gelu"
        treats_samples_alone = True

        def __init__(self):
            super().__init__()
            self.z = nn.Parameter(torch.randn(3, 7, 5).bfloat16())

        def forward(self, x, last_gelu=True):
            assert not last_gelu
            assert x.shape == (2, 7, 5)
            return self.z[[0, 2]]

    torch.manual_seed(0)
    layer = WeightedResidual(Rounded(), 5, 0.3, drop_path=0.5).train()
    mask = torch.tensor([2.0, 0.0, 2.0]).view(3, 1, 1)
    monkeypatch.setattr(layer, "draw_mask", lambda x: mask)
    x = torch.randn(3, 7, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.float32
    y.square().sum().backward()
    rounded, grad_scale = layer.branch.z.grad[[0, 2]], layer.residual_scale.grad.clone()

    layer.zero_grad()
    wide = layer.branch.z.detach()[[0, 2]].double().requires_grad_()
    added = layer.residual_scale.double() * 2.0 * torch.nn.functional.gelu(wide)
    expected = x.double().index_add(0, torch.tensor([0, 2]), added)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    expected.square().sum().backward()
    torch.testing.assert_close(rounded.double(), wide.grad, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(grad_scale, layer.residual_scale.grad, rtol=1e-5, atol=1e-5)


def test_a_branch_with_another_shape_is_refused_where_samples_are_dropped():
    class Pool(nn.Module):
        ends_in = "linear"
        treats_samples_alone = True

        def forward(self, x, output_scale):
            return x.mean((1, 2), keepdim=True) * output_scale

    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="shape"):
        WeightedResidual(Pool(), 17, 1.0, 0.3)(torch.randn(11, 5, 7, 17))


class Mean(nn.Module):
    """Return one sample for all, which the sum of the residual repeats."""

    ends_in = "linear"

    def forward(self, x, output_scale=1.0):
        return x.mean(0, keepdim=True) * output_scale


class MeanWithGelu(nn.Module):
    ends_in = "gelu"

    def forward(self, x, last_gelu=True):
        z = x.mean(0, keepdim=True)
        return F.gelu(z) if last_gelu else z


@pytest.mark.parametrize("branch", [Mean(), MeanWithGelu()])
def test_a_branch_that_returns_one_sample_for_all(branch, compiled_kernels):
    torch.manual_seed(0)
    residual = WeightedResidual(branch, 7, 0.5, drop_path=1e-9).train()
    x, grad = torch.randn(5, 11, 7, requires_grad=True), torch.randn(5, 11, 7)
    y = residual(x)
    own = torch.autograd.grad(y, (x, residual.residual_scale), grad)
    exact = x.detach().double().requires_grad_()
    scale = residual.residual_scale.detach().double().requires_grad_()
    expected = exact + scale * branch(exact)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        own, torch.autograd.grad(expected, (exact, scale), grad.double()), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of_all_modules", [False, True])
def test_a_hook_sees_the_output_of_the_branch(compiled_kernels, of_all_modules):
    block = timm.create_model("lipsformer_nano").stages[0].blocks[0].eval()
    seen, x = [], torch.randn(2, 8, 8, block.conv1.residual_scale.numel())

    def hook(module, _, output):
        if module is block.conv1.branch:
            seen.append(output.detach())

    everywhere = nn.modules.module.register_module_forward_hook
    handle = (everywhere if of_all_modules else block.conv1.branch.register_forward_hook)(hook)
    with handle:
        with torch.no_grad():
            block.conv1(x)
        block.conv1(x)
        block.train()
        block.conv1(x)
    with torch.no_grad():
        expected = type(block.conv1.branch).forward(block.conv1.branch, x)
    assert len(seen) == 3
    for output in seen:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


class WithNodes(nn.Module):
    """Branch in which one sample changes another one's result, as nodes of a graph do."""

    def forward(self, x, source, target):
        return torch.zeros_like(x).index_add(0, target, x[source].sin())


class OverBatch(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("branch", "context"),
    [
        (WithNodes(), (torch.tensor([4, 0, 2]), torch.tensor([1, 3, 0]))),
        (OverBatch(), ()),
    ],
)
def test_samples_that_depend_on_each_other_all_enter_the_branch(path, branch, context, monkeypatch):
    torch.manual_seed(0)
    residual = WeightedResidual(branch, 7, 0.5, drop_path=0.4).train()
    mask = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]).view(5, 1) / 0.6
    monkeypatch.setattr(residual, "draw_mask", lambda x: mask)
    x = torch.randn(5, 7)
    expected = x.double() + 0.5 * mask.double() * branch(x.double(), *context)
    torch.testing.assert_close(residual(x, *context).double(), expected, rtol=1e-6, atol=1e-6)


def test_one_gradient_per_sample_can_be_taken_with_drop_path():
    torch.manual_seed(0)
    residual = WeightedResidual(nn.Tanh(), 3, 0.5, drop_path=0.5).train()
    x = torch.randn(64, 3)

    def loss(scale, x):
        return torch.func.functional_call(residual, {"residual_scale": scale}, (x[None],)).sum()

    gradient = torch.func.grad(loss)
    found = torch.vmap(gradient, (None, 0), randomness="different")(residual.residual_scale, x)
    dropped = (found == 0.0).all(1)
    torch.testing.assert_close(found[~dropped], 2.0 * x[~dropped].tanh())
    assert 16 < dropped.sum() < 48


class WithBatchNorm(LinearEnd):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, output_scale=None):
        return super().forward(self.norm(x), output_scale)


def test_a_subclass_does_not_inherit_that_samples_are_alone():
    torch.manual_seed(0)
    residual = WeightedResidual(WithBatchNorm(), 3, 0.5, drop_path=0.5).train()
    residual(torch.randn(23, 3))
    assert residual.branch.seen == [23]


class Squashed(LinearEnd):
    """A subclass that changes the output, so that alpha can no longer be multiplied inside it."""

    def forward(self, x, output_scale=None):
        return super().forward(x, output_scale).tanh()


class SquashedGelu(GeluEnd):
    def forward(self, x, last_gelu=True):
        return super().forward(x, last_gelu).tanh()


def with_forward_of_its_own(branch):
    branch.forward = torch.cos
    return branch


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "branch",
    [
        *(Squashed(), SquashedGelu()),
        *(with_forward_of_its_own(LinearEnd()), with_forward_of_its_own(GeluEnd())),
    ],
)
def test_how_a_branch_ends_is_said_by_the_class_of_its_forward_function(branch, training):
    torch.manual_seed(0)
    residual = WeightedResidual(branch, 3, 0.3).train(training)
    x = torch.randn(5, 2, 7, 3)
    with torch.set_grad_enabled(training):
        y = residual(x)
    torch.testing.assert_close(y, x + 0.3 * branch(x), rtol=1e-5, atol=1e-6)
