"""The released code's weights give the released code's features and logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from lipsformer.models import LipsFormerCSwin, LipsFormerSwin, lipsformer_cswin, lipsformer_swin

pytestmark = pytest.mark.data

BODIES = ["swin", "cswin"]


def read(path: Path) -> tuple[dict, dict[str, Tensor], dict[str, Tensor]]:
    """Return the constructor's arguments, the weights and the reference tensors of a file."""
    with safe_open(str(path), "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = {
        n.removeprefix("weights/"): t for n, t in tensors.items() if n.startswith("weights/")
    }
    return config, weights, tensors


def build(body: str, config: dict, **kwargs):
    args = {key: config[key] for key in ("num_classes", "embed_dim", "num_heads")}
    if body == "swin":
        return LipsFormerSwin(depths=config["depths"], **args, **kwargs), lipsformer_swin
    return LipsFormerCSwin(depths=config["depth"], **args, **kwargs), lipsformer_cswin


def oracle(oracles: Path, body: str):
    return read(oracles / f"official_lipsformer_{body}.safetensors")


@pytest.mark.parametrize("wrapper", [None, "model", "state_dict"])
@pytest.mark.parametrize("body", BODIES)
def test_official_weights_give_the_official_output(oracles, body, wrapper):
    config, weights, tensors = oracle(oracles, body)
    model, module = build(body, config, official_compat=True)
    checkpoint = weights if wrapper is None else {wrapper: weights}
    model.load_state_dict(module.checkpoint_filter_fn(checkpoint, model))
    model.eval()
    with torch.no_grad():
        features = model.forward_features(tensors["input"])
        pooled = model.forward_head(features, pre_logits=True)
        logits = model.forward_head(features)
    torch.testing.assert_close(pooled, tensors["features"], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, tensors["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("body", BODIES)
def test_official_weights_are_refused_by_the_papers_form(oracles, body):
    config, weights, _ = oracle(oracles, body)
    model, module = build(body, config)
    with pytest.raises(ValueError, match="official_compat=True"):
        module.checkpoint_filter_fn(weights, model)


@pytest.mark.parametrize("body", BODIES)
def test_the_papers_weights_are_refused_by_the_official_form(oracles, body):
    config, _, _ = oracle(oracles, body)
    model, module = build(body, config, official_compat=True)
    paper, _ = build(body, config)
    with pytest.raises(ValueError, match="official_compat=False"):
        module.checkpoint_filter_fn(paper.state_dict(), model)
