"""Training end to end: the files in `configs/`, the outputs of a run, and what ends it."""

from pathlib import Path
from shutil import copy

import pytest
import torch
from safetensors.torch import load_file
from timm import create_model
from timm.models import save_for_hf

from lipsformer._configfile import read_config
from lipsformer._errors import ConfigError
from lipsformer.config import Config
from lipsformer.engine.build import build_model
from lipsformer.engine.initial_weights import load_initial_weights
from lipsformer.engine.optim import parameter_groups
from scripts import check_data
from tests.data.trees import write_tree
from tests.launch import launch
from tests.runs import DIGITS, write_config

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
FINETUNE = CONFIGS / "finetune.yaml"
RUNS = sorted(
    path
    for path in set(CONFIGS.rglob("*.yaml")) - {FINETUNE}
    if not path.name.startswith("_") and "graph" not in path.parts
)


def as_parameter(path: Path):
    """The configs of 300 epochs build the models of those of 100 epochs again."""
    marks = [pytest.mark.slow] if path.stem.endswith("_300ep") else []
    return pytest.param(path, id=str(path.relative_to(CONFIGS)), marks=marks)


@pytest.mark.parametrize("path", map(as_parameter, RUNS))
def test_every_config_builds_its_model(path: Path) -> None:
    config = read_config(Config, path)
    with torch.device("meta"):
        model = build_model(config, [str(label) for label in range(7)])
    size = config.data.img_size
    assert model(torch.zeros(2, 3, size, size, device="meta")).shape == (2, 7)
    assert f"{path.relative_to(CONFIGS.parent)}" in path.read_text(), "its header lacks its command"


def test_a_broken_image_ends_the_run_unless_it_is_listed(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_tree(tmp_path / "set" / split, {"a": 5, "b": 4}, size=(19, 17))
    broken = tmp_path / "set" / "train" / "b" / "001.png"
    broken.write_bytes(broken.read_bytes()[:99])
    output = tmp_path / "out"
    settings = {
        **DIGITS,
        "data": {**DIGITS["data"], "source": "folder", "root": str(tmp_path / "set")},
        "train": {**DIGITS["train"], "global_batch_size": 3, "batch_size_per_device": 3},
    }
    arguments = ["--config", str(write_config(tmp_path, settings, output)), "train.epochs=1"]
    assert launch([*arguments, "train.drop_last=false"], tmp_path / "log") == [2]
    (line,) = [s for s in (tmp_path / "log.0").read_text().splitlines() if s.startswith("error: ")]
    assert f"cannot read image {broken}: " in line

    assert check_data.main([str(tmp_path / "set"), "--list", str(tmp_path / "bad")]) == 1
    more = [f"data.skip_list={tmp_path / 'bad'}", f"run.output_dir={output}2"]
    assert launch([*arguments, *more], tmp_path / "again") == [0]
    lines = (tmp_path / "again.0").read_text().splitlines()
    reason = f"because {tmp_path / 'bad'} names them"
    assert f"warning: 1 images of train are left out, {reason}" in lines
    assert not [line for line in lines if "UserWarning" in line or "DataWarning" in line]
    assert (tmp_path / "out2" / "skipped.txt").read_text() == "train/b/001.png\n"
    assert "1 epochs x 2 updates" in (tmp_path / "again.0").read_text()  # of 8 images, not 9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of a lipsformer_nano for seven classes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(3)
    names = {"label_names": [str(label) for label in range(7)]}
    model = create_model("lipsformer_nano", num_classes=7)
    save_for_hf(model, folder, safe_serialization=True, model_config=names)
    return folder


def test_fine_tuning_preset_asks_for_what_it_needs(checkpoint: Path) -> None:
    needed = {"model.name": "lipsformer_nano", "model.checkpoint": checkpoint, "data.name": "set"}
    for left_out in needed:
        given = [f"{key}={value}" for key, value in needed.items() if key != left_out]
        with pytest.raises(ConfigError, match=f"{left_out} is required and not given"):
            read_config(Config, FINETUNE, given)
    with pytest.raises(ConfigError, match=r"data.name, model.checkpoint, model.name are"):
        read_config(Config, FINETUNE)


def test_fine_tuning_preset_starts_from_the_weights_with_a_lower_lr_in_early_layers(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = ["model.name=lipsformer_nano", f"model.checkpoint={checkpoint}", "data.name=set"]
    config = read_config(Config, FINETUNE, [*overrides, "data.img_size=32"])
    model = build_model(config, ["a", "b", "c"])
    caplog.set_level("INFO", "lipsformer")
    load_initial_weights(config, model)
    file = checkpoint / "model.safetensors"
    random = f"classifier  random, because that of {file} has another number of classes"
    images = "images      data.crop_pct=0.875, and 0.9 when the weights were trained"
    assert caplog.messages == [random, f"weights     {file}", images]
    same = build_model(config, [str(label) for label in range(7)])
    caplog.clear()
    names = [str(label) for label in range(5)] + ["pear", "zebra"]
    load_initial_weights(config, same, names)  # with its classifier
    kept = f"that of {file} has as many classes, but 'pear' is '5' there"
    assert caplog.messages == [
        f"weights     {file}",
        f"classifier  kept, because {kept}",
        images,
    ]
    weights = load_file(file)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]) == (not name.startswith("head.fc")), name
    groups = parameter_groups(model, config.optim)
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    # eight blocks lie between the stem and the head
    assert scales[id(model.get_parameter("patch_embed.proj.weight"))] == pytest.approx(0.8**9)
    assert scales[id(model.get_parameter("head.fc.weight"))] == 1.0


