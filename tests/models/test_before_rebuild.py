"""Weights saved before weighted residuals owned their branches still load and give their logits.

The files hold the parameters of a small model under the names of that time, images and logits.
"""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lipsformer  # noqa: F401  (registers the models)

FILES = sorted((Path(__file__).parent / "before_rebuild").glob("*.safetensors"))


def read(path):
    """Architecture, arguments, weights, images and logits."""
    with safe_open(path, "pt") as file:
        about = file.metadata()
    weights = load_file(path)
    images, logits = weights.pop("images"), weights.pop("logits")
    return about["architecture"], json.loads(about["arguments"]), weights, images, logits


def load(way, folder, name, arguments, weights):
    """A model that is given the weights in one of timm's ways."""
    file = folder / "model.safetensors"
    save_file(weights, file)
    if way == "checkpoint_path":
        return timm.create_model(name, checkpoint_path=str(file), **arguments)
    if way == "pretrained_cfg_overlay":
        overlay = {"file": str(file), "num_classes": arguments["num_classes"]}
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
    if way == "local-dir":
        num_classes = arguments.pop("num_classes")
        config = {
            "architecture": name,
            "model_args": arguments,
            "pretrained_cfg": {"num_classes": num_classes},
        }
        (folder / "config.json").write_text(json.dumps(config))
        return timm.create_model(f"local-dir:{folder}", pretrained=True)
    model = timm.create_model(name, **arguments)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "way", ["checkpoint_path", "pretrained_cfg_overlay", "local-dir", "load_state_dict"]
)
def test_weights_load_bit_for_bit_and_give_the_same_logits(tmp_path, path, way):
    name, arguments, weights, images, logits = read(path)
    model = load(way, tmp_path, name, arguments, weights).eval()
    loaded = model.state_dict()
    assert len(loaded) == len(weights)
    found = {tuple(t.shape): [] for t in loaded.values()}
    for tensor in loaded.values():
        found[tuple(tensor.shape)].append(tensor)
    for old, tensor in weights.items():
        same = [i for i, t in enumerate(found[tuple(tensor.shape)]) if torch.equal(t, tensor)]
        assert same, old
        found[tuple(tensor.shape)].pop(same[0])
    with torch.no_grad():
        error = (model(images) - logits).abs().max() / (logits.max() - logits.min())
    assert error <= 1e-6


def test_all_three_backbones_are_there():
    assert [path.stem for path in FILES] == ["cswin", "swin", "vit"]
