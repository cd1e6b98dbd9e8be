import pytest
import torch

from lipsformer.graph.dropout import Dropout
from lipsformer.graph.edge_attention.csr import silence_beta_notice


@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.6, 1.0])
def test_dropout_draws_and_computes_what_pytorch_does(dtype, p):
    results = []
    for layer in (Dropout(p), torch.nn.Dropout(p)):
        x = torch.linspace(-3, 5, 101 * 13).to(dtype).view(101, 13).requires_grad_()
        torch.manual_seed(2)
        out = layer(x)
        out.square().sum().backward()
        results.append((out, x.grad, torch.get_rng_state()))
        assert torch.equal(layer.eval()(x), x)
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own, expected)


def test_dropout_of_a_sparse_matrix_is_that_of_its_stored_elements():
    silence_beta_notice()
    dense = torch.randn(101, 13).relu()
    stored = dense != 0
    layer = Dropout(0.6)
    torch.manual_seed(2)
    out = layer(dense.to_sparse_csr()).to_dense()
    torch.manual_seed(2)
    assert torch.equal(out[stored], torch.nn.Dropout(0.6)(dense[stored]))
    assert not out[~stored].any()
    assert torch.equal(layer.eval()(dense.to_sparse_csr()).to_dense(), dense)