def test_running_statistics_and_repeated_forward_passes_are_refused() -> None:
    overrides = ["model.name=resnet10t", "data.img_size=32", "train.grad_checkpointing=true"]
    config = read_config(Config, FINETUNE.with_name("demo.yaml"), overrides)
    with pytest.raises(ConfigError, match=r"its BatchNorm2d would count every batch twice"):
        build_model(config, ["a", "b", "c"])


def test_weights_of_another_model_are_named(checkpoint: Path) -> None:
    overrides = ["model.name=lipsformer_swin_nano", f"model.checkpoint={checkpoint}"]
    config = read_config(Config, FINETUNE, [*overrides, "data.name=set", "data.img_size=32"])
    with pytest.raises(ConfigError, match=r"holds a lipsformer_nano; set model\.name=lipsformer_n"):
        load_initial_weights(config, build_model(config, ["a", "b", "c"]))


def test_arguments_of_a_checkpoint_that_the_config_has_not_are_named() -> None:
    """The committed weights belong to a model with a convolutional stem."""
    folder = FINETUNE.parents[1] / "weights/lipsformer_swin_nano.cifar10"
    overrides = ["model.name=lipsformer_swin_nano", f"model.checkpoint={folder}", "data.name=set"]
    config = read_config(Config, FINETUNE, [*overrides, "data.img_size=32"])
    with pytest.raises(ConfigError, match=r"trained with model.kwargs=.*'stem': 'conv'"):
        load_initial_weights(config, build_model(config, ["a", "b", "c"]))
    same = ["model.kwargs.stem=conv", "model.kwargs.residual_scale=1.0"]
    config = read_config(Config, FINETUNE, [*overrides, *same])
    load_initial_weights(config, build_model(config, ["a", "b", "c"]))
    overrides[0] += ".cifar10"  # a tag names the arguments too
    config = read_config(Config, FINETUNE, [*overrides, "data.img_size=32"])
    load_initial_weights(config, build_model(config, ["a", "b", "c"]))


