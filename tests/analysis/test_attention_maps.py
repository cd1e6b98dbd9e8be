"""Attention maps against attention computed in float64 from the projections, one head at a time."""

import math

import pytest
import timm
import torch
from torch import nn

import lipsformer
from lipsformer.analysis.attention_maps import (
    attention_maps,
    attention_scores,
    probe_attention,
)
from lipsformer.layers import ScaledCosineAttention

TAU, EPS = 12.0, 1e-2


def projections(model, name, images):
    """Input map [B, H, W, C] and the q, k of every token [B, H, W, 3 C] in float64."""
    kept = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: kept.append(args))
    with torch.no_grad():
        model.eval()(images)
    handle.remove()
    module = model.get_submodule(name)
    x = kept[0][0].double()
    return x @ module.qkv.weight.double().T + module.qkv.bias.double()


def received(q, k, tau, bias=None):
    """Attention that each of the keys [N, d] receives from the queries [N, d]: loops, float64."""
    total = torch.zeros(len(k), dtype=torch.float64)
    for i, query in enumerate(q):
        scores = torch.stack(
            [tau * (query @ key) / ((query @ query + EPS) * (key @ key + EPS)).sqrt() for key in k]
        )
        weights = (scores if bias is None else scores + bias[i]).exp()
        total += weights / weights.sum()
    return total


