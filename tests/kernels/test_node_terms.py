"""What additive attention reads of the nodes, against its formula in float64."""

import pytest
import torch

from lipsformer import kernels

SHAPES = [(13, 3, 5), (331, 3, 37), (2, 1, 1)]  # the second one is shared among threads


def formula(x, source_weight, target_weight):
    return x, (x * source_weight).sum(-1), (x * target_weight).sum(-1), x.square().sum(-1)


def inputs(nodes, heads, channels):
    torch.manual_seed(0)
    x, *weights = torch.randn(nodes, heads, channels), *torch.randn(2, 1, heads, channels)
    grads = [torch.randn(nodes, heads, channels), *torch.randn(3, nodes, heads)]
    return [tensor.requires_grad_() for tensor in (x, *weights)], grads


def exactly(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("shape", SHAPES)
def test_terms_and_all_derivatives_equal_the_formula(shape, compiled_kernels):
    own, grads = inputs(*shape)
    expected = exactly(own)
    results = []
    for function, tensors in ((kernels.node_terms, own), (formula, expected)):
        upstream = [grad.to(tensors[0].dtype) for grad in grads]
        out = function(*tensors)
        first = torch.autograd.grad(out, tensors, upstream, retain_graph=True)
        slow = torch.autograd.grad(out, tensors, upstream, create_graph=True)
        total = torch.stack([grad.sin().sum() for grad in slow]).sum()
        second = torch.autograd.grad(total, tensors)
        results.append([*out, *first, *second])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=2e-5)


def test_batched_gradients_equal_single_ones(compiled_kernels):
    own, _ = inputs(13, 3, 5)
    out = kernels.node_terms(*own)[2]
    batch = torch.randn(7, 13, 3)
    together = torch.autograd.grad(
        out, own, batch, retain_graph=True, is_grads_batched=True, allow_unused=True
    )
    single = [torch.autograd.grad(out, own, grad, retain_graph=True) for grad in batch]
    for ours, expected in zip(together, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(expected))
