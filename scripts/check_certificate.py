"""Check certificates of `eval.py --certify`: `python -m scripts.check_certificate FILE... WEIGHTS`.

WEIGHTS is a file of weights, its folder or a run, with timm's config.json. All claims are derived
again from the weights, and a stronger one is refused. Logits, labels, source and sizes of the
data's images are taken from the certificate. It covers `lipsformer_swin_*` with cosine attention
and normalized values, and `lipsformer_contractive_*`. Proofs: docs/theorems.md.

This file compares the claims. `_check_swin.py` and `_check_contractive.py` derive the constants and
errors of the layers with the bounds of `_check_maps.py`. These four files are the whole checker;
they need only NumPy and the standard library.
"""

import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from scripts._check_contractive import Contractive
from scripts._check_maps import MAX_NORM, UP, Map, carried, gamma, require
from scripts._check_swin import Bound, Model

# The digest of the sentences that say what is claimed, and what the file, a set and a share hold.
SAYS = "78664b7dcc667c50a5efcc5a3f25cd6621a14c4277d6fe407a14fd2bdc3a713f"
FILE = "format says weights model preprocessing domain layers dtype logit_rounding sets"
PARTS = {
    "weights": "file sha256",
    "model": "architecture model_args",
    "preprocessing": "source img_size crop_pct interpolation exact_eval mean std sha256",
}
SET = {"premises", "premises_sha256", "own_pixel_factors", "real", "executed", "shares"}
SHARE = {"distance", "real", "executed"}
FLOAT32_SHARES = {"float32": 1.0, "float64": 2.0**-28}  # error of a program over float32's
ROW, PREMISES = "name class proof log10", "outputs sizes size_of labels logits norms levels"


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary; a key that appears twice is refused."""
    require(len(dict(pairs)) == len(pairs), "a key appears twice")
    return dict(pairs)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file in float64, by name."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, arrays = json.loads(content[8:start]), {}
    header.pop("__metadata__", None)
    for name, entry in header.items():
        require(entry["dtype"] == "F32", f"{name} is {entry['dtype']}, not float32")
        flat = np.frombuffer(content[start:][slice(*entry["data_offsets"])], "<f4")
        arrays[name] = flat.reshape(entry["shape"]).astype(np.float64)
    return arrays


def resize_norm(old: int, new: int, interpolation: str) -> float:
    """Return the norm of Pillow's resize of a line of pixels."""
    centers = (np.arange(new)[:, None] + 0.5) * old / new
    t = np.abs(np.arange(old) + 0.5 - centers) / max(old / new, 1.0)
    cubic = np.where(t < 1, (1.5 * t - 2.5) * t**2 + 1, ((2.5 - 0.5 * t) * t - 4) * t + 2)
    weights = np.where(t < 2, cubic, 0) if interpolation == "bicubic" else np.maximum(1 - t, 0)
    return 1.0 if old == new else float(np.linalg.norm(weights / weights.sum(1, keepdims=True), 2))


def own_factor(size: list[int], settings: dict[str, Any]) -> float:
    """Return how much a change of an image, [height, width, channels], grows before the net."""
    *sides, channels = size
    new, kind, factor = settings["img_size"], settings["interpolation"], math.sqrt(3.0 / channels)
    if settings["source"] == "digits":
        factor *= math.prod(resize_norm(side, new, kind) for side in sides)
        sides = [new, new]
    resized = math.floor(new / settings["crop_pct"])
    return factor * math.prod(resize_norm(s, int(resized * s / min(sides)), kind) for s in sides)


