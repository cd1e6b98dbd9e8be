"""eval.py --set against a loop over the files, one image at a time, in float64."""

import json
import math
import pkgutil
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn

import eval as evaluation
from data import DataError, build_eval_sets
from data.evalsets import ALEXNET_ERROR, STANDARD, STANDARD_WORDS, corruption_summary
from lipsformer.config import DataConfig
from lipsformer.engine.build import timm_config
from tests.data.trees import write_tree

SIZE = 32
KNOWN = 307  # classes of the model: some of ImageNet's, in an order of their own


@pytest.fixture(scope="module")
def wnids() -> list[str]:
    return random.Random(5).sample(STANDARD, KNOWN)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, wnids: list[str]) -> Path:
    return write_tree(tmp_path_factory.mktemp("images"), dict.fromkeys(wnids, 1))


@pytest.fixture(scope="module")
def model(images: Path, wnids: list[str]) -> nn.Module:
    """Knows three of five images by heart, and takes a fourth for the fifth's class, then its own.

    Of unit vectors, each has its largest product with itself.
    """
    torch.manual_seed(0)
    model = tiny(KNOWN)
    with torch.no_grad():
        inputs = torch.cat([transformed(images / wnid / "000.png", 0.875) for wnid in wnids])
        features = model.forward_head(model.forward_features(inputs), pre_logits=True)
        mean = features.mean(dim=0)
        known = 5 * nn.functional.normalize(features - mean)
        mistaken = torch.arange(1, KNOWN, 5)
        known[mistaken - 1] = 1.1 * known[mistaken]
        model.head.weight.copy_(known)
        model.head.bias.copy_(-known @ mean)
    return model


@pytest.fixture(scope="module")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, model: nn.Module, wnids: list[str]
) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(timm_config(model, wnids))
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def tiny(num_classes: int) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=num_classes,
        pretrained_cfg_overlay={"input_size": (3, SIZE, SIZE), "crop_pct": 0.875},
        **{"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2},
    ).eval()


