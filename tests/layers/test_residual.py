import pytest
import torch

from lipsformer.layers import WeightedResidual, kept_samples


def test_weighted_residual_equals_the_formula_per_channel():
    torch.manual_seed(0)
    residual = WeightedResidual(5, 0.25).double()
    torch.nn.init.normal_(residual.residual_scale)
    x, branch = torch.randn(2, 2, 3, 7, 5, dtype=torch.float64).unbind(0)
    expected = torch.empty_like(x)
    for channel in range(5):
        scale = residual.residual_scale[channel].item()
        expected[..., channel] = x[..., channel] + scale * branch[..., channel]
    torch.testing.assert_close(residual(x, branch), expected)


def test_initial_scale():
    assert WeightedResidual(3, 1 / 12).residual_scale.tolist() == pytest.approx([1 / 12] * 3)


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    residual = WeightedResidual(3, 1.0, drop_path=0.4).train()
    x, branch = torch.zeros(4000, 2, 3), torch.ones(4000, 2, 3)
    with torch.no_grad():
        added = residual(x, branch, residual.draw_mask(x))
    kept = added[:, 0, 0] > 0
    torch.testing.assert_close(added, (kept / 0.6)[:, None, None].expand_as(added))
    # 4000 draws: the share of kept samples has a standard deviation of 0.008
    assert kept.float().mean().item() == pytest.approx(0.6, abs=0.04)


def test_drop_path_is_off_in_evaluation():
    residual = WeightedResidual(3, 1.0, drop_path=0.9).eval()
    assert residual.draw_mask(torch.zeros(50, 3)) is None
    x, branch = torch.zeros(50, 3), torch.ones(50, 3)
    torch.testing.assert_close(residual(x, branch), branch)


def test_a_branch_scaled_by_its_last_layer_is_added_as_it_is():
    torch.manual_seed(0)
    residual = WeightedResidual(3, 0.3, drop_path=0.4)
    x, branch = torch.randn(2, 50, 5, 3).unbind(0)
    torch.testing.assert_close(residual.eval()(x, branch, scaled=True), x + branch)
    mask = residual.train().draw_mask(x)
    added = residual(x, branch, mask, scaled=True) - x
    kept = added[:, 0, 0] != 0
    assert 0 < kept.sum() < 50
    torch.testing.assert_close(added, kept[:, None, None] * branch / 0.6)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_drop_path_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match=rf"drop_path must lie in \[0, 1\), got {rate}"):
        WeightedResidual(3, 1.0, drop_path=rate)


@pytest.mark.parametrize("drop_path", [0.0, 0.4])
def test_gelu_inside_equals_gelu_outside_in_value_and_gradient(drop_path):
    torch.manual_seed(0)
    x, z, upstream = torch.randn(3, 5, 2, 7, 3).unbind(0)
    results = []
    for dtype in (torch.float32, torch.float64):
        residual = WeightedResidual(3, 0.3, drop_path).train()
        torch.nn.init.normal_(residual.residual_scale, generator=torch.manual_seed(1))
        residual = residual.to(dtype)
        x_in, z_in = (t.detach().to(dtype).requires_grad_() for t in (x, z))
        torch.manual_seed(2)
        mask = residual.draw_mask(x_in)
        if dtype == torch.float32:
            out = residual(x_in, z_in, mask, gelu=True)
        else:
            gelu = 0.5 * z_in * (1 + torch.erf(z_in / 2**0.5))
            out = residual(x_in, gelu, mask)
        out.backward(upstream.to(dtype))
        results.append([out.detach(), x_in.grad, z_in.grad, residual.residual_scale.grad])
    for fast, exact in zip(*results, strict=True):
        torch.testing.assert_close(fast.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", [[1, 3, 4], [], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("form", ["plain", "gelu", "scaled"])
def test_computing_kept_samples_alone_equals_computing_all(kept, form):
    """Value and every gradient, against float64 on all samples with the masked formula."""
    torch.manual_seed(0)
    x, upstream = torch.randn(2, 5, 2, 7, 3).unbind(0)
    mask = torch.zeros(5, 1, 1, 1)
    mask[kept] = 1 / 0.6
    residual = WeightedResidual(3, 0.3, drop_path=0.4).train()
    layer = torch.nn.Linear(3, 3)
    inputs = [x.requires_grad_(), residual.residual_scale, layer.weight, layer.bias]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    few = kept_samples(x, mask)
    assert len(few) == (len(kept) or 5)
    branch = layer(few) * residual.residual_scale if form == "scaled" else layer(few)
    out = residual(x, branch, mask, gelu=form == "gelu", scaled=form == "scaled")
    z = exact[0] @ exact[2].T + exact[3]
    value = 0.5 * z * (1 + torch.erf(z / 2**0.5)) if form == "gelu" else z
    expected = exact[0] + exact[1] * mask.double() * value
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    out.backward(upstream)
    expected.backward(upstream.double())
    for tensor, reference in zip(inputs, exact, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


def test_training_with_drop_path_refuses_a_missing_mask():
    x = torch.zeros(5, 3)
    with pytest.raises(ValueError, match=r"drop_path=0.4 needs the mask of draw_mask"):
        WeightedResidual(3, 1.0, drop_path=0.4).train()(x, x)


def test_bfloat16_branch_of_a_float32_map_in_training():
    torch.manual_seed(0)
    layer = WeightedResidual(5, 0.3, drop_path=0.5).train()
    mask = torch.tensor([2.0, 0.0, 2.0]).view(3, 1, 1)
    x, branch = torch.randn(3, 7, 5), torch.randn(2, 7, 5).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert kept_samples(x, mask).shape == (2, 7, 5)
        y = layer(x, branch, mask, gelu=True)
    assert y.dtype == torch.float32
    y.square().sum().backward()
    rounded, grad_scale = branch.grad, layer.residual_scale.grad.clone()

    layer.zero_grad()
    wide = branch.detach().double().requires_grad_()
    added = layer.residual_scale.double() * 2.0 * torch.nn.functional.gelu(wide)
    expected = x.double().index_add(0, torch.tensor([0, 2]), added)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    expected.square().sum().backward()
    torch.testing.assert_close(rounded.double(), wide.grad, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(grad_scale, layer.residual_scale.grad, rtol=1e-5, atol=1e-5)
