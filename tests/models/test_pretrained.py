"""`pretrained=True`: the folder that it loads, what may differ from it, what the weights can do."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.models import save_for_hf

import lipsformer  # noqa: F401  (registers)
from lipsformer.engine.weights import load_model

NAME = "lipsformer_swin_nano"
FOLDER = Path(__file__).resolve().parents[2] / "weights" / f"{NAME}.cifar10"


@pytest.fixture(scope="module")
def weights():
    return load_file(FOLDER / "model.safetensors")


@pytest.mark.parametrize("name", [NAME, f"{NAME}.cifar10", f"local-dir:{FOLDER}"])
def test_every_name_gives_the_file_bit_for_bit(name, weights):
    model = timm.create_model(name, pretrained=True).eval()
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in weights.items())
    plain = timm.create_model(NAME, num_classes=10, stem="conv")
    plain.load_state_dict(weights)
    images = torch.randn(3, 3, 32, 48)
    assert torch.equal(model(images), plain.eval()(images))
    card = json.loads((FOLDER / "config.json").read_text())
    assert model.pretrained_cfg["label_names"] == card["label_names"]
    assert timm.data.resolve_model_data_config(model)["mean"] == [0.4914, 0.4822, 0.4465]


def test_a_tag_without_pretrained_names_the_model_and_leaves_its_weights_random(weights):
    model = timm.create_model(f"{NAME}.cifar10", num_classes=7)
    assert {*model.head.fc.weight.shape} == {7, 256}
    state = model.state_dict()
    assert {k: v.shape for k, v in state.items() if k[:4] != "head"} == {
        k: v.shape for k, v in weights.items() if k[:4] != "head"
    }
    matrices = [key for key, tensor in weights.items() if tensor.ndim > 1 and key[:4] != "head"]
    assert not any(torch.equal(state[key], weights[key]) for key in matrices)


def test_the_tag_of_models_without_weights_stays_timms():
    torch.manual_seed(0)
    tagged = load_model("lipsformer_nano.untrained").state_dict()
    torch.manual_seed(0)
    plain = timm.create_model("lipsformer_nano").state_dict()
    assert all(torch.equal(tagged[key], tensor) for key, tensor in plain.items())


def test_commands_take_the_weights_of_a_name_with_a_tag(weights):
    state = load_model(f"{NAME}.cifar10").state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in weights.items())


def test_what_timm_adapts_is_adapted(weights, tmp_path):
    """The head is new for other classes, the channels are summed, and the body is the file's."""
    torch.manual_seed(0)
    model = timm.create_model(NAME, pretrained=True, num_classes=7, drop_path_rate=0.1)
    assert {*model.head.fc.weight.shape} == {7, 256}
    body = {key: tensor for key, tensor in model.state_dict().items() if key[:4] != "head"}
    assert all(torch.equal(tensor, weights[key]) for key, tensor in body.items())
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert torch.equal(again.head.fc.weight, model.head.fc.weight)

    images = torch.randn(2, 3, 32, 32)
    whole = timm.create_model(NAME, pretrained=True).eval()
    pooled = timm.create_model(NAME, pretrained=True, num_classes=0).eval()(images)
    assert torch.equal(whole.forward_head(whole.forward_features(images), pre_logits=True), pooled)
    stages = timm.create_model(NAME, pretrained=True, features_only=True).eval()(images)
    expected = whole.forward_intermediates(images, output_fmt="NHWC", intermediates_only=True)
    assert all(map(torch.equal, stages, expected))
    gray = timm.create_model(NAME, pretrained=True, in_chans=1).eval()
    torch.testing.assert_close(gray(images[:, :1]), whole(images[:, :1].expand(-1, 3, -1, -1)))


@pytest.mark.parametrize("name", [*timm.list_models("lipsformer*"), "converted_to_lipsformer"])
def test_missing_weights_are_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.setenv("LIPSFORMER_WEIGHTS", str(tmp_path))
    arguments = {"original": "vit_tiny_patch16_224"} if name.startswith("converted") else {}
    for root in (tmp_path, tmp_path / "nowhere"):
        monkeypatch.setenv("LIPSFORMER_WEIGHTS", str(root))
        message = f"no pretrained weights of {name}, because {root} has no folder {name}.<tag>: "
        with pytest.raises(RuntimeError, match=message):
            timm.create_model(name, pretrained=True, **arguments)


