import json
import math

import pytest
import torch
from torch import nn

from lipsformer.layers import CenterNorm, ScaledCosineAttention
from scripts.stability_sweep import DotProductAttention, build, main, run_cell, table

SMALL = ["--data", "source=digits", "img_size=8", "--epochs", "1", "--batch-size", "701"]
SMALL += ["--embed-dim", "4", "--blocks", "2"]


def count(model: nn.Module, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def test_each_swap_changes_its_own_part_alone():
    models = {}
    for parts in ("lipsformer", "layernorm", "dot_product", "plain_residual", "default_init"):
        torch.manual_seed(0)
        models[parts] = build(parts, 6, img_size=8, num_classes=3, embed_dim=8, patch_size=2)
    base = models["lipsformer"]
    assert [len(stage.blocks) for stage in base.stages] == [2, 4]
    for parts, model in models.items():
        swapped = parts == "layernorm"
        assert count(model, nn.LayerNorm) == (count(base, CenterNorm) if swapped else 0)
        swapped = parts == "dot_product"
        assert count(model, DotProductAttention) == (6 if swapped else 0)
        assert count(model, ScaledCosineAttention) == (0 if swapped else 6)
        scale = model.stages[1].blocks[3].mlp.residual_scale
        swapped = parts == "plain_residual"
        assert scale.requires_grad is not swapped
        assert scale.unique().item() == pytest.approx(1.0 if swapped else 1 / 6)
        sigma = torch.linalg.svdvals(model.stages[0].blocks[0].mlp.branch.fc1.weight)[0].item()
        assert (abs(sigma - 1.0) < 1e-3) is (parts != "default_init")


def test_a_run_that_was_cut_off_continues_to_the_same_results(tmp_path, capsys):
    options = [*SMALL, "--parts", "lipsformer", "plain", "--lrs", "1e-2"]
    assert main(["--output", str(tmp_path / "a"), *options]) == 0
    whole = (tmp_path / "a" / "results.jsonl").read_text()
    assert len(whole.splitlines()) == 2
    (tmp_path / "b").mkdir()
    first = whole.index("\n") + 1
    (tmp_path / "b" / "results.jsonl").write_text(whole[: first + 17])  # killed while writing
    capsys.readouterr()
    assert main(["--output", str(tmp_path / "b"), *options]) == 0
    assert "2/2" in (told := capsys.readouterr().out) and "1/2" not in told
    assert (tmp_path / "b" / "results.jsonl").read_text() == whole
    top1 = json.loads(whole.splitlines()[0])["top1"]
    assert f"| lipsformer | 2 | 0 | {top1:.1f}" in told
    for name in ("accuracy.png", "losses.png"):
        assert (tmp_path / "b" / name).read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_is_not_finite_is_not_stable():
    images, labels = torch.full((4, 3, 8, 8), float("inf")), torch.zeros(4, dtype=torch.long)
    cell = {"parts": "lipsformer", "lr": 1e-3, "warmup": 0, "blocks": 2, "seed": 0}
    data = (images, labels)
    record = run_cell(
        cell, data, data, num_classes=3, epochs=3, batch_size=2, embed_dim=4, patch_size=2
    )
    assert not record["stable"] and record["updates"] == 1 and record["losses"] == []
    assert record["final_loss"] is None and record["top1"] == 0.0


def test_table_tells_the_largest_stable_rate_and_the_sensitivity():
    def cell(lr: float, seed: int, final: float | None, top1: float) -> dict:
        stable = final is not None and final < 2.0
        about = {"parts": "plain", "warmup": 0, "blocks": 2, "seed": seed, "num_classes": 10}
        return {**about, "lr": lr, "final_loss": final, "stable": stable, "top1": top1}

    records = [cell(1e-3, 0, 1.0, 40.0), cell(1e-3, 1, 1.2, 50.0), cell(1e-1, 0, None, 0.0)]
    records += [cell(1e-1, 1, 1.4, 30.0), cell(1e-2, 0, 9.0, 12.0), cell(1e-2, 1, 1.8, 20.0)]
    # over 1.0: 0, 0.2, ln 10 - 1, 0.4, ln 10 - 1, 0.8
    excess = (1.4 + 2 * (math.log(10) - 1)) / 6
    row = f"| plain | 2 | 0 | 45.0 | 16.0* | 15.0* | 0.001 | {excess:.3f} |"
    assert table(records).splitlines()[2:] == [row]


def test_cells_of_another_setting_are_not_mixed_in(tmp_path, capsys):
    options = [*SMALL, "--parts", "plain", "--lrs", "1e-2", "--output", str(tmp_path)]
    assert main(options) == 0
    assert main([*options, "--epochs", "2"]) == 2
    assert "other settings" in capsys.readouterr().err
    assert main([*options, "--blocks", "1"]) == 2
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1