def digest(content: Any) -> str:
    """Return the SHA-256 of the canonical JSON of a value."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def differences(bound: Bound, apart: np.ndarray, chosen: list[int]) -> np.ndarray:
    """Bound the errors of the differences of chosen logits in float32, for every case.

    The error of z_i - z_j is |w_i - w_j| e + rho_i + rho_j (Theorem 33).
    """
    rows = bound.rounding
    errors = apart * np.reshape(bound.error, (-1, 1, 1)) + rows[:, :, None] + rows[:, None, :]
    return UP * errors[:, chosen][:, :, chosen]


def check(claims: dict[str, Any], path: Path) -> str:
    """Derive all claims again from the weights of a file or folder; return what was found."""
    check_form(claims)
    file, config = claimed_weights(claims, path)
    data = claims["preprocessing"]
    x, domain = images(data)
    require(claims["domain"] == domain, f"the domain is not {domain}")
    kind = Model if config["architecture"].startswith(Model.prefix) else Contractive
    model = kind(read_safetensors(file), config)
    bound = model.bound(x, {})
    whole = bound.logits
    check_layers(claims["layers"], bound.constants)
    error = whole.error if whole.norm <= MAX_NORM else math.inf
    require(claims["logit_rounding"] >= error, f"the rounding of the logits is {error}")
    rows, last = model.of("head.fc.weight"), bound.constants["head.fc"]
    apart = np.array([np.linalg.norm(row - rows, axis=1) for row in rows]) * UP**2
    between = apart * (whole.value / last if last > 0.0 else 0.0)  # of the differences of logits
    for name, content in claims["sets"].items():
        check_premises(name, content, data)
        bounds = (model, x, bound, apart, between)
        check_radii(name, content, *bounds, min(data["std"]), claims["dtype"])
    follow = f"all claims follow: bound {whole.value:.6g}, rounding {whole.error:.3e}"
    return f"{follow}; taken from the file: logits, labels, source and sizes of the images"


def check_form(claims: dict[str, Any]) -> None:
    """Refuse a file that claims more, or something else, than is checked here."""
    require(claims["format"] == "lipsformer certificate 2", "the format is unknown")
    require(digest(claims["says"]) == SAYS and set(claims) == set(FILE.split()), "other claims")
    for part, keys in PARTS.items():
        require(set(claims[part]) == set(keys.split()), f"{part}: there are other claims")


def claimed_weights(claims: dict[str, Any], path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file of weights that is meant, and its config.json, which must say the same."""
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    hashes = {hashlib.sha256(file.read_bytes()).hexdigest(): file for file in files}
    require(claims["weights"]["sha256"] in hashes, f"{path} holds no weights with this SHA-256")
    file, data = hashes[claims["weights"]["sha256"]], claims["preprocessing"]
    config = json.loads((file.parent / "config.json").read_text())
    known = {**config, **config["pretrained_cfg"], **claims["model"], **data}
    config["img_size"] = config["pretrained_cfg"]["input_size"][1]
    require({**known, **config, **config["pretrained_cfg"]} == known, "config.json is another")
    require(data.pop("sha256") == digest(data), "the hash of the preprocessing is another")
    return file, config


def images(data: dict[str, Any]) -> tuple[Map, dict[str, Any]]:
    """Return all normalized images of pixels in [0, 1], and what the certificate says of them."""
    channels = list(zip(data["mean"], data["std"], strict=True))
    size, pixels = [data["img_size"]] * 2, data["img_size"] ** 2
    radius = UP * math.hypot(*(max(m, 1.0 - m) / s for m, s in channels))
    added = gamma(8) * math.hypot(*((1.0 + abs(m)) / s for m, s in channels))
    x = Map(tuple(size), UP * math.sqrt(pixels) * radius, carried(0.0, 0.0, added, pixels))
    return x, {"size": size, "pixels": [0, 1], "radius": radius}


def check_layers(claimed: list[dict[str, Any]], constants: dict[str, float]) -> None:
    """Compare the constants of all layers with those that were derived."""
    require(all(set(row) == set(ROW.split()) for row in claimed), "a layer claims more")
    stated = unique([(row["name"], row["log10"]) for row in claimed])
    require(set(stated) == set(constants), f"other layers: {set(stated) ^ set(constants)}")
    for name, value in constants.items():
        derived = math.log10(UP * value) if value > 0.0 else -400.0
        require(stated[name] >= derived, f"{name!r}: {stated[name]} is below {derived}")


