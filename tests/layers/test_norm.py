import pytest
import torch

from lipsformer.layers import CenterNorm
from tests.oracles import center_norm_matrix


def test_center_norm_equals_its_matrix():
    torch.manual_seed(0)
    norm = CenterNorm(11).double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    expected = torch.einsum("bhwj,ij->bhwi", x, center_norm_matrix(norm.weight)) + norm.bias
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("dim", [2, 3, 7, 96])
def test_center_norm_constant_is_d_over_d_minus_1_at_initialisation(dim):
    sigma = torch.linalg.matrix_norm(center_norm_matrix(CenterNorm(dim).weight), 2)
    assert sigma.item() == pytest.approx(dim / (dim - 1), rel=1e-12)


def test_center_norm_ignores_constants():
    torch.manual_seed(0)
    x = torch.randn(3, 13, dtype=torch.float64)
    norm = CenterNorm(13).double()
    torch.testing.assert_close(norm(x + 7.5), norm(x))


def test_center_norm_gradients():
    torch.manual_seed(0)
    norm = CenterNorm(5).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    parameters = tuple(norm.parameters())
    torch.autograd.gradcheck(
        lambda x, *p: torch.func.functional_call(
            norm, dict(zip(("weight", "bias"), p, strict=True)), x
        ),
        (x, *parameters),
    )


def test_center_norm_refuses_one_channel():
    with pytest.raises(ValueError, match=r"dim >= 2.*dim=1"):
        CenterNorm(1)
