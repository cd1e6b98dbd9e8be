"""Released checkpoints become timm models; nothing in them is executed."""

import json
import os
import pickle
import pkgutil
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from yacs.config import CfgNode

from lipsformer.engine.run_files import CheckpointError
from scripts.import_weights import (
    ReleasedWeightsError,
    build_model,
    import_weights,
    main,
    read_checkpoint,
)
from tests.models.test_official import oracle

CSWIN = {"num_heads": [2, 4, 8, 16], "split_sizes": [1, 2, 7]}


def released(weights, path, **kwargs):
    """Save the way the released code does."""
    config = CfgNode({"MODEL": {"TYPE": "swin", "SWIN": {"DEPTHS": [2, 2, 6, 2]}}, "EPOCHS": 300})
    config.freeze()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": {"base_values": [0.001], "t_initial": 300},
        "max_accuracy": 82.7,
        "epoch": 299,
        "config": config,
    }
    torch.save(content, path, **kwargs)
    return path


@pytest.mark.data
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("body", ["swin", "cswin"])
def test_converted_checkpoint_gives_the_official_logits(oracles, tmp_path, body, legacy):
    _, weights, tensors = oracle(oracles, body)
    source = released(weights, tmp_path / "released.pth", _use_new_zipfile_serialization=not legacy)
    out = tmp_path / "out"
    message = import_weights(source, out, **(CSWIN if body == "cswin" else {}))
    assert "no registered model" in message
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    with torch.no_grad():
        logits = model(tensors["input"])
    torch.testing.assert_close(logits, tensors["logits"], rtol=0, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "released.pth"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.data
def test_plain_state_dicts_and_safetensors_give_the_same(oracles, tmp_path):
    _, weights, _ = oracle(oracles, "swin")
    expected = build_model(weights)[0].state_dict()
    torch.save(weights, tmp_path / "plain.pth")
    save_file(weights, tmp_path / "weights.safetensors")
    for name in ("plain.pth", "weights.safetensors"):
        actual = build_model(read_checkpoint(tmp_path / name))[0].state_dict()
        assert actual.keys() == expected.keys()
        for key in expected:
            assert torch.equal(actual[key], expected[key]), key


def to_official(model):
    """This project's parameters of a Swin body under the released names."""
    names = {
        "stages.": "layers.",
        "conv1.branch.depthwise": "dwconv_layers.0",
        "conv2.branch.depthwise": "dwconv_layers.1",
        "conv1.branch.pointwise": "nin",
        "conv1.residual_scale": "scale_layers.0.scale",
        "conv2.residual_scale": "scale_layers.1.scale",
        "attn.residual_scale": "alpha1.scale",
        "mlp.residual_scale": "alpha2.scale",
        "attn.branch.": "attn.",
        "mlp.branch.": "mlp.",
        "head.fc": "head",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if ".downsample." in name:
            _, stage, rest = name.split(".", 2)
            name = f"layers.{int(stage) - 1}.{rest}"
        weights[name] = tensor[:, :, None, None] if name.endswith("nin.weight") else tensor
    return weights


@pytest.fixture
def weights():
    """Random weights of a Swin body under the released names."""
    return to_official(timm.create_model("lipsformer_swin_nano", official_compat=True))


@pytest.mark.parametrize(
    ("name", "in_chans"),
    [
        ("lipsformer_swin_nano", 2),
        ("lipsformer_swin_nano", 3),
        pytest.param("lipsformer_swin_tiny", 2, marks=pytest.mark.slow),
    ],
)
def test_registered_architectures_are_recognized(tmp_path, name, in_chans):
    args = {"official_compat": True, "num_classes": 11, "in_chans": in_chans}
    model = timm.create_model(name, **args).eval()
    out = tmp_path / "out"
    message = import_weights(released(to_official(model), tmp_path / "released.pth"), out)
    assert f"it is {name}" in message
    config = json.loads((out / "config.json").read_text())
    assert config["architecture"] == name
    assert config["num_classes"] == 11
    assert config["model_args"]["official_compat"] is True
    loaded = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    images = torch.randn(1, in_chans, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)
    # and by the registered name, from the file
    again = timm.create_model(
        name,
        **args,
        pretrained=True,
        pretrained_cfg_overlay={
            "file": str(out / "model.safetensors"),
            "num_classes": 11,
            "input_size": (in_chans, 224, 224),
        },
    )
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["config", "model"])
@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("os.system", ("touch {marker}",)),
        ("builtins.eval", ("open('{marker}', 'w')",)),
        ("builtins.exec", ("open('{marker}', 'w')",)),
        ("builtins.getattr", (Path, "home")),
        ("subprocess.check_call", (["touch", "{marker}"],)),
        ("shutil.rmtree", ("{marker}",)),
        ("importlib.import_module", ("antigravity",)),
        ("torch.load", ("{marker}",)),
        ("torch.hub.load", ("{marker}", "x")),
        ("torch.serialization.load", ("{marker}",)),
        ("torch.jit.load", ("{marker}",)),
        ("torch.utils.collect_env.run", ("touch {marker}",)),
        ("timm.create_model", ("resnet18",)),
        ("yacs.config.load_cfg", ("A: 1",)),
    ],
)
def test_a_malicious_file_is_refused(tmp_path, function, args, where):
    marker = tmp_path / "executed"
    args = tuple(a.format(marker=marker) if isinstance(a, str) else a for a in args)
    args = tuple([p.format(marker=marker) for p in a] if isinstance(a, list) else a for a in args)
    content = {"model": {"head.weight": torch.ones(2, 3)}, "epoch": 1}
    content[where] = {"head.weight": Call(pkgutil.resolve_name(function), *args)}
    torch.save(content, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match="is not a file of weights: "):
        import_weights(tmp_path / "evil.pth", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["evil.pth"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"Repository not found", "pop from"),
        (b"<html></html>", "expected .safetensors"),
        (b"", "EOFError"),
        ({"model": [torch.ones(2)]}, "it holds no mapping of names to tensors"),
        ({1: torch.ones(2)}, "it holds no mapping of names to tensors"),
    ],
)
def test_files_that_hold_no_weights_are_one_sentence(tmp_path, capsys, content, reason):
    file = tmp_path / "weights.pth"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    assert main([str(file), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file} is not a file of weights: ") and reason in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pth"]