def check_premises(name: str, content: dict[str, Any], data: dict[str, Any]) -> None:
    """Check the form of a set of images, and the factors of the data's own pixels."""
    only = set(content) == SET and all(set(share) == SHARE for share in content["shares"])
    given = content["premises"]
    require(only and set(given) == set(PREMISES.split()), f"{name}: there are other claims")
    require(content["premises_sha256"] == digest(given), f"{name}: other premises")
    for size, factor in zip(given["sizes"], content["own_pixel_factors"], strict=True):
        whole = len(size) == 3 and all(type(side) is int and side > 0 for side in size)
        require(whole and size[2] in (1, 3), f"{name}: {size} is no height, width and channels")
        require(factor >= own_factor(size, data), f"{name}: {factor} for {size} is too small")
    require(all(norm >= 0.0 for norm in given["norms"].values()), f"{name}: a norm is negative")
    listed = [given[key] for key in ("labels", "levels", "size_of", "logits")]
    lengths = {len(values) for values in (*listed, content["real"], content["executed"])}
    require(len(lengths) == 1, f"{name}: lists of images of several lengths {lengths}")
    sizes, classes = range(len(given["sizes"])), range(len(given["logits"][0]))
    for key, known in (("levels", range(1, 17)), ("size_of", sizes), ("labels", classes)):
        inside = all(type(value) is int and value in known for value in given[key])
        require(inside, f"{name}: {key} must be integers in {known}")


def check_radii(
    name: str,
    content: dict[str, Any],
    model: Model,
    x: Map,
    bound: Bound,
    apart: np.ndarray,
    between: np.ndarray,
    least_std: float,
    dtype: str,
) -> None:
    """Derive the radii of a set from its logits, and its shares from the radii.

    The bound is that of all images x. The differences of logits i and j change by at most
    between[i, j] times the distance of the network's input, and apart[i, j] times that of the input
    of its last layer.
    """
    given, every = content["premises"], range(len(apart))
    logits, chosen = np.array(given["logits"]), [every[i] for i in given["outputs"] or every]
    require(np.isfinite(logits).all(), f"{name}: the logits are not finite")
    require(len(set(chosen)) == logits.shape[1], f"{name}: not one logit for every output")
    best, every = logits.argmax(1), np.arange(len(logits))
    levels, level = np.unique(given["levels"], return_inverse=True)
    parts, balls = UP * levels / 16.0, np.zeros(len(levels))
    np.maximum.at(balls, level, np.array(content["executed"]) * UP / least_std)
    allowance = {"real": 2.0**-28 * differences(bound, apart, chosen)[0, best]}
    around = x._replace(ball=balls)
    centers = {path: norm * parts for path, norm in given["norms"].items()}
    errors = differences(model.bound(around, centers), apart, chosen)[level, best]
    allowance["executed"] = (FLOAT32_SHARES[dtype] + 2.0**-28) * errors
    for key, errors in allowance.items():
        margins = logits[every, best][:, None] - logits - UP**2 * errors
        radii = margins.clip(0.0) / between[np.ix_(chosen, chosen)][best].clip(1e-300)
        radii[every, best] = np.inf
        claimed = np.array(content[key], dtype=float)
        require(claimed.shape == best.shape, f"{name}: not one {key} radius for every image")
        follows = claimed <= radii.min(1) * least_std / UP**2
        require(follows.all(), f"{name}: {key} radii {np.flatnonzero(~follows)[:9]} too large")
        right = best == np.array(given["labels"])
        for share in content["shares"]:
            require(share["distance"] > 0.0, f"{name}: {share['distance']} is no distance")
            held = 100.0 * float((right & (claimed > share["distance"])).mean())
            require(share[key] <= held, f"{name}: the {key} share {share[key]} exceeds {held}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("certificates", type=Path, nargs="+")
    parser.add_argument("weights", type=Path)
    args = parser.parse_args(argv)
    for path in (*args.certificates, args.weights):
        if not path.exists():
            parser.error(f"{path} does not exist")
    try:
        for path in args.certificates:
            claims = json.loads(path.read_text(), object_pairs_hook=unique)
            print(check(claims, args.weights))
    except Exception as error:
        print(f"refused: {error}" if type(error) is ValueError else f"refused: {error!r}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
