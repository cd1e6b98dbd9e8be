import pytest
import torch

from lipsformer.layers import DepthwiseConv2d
from tests.oracles import depthwise_conv

B, HEIGHT, WIDTH, C = 2, 5, 11, 3


@pytest.mark.parametrize("kernel_size", [3, 7])
@pytest.mark.parametrize("training", [True, False])
def test_depthwise_conv_equals_the_loop(kernel_size, training):
    torch.manual_seed(0)
    layer = DepthwiseConv2d(C, kernel_size).train(training)
    x = torch.randn(B, HEIGHT, WIDTH, C)
    expected = torch.stack([depthwise_conv(image, layer.weight, layer.bias) for image in x])
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [(5, 11), (2, 3), (1, 1)])
def test_fast_gradients_equal_float64(size):
    torch.manual_seed(0)
    layer = DepthwiseConv2d(C, 7).train()
    x = torch.randn(B, *size, C, requires_grad=True)
    upstream = torch.randn(B, *size, C)
    layer(x).backward(upstream)
    reference = DepthwiseConv2d(C, 7).double().eval()
    reference.load_state_dict(layer.state_dict())
    x64 = x.detach().double().requires_grad_()
    reference(x64).backward(upstream.double())
    for actual, expected in [
        (x.grad, x64.grad),
        (layer.weight.grad, reference.weight.grad),
        (layer.bias.grad, reference.bias.grad),
    ]:
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_output_is_channels_last_without_a_copy():
    assert DepthwiseConv2d(C, 7)(torch.randn(B, HEIGHT, WIDTH, C)).is_contiguous()


def test_even_kernels_are_refused():
    with pytest.raises(ValueError, match=r"kernel_size must be odd.*got 4"):
        DepthwiseConv2d(C, 4)