def test_a_malicious_plain_pickle_is_refused(tmp_path):
    marker = tmp_path / "executed"
    content = pickle.dumps(Call(os.system, f"touch {marker}"), protocol=2)
    (tmp_path / "evil.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a file of weights: "):
        read_checkpoint(tmp_path / "evil.pth")
    assert not marker.exists()


def test_the_released_file_is_what_pytorch_itself_refuses(tmp_path):
    path = released({"head.weight": torch.ones(2, 3)}, tmp_path / "released.pth")
    with pytest.raises(pickle.UnpicklingError, match=r"yacs.config.CfgNode"):
        torch.load(path, weights_only=True)
    assert read_checkpoint(path).keys() == {"head.weight"}
    with pytest.raises(pickle.UnpicklingError, match=r"yacs.config.CfgNode"):
        torch.load(path, weights_only=True)  # reading left no permission behind


SWIN_KEY = "layers.0.blocks.0.dwconv_layers.0.weight"
CSWIN_KEY = "stage1_conv_embed.0.weight"
TABLE = "layers.2.blocks.0.attn.relative_position_bias_table"


@pytest.mark.parametrize(
    ("weights", "missing"),
    [
        ({SWIN_KEY: torch.ones(7, 1, 3, 3)}, "layers.0.blocks.0.attn.relative_position_bias_table"),
        ({CSWIN_KEY: torch.ones(7, 3, 2, 2)}, "head.weight"),
        ({CSWIN_KEY: torch.ones(7, 3, 2, 2), "head.weight": torch.ones(5, 11)}, "stage1.0.mlp.fc1"),
    ],
)
def test_a_nearly_empty_checkpoint_is_one_sentence(tmp_path, capsys, weights, missing):
    torch.save(weights, tmp_path / "weights.pth")
    assert main([str(tmp_path / "weights.pth"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: the checkpoint is incomplete: it contains no {missing}")
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pth"]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("patch_embed.proj.weight", "incomplete: it contains no patch_embed.proj.weight"),
        ("head.weight", "incomplete: it contains no head.weight"),
        ("layers.0.blocks.0.mlp.fc1.weight", "contains no layers.0.blocks.0.mlp.fc1.weight"),
        (TABLE, f"incomplete: it contains no {TABLE}"),
        ("layers.3.blocks.0.nin.bias", "not fit: .*stages.3.blocks.0.conv1.branch.pointwise.bias"),
        ("layers.2.blocks.1.", "the weights do not fit: "),
        ("layers.2.", "incomplete: it contains no layers.2.blocks.0.attn"),
        ("layers.3.", "the weights do not fit: "),
    ],
)
def test_an_incomplete_checkpoint_is_refused(weights, missing, message):
    """What is missing is a tensor, a block or a stage, in the middle or at the end."""
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(missing)}
    assert len(kept) < len(weights)
    with pytest.raises(ReleasedWeightsError, match=f"(?s){message}"):
        build_model(kept)


