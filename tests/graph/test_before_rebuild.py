"""Weights that were written before the files of `lipsformer.graph` were rearranged still load."""

import operator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lipsformer.graph import DeepGAT, ResidualGAT

FILE = Path(__file__).parent / "before_rebuild" / "graph_models.safetensors"


@pytest.mark.parametrize(
    ("name", "model", "kwargs"),
    [("deep_gat", DeepGAT, {"residual": True}), ("residual_gat", ResidualGAT, {})],
)
def test_old_weights_load_and_give_the_old_logits(name, model, kwargs):
    tensors = load_file(FILE)
    prefix = f"{name}.weights."
    weights = {
        key.removeprefix(prefix): tensor
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }
    net = model(11, 4, 5, 3, heads=2, norm="lipschitznorm", **kwargs).eval()
    net.load_state_dict(weights)
    # a residual network saved its scaled weights too, which the module computes to rounding
    own = {key: operator.attrgetter(key)(net).detach() for key in weights}
    torch.testing.assert_close(own, weights, rtol=1e-6, atol=0)
    assert set(net.state_dict()) <= set(weights)
    logits = net(tensors["x"], tensors["edge_index"])
    expected = tensors[f"{name}.logits"]
    assert (logits - expected).abs().max() <= 2e-6 * expected.std()