def test_bare_weights_load_into_a_model_that_a_tag_names(tmp_path: Path) -> None:
    """A file without a config.json has no description, so that only its tensors must fit."""
    bare = tmp_path / "bare.safetensors"
    copy(FINETUNE.parents[1] / "weights/lipsformer_swin_nano.cifar10/model.safetensors", bare)
    overrides = [f"model.checkpoint={bare}", "data.name=set", "data.img_size=32"]
    plain = read_config(Config, FINETUNE, ["model.name=lipsformer_swin_nano", *overrides])
    with pytest.raises(ConfigError, match=r"use the model and the arguments with which these"):
        load_initial_weights(plain, build_model(plain, ["a", "b", "c"]))
    tagged = read_config(Config, FINETUNE, ["model.name=lipsformer_swin_nano.cifar10", *overrides])
    model = build_model(tagged, ["a", "b", "c"])
    load_initial_weights(tagged, model)
    weights = load_file(bare)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]) == (not name.startswith("head.fc")), name


def test_weights_of_a_converted_model_load_where_its_name_has_a_tag(tmp_path: Path) -> None:
    overrides = ["model.name=vit_tiny_patch16_224.augreg_in21k", "model.convert=true"]
    small = ["embed_dim=16", "depth=2", "num_heads=2"]
    overrides += [f"model.kwargs.{pair}" for pair in small]
    overrides += [f"model.checkpoint={tmp_path}", "data.name=set", "data.img_size=32"]
    config = read_config(Config, FINETUNE, overrides)
    save_for_hf(build_model(config, ["a", "b", "c"]), tmp_path, safe_serialization=True)
    model = build_model(config, ["a", "b", "c"])
    load_initial_weights(config, model)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("setting", "held"),
    [
        ("num_heads=[4,4,8,16]", "heads_per_partition=1 and not 2"),
        ("logit_scale=7.0", "init_logit_scale=12.0 and not 7.0"),
    ],
)
def test_weights_of_a_model_with_other_arguments_are_refused_though_all_shapes_fit(
    checkpoint: Path, setting: str, held: str
) -> None:
    overrides = ["model.name=lipsformer_nano", f"model.checkpoint={checkpoint}", "data.name=set"]
    free = ["data.img_size=48", "model.kwargs.drop_path_rate=0.3"]  # these may differ
    config = read_config(Config, FINETUNE, [*overrides, *free])
    model = build_model(config, ["a", "b", "c"])
    load_initial_weights(config, model)
    other = read_config(Config, FINETUNE, [*overrides, *free, f"model.kwargs.{setting}"])
    wrong = build_model(other, ["a", "b", "c"])
    wrong.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 48, 48)
    assert not torch.allclose(wrong.eval()(images), model.eval()(images), rtol=1e-3)
    with pytest.raises(ConfigError, match="holds the weights of another model") as refusal:
        load_initial_weights(other, build_model(other, ["a", "b", "c"]))
    assert held in str(refusal.value)


def test_weights_of_a_model_that_was_converted_with_other_arguments_are_refused(
    tmp_path: Path,
) -> None:
    small = ["embed_dim=16", "depth=2", "num_heads=2"]
    overrides = ["model.name=vit_tiny_patch16_224", "model.convert=true", "data.name=set"]
    overrides += [f"model.kwargs.{pair}" for pair in small]
    overrides += [f"model.checkpoint={tmp_path}", "data.img_size=32"]
    config = read_config(Config, FINETUNE, [*overrides, "model.convert_kwargs.logit_scale=7.0"])
    model = build_model(config, ["a", "b", "c"])
    save_for_hf(model, tmp_path, safe_serialization=True)
    load_initial_weights(config, build_model(config, ["a", "b", "c"]))
    same = [*overrides, "model.convert_kwargs={logit_scale: 7.0, spectral_init: false}"]
    config = read_config(Config, FINETUNE, same)  # the weights replace the initial ones
    load_initial_weights(config, build_model(config, ["a", "b", "c"]))
    config = read_config(Config, FINETUNE, overrides)
    with pytest.raises(ConfigError, match=r"convert_kwargs=\{'logit_scale': 7.0"):
        load_initial_weights(config, build_model(config, ["a", "b", "c"]))