def transformed(file: Path, crop_pct: float) -> Tensor:
    transform = create_transform(
        SIZE, interpolation="bicubic", crop_pct=crop_pct, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    return transform(Image.open(file).convert("RGB"))[None]


Answers = list[tuple[list[float], set[int]]]  # logits, right outputs


def answers(model: nn.Module, files: list[tuple[Path, set[int]]], crop_pct=0.875) -> Answers:
    with torch.no_grad():
        return [
            (model(transformed(file, crop_pct))[0].double().tolist(), right)
            for file, right in files
        ]


def by_hand(answers: Answers, counting: list[int] | None = None) -> dict[str, float]:
    """Return the figures if only the logits of the classes `counting` are considered."""
    top1 = top5 = 0
    losses = []
    for logits, right in answers:
        considered = counting or list(range(len(logits)))
        ranked = sorted(considered, key=lambda output: -logits[output])
        top1 += ranked[0] in right
        top5 += bool(right.intersection(ranked[:5]))
        total = math.log(math.fsum(math.exp(logits[output]) for output in considered))
        losses.append(math.fsum(total - logits[output] for output in right) / len(right))
    count = len(answers)
    return {
        "top1": 100 * top1 / count,
        "top5": 100 * top5 / count,
        "loss": math.fsum(losses) / count,
        "images": count,
    }


@pytest.fixture
def evaluate(tmp_path: Path, checkpoint: Path) -> Iterator[Callable[..., list[dict]]]:
    """Runs eval.py on sets below tmp_path; gives the records."""

    def run(*sets: str) -> list[dict]:
        output = tmp_path / "records.json"
        arguments = ["--checkpoint", str(checkpoint), "--json", str(output), "--batch-size", "7"]
        data = ["--data", f"root={tmp_path}", "num_workers=0"]
        assert evaluation.main([*arguments, *data, "--set", *sets]) == 0
        return json.loads(output.read_text())

    return run


def matches(record: dict, expected: dict) -> None:
    for key, value in expected.items():
        assert record[key] == pytest.approx(value, rel=1e-5), key


def lay(images: Path, folder: Path, names: dict[str, str]) -> list[tuple[Path, str]]:
    """Put the images of wnids into folder/name for each (wnid, name)."""
    for wnid, name in names.items():
        shutil.copytree(images / wnid, folder / name)
    return [(images / wnid / "000.png", wnid) for wnid in names]


@pytest.mark.filterwarnings("ignore:.*classes have no images:UserWarning")
def test_val_v2_and_sketch(tmp_path, images, model, wnids, evaluate, capsys):
    chosen = {
        "val": ("imagenet-1k/val", wnids[3:20], lambda wnid: wnid),
        "v2": ("imagenetv2-matched-frequency-format-val", wnids[10:41], STANDARD.index),
        "sketch": ("imagenet-sketch", wnids[20:33], lambda wnid: wnid),
    }
    expected = []
    for folder, some, name in chosen.values():
        laid = lay(images, tmp_path / folder, {wnid: str(name(wnid)) for wnid in some})
        files = [(file, {wnids.index(wnid)}) for file, wnid in laid]
        expected.append(by_hand(answers(model, files)))
    assert len({len(str(STANDARD.index(wnid))) for wnid in wnids[10:41]}) > 1  # '10' < '2'
    records = evaluate(*chosen)
    assert [record["set"] for record in records] == list(chosen)
    for record, figures in zip(records, expected, strict=True):
        assert 40 < figures["top1"] < 90  # a wrong map would give about 0
        matches(record, figures)
    assert "sketch" in capsys.readouterr().out


def test_of_a_and_r_only_the_logits_of_200_classes_count(tmp_path, images, model, wnids, evaluate):
    some = random.Random(7).sample(wnids, 200)
    laid = lay(images, tmp_path / "imagenet-r", dict(zip(some, some, strict=True)))
    (tmp_path / "imagenet-r" / ".ipynb_checkpoints").mkdir()
    given = answers(model, [(file, {wnids.index(wnid)}) for file, wnid in laid])
    expected = by_hand(given, [wnids.index(wnid) for wnid in some])
    assert expected["top1"] > by_hand(given)["top1"] + 5
    for record in evaluate(f"a={tmp_path / 'imagenet-r'}", "r"):
        matches(record, expected)


@pytest.fixture
def standard(tmp_path, images, model, wnids) -> nn.Module:
    """A model of all 1,000 classes without names: `wnids` as before, the others unlikely."""
    weights = model.state_dict()
    large = tiny(1000)
    order = [STANDARD.index(wnid) for wnid in wnids]
    head, bias = torch.zeros(1000, 24), torch.full((1000,), -9.0)
    head[order], bias[order] = weights["head.weight"], weights["head.bias"]
    large.load_state_dict({**weights, "head.weight": head, "head.bias": bias})
    return large


@pytest.mark.filterwarnings("ignore:.*classes have no images:UserWarning")
def test_real_labels_are_sets_and_images_without_any_are_left_out(
    tmp_path, images, standard, wnids
):
    labels = json.loads(pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json") or b"")
    folder = tmp_path / "val" / STANDARD[4]  # ReaL goes by the file's name, not its folder
    folder.mkdir(parents=True)
    files = []
    for number in [*range(1, 90), 49_999, 50_000]:
        right = labels[number - 1]
        like = STANDARD[right[-1]] if right else ""
        file = folder / f"ILSVRC2012_val_{number:08d}.JPEG"
        like = like if like in wnids else wnids[number % KNOWN]
        shutil.copy(images / like / "000.png", file)
        if right:
            files.append((file, set(right)))
    assert len(files) < 91
    assert any(len(right) > 1 for _, right in files)
    large = tmp_path / "large"
    large.mkdir()
    save_config_for_hf(standard, str(large / "config.json"))
    save_file(standard.state_dict(), large / "model.safetensors")
    output = tmp_path / "records.json"
    arguments = ["--checkpoint", str(large), "--set", f"real={tmp_path / 'val'}", "--json"]
    assert evaluation.main([*arguments, str(output), "--data", "num_workers=0"]) == 0
    (record,) = json.loads(output.read_text())
    expected = by_hand(answers(standard, files))
    assert 5 < expected["top1"] < expected["top5"] < 60
    matches(record, expected)


@pytest.mark.filterwarnings("ignore:.*classes have no images:UserWarning")
def test_corruptions_are_tabulated_with_their_mean(tmp_path, images, model, wnids, evaluate):
    expected: dict[str, list[dict]] = {}
    for number, corruption in enumerate(["fog", "saturate", "snow"]):
        expected[corruption] = []
        for severity in range(1, 6):
            some = wnids[7 * severity + 40 * number :][: 2 + severity]
            folder = tmp_path / "imagenet-c" / corruption / str(severity)
            files = [
                (file, {wnids.index(wnid)})
                for file, wnid in lay(images, folder, dict(zip(some, some, strict=True)))
            ]
            expected[corruption].append(by_hand(answers(model, files, crop_pct=1.0)))
    records = evaluate("c")
    by_name = {record["set"]: record for record in records}
    for corruption, severities in expected.items():
        for severity, figures in enumerate(severities, start=1):
            matches(by_name[f"c/{corruption}/{severity}"], figures)
        mean = sum(figures["top1"] for figures in severities) / 5
        matches(by_name[f"c/{corruption}"], {"top1": mean, "images": 25})
    total = sum(by_name[f"c/{name}"]["top1"] for name in ("fog", "snow")) / 2  # not saturate
    matches(by_name["c"], {"top1": total, "corruptions": 2})
    assert by_name["c"]["mce"] is None


def test_mean_corruption_error_is_relative_to_alexnets():
    shift = (-0.02, -0.01, 0.0, 0.01, 0.02)  # of the five severities
    records = {
        f"c/{name}/{severity}": {
            "top1": 100 * (1 - factor * (error + shift[severity - 1])),
            **{"top5": 7.0, "loss": 1.0, "images": 3},
        }
        for factor, (name, error) in zip((0.5, 0.8) * 8, ALEXNET_ERROR.items(), strict=False)
        for severity in range(1, 6)
    }
    rows = corruption_summary(records)
    assert [row["set"] for row in rows] == [*(f"c/{name}" for name in ALEXNET_ERROR), "c"]
    # 8 corruptions at half of AlexNet's error, 7 at four fifths.
    assert rows[-1]["mce"] == pytest.approx(100 * (8 * 0.5 + 7 * 0.8) / 15)
    assert rows[-1]["images"] == 225
    # The published figure of each corruption is the mean of five severities; of the first:
    assert np.mean([0.69528, 0.82542, 0.93554, 0.98138, 0.99452]) == pytest.approx(
        ALEXNET_ERROR["gaussian_noise"]
    )
    assert corruption_summary({"v2": records["c/fog/1"]}) == []


@pytest.mark.parametrize("names", ["wnids", "words"])
@pytest.mark.filterwarnings("ignore:.*classes have no images:UserWarning")
def test_class_names_may_be_the_words_of_the_index(tmp_path, names):
    write_tree(tmp_path / "s", {STANDARD[517]: 1, STANDARD[134]: 1, STANDARD[2]: 1})
    words = list(STANDARD_WORDS)
    assert (words[134], words[517]) == ("crane", "crane")
    words[517] = "crane2"  # as the Hub's ImageNet-1K has it
    classes = {"wnids": STANDARD, "words": words}[names][::-1]
    data = DataConfig(source="folder", img_size=16)
    (found,) = build_eval_sets([f"sketch={tmp_path / 's'}"], data, classes, 1000)
    assert found.dataset.labels.tolist() == [999 - 2, 999 - 134, 999 - 517]


@pytest.mark.parametrize(
    ("entries", "classes", "message"),
    [
        ("valid", STANDARD, r"no evaluation set 'valid': known are val, real, v2, a, r, sketch, c"),
        ("sketch", STANDARD, r"no folder .*/imagenet-sketch for .* sketch: expected .*/<wnid>/<im"),
        ("v3", ["cat", STANDARD[0]], r"no evaluation set 'v3'"),
        ("sketch=S", ["cat", STANDARD[0]], r"1 of the model's 2 classes are not .* 'cat'"),
        ("sketch=S", STANDARD[1:], r"1 unknown class\(es\) n01440764"),
        ("sketch=S", None, r"no class names and 7 outputs"),
        ("v2=S", STANDARD, r"S/n01440764: the class folders of V2 are named 0 to 999"),
        ("real=S", STANDARD, r"000.png has not the name of a validation image"),
        (
            "a=S",
            STANDARD,
            r"3 class folders, of which the model knows 3; expected the 200 of",
        ),
        ("sketch=S sketch", STANDARD[:3], r"evaluation set sketch is named twice"),
        ("c=S", STANDARD, r"n01440764: expected the folders 1 to 5 .* found none"),
    ],
)
def test_mistakes_are_one_clear_error(tmp_path, monkeypatch, entries, classes, message):
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "S", dict.fromkeys(STANDARD[:3], 1))
    data = DataConfig(source="folder", root=str(tmp_path), img_size=16)
    with pytest.raises(DataError, match=message) as caught:
        build_eval_sets(entries.split(), data, classes, 7)
    assert "\n" not in str(caught.value)


@pytest.mark.data
def test_v2s_numbers_are_the_standard_index_on_real_photos(datasets, tmp_path):
    sample = datasets / "imagenet-1k-sample"
    for number, (wnid, _) in json.loads((sample / "imagenet_class_index.json").read_text()).items():
        (tmp_path / number).symlink_to(sample / "val" / wnid, target_is_directory=True)
    data = DataConfig(source="folder", img_size=16)
    (found,) = build_eval_sets([f"v2={tmp_path}"], data, None, 1000)
    numbers = [Path(found.dataset.source.source.file(index)).parent.name for index in range(1000)]
    assert found.dataset.labels.tolist() == [int(number) for number in numbers]
    assert numbers != sorted(numbers, key=int)
