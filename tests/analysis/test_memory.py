"""What training keeps in memory, against sizes that follow from the layers."""

import functools

import torch
from torch import nn

from lipsformer.analysis.memory import saved_bytes, training_bytes


def small() -> nn.Module:
    """Flatten 3 x 2 x 5 pixels, 30 -> 7 -> 11."""
    return nn.Sequential(nn.Flatten(), nn.Linear(30, 7), nn.GELU(), nn.Linear(7, 11, bias=False))


def test_kept_are_the_inputs_of_gelu_and_of_the_second_layer() -> None:
    model, images = small().eval(), torch.randn(13, 3, 2, 5)
    # the first layer keeps a view of the images, which do not count
    assert saved_bytes(model, images) == 13 * (7 + 7) * 4
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert saved_bytes(model, images) == 13 * (7 + 7) * 4


def test_under_autocast_what_was_cast_is_kept_too() -> None:
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    cast = 13 * 30 + 7 * 11  # the first weight is not needed: images have no gradient
    kept = saved_bytes(small(), torch.randn(13, 3, 2, 5), autocast)
    assert kept == 2 * (cast + 13 * (7 + 7))


def test_a_storage_that_two_layers_keep_counts_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()  # keeps its result, and so do the two products
            return y * y.flip(0) + y * 3.0

    x = torch.randn(5, 3, 2, 7, requires_grad=True)
    assert saved_bytes(Twice(), x) == 2 * x.numel() * 4


def test_training_needs_weights_gradients_moments_and_a_line_through_two_batches() -> None:
    model = small()
    model.register_buffer("table", torch.zeros(17))
    found = training_bytes(model, torch.randn(2, 3, 2, 5), micro_batch=19, ema=True)
    learned = 4 * (30 * 7 + 7 + 7 * 11)
    assert found == {
        "weights": learned + 4 * 17,
        "gradients": learned,
        "moments of AdamW": 2 * learned,
        "average of the weights": learned + 4 * 17,
        "kept for the backward pass": 19 * (7 + 7) * 4,
    }
