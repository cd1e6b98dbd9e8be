"""What training keeps for the backward pass, counted instead of timed."""

import pytest
import timm
import torch

import lipsformer  # noqa: F401  (registers the models)
from lipsformer.kernels import dispatch

BATCH = 2


def kept_bytes(name: str) -> int:
    """Bytes of the activations that one forward pass keeps, each storage once."""
    model = timm.create_model(name).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}  # holds the tensors, so that no address comes twice

    def look(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        model(torch.randn(BATCH, 3, 224, 224)).sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.skipif(not dispatch.ENABLED, reason="the plain formulas keep more")
@pytest.mark.parametrize(
    "name", [pytest.param("lipsformer_tiny", marks=pytest.mark.slow), "lipsformer_swin_tiny"]
)
def test_training_keeps_less_than_timms_swin(name):
    assert kept_bytes(name) < 0.95 * kept_bytes("swin_tiny_patch4_window7_224")
