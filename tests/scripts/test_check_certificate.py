"""The checker of certificates: true ones pass, stronger claims do not, weaker claims do."""

import ast
import copy
import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import eval as evaluation
from data.images import ArrayPicture
from data.transforms import EvalTransform
from lipsformer.engine.build import timm_config
from scripts import check_certificate
from scripts._certificate import digest, own_factor, resize_norm

ROOT = Path(check_certificate.__file__).parents[1]
CHECKER = ("check_certificate", "_check_swin", "_check_contractive", "_check_maps")

MODELS = {
    "lipsformer_swin_nano": {
        **{"patch_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 4)},
        **{"window_size": 2, "logit_scale": 1.0, "value_scale": 0.1},
    },
    "lipsformer_contractive_nano": {
        **{"patch_size": 2, "dims": (16, 24), "depths": (1, 1), "window_size": (4, 2)},
        **{"attn_share": 0.5, "head_dim": 4, "logit_scale": 0.7, "eps": 2.0},
    },
}
PRECISIONS = {"lipsformer_swin_nano": "fp32", "lipsformer_contractive_nano": "fp64"}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and certificates of the 40 images that are held out."""
    folder = tmp_path_factory.mktemp("certified")
    torch.manual_seed(0)
    options = {"img_size": 12, "num_classes": 10, **MODELS[request.param]}
    model = timm.create_model(request.param, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    shape = {"input_size": (3, 12, 12), "crop_pct": 0.9, "interpolation": "bicubic"}
    model.pretrained_cfg |= {**shape, "mean": (0.4, 0.5, 0.6), "std": (0.5, 0.25, 0.3)}
    (folder / "config.json").write_text(timm_config(model, list("0123456789")))
    save_file(model.state_dict(), folder / "model.safetensors")
    data = ["--data", "source=digits", "num_workers=0", "holdout=0.03"]
    precision = PRECISIONS[request.param]
    options = ["--certify", "1e-9", "--batch-size", "17", "--precision", precision]
    options += ["--attack-every", "7"]
    assert evaluation.main(["--checkpoint", str(folder), *data, *options]) == 0
    return folder


@pytest.fixture(scope="module")
def claims(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "certificate.json").read_text())


def accepted(claims: dict[str, Any], folder: Path) -> bool:
    try:
        check_certificate.check(claims, folder)
    except Exception:
        return False
    return True


def factor(draw: random.Random) -> float:
    """A relative change of at least 1e-6."""
    return 1.0 + 10.0 ** draw.uniform(-5.99, 0.0)


def images(claims: dict[str, Any]) -> dict[str, Any]:
    return claims["sets"]["data"]


def constant(claims, draw, sign):
    row = draw.choice(claims["layers"])
    row["log10"] -= sign * math.log10(factor(draw))


def rounding(claims, draw, sign):
    claims["logit_rounding"] *= factor(draw) ** -sign


def radius(claims, draw, sign):
    radii = images(claims)[draw.choice(("real", "executed"))]
    index = draw.randrange(len(radii))
    radii[index] = (radii[index] or 1e-9) * factor(draw) ** sign


def share(claims, draw, sign):
    row, key = draw.choice(images(claims)["shares"]), draw.choice(("real", "executed"))
    row[key] = row[key] * factor(draw) ** sign + sign * 1e-6


def own_pixels(claims, draw, sign):
    images(claims)["own_pixel_factors"][0] *= factor(draw) ** -sign


def distance(claims, draw, sign):
    """A share that holds within a distance is claimed for another."""
    row = images(claims)["shares"][0]
    row["distance"] = 1e3 if sign > 0 else row["distance"] / factor(draw)


CLAIMS: list[Callable[..., None]] = [constant, rounding, radius, share, own_pixels, distance]


def leave_out_a_layer(claims, draw):
    claims["layers"].remove(draw.choice(claims["layers"]))


def domain(claims, draw):
    change = draw.choice(("size", "pixels", "radius"))
    if change == "radius":
        claims["domain"]["radius"] *= factor(draw)
    else:
        claims["domain"][change] = [claims["domain"][change][0], draw.randrange(2, 99)]


def preprocessing(claims, draw):
    settings = claims["preprocessing"]
    key = draw.choice(("mean", "std", "img_size", "crop_pct", "interpolation", "source"))
    if key in ("mean", "std"):
        settings[key][draw.randrange(3)] *= factor(draw)
    elif key in ("img_size", "crop_pct"):
        settings[key] *= 2
    else:
        settings[key] = {"bicubic": "bilinear", "digits": "folder"}[settings[key]]
    if key != "source" and draw.random() < 0.5:  # also with a hash that fits
        given = {name: value for name, value in settings.items() if name != "sha256"}
        settings["sha256"] = digest(given)


def premises(claims, draw):
    given = images(claims)["premises"]
    row = draw.randrange(len(given["labels"]))
    if draw.random() < 0.5:
        given["logits"][row][draw.randrange(10)] += draw.choice((-1, 1)) * 1e-6
    else:
        given["labels"][row] = (given["labels"][row] + 1) % 10


def model(claims, draw):
    key, value = draw.choice([("logit_scale", 0.5), ("value_scale", 0.01), ("window_size", 3)])
    claims["model"]["model_args"][key] = value


def other_weights(claims, draw):
    digits = list(claims["weights"]["sha256"])
    place = draw.randrange(64)
    digits[place] = "0" if digits[place] != "0" else "1"
    claims["weights"]["sha256"] = "".join(digits)


def shorter_maps(claims, draw):
    """Norms are premises, and their digest tells that they were changed."""
    images(claims)["premises"]["norms"]["head.fc"] *= 0.5


FACTS = [leave_out_a_layer, domain, preprocessing, premises, model, other_weights, shorter_maps]


def alter(folder: Path, claims: dict[str, Any], number: int) -> None:
    for seed in range(number):
        draw, kinds = random.Random(seed), [*CLAIMS, *FACTS]
        kind = kinds[seed % len(kinds)]
        altered = copy.deepcopy(claims)
        kind(altered, draw, 1) if kind in CLAIMS else kind(altered, draw)
        assert not accepted(altered, folder), (seed, kind.__name__)
        if kind in CLAIMS:
            weaker = copy.deepcopy(claims)
            kind(weaker, draw, -1)
            assert accepted(weaker, folder), (seed, kind.__name__)


def test_four_files_alone_accept_a_true_certificate_without_torch(folder, claims, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").touch()  # before the installed package in the search
    for name in CHECKER:
        shutil.copy(ROOT / "scripts" / f"{name}.py", tmp_path / "scripts")
    alone = "import sys; sys.modules['torch'] = None; from scripts import check_certificate as c; "
    command = [sys.executable, "-c", f"{alone}sys.exit(c.main(sys.argv[1:]))"]
    arguments = [str(folder / "certificate.json"), str(folder)]
    done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all claims follow" in done.stdout and "taken from the file" in done.stdout
    real, executed = (np.array(images(claims)[key]) for key in ("real", "executed"))
    assert (executed <= real).all() and (executed > 0.0).any()
    assert (executed < real).any() or claims["dtype"] == "float64"


def test_stronger_claims_are_refused_and_weaker_ones_accepted(folder, claims):
    alter(folder, claims, 48)


@pytest.mark.slow
def test_a_thousand_alterations(folder, claims):
    alter(folder, claims, 1000)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_file_that_is_not_there_is_a_mistake_and_no_refusal(tmp_path, capsys, missing):
    arguments = [str(tmp_path), str(tmp_path)]
    arguments[missing] += "/nowhere"
    with pytest.raises(SystemExit, match="2"):
        check_certificate.main(arguments)
    output = capsys.readouterr()
    assert output.err.endswith(f"error: {tmp_path}/nowhere does not exist\n")
    assert output.out == ""


def test_several_certificates_of_a_run_are_checked_in_turn(folder, tmp_path, capsys):
    name = str(folder / "certificate.json")
    assert check_certificate.main([name, name, str(folder)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    (tmp_path / "forged.json").write_text("{}")
    assert check_certificate.main([name, str(tmp_path / "forged.json"), str(folder)]) == 1


def test_the_bound_of_all_images_is_derived_once_for_all_sets(folder, claims, monkeypatch):
    several = copy.deepcopy(claims)
    several["sets"] = {name: images(claims) for name in ("data", "noise", "blur")}
    derived, bound = [], check_certificate.Model.bound
    monkeypatch.setattr(
        check_certificate.Model,
        "bound",
        lambda self, x, centers: derived.append(bool(centers)) or bound(self, x, centers),
    )
    assert accepted(several, folder)
    assert derived == [False, True, True, True]  # of all images, then around those of every set


def test_changed_weights_are_refused(folder, claims, tmp_path):
    for name in ("config.json", "certificate.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-7] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    assert check_certificate.main([str(tmp_path / "certificate.json"), str(tmp_path)]) == 1
    # Twice the classifier, with the hash that fits: the constants no longer follow.
    weights = check_certificate.read_safetensors(folder / "model.safetensors")
    tensors = {name: torch.tensor(w, dtype=torch.float32) for name, w in weights.items()}
    tensors["head.fc.weight"] *= 2.0
    save_file(tensors, tmp_path / "model.safetensors")
    forged = copy.deepcopy(claims)
    file = (tmp_path / "model.safetensors").read_bytes()
    forged["weights"]["sha256"] = check_certificate.hashlib.sha256(file).hexdigest()
    with pytest.raises(ValueError, match=r"head\.fc"):
        check_certificate.check(forged, tmp_path)


def test_the_factor_of_the_own_pixels_is_that_of_pillows_resize():
    for old, new, kind in ((8, 12, "bicubic"), (31, 12, "bicubic"), (5, 13, "bilinear")):
        settings = type("Data", (), {"interpolation": kind})()
        expected = resize_norm(old, new, settings)
        assert check_certificate.resize_norm(old, new, kind) == pytest.approx(expected, rel=2e-7)
    digits = {"source": "digits", "img_size": 32, "crop_pct": 1.0, "interpolation": "bicubic"}
    found = own_factor((8, 8, 1), type("Data", (), digits)())
    assert check_certificate.own_factor((8, 8, 1), digits) <= found
    assert found == pytest.approx(6.94265, abs=1e-4)


@pytest.mark.parametrize("in_memory", ["false", "true"])
def test_the_factor_of_gray_files_covers_the_measured_growth(folder, tmp_path, in_memory):
    """A change of one gray pixel changes three pixels of the network."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    pictures = np.random.default_rng(0).integers(0, 256, (10, 13, 13), dtype=np.uint8)
    for label, picture in enumerate(pictures):
        (tmp_path / "val" / str(label)).mkdir(parents=True)
        Image.fromarray(picture).save(tmp_path / "val" / str(label) / "0.png")
    data = ["--data", "source=folder", f"root={tmp_path}", "num_workers=0"]
    precision = PRECISIONS[json.loads((folder / "config.json").read_text())["architecture"]]
    options = ["--certify", "1e-9", "--precision", precision, "--attack-every", "10"]
    memory = f"in_memory={in_memory}"
    assert evaluation.main(["--checkpoint", str(tmp_path), *data, memory, *options]) == 0

    claims = json.loads((tmp_path / "certificate.json").read_text())
    assert images(claims)["premises"]["sizes"] == [[13, 13, 1]]
    transform = EvalTransform(12, crop_pct=0.9)
    changed = pictures[0].copy()
    changed[6, 6] ^= 128
    before, after = (transform(ArrayPicture(x)).double() for x in (pictures[0], changed))
    growth = float((after - before).norm()) / 128.0
    assert growth == pytest.approx(math.sqrt(3.0))
    assert growth <= images(claims)["own_pixel_factors"][0] < 1.001 * growth
    assert accepted(claims, tmp_path)


def test_the_checker_is_short_and_needs_only_numpy_and_itself():
    """An auditor can read all of it."""
    sources = {name: (ROOT / "scripts" / f"{name}.py").read_text() for name in CHECKER}
    assert sum(len(source.splitlines()) for source in sources.values()) <= 775
    imported = {
        name
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    own = {f"scripts.{name}" for name in CHECKER}
    assert {name.split(".")[0] for name in imported - own} <= {"numpy", *sys.stdlib_module_names}


def a_layer_twice(claims):
    claims["layers"].insert(0, {**claims["layers"][0], "log10": -99.0})


def another_sentence(claims):
    claims["says"]["distance"] = "Largest change of a pixel."


def radii_of_the_exact_network(claims):
    claims["dtype"], images(claims)["executed"] = "float32", images(claims)["real"]


def another_program(claims):
    claims["dtype"] = "bfloat16"


def another_claim(claims):
    claims["infinity_norm_radius"] = 1.0


def another_claim_of_a_layer(claims):
    claims["layers"][0]["local_log10"] = -9.0


def another_claim_of_a_set(claims):
    images(claims)["infinity_norm"] = 1.0


def another_share(claims):
    images(claims)["shares"][0]["attacked"] = 100.0


def changed_premises(change):
    return lambda claims: change(images(claims)["premises"])


def another_claim_of_a_part(part, **claim):
    def alter(claims):
        claims[part].update(claim)
        if part == "preprocessing":
            del claims[part]["sha256"]
            claims[part]["sha256"] = digest(claims[part])

    return alter


def of_all_images(key, value):
    return changed_premises(lambda given: given.update({key: [value for _ in given[key]]}))


def negative_norms(claims):
    """They left a negative allowance for rounding, which allowed any executed radius."""
    norms = images(claims)["premises"]["norms"]
    norms.update(dict.fromkeys(norms, -1e12))
    images(claims)["executed"] = [1e3 for _ in images(claims)["executed"]]


def a_picture_of_many_channels(claims):
    """Its factor of the own pixels is small."""
    images(claims)["premises"]["sizes"] = [[8, 8, 10**9]]
    images(claims)["own_pixel_factors"] = [1e-3]


def several_radii_of_every_image(claims):
    images(claims)["real"] = [images(claims)["real"]] * len(images(claims)["real"])


def labels_in_lists(claims):
    """Every prediction was compared with every label."""
    given = images(claims)["premises"]
    given["labels"] = [[label] for label in given["labels"]]
    for share in images(claims)["shares"]:
        share.update(real=0.0, executed=0.0)


def a_negative_distance(claims):
    """All images whose class is right have a radius above -1."""
    given = images(claims)["premises"]
    given["labels"] = np.argmax(given["logits"], axis=1).tolist()
    images(claims)["shares"] = [{"distance": -1.0, "real": 100.0, "executed": 100.0}]


def a_radius_less(claims):
    images(claims)["executed"].pop()


ADDED = [
    *(negative_norms, a_picture_of_many_channels, several_radii_of_every_image),
    *(a_negative_distance, labels_in_lists, a_radius_less),
    another_claim_of_a_part("weights", infinity_norm=1.0),
    another_claim_of_a_part("model", accuracy=100.0),
    another_claim_of_a_part("preprocessing", after_jpeg=True),
    *(of_all_images("levels", level) for level in (1.999, 0, -5, 17)),
    of_all_images("size_of", 7),
    changed_premises(lambda given: given["size_of"].pop()),
    changed_premises(lambda given: given.update(labels=3)),
    changed_premises(lambda given: given["logits"][0].__setitem__(0, math.inf)),
    changed_premises(lambda given: given.update(outputs=[0] * 10)),
    changed_premises(lambda given: given.update(outputs=list(range(5)) + list(range(-10, -5)))),
    changed_premises(lambda given: given.update(infinity_norm=1.0)),
    *(a_layer_twice, another_sentence, another_claim, another_claim_of_a_set, another_share),
    *(another_claim_of_a_layer, radii_of_the_exact_network, another_program),
]


@pytest.mark.parametrize("change", ADDED)
def test_claims_beside_those_that_follow_are_refused(folder, claims, change):
    """Although the digest of the premises is that of the changed ones."""
    altered = copy.deepcopy(claims)
    change(altered)
    images(altered)["premises_sha256"] = digest(images(altered)["premises"])
    assert not accepted(altered, folder)


def test_a_key_that_appears_twice_is_refused(folder, tmp_path):
    """Readers differ in which of the two they take."""
    text = (folder / "certificate.json").read_text()
    forged = tmp_path / "certificate.json"
    forged.write_text(
        text.replace('"logit_rounding"', '"logit_rounding": 0.0, "logit_rounding"', 1)
    )
    assert check_certificate.main([str(forged), str(folder)]) == 1


def test_nothing_bounds_the_error_where_float32_overflows(folder):
    weights = check_certificate.read_safetensors(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if config["architecture"] != "lipsformer_swin_nano":
        return
    images = check_certificate.Map((12, 12), 100.0, 1e-3)
    assert check_certificate.Model(weights, config).bound(images, {}).logits.error < math.inf
    weights["stages.0.blocks.0.mlp.branch.fc1.weight"] *= 1e38
    weights["stages.0.blocks.0.mlp.branch.fc2.weight"] *= 1e-38
    assert check_certificate.Model(weights, config).bound(images, {}).logits.error == math.inf


def test_windows_that_are_not_square_are_refused(claims):
    """The table of windows of 1 x 5 tokens is as long as that of 2 x 2."""
    weights = {"path.relative_position_bias_table": np.zeros((9, 1))}
    config = {"architecture": "lipsformer_swin_nano", "model_args": {"window_size": [1, 5]}}
    model = check_certificate.Model(weights, config)
    with pytest.raises(ValueError, match="only square windows"):
        model.windows("path", check_certificate.Map((5, 5), 1.0, 0.0), None)