@pytest.mark.parametrize(
    ("name", "shape", "ndim"),
    [
        ("patch_embed.proj.weight", (7, 11), 4),
        (TABLE, (49,), 2),
        (TABLE.replace("blocks.0", "blocks.1"), (49,), 2),
    ],
)
def test_a_tensor_with_other_dimensions_is_named(weights, name, shape, ndim):
    weights[name] = torch.ones(shape)
    expected = f"{name} has the shape {list(shape)}, but must have {ndim} dimensions"
    with pytest.raises(ReleasedWeightsError) as caught:
        build_model(weights)
    assert str(caught.value) == expected


@pytest.mark.parametrize("name", ["layers.1.blocks.1.nin.weight", "norm.bias"])
def test_a_tensor_of_another_shape_is_refused(weights, name):
    weights[name] = torch.ones(7)
    with pytest.raises(ReleasedWeightsError, match="the weights do not fit: "):
        build_model(weights)


@pytest.mark.data
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("norm.weight"), "do not fit: .*norm.weight"),
        (lambda w: w.update({"norm.weight": torch.ones(5)}), "do not fit: .*norm.weight"),
        (lambda w: w.update({"extra.weight": torch.ones(5)}), "do not fit: .*extra.weight"),
        (lambda w: w.clear(), "neither a Swin nor a CSwin checkpoint"),
    ],
)
def test_weights_that_do_not_fit_leave_nothing_behind(oracles, tmp_path, change, message):
    _, weights, _ = oracle(oracles, "swin")
    change(weights)
    torch.save(weights, tmp_path / "weights.pth")
    with pytest.raises(ReleasedWeightsError, match=f"(?s){message}"):
        import_weights(tmp_path / "weights.pth", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pth"]


@pytest.mark.data
@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        ("cswin", {}, "pass both --num-heads and --split-sizes"),
        ("cswin", {"num_heads": [2, 4], "split_sizes": [1, 2, 7]}, "2 numbers of heads and 3"),
        ("cswin", {"num_heads": [2, 4, 8, 16]}, "belong together: pass both, or neither"),
        ("cswin", {"split_sizes": [1, 2, 7]}, "belong together: pass both, or neither"),
        ("cswin", {**CSWIN, "num_heads": [3, 4, 8, 16]}, "cannot be built: num_heads=3 must be"),
        ("swin", CSWIN, "to CSwin checkpoints only"),
    ],
)
def test_options_that_do_not_fit_are_named(oracles, body, options, message):
    _, weights, _ = oracle(oracles, body)
    with pytest.raises(ReleasedWeightsError, match=message):
        build_model(weights, **options)


def test_an_existing_folder_and_a_missing_file_are_named(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert main([str(tmp_path / "x.pth"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'out'} exists")
    assert main([str(tmp_path / "x.pth"), str(tmp_path / "new")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_released_file_is_read_where_yacs_is_not_installed(tmp_path, monkeypatch):
    path = released({"head.weight": torch.ones(2, 3)}, tmp_path / "released.pth")
    monkeypatch.setitem(sys.modules, "yacs", None)
    monkeypatch.setitem(sys.modules, "yacs.config", None)
    assert read_checkpoint(path).keys() == {"head.weight"}