def test_other_folders_are_chosen_by_their_tag(tmp_path, monkeypatch):
    monkeypatch.setenv("LIPSFORMER_WEIGHTS", str(tmp_path))
    shape = {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 3], "window_size": 2}
    small = timm.create_model(NAME, num_classes=5, **shape)
    save_for_hf(small, str(tmp_path / f"{NAME}.small"), safe_serialization=True)
    shutil.copytree(tmp_path / f"{NAME}.small", tmp_path / f"{NAME}_.other")  # of another name
    found = timm.create_model(NAME, pretrained=True, depths=(1, 1))
    assert torch.equal(found.head.fc.weight, small.head.fc.weight)
    shutil.copytree(FOLDER, tmp_path / f"{NAME}.large")
    with pytest.raises(RuntimeError, match=f"choose one by its name, {NAME}.large or {NAME}.small"):
        timm.create_model(NAME, pretrained=True)
    assert timm.create_model(f"{NAME}.small", pretrained=True).num_classes == 5
    with pytest.raises(RuntimeError, match=f"has no folder {NAME}.medium: "):
        timm.create_model(f"{NAME}.medium", pretrained=True)
    shutil.copytree(FOLDER, tmp_path / "lipsformer_nano.wrong")
    with pytest.raises(RuntimeError, match="wrong holds a lipsformer_swin_nano"):
        timm.create_model("lipsformer_nano", pretrained=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json cannot be read as JSON: No such file or directory; restore the file"),
        ("{", "config.json cannot be read as JSON: Expecting property name"),
        ("[]", "config.json holds no JSON dict; restore the file"),
    ],
)
def test_a_damaged_description_of_a_model_is_named(text, message, tmp_path, monkeypatch):
    monkeypatch.setenv("LIPSFORMER_WEIGHTS", str(tmp_path))
    (folder := tmp_path / f"{NAME}.damaged").mkdir()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"^{folder}/{message}"):
        timm.create_model(NAME, pretrained=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stem": "patch"}, "stem='patch' contradicts the weights .* stem='conv': leave stem out"),
        ({"residual_scale": 0.5}, "residual_scale=0.5 contradicts .* residual_scale=1.0: leave"),
        ({"embed_dim": 48}, "embed_dim=48 contradicts .* embed_dim=32 and not 48: leave embed_dim"),
        (
            {"logit_scale": 20.0},
            "^logit_scale=20.0 contradicts the weights in .*cifar10, whose model has .*logit_scale="
            "10.0 and not 20.0: leave logit_scale out, or use pretrained=False$",
        ),
        ({"value_scale": 2.0}, "value_scale=2.0 contradicts .*init_value_scale=1.0 and not 2.0: "),
        ({"attn": "lipschitznorm"}, "attn='lipschitznorm' contradicts .* has attn='cosine' and"),
        ({"official_compat": True}, "official_compat=True contradicts .* official_compat=False"),
        ({"learn_logit_scale": True}, "learn_logit_scale=True contradicts .*log_logit_scale=None"),
        ({"mlp_ratio": 3.0}, "mlp_ratio=3.0 contradicts .*fc1.out_features=128 and not 96: "),
        ({"depths": (1, 2, 4, 1), "mlp_ratio": 3.0}, "mlp_ratio=3.0 contradict .*=128 and not 96"),
    ],
)
def test_arguments_that_contradict_the_weights_are_named(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        timm.create_model(NAME, pretrained=True, **arguments)


def test_arguments_equal_to_those_of_the_training_are_accepted(weights):
    """The defaults of the entry function and of the class, and what an initialization draws."""
    shape = {"depths": [1, 2, 4, 1], "embed_dim": 32, "num_heads": (2, 4, 8, 16), "patch_size": 2}
    rest = {"logit_scale": 10, "value_scale": 1.0, "stem": "conv", "weight_init": "unit_norm"}
    state = timm.create_model(NAME, pretrained=True, **shape, **rest).state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in weights.items())


TINY = {"embed_dim": 12, "num_classes": 5}
STAGES = {**TINY, "depths": [1, 1], "num_heads": [2, 6]}
CONTRACTIVE = {"dims": (64, 64, 64), "depths": (1, 1, 1), "num_classes": 5}
VIT = {**TINY, "img_size": 32, "depth": 1}


@pytest.mark.parametrize(
    ("name", "stored", "argument", "held"),
    [
        (NAME, STAGES, {"logit_scale": 20.0}, "init_logit_scale=10.0 and not 20.0"),
        ("lipsformer_nano", STAGES, {"split_sizes": (1, 1)}, "split_size=2 and not 1"),
        ("lipsformer_contractive_nano", CONTRACTIVE, {"eps": 3.0}, "eps=16.0 and not 3.0"),
        ("lipsformer_vit_tiny", VIT, {"num_heads": 6}, "num_heads=3 and not 6"),
        (
            "converted_to_lipsformer",
            {**VIT, "original": "vit_tiny_patch16_224"},
            {"num_heads": 6},
            "num_heads=3 and not 6",
        ),
    ],
)
def test_a_contradiction_that_fits_every_tensor_is_refused(
    name, stored, argument, held, tmp_path, monkeypatch
):
    """The same weights give other logits with the argument, and no tensor tells of it."""
    monkeypatch.setenv("LIPSFORMER_WEIGHTS", str(tmp_path))
    torch.manual_seed(0)
    model = timm.create_model(name, **stored).eval()
    save_for_hf(model, str(tmp_path / f"{name}.small"), safe_serialization=True)
    images = torch.randn(2, 3, 32, 32)
    other = timm.create_model(name, **stored, **argument).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (other(images) - model(images)).abs().max() > 1e-6
    assert torch.equal(timm.create_model(name, pretrained=True).eval()(images), model(images))
    with pytest.raises(RuntimeError, match=f"{next(iter(argument))}=.* contradicts .*{held}"):
        timm.create_model(name, pretrained=True, **argument)


@pytest.mark.data
@torch.no_grad()
def test_accuracy_on_every_twentieth_test_image(datasets):
    model = timm.create_model(NAME, pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    names = model.pretrained_cfg["label_names"]
    files = sorted((datasets / "cifar10/test").glob("*/*.png"))[::20]
    labels = torch.tensor([names.index(file.parent.name) for file in files])
    images = torch.stack([transform(Image.open(file)) for file in files])
    right = int((model(images).argmax(1) == labels).sum())
    assert (len(files), right) == (500, pytest.approx(431, abs=2))
