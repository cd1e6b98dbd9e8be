import pytest
import torch

from lipsformer.graph.dropout import Dropout
from lipsformer.graph.edge_attention.csr import silence_beta_notice


@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.6, 1 - 2**-15])
def test_elements_are_dropped_independently_with_the_probability(dtype, p):
    torch.manual_seed(2)
    x = torch.linspace(1, 5, 1201 * 1303).to(dtype).view(1201, 1303).requires_grad_()
    layer = Dropout(p)
    out = layer(x)
    (grad,) = torch.autograd.grad(out, x, x.detach())
    kept = round((1 - p) * 2**16) / 2**16  # the probability in the steps of 16 bits
    mask = out != 0
    scale = torch.tensor(1 / kept, dtype=torch.double).to(dtype)
    assert torch.equal(out, x * mask * scale)
    assert torch.equal(grad, x * mask * scale)
    flat = mask.flatten().double()
    for lane in range(4):  # of a 64-bit number
        share = flat[lane::4]
        assert abs(share.mean() - kept) < 5 * (kept * (1 - kept) / len(share)) ** 0.5
    for distance in (1, 2, 3, 4, 1303):
        both = flat[:-distance] * flat[distance:]
        spread = (kept**2 * (1 - kept**2) * 3 / len(both)) ** 0.5  # neighboring pairs overlap
        assert abs(both.mean() - kept**2) < 5 * spread
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize("p", [0.0, 2**-18, 1 - 2**-18, 1.0])
def test_probabilities_that_16_bits_cannot_tell_from_0_and_1_are_pytorchs(p):
    x = torch.randn(101, 13)
    torch.manual_seed(2)
    expected = torch.nn.Dropout(p)(x)
    torch.manual_seed(2)
    assert torch.equal(Dropout(p)(x), expected)


def test_a_seed_gives_the_same_mask_again_and_the_next_call_another_one():
    x, layer = torch.ones(101, 13), Dropout(0.5)
    torch.manual_seed(2)
    first, second = layer(x), layer(x)
    torch.manual_seed(2)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)


def test_dropout_in_place_changes_its_input():
    x = torch.ones(101, 13)
    assert Dropout(0.5, inplace=True)(x) is x
    assert set(x.unique().tolist()) == {0.0, 2.0}


def test_dropout_of_a_sparse_matrix_is_that_of_its_stored_elements():
    silence_beta_notice()
    dense = torch.randn(101, 13).relu()
    stored = dense != 0
    layer = Dropout(0.6)
    torch.manual_seed(2)
    out = layer(dense.to_sparse_csr()).to_dense()
    torch.manual_seed(2)
    assert torch.equal(out[stored], layer(dense[stored]))
    assert not out[~stored].any()
    assert torch.equal(layer.eval()(dense.to_sparse_csr()).to_dense(), dense)
