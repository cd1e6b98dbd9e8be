"""What the benchmarks count, against closed forms and torch's own counter."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import lipsformer  # noqa: F401  (registers the models)
from benchmarks.counting import OperatorCounter
from benchmarks.roofline import operators

B, C, H, W, D = 2, 11, 7, 5, 13


def test_training_step_of_a_product_is_three_products():
    a = torch.randn(H, C, requires_grad=True)
    b = torch.randn(C, D, requires_grad=True)
    grad = torch.ones(H, D)
    with OperatorCounter() as counter:
        torch.mm(a, b).backward(grad)
    assert counter.flops == 3 * 2 * H * C * D
    assert counter.bytes == 4 * 3 * (H * C + C * D + H * D)


def test_grouped_convolution_counts_the_channels_of_its_group():
    x = torch.randn(B, C, H, W, requires_grad=True)
    weight = torch.randn(C, 1, 3, 3, requires_grad=True)
    grad = torch.ones(B, C, H, W)
    with OperatorCounter() as counter:
        F.conv2d(x, weight, padding=1, groups=C).backward(grad)
    assert counter.flops == 3 * 2 * B * C * H * W * 9


def test_attention_on_a_cpu_is_two_products_and_five_in_its_gradient():
    q, k, v = torch.randn(3, B, H, W, D, requires_grad=True).unbind()
    grad = torch.ones(B, H, W, D)
    with OperatorCounter() as counter:
        out = F.scaled_dot_product_attention(q, k, v)
    assert counter.products == 2 * 2 * B * H * W * W * D
    with OperatorCounter() as counter:
        out.backward(grad)
    assert counter.products == 5 * 2 * B * H * W * W * D


def test_elementwise_operators_count_elements_and_views_nothing():
    x, row = torch.randn(D, C), torch.randn(C)
    with OperatorCounter() as counter:
        wide = row.unsqueeze(0).expand(D, C)
    assert (counter.flops, counter.bytes) == (0, 0)
    with OperatorCounter() as counter:
        x + wide
    assert (counter.flops, counter.bytes) == (D * C, 4 * (2 * D * C + C))


@pytest.mark.parametrize("name", ["lipsformer_nano", "lipsformer_swin_nano"])
def test_operators_of_the_roofline_are_all_that_multiplies(name):
    model = timm.create_model(name).train()
    images = torch.randn(B, 3, 32, 32)
    with FlopCounterMode(display=False) as whole:
        model(images)
    total = 0
    for operator in operators(model, images):
        with FlopCounterMode(display=False) as alone:
            operator.forward()
        total += operator.calls * alone.get_total_flops()
    assert total == whole.get_total_flops()
