"""Layers with the constant 1, against loops, exact Jacobians and the nearest orthogonal matrix."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lipsformer.analysis.bounds import Domain, lipschitz_bound
from lipsformer.analysis.bounds.contractive import divisor
from lipsformer.analysis.instruments import Orthogonal
from lipsformer.layers import (
    FoldShift,
    JoinTokens,
    ScaledCosineAttention,
    orthogonalize,
)
from lipsformer.models.lipsformer_contractive import ContractiveResidual
from lipsformer.models.lipsformer_swin import WindowAttention


def test_folds_and_shifts_are_those_of_a_loop_and_so_are_their_gradients():
    batch, height, width, channels = 2, 3, 5, 24
    x = torch.randn(batch, height, width, channels, dtype=torch.float64, requires_grad=True)
    expected = torch.empty_like(x)
    for row in range(height):
        for column in range(width):
            for channel in range(channels):
                group = channel // 3
                down, right = {2: (1, 0), 3: (-1, 0), 4: (0, 1), 5: (0, -1)}.get(group, (0, 0))
                source = x[:, (row - down) % height, (column - right) % width, channel]
                expected[:, row, column, channel] = source.abs() if group < 4 else source
    grad = torch.randn_like(x)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    with FakeTensorMode():  # leaves nothing behind that real maps of this size would meet
        FoldShift()(torch.empty(x.shape, requires_grad=True))
    for training in (True, False):
        y = FoldShift().train(training)(x)
        assert torch.equal(y, expected)
        assert torch.equal(torch.autograd.grad(y, x, grad, retain_graph=True)[0], expected_grad)
        assert torch.equal(torch.autograd.grad(y.mul_(2.0), x, grad)[0], 2.0 * expected_grad)


def test_tokens_are_joined_in_every_batch_also_of_an_exported_program():
    batch = ({0: torch.export.Dim("batch")},)
    example = (torch.randn(2, 3, 5, 7),)
    program = torch.export.export(JoinTokens(), example, dynamic_shapes=batch).module()
    for count in (0, 1, 11):
        x = torch.randn(count, 3, 5, 7)
        expected = x.new_tensor([image.flatten().tolist() for image in x]).view(count, 1, 1, 105)
        assert torch.equal(JoinTokens()(x), expected)
        assert torch.equal(program(x), expected)


def mixing(tau: float, mix: float, table: float) -> ContractiveResidual:
    """Return attention on 6 of 11 channels, with orthogonal projections and the weight `mix`."""
    core = ScaledCosineAttention(2, logit_scale=tau, value_scale=0.7, eps=0.3)
    residual = ContractiveResidual(WindowAttention(6, 2, (2, 3), core), 6).double()
    with torch.no_grad():
        residual.branch.qkv.weight.normal_()
        residual.branch.proj.weight.normal_()
        residual.mix.fill_(mix)
        residual.branch.relative_position_bias_table.normal_(std=table)
    Orthogonal(residual).before_eval()
    return residual.eval()


@pytest.mark.parametrize(("tau", "table"), [(0.25, 0.1), (3.0, 2.0)])
def test_the_largest_jacobian_that_ascent_finds_is_below_one(tau, table):
    """The stated divisor is that of Theorem 31, and the residual is attacked at a = 1 too."""
    torch.manual_seed(0)
    for mix in (0.6, 7.0):  # a mix of 7 counts as 1
        residual = mixing(tau, mix, table)
        domain = Domain(size=(2, 3), channels=11)
        stated = lipschitz_bound(residual, domain).value
        assert 1.0 <= stated < 1.01
        assert divisor(residual.branch, (2, 3)) == pytest.approx(residual.divisor(2, 3).item())
        x = (0.1 * torch.randn(1, 2, 3, 11, dtype=torch.float64)).requires_grad_()
        largest = 0.0
        for _ in range(8):
            jacobian = torch.autograd.functional.jacobian(residual, x, create_graph=True)
            norm = torch.linalg.matrix_norm(jacobian.reshape(66, 66), 2)
            largest = max(largest, norm.item())
            (gradient,) = torch.autograd.grad(norm, x)
            x = (x + 0.05 * gradient / gradient.norm().clamp_min(1e-9)).detach().requires_grad_()
        assert largest <= stated
        # The channels that are kept reach the constant, so look only at the others.
        own = torch.autograd.functional.jacobian(residual, x)[..., 5:, :, :, :, 5:]
        assert torch.linalg.matrix_norm(own.reshape(36, 36), 2) <= stated


def test_a_step_lowers_every_norm_below_one_and_comes_near_the_nearest_orthogonal_matrix():
    torch.manual_seed(0)
    for shape in ((5, 7), (7, 5), (6, 2, 2)):
        matrix = torch.randn(shape, dtype=torch.float64)
        u, s, vh = torch.linalg.svd(matrix.flatten(1), full_matrices=False)
        assert torch.allclose(orthogonalize(matrix, exact=True).flatten(1), u @ vh)
        far = orthogonalize((u * s / s.max() * 1.99) @ vh)
        assert torch.linalg.matrix_norm(far, 2) <= 1.0 + 1e-12
        equal = torch.where(s == s.max(), s.new_tensor(1e-6), s.new_tensor(1.0))
        for singular in (equal, 1e6 * s, torch.ones_like(s) + 1e-7):
            assert torch.allclose(orthogonalize((u * singular) @ vh, exact=True), u @ vh)
        near = orthogonalize((u * torch.linspace(0.99, 1.01, len(s), dtype=s.dtype)) @ vh)
        assert (near - u @ vh).norm() < 1e-3


def test_queries_keys_and_values_are_orthogonal_each_and_the_classifier_is_left():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(5, 15), nn.Linear(5, 3)

        def get_classifier(self) -> nn.Module:
            return self.head

    torch.manual_seed(0)
    model = Model()
    before = model.head.weight.clone()
    Orthogonal(model).before_eval()
    for part in model.qkv.weight.detach().chunk(3):
        assert torch.allclose(part @ part.T, torch.eye(5), atol=1e-5)
    assert torch.equal(model.head.weight, before)
    assert math.isclose(
        torch.linalg.matrix_norm(model.qkv.weight.detach(), 2).item(), 3**0.5, rel_tol=1e-5
    )


@pytest.mark.parametrize("least", [-0.1, 1.1, math.nan])
def test_a_least_weight_outside_the_unit_interval_is_refused(least):
    with pytest.raises(ValueError, match=rf"least={least} must be in \[0, 1\]"):
        ContractiveResidual(nn.Identity(), 3, least)


@pytest.mark.parametrize("least", [1e-3, 1e-9, 1e-12])
def test_the_nearest_orthogonal_matrix_of_tiny_singular_values(least):
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(3, 3).double())
    right, _ = torch.linalg.qr(torch.randn(5, 5).double())
    values = torch.tensor([1.0, 1.0, least]).double()
    found = orthogonalize((left * values) @ right[:3], exact=True)
    torch.testing.assert_close(found, left @ right[:3], rtol=0, atol=1e-15 / least + 1e-12)


def test_a_singular_value_of_zero_stays_zero():
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]).double()
    for weight, expected in ((weights, [1, 1, 0]), (0 * weights, [0, 0, 0])):
        found = torch.linalg.svdvals(orthogonalize(weight, exact=True))
        torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=0, atol=1e-11)


def test_the_divisor_of_large_scales_is_that_of_float64():
    attn = WindowAttention(
        8, 1, window_size=4, attention=ScaledCosineAttention(1, logit_scale=60.0)
    )
    nn.init.constant_(attn.relative_position_bias_table, -110.0)
    attn.relative_position_bias_table.data[24] = 0.0
    layer = ContractiveResidual(attn, dim=8, least=1.0).eval()
    exact = copy.deepcopy(layer).double().divisor(4, 4)
    torch.testing.assert_close(layer.divisor(4, 4).double(), exact, rtol=1e-6, atol=0)
    assert layer(torch.randn(1, 4, 4, 8)).isfinite().all()


def test_channels_that_are_no_eight_groups_are_refused(path):
    with pytest.raises(ValueError, match="x has 12 channels: use a multiple of 8"):
        FoldShift()(torch.randn(2, 3, 4, 12))
