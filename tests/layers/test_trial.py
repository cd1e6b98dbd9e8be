"""The trial of a kernel that computes what modules compute, with stand-ins for the kernel."""

import pytest
import torch
from torch import nn

from lipsformer.kernels import TRIAL_SAMPLES
from lipsformer.layers._trial import try_kernel


class Wrong(torch.autograd.Function):
    """An identity with a wrong gradient in one place of the last sample that is tried."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[TRIAL_SAMPLES - 1, 0] += 1.0 + grad.abs().max()
        return grad


@pytest.fixture
def untimed():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_trial_sees_gradients_and_leaves_module_and_input_alone(untimed):
    torch.manual_seed(0)
    module, x = nn.Linear(5, 3).double().bfloat16(), torch.randn(TRIAL_SAMPLES + 3, 5).bfloat16()
    x.requires_grad_()
    before = [p.clone() for p in module.parameters()]
    assert try_kernel("right", module, x, lambda m, y: m(y), lambda m, y: m(y))
    with pytest.warns(RuntimeWarning, match="result 1 is off"):
        assert not try_kernel("wrong", module, x, lambda m, y: m(Wrong.apply(y)), lambda m, y: m(y))
    with torch.no_grad():  # where only the results count
        assert try_kernel("forward", module, x, lambda m, y: m(Wrong.apply(y)), lambda m, y: m(y))
    assert x.grad is None and all(p.grad is None for p in module.parameters())
    assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))