def test_stripes_of_one_head_in_either_direction():
    torch.manual_seed(0)
    # a map of 6 x 10 in stripes of width 3 at most: 4 stripes across need 2 columns of padding
    model = timm.create_model(
        "lipsformer_nano", embed_dim=12, depths=(1,), num_heads=(4,), split_sizes=(3,)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    name = "stages.0.blocks.0.attn"
    images = torch.randn(2, 3, 12, 20)
    maps = attention_maps(model, images)
    assert list(maps) == [name] and maps[name].shape == (2, 4, 6, 10)

    qkv = projections(model, f"{name}.branch", images)[1]
    qkv = qkv.unflatten(-1, (3, 2, 2, 3))  # partition, head, d
    vertical, horizontal = torch.zeros(6, 12).double(), torch.zeros(6, 10).double()
    padded = torch.cat([qkv, torch.zeros(6, 2, 3, 2, 2, 3).double()], dim=1)
    for left in range(0, 12, 3):
        q, k = (padded[:, left : left + 3, part, 0, 1].reshape(-1, 3) for part in (0, 1))
        vertical[:, left : left + 3] = received(q, k, TAU).view(6, 3)
    for top in (0, 3):
        q, k = (qkv[top : top + 3, :, part, 1, 0].reshape(-1, 3) for part in (0, 1))
        horizontal[top : top + 3] = received(q, k, TAU).view(3, 10)
    torch.testing.assert_close(maps[name][1, 1].double(), vertical[:, :10], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(maps[name][1, 2].double(), horizontal, rtol=1e-4, atol=1e-5)
    assert (maps[name][1, 1] - 1).abs().max() > 0.1  # far from uniform


def test_window_of_one_head_with_its_position_bias():
    torch.manual_seed(0)
    model = timm.create_model(
        "lipsformer_swin_nano", embed_dim=10, depths=(1,), num_heads=(2,), window_size=3
    )
    name = "stages.0.blocks.0.attn"
    torch.nn.init.normal_(model.get_submodule(f"{name}.branch").relative_position_bias_table)
    images = torch.randn(2, 3, 12, 6)
    found = attention_maps(model, images)[name][1, 1].double()

    qkv = projections(model, f"{name}.branch", images)[1].unflatten(-1, (3, 2, 5))
    bias = model.get_submodule(f"{name}.branch").position_bias(3, 3)[0, 1].double()
    expected = torch.zeros(6, 3).double()
    for top in (0, 3):
        q, k = (qkv[top : top + 3, :, part, 1].reshape(-1, 5) for part in (0, 1))
        expected[top : top + 3] = received(q, k, 10.0, bias).view(3, 3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_vit_map_leaves_out_the_class_token_but_not_its_query():
    torch.manual_seed(0)
    model = timm.create_model(
        "lipsformer_vit_tiny", img_size=(6, 10), patch_size=2, embed_dim=14, depth=2, num_heads=2
    ).train()
    images = torch.randn(2, 3, 6, 10)
    maps = attention_maps(model, images)
    assert model.training
    assert list(maps) == ["blocks.0.attn", "blocks.1.attn"]
    qkv = projections(model, "blocks.1.attn", images)[0].unflatten(-1, (3, 2, 7))
    expected = received(qkv[:, 0, 1], qkv[:, 1, 1], 10.0)[1:].view(3, 5)
    found = maps["blocks.1.attn"][0, 1].double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_lipschitznorm_scores_are_divided_by_the_norms():
    torch.manual_seed(0)
    model = timm.create_model(
        "lipsformer_swin_nano",
        embed_dim=10,
        depths=(1,),
        num_heads=(2,),
        window_size=3,
        attn="lipschitznorm",
    )
    name = "stages.0.blocks.0.attn"
    with torch.no_grad():
        model.get_submodule(f"{name}.branch").qkv.weight.mul_(5.0)
    images = torch.randn(1, 3, 6, 6)
    found = attention_maps(model, images)[name][0, 0].double()
    qkv = projections(model, f"{name}.branch", images)[0].unflatten(-1, (3, 2, 5))
    q, k, v = qkv[..., 0, :].unbind(-2)
    q, k, v = (part.reshape(9, 5) for part in (q, k, v))
    u, key, value = q.norm(), k.norm(dim=1).max(), v.norm(dim=1).max()
    scale = max(u * key, u * value, key * value)
    bias = model.get_submodule(f"{name}.branch").position_bias(3, 3)[0, 0].double()
    expected = (q @ k.T / scale + bias).softmax(1).sum(0).view(3, 3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("boolean", [False, True])
def test_masked_keys_have_no_weight_and_no_entropy(boolean):
    torch.manual_seed(0)
    core = ScaledCosineAttention(num_heads=1, value_scale=None).double()
    q, k, v = torch.randn(3, 2, 1, 5, 7, dtype=torch.float64)
    keys = torch.rand(5, 5) < 0.5
    keys.fill_diagonal_(True)
    mask = keys if boolean else torch.zeros(5, 5, dtype=q.dtype).masked_fill(~keys, -math.inf)
    weights = attention_scores(core, q, k, v, mask).softmax(-1)
    torch.testing.assert_close(weights @ v, core(q, k, v, mask))
    assert (weights.masked_select(~keys) == 0.0).all()

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = core

        def forward(self, x):
            return self.core(q, k, v, mask)

    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1).mean()
    found = probe_attention(Masked(), q)["attn_entropy/core"]
    torch.testing.assert_close(found.double(), entropy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("vit_tiny_patch16_224", {"img_size": 28, "patch_size": 14, "depth": 1}, "Vision"),
        ("swin_tiny_patch4_window7_224", {"img_size": 28, "depths": (1,)}, "Swin"),
    ],
)
def test_models_that_were_not_converted_are_refused(name, options, kind):
    model = timm.create_model(name, **options)
    with pytest.raises(TypeError, match=f"{kind}Transformer has no attention whose map"):
        attention_maps(model, torch.zeros(1, 3, 28, 28))


def test_shifted_windows_of_a_converted_swin():
    torch.manual_seed(0)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=(12, 20),
        patch_size=2,
        window_size=4,
        embed_dim=10,
        depths=(2,),
        num_heads=(2,),
    )
    lipsformer.convert(model).eval()
    block = model.get_submodule("layers.0.blocks.1")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    images = torch.randn(2, 3, 12, 20)
    maps = attention_maps(model, images)
    assert list(maps) == ["layers.0.blocks.0", "layers.0.blocks.1"]
    assert block.shift_size == (2, 2)

    kept = []
    block.norm1.register_forward_hook(lambda *args: kept.append(args[2]))
    with torch.no_grad():
        model(images)
    rows, columns = 8, 12  # 6 x 10 in windows of 4, two rows and columns of padding
    x = torch.zeros(rows, columns, 10).double()
    for i in range(6):
        for j in range(10):
            x[i, j] = kept[0][1, (i + 2) % 6, (j + 2) % 10]  # shifted by two, cyclic
    qkv = x @ block.attn.qkv.weight.double().T + block.attn.qkv.bias.double()
    q, k = qkv.unflatten(-1, (3, 2, 5))[..., :2, 1, :].unbind(-2)
    bias = block.attn._get_rel_pos_bias()[0, 1].double()

    def region(place: int, length: int) -> int:  # what lay elsewhere does not attend
        return (place >= length - 4) + (place >= length - 2)

    expected = torch.zeros(6, 10).double()
    for top in range(0, rows, 4):
        for left in range(0, columns, 4):
            places = [(top + i, left + j) for i in range(4) for j in range(4)]
            regions = [(region(i, rows), region(j, columns)) for i, j in places]
            mask = torch.tensor([[0.0 if a == b else -100.0 for b in regions] for a in regions])
            tokens = [torch.stack([part[place] for place in places]) for part in (q, k)]
            for (i, j), share in zip(places, received(*tokens, 10.0, bias + mask), strict=True):
                if i < 6 and j < 10:
                    expected[(i + 2) % 6, (j + 2) % 10] = share
    found = maps["layers.0.blocks.1"][1, 1].double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
