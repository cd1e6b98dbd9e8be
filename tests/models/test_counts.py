"""Parameters and multiply-adds of every model, against the published and the closed forms."""

import re
from pathlib import Path

import pytest
import timm
import torch

import lipsformer  # noqa: F401  (registers)
from lipsformer.analysis.cost import count_parameters, part_costs

# parameters of the released code without its unused norms, and GMACs at 224 px
PUBLISHED = {
    "lipsformer_swin_tiny": (30_908_578, 4.978),
    "lipsformer_swin_small": (54_479_794, 9.663),
    "lipsformer_swin_base": (96_011_168, 16.969),
    "lipsformer_tiny": (23_767_720, 4.674),
    "lipsformer_small": (37_486_120, 7.439),
    "lipsformer_base": (83_022_664, 16.226),
}
# The forms that nobody has published, at 224 px, and the small ones at 32 px
OURS = {
    "lipsformer_vit_tiny": (5_722_024, 1.254),
    "lipsformer_vit_small": (22_059_880, 4.599),
    "lipsformer_vit_base": (86_586_088, 17.564),
    "lipsformer_nano": (2_371_528, 0.033),
    "lipsformer_swin_nano": (2_367_906, 0.033),
}
PAGE = Path(__file__).parents[2] / "docs" / "results.md"


def model_and_images(name, **kwargs):
    model = timm.create_model(name, weight_init="skip", **kwargs)
    return model, torch.zeros(1, *model.pretrained_cfg["input_size"])


def test_every_model_has_its_figures_here_and_on_the_page_of_results():
    modules = ["lipsformer_swin", "lipsformer_cswin", "lipsformer_vit"]
    figures = PUBLISHED | OURS
    assert set(timm.list_models("lipsformer*", module=modules)) == set(figures)
    rows = re.findall(
        r"^\| `(lipsformer_\w+)`.*\| ([\d,]+) \| ([\d.]+).* \|$", PAGE.read_text(), re.M
    )
    assert {name: (int(n.replace(",", "")), float(g)) for name, n, g in rows} == figures


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name, official):
    model = timm.create_model(name, device="meta", official_compat=official)
    assert count_parameters(model) == PUBLISHED[name][0]


def test_gmacs_are_the_published_ones():
    costs = part_costs(*model_and_images("lipsformer_swin_tiny"))
    assert round(sum(part.macs for part in costs) / 1e9, 3) == PUBLISHED["lipsformer_swin_tiny"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_gmacs_of_all_models_are_the_published_ones(name):
    for official in (False, True) if name.endswith("tiny") else (False,):
        costs = part_costs(*model_and_images(name, official_compat=official))
        assert round(sum(part.macs for part in costs) / 1e9, 3) == PUBLISHED[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_figures_of_our_own_forms(name):
    model, _ = model_and_images(name)
    size = 32 if name.endswith("nano") else 224
    macs = sum(part.macs for part in part_costs(model, torch.zeros(1, 3, size, size)))
    assert (count_parameters(model), round(macs / 1e9, 3)) == OURS[name]


@pytest.mark.parametrize(
    "name", ["lipsformer_swin_nano", pytest.param("lipsformer_swin_tiny", marks=pytest.mark.slow)]
)
def test_swin_stages_follow_the_closed_form(name):
    """A block has 13C^2 + 118C + table * h parameters and 13C^2 + 196C MACs per token (w = 7)."""
    model, images = model_and_images(name)
    window = 7 if name.endswith("tiny") else 4
    costs = {part.name: part for part in part_costs(model, images)}
    for index, stage in enumerate(model.stages):
        rows, cols, c = costs[f"stages.{index}"].output
        heads = stage.blocks[0].attn.branch.num_heads
        parameters = 13 * c**2 + 118 * c + (2 * window - 1) ** 2 * heads
        side = min(window, rows)
        macs = rows * cols * (13 * c**2 + 98 * c + 2 * side**2 * c)
        # 4C -> 2C of the stage before, with its norm
        merging = (2 * c**2 + 4 * c, rows * cols * 2 * c**2) if index > 0 else (0, 0)
        assert costs[f"stages.{index}"].parameters == len(stage.blocks) * parameters + merging[0]
        assert costs[f"stages.{index}"].macs == len(stage.blocks) * macs + merging[1]
