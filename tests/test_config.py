"""The config schema: what it accepts comes out typed, the rest is refused in one clear line."""

import dataclasses
import json
import re
import typing
from pathlib import Path

import pytest

from lipsformer._configfile import dump_config, read_config
from lipsformer._errors import ConfigError
from lipsformer._settings_help import read_docstring
from lipsformer.config import Config
from lipsformer.engine.resume import config_identity
from lipsformer.graph.config import GraphConfig, GraphSweepConfig

ROOT = Path(__file__).resolve().parents[1]

MINIMAL = """
model: {name: lipsformer_nano}
data: {source: digits}
optim: {lr: 1e-3}
train: {epochs: 3, global_batch_size: 12}
run: {output_dir: outputs/x}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(Config, path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path)) or message.startswith("override")
    return message


def test_overrides_win_over_file_and_file_over_base(tmp_path: Path, minimal: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("base: run.yaml\noptim: {lr: 2e-3, weight_decay: 0.5}\ntrain: {epochs: 7}\n")
    config = read_config(Config, child, ["train.epochs=11", "augment.scale=[0.3,1]"])
    assert config.optim.lr == 2e-3
    assert config.optim.weight_decay == 0.5
    assert config.train.epochs == 11
    assert config.augment.scale == (0.3, 1.0)
    assert config.train.global_batch_size == 12


def test_dump_loads_to_equal_config(tmp_path: Path, minimal: Path) -> None:
    config = read_config(
        Config,
        minimal,
        [
            "model.kwargs.drop_path_rate=0.1",
            "model.kwargs.depths=[1,2]",
            "augment.auto_augment=rand-m9-mstd0.5-inc1",
            "run.trackers=[tensorboard]",
            "data.mean=[0.1,0.2,0.3]",
            "train.ema_decay=0.99",
        ],
    )
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_config(config))
    assert read_config(Config, saved) == config


@pytest.mark.parametrize(
    "name", ["a b #2", "a#2", "a: b", "a, b", "'a", 'a "b"', "a=b", " a ", "010"]
)
def test_a_quoted_override_is_taken_as_it_is(minimal: Path, name: str) -> None:
    config = read_config(Config, minimal, [f"run.output_dir={json.dumps(name)}"])
    assert config.run.output_dir == name


def test_an_empty_mapping_removes_all_keys_and_another_one_changes_its_own(minimal: Path) -> None:
    given = ["model.kwargs={depth: 3, drop_path_rate: 0.1}", "model.kwargs={depth: 4}"]
    assert read_config(Config, minimal, given).model.kwargs == {"depth": 4, "drop_path_rate": 0.1}
    for empty in ("model.kwargs={}", "model.kwargs={ }"):
        assert read_config(Config, minimal, [*given, empty]).model.kwargs == {}
    later = read_config(Config, minimal, [*given, "model.kwargs={}", "model.kwargs.depth=5"])
    assert later.model.kwargs == {"depth": 5}
    assert "optim.lr" in refusal(minimal, "optim={}")
    assert "unknown key model.kwarg={}" in refusal(minimal, "model.kwarg={}")


@pytest.mark.parametrize("value", ["{}", "{a: 1}"])
def test_a_mapping_in_place_of_a_list_is_named_as_such(minimal: Path, value: str) -> None:
    message = refusal(minimal, "run.trackers=[tensorboard]", f"run.trackers={value}")
    assert "must be a list of values" in message
    message = refusal(minimal, f"optim.kwargs={value}", "optim.kwargs=[a]")
    assert "optim.kwargs=['a'] is not possible: must be a mapping" in message


def test_config_is_frozen(minimal: Path) -> None:
    with pytest.raises(AttributeError):
        read_config(Config, minimal).optim.lr = 1.0


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.lrr=1", ["unknown key optim.lrr=1", "did you mean optim.lr?"]),
        (
            "model.drop_path=0.1",
            ["unknown key model.drop_path=", "known are model.name, "],
        ),
        ("optm.lr=1", ["unknown key optm={'lr': 1}", "did you mean optim?"]),
        ("train.epochs", ["override 'train.epochs'", "key=value"]),
        ("lipschitz.sigma_cap=0", ["lipschitz.sigma_cap=0.0", "> 0"]),
        ("lipschitz.monitor_every=0", ["lipschitz.monitor_every=0", ">= 1"]),
        ("lipschitz.cap_strength=1.5", ["lipschitz.cap_strength=1.5", "(0, 1]"]),
        (
            "lipschitz.cap_strength=0.2",
            ["cap_strength=0.2 has no effect without lipschitz.cap_mode=soft: remove it"],
        ),
        ("lipschitz={sigma_cap: 2, cap_strength: 0.2}", ["cap_strength=0.2 has no effect"]),
        (
            "lipschitz.cap_mode=soft",
            ["lipschitz.cap_mode='soft' has no effect without lipschitz.sigma_cap"],
        ),
        (
            "lipschitz={sigma_cap: 2, orthogonal: true}",
            ["lipschitz.sigma_cap=2.0 is not possible: lipschitz.orthogonal=true sets the norms"],
        ),
        ("=3", ["override '=3'", "key=value"]),
        ("run.output_dir=/a b #2", ["override 'run.output_dir=/a b #2'", "'#2' as a comment"]),
        ("data.root=#2", ["override 'data.root=#2'", "'#2' as a comment"]),
        ("optim.lr=???", ["optim.lr is ???, which stands for a missing value: give one"]),
        ('model.kwargs={depth: "???"}', ["model.kwargs.depth is ???"]),
        ("model.name=no", ["model.name=False", "quote it"]),
        ("run.output_dir=010", ["run.output_dir=8", "reads it unquoted as a number", "quote it"]),
        ("data.root=1e3", ["data.root=1000.0", "quote it"]),
        ("data.source=imagenet", ["data.source", "'imagenet'", "'folder'"]),
        ("train.epochs=1.5", ["train.epochs", "1.5", "Integer"]),
        ("data.mean=[1,2]", ["length 2", "length 3"]),
        ("data.mean=[1,2,x]", ["data.mean=[1, 2, 'x']", "list of numbers"]),
        ("augment.img_sizes=[64,0.5]", ["augment.img_sizes=[64, 0.5]", "list of whole numbers"]),
        ("augment.scale=[true,1]", ["augment.scale=[True, 1]", "list of numbers"]),
        ("run.trackers=[null]", ["run.trackers=[None]", "list of words"]),
        ("optim=3", ["optim=3", "mapping"]),
        ("optim.lr=null", ["optim.lr", "None"]),
        ("optim.lr=-1", ["optim.lr=-1.0", ">= 0"]),
        ("optim.lr=.nan", ["optim.lr=nan", "finite"]),
        ("optim.betas=[0.9,1.0]", ["optim.betas=(0.9, 1.0)", "[0, 1)"]),
        ("optim.clip_grad=0", ["optim.clip_grad=0.0", "null for off"]),
        ("train.global_batch_size=0", ["train.global_batch_size=0", ">= 1"]),
        ("train.batch_size_per_device=5", ["train.batch_size_per_device=5", "divide", "12"]),
        ("train.batch_size_per_device=0", ["train.batch_size_per_device=0", ">= 1"]),
        ("train.ema_decay=1", ["train.ema_decay=1.0", "(0, 1)"]),
        ("train.precision=fp16", ["train.max_nonfinite_updates=3", "at least 10"]),
        (
            "train.ema_warmup=true",
            ["train.ema_warmup=True has no effect without train.ema_decay: remove it, or set"],
        ),
        ("data.img_size=0", ["data.img_size=0", ">= 1"]),
        ("data.name=imagenette-160", ["data.name", "no effect", "data.source=folder or shards"]),
        ("data.root=/d", ["data.root='/d' has no effect without data.source=folder or "]),
        ("data.download=true", ["data.download=True", "no effect", "data.source=cifar10 or "]),
        ("schedule.min_lr=1", ["schedule.min_lr=1.0", "optim.lr=0.001"]),
        ("schedule.warmup_epochs=3", ["schedule.warmup_epochs=3.0", "train.epochs=3"]),
        ("augment.scale=[0.5,0.2]", ["augment.scale=(0.5, 0.2)", "low <= high"]),
        ("augment.mixup_prob=1.5", ["augment.mixup_prob=1.5", "[0, 1]"]),
        ("model.kwargs.num_classes=3", ["model.kwargs.num_classes", "follows from the data"]),
        ("run.keep=0", ["run.keep=0", ">= 1"]),
    ],
)
def test_mistakes_are_named(minimal: Path, override: str, parts: list[str]) -> None:
    message = refusal(minimal, override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- 1\n- 2\n", "mapping of sections, not a list"),
        (MINIMAL + "model: {name: other}\n", "duplicate key model"),
        (MINIMAL.replace("{lr: 1e-3}", "{}"), "optim.lr is required"),
        (MINIMAL.replace("run: {output_dir: outputs/x}", ""), "run is required"),
        ("model: [", "expected"),
        ("base: missing.yaml\n", "missing.yaml: there is no such config file"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(Config, path)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_base_of_a_base_is_refused(tmp_path: Path, minimal: Path) -> None:
    (tmp_path / "middle.yaml").write_text("base: run.yaml\n")
    (tmp_path / "leaf.yaml").write_text("base: middle.yaml\n")
    assert "one level only" in refusal(tmp_path / "leaf.yaml")


def test_identity_is_every_setting_but_those_of_place_speed_and_reporting(minimal: Path) -> None:
    identity = config_identity(read_config(Config, minimal))
    every = {
        (section, item.name)
        for section, kind in typing.get_type_hints(Config).items()
        for item in dataclasses.fields(kind)
        if section != "run"
    }
    left_out = {
        "data": {"root", "download", "num_workers", "exact_eval", "skip_list"},
        "loss": {"teacher"},
        "train": {
            *{"batch_size_per_device", "compile", "deterministic", "eval_batch_size"},
            *{"grad_checkpointing", "max_nonfinite_updates"},
        },
        "lipschitz": {"monitor_every", "bound_limit"},
    }
    decides = {
        f"{section}.{name}" for section, name in every if name not in left_out.get(section, ())
    }
    assert identity.keys() == decides
    assert identity["optim.lr"] == 1e-3


@pytest.mark.parametrize(
    "section",
    [
        *typing.get_type_hints(Config).values(),
        *typing.get_type_hints(GraphConfig).values(),
        GraphSweepConfig,
    ],
)
def test_every_setting_is_described_once_and_in_order(section: type) -> None:
    about, meanings = read_docstring(section)
    assert about
    assert list(meanings) == [item.name for item in dataclasses.fields(section)]
    assert all(meaning.endswith(".") for meaning in meanings.values())


def test_the_table_of_timms_flags_has_every_key_once_and_in_order() -> None:
    rows = [
        line.split("|")[1:4]
        for line in (ROOT / "docs" / "recipes.md").read_text().splitlines()
        if line.startswith("| `") and "` | " in line and ".yaml" not in line
    ]
    schema = [
        f"{section}.{item.name}"
        for section, kind in typing.get_type_hints(Config).items()
        for item in dataclasses.fields(kind)
    ]
    assert [key.strip(" `") for key, _, _ in rows] == schema
    for key, flag, remark in rows:
        assert re.fullmatch(r" (`--[a-z-]+`|-) ", flag), key
        # a default of timm's that is named there differs from ours
        assert "default" not in remark or flag.strip() != "-", key


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # arXiv 2204.07118, table 1; the table's 5 epochs of warmup are left out
        (
            "deit3",
            {
                "train.global_batch_size": 2048,
                "optim.name": "lamb",
                "optim.lr": 3e-3,
                "optim.weight_decay": 0.02,
                "schedule.warmup_epochs": 0,
                "augment.label_smoothing": 0,
                "augment.repeats": 3,
                "optim.clip_grad": 1.0,
                "augment.hflip": 0.5,
                "augment.auto_augment": "3a",
                "augment.mixup": 0.8,
                "augment.cutmix": 1.0,
                "augment.reprob": 0,
                "augment.color_jitter": 0.3,
                "data.crop_pct": 1.0,
                "loss.type": "bce",
                # engine.py and main.py of github.com/facebookresearch/deit
                "loss.bce_target_thresh": 0.0,
                "schedule.min_lr": 1e-5,
                "optim.eps": 1e-8,
            },
        ),
        # arXiv 2110.00476, table 2
        (
            "a3",
            {
                "augment.img_sizes": (160,),
                "data.img_size": 224,
                "train.epochs": 100,
                "train.global_batch_size": 2048,
                "optim.name": "lamb",
                "optim.lr": 8e-3,
                "optim.weight_decay": 0.02,
                "schedule.warmup_epochs": 5,
                "augment.label_smoothing": 0,
                "augment.repeats": 1,
                "optim.clip_grad": None,
                "augment.hflip": 0.5,
                "augment.auto_augment": "rand-m6-mstd0.5-inc1",
                "augment.mixup": 0.1,
                "augment.cutmix": 1.0,
                "augment.reprob": 0,
                "augment.color_jitter": 0,
                "train.ema_decay": None,
                "data.crop_pct": 0.95,
                "loss.type": "bce",
            },
        ),
    ],
)
def test_recipes_are_the_published_ones(name: str, published: dict[str, object]) -> None:
    config = read_config(Config, ROOT / "configs" / "recipes" / f"{name}.yaml")
    for key, value in published.items():
        section, _, option = key.partition(".")
        assert getattr(getattr(config, section), option) == value, key
