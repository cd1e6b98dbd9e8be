"""What the parts of a step compute and move, against torch's own counter and the tensors' sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.step_parts import PARTS, part_of, watched_kernels
from lipsformer.kernels.bindings import SIGNATURES
from lipsformer.kernels.depthwise import depthwise_conv
from lipsformer.layers import ScaledCosineAttention, attend_in_windows

B, H, W, HEADS, D = 2, 7, 11, 3, 5


@pytest.mark.usefixtures("compiled_kernels")
def test_attention_costs_what_its_products_cost_in_plain_operators():
    h, w = 3, 4  # the map is padded to 9 x 12
    qkv = torch.randn(B, H, W, 3, 1, HEADS * D, requires_grad=True)
    attention = ScaledCosineAttention(HEADS).train()
    with watched_kernels() as costs:
        out = attend_in_windows(qkv, [(h, w)], [attention], None)
        forward = dict(costs["flops"])
        out.sum().backward()
    q, k, v = torch.randn(3, B * 9, HEADS, h * w, D, requires_grad=True).unbind()
    with FlopCounterMode(display=False) as plain:
        product = (q @ k.mT) @ v
    assert forward == {"attention between the projections": plain.get_total_flops()}
    with FlopCounterMode(display=False) as gradients:
        product.sum().backward()
    again = plain.get_total_flops() // 2  # the backward pass computes the scores again
    total = plain.get_total_flops() + gradients.get_total_flops() + again
    assert sum(costs["flops"].values()) == total
    # the queries, keys, values and output, and in the backward pass all gradients but the output
    assert sum(costs["bytes"].values()) == (4 + 7) * 4 * B * H * W * HEADS * D


@pytest.mark.usefixtures("compiled_kernels")
def test_depthwise_convolution_costs_what_torch_counts():
    x = torch.randn(B, H, W, D, requires_grad=True)
    weight, bias = torch.randn(D, 1, 7, 7, requires_grad=True), torch.zeros(D, requires_grad=True)
    with watched_kernels() as costs:
        depthwise_conv(x, weight, bias).sum().backward()
    with FlopCounterMode(display=False) as plain:
        F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=3, groups=D).detach()
    assert costs["flops"]["depthwise convolution"] == 3 * plain.get_total_flops()
    # x, y and the parameters; the two gradients of maps and the weight; x, a map and the parameters
    maps, kernel = B * H * W * D, D * 49
    assert costs["bytes"]["depthwise convolution"] == 4 * (6 * maps + 3 * kernel + 2 * D)


def test_every_kernel_has_a_part_and_no_operator_takes_a_kernels_part():
    for kernel in SIGNATURES:
        assert part_of(f"kernel {kernel}") in PARTS.values()
        assert part_of(f"kernel {kernel}") != "other operators"
    assert part_of("aten::convolution_backward") == part_of("mkldnn::_linear_pointwise")
    assert part_of("aten::select") == "other operators"
