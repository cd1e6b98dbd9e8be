"""The law of docs/method.md, Theorem 25: what the initial weights of every form contribute."""

import math

import pytest
import timm
import torch
from timm.layers import LayerScale

import lipsformer  # noqa: F401  (registers the models)
from lipsformer.analysis.bounds import Domain, flatten_bound, lipschitz_bound
from lipsformer.layers import CenterNorm, WeightedResidual

SMALL = {"img_size": 12, "num_classes": 5}
FORMS = {
    # branches and CenterNorms behind a residual, per block
    "lipsformer_swin_nano": (4, 2, {"depths": (2, 3), "num_heads": (2, 2), "patch_size": 2}),
    "lipsformer_nano": (4, 1, {"depths": (2, 3), "num_heads": (2, 2), "patch_size": 2}),
    "lipsformer_vit_tiny": (2, 0, {"depth": 5, "num_heads": 2, "patch_size": 4}),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_blocks_of_a_new_model_obey_the_law(name):
    torch.manual_seed(0)
    branches, norms, sizes = FORMS[name]
    model = timm.create_model(name, embed_dim=14, **SMALL, **sizes)
    alphas = [m for m in model.modules() if isinstance(m, (WeightedResidual, LayerScale))]
    assert len(alphas) == 5 * branches
    weights = [getattr(m, "residual_scale", getattr(m, "gamma", None)) for m in alphas]
    assert all(torch.equal(weight, torch.full_like(weight, 1 / 5)) for weight in weights)

    parts = dict(flatten_bound(lipschitz_bound(model, Domain(size=(12, 12)))))
    modules = dict(model.named_modules())
    behind = [
        module
        for path, module in modules.items()
        if isinstance(module, CenterNorm) and path.split(".")[-1] in ("norm1", "norm2")
    ]
    behind = behind if norms else []  # the norms of a ViT lie inside its branches
    assert len(behind) == 5 * norms
    factors = [module.dim / (module.dim - 1) for module in behind]
    blocks = [part for path, part in parts.items() if path and "Block" in part.kind]
    assert len(blocks) == 5
    total = sum(block.log10 for block in blocks)
    largest = max(
        part.log10
        for path, part in parts.items()
        if path.endswith((".branch", ".attn", ".mlp")) and part.kind != "WeightedResidual"
    )
    if name == "lipsformer_vit_tiny":  # the norm is a part of the branch
        largest += math.log10(14 / 13)
    law = branches * 10.0**largest / math.log(10) + sum(map(math.log10, factors))
    assert sum(map(math.log10, factors)) <= total <= law
