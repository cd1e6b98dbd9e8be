"""Check certificates of `eval.py --certify`: `python -m scripts.check_certificate FILE... WEIGHTS`.

WEIGHTS is a file of weights, its folder or a run, with timm's config.json. All claims are derived
again from the weights, in NumPy and the standard library alone, and a stronger one is refused.
Logits, labels, source and sizes of the data's images are taken from the certificate. It covers
`lipsformer_swin_*` with cosine attention and normalized values, and `lipsformer_contractive_*`
(`_check_contractive.py`). Proofs: docs/theorems.md.
"""

import argparse
import contextlib
import hashlib
import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts._check_contractive import contractive

U, U32, UP = 2.0**-53, 2.0**-24, 1.0 + 2.0**-44  # float64, float32, rounding up
GELU = UP * (0.5 * (1.0 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi))
GELU_ERROR, EXP_ERROR, FFT_ERROR, TINY = 2.0**-20, 2.0**-18, 2.0**-43, 2.0**-90
MAX_DENSE_TOKENS, MAX_LOGIT_SCALE, MAX_NORM = 64, 100.0, 2.0**50
# Arguments of a model that are read here, follow from the weights, or matter in training only.
ARGUMENTS = (
    "num_classes in_chans img_size patch_size embed_dim depths num_heads mlp_ratio window_size "
    "global_pool attn logit_scale learn_logit_scale value_scale residual_scale official_compat "
    "weight_init drop_rate proj_drop_rate attn_drop_rate drop_path_rate"
)
# The digest of the sentences that say what is claimed, and what the file, a set and a share hold.
SAYS = "646e9b0b23271d996a4d15253e04975138343a81f851c58a1d994a969d0a6aa5"
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


def require(holds: Any, otherwise: str) -> None:
    """Refuse the certificate, with a reason, unless a condition holds."""
    if not holds:
        raise ValueError(otherwise)


class Map(NamedTuple):
    """Maps of tokens; norm, error and ball may be arrays, with one case in each entry."""

    size: tuple[int, ...]
    norm: Any
    error: Any  # of float32
    value: float = 1.0  # constant of the layer that makes them
    ball: Any = math.inf  # distance from the map of one image

    @property
    def rms(self) -> Any:
        """Root mean square of the lengths of the tokens, which float32 computes."""
        total = self.norm + self.error
        known = UP * total / math.sqrt(math.prod(self.size))
        return np.where(total <= MAX_NORM, known, math.inf)


def gamma(steps: int) -> float:
    """Bound the relative error of so many additions and products in float32."""
    return UP * (steps * U32 / (1.0 - steps * U32))


def carried(value: float, error: Any, added: Any, tokens: int) -> Any:
    """Bound the error after a layer: that of its input times its constant, and its own."""
    total = value * error + math.sqrt(tokens) * added
    return np.where(total < math.inf, UP * total + TINY, math.inf)


def layer(value: float, x: Map, shift: float, rounding: Any) -> Map:
    """Return the output of a layer with a constant, the length of its bias, and its rounding."""
    known = ((x.norm, shift), (x.error, rounding), (x.ball, 0.0))
    norm, error, ball = (carried(value, *pair, math.prod(x.size)) for pair in known)
    return Map(x.size, norm, error, UP * value, ball)


def eigenvalue(gram: np.ndarray, terms: int) -> float:
    """Bound the largest eigenvalue: proposed by LAPACK, proved by a Cholesky decomposition."""
    n, trace = len(gram), float(np.trace(gram))
    if trace == 0.0:
        return 0.0
    mu, step, proved = max(float(np.linalg.eigvalsh(gram)[-1]), 0.0), 8.0 * n * U, False
    while not proved:
        mu, step = mu + step * max(mu, trace / n), 8.0 * step
        with contextlib.suppress(np.linalg.LinAlgError):
            proved = np.linalg.cholesky(mu * np.eye(n) - gram) is not None
    return UP * (mu * (1.0 + 4.0 * n * (n + 3) * U) + 4.0 * (terms + 4) * U * trace)


def sigma(matrix: np.ndarray) -> float:
    """Bound the largest singular value of a matrix."""
    scale = 2.0 ** math.frexp(float(np.abs(matrix).max()))[1]
    rows = matrix / scale if matrix.shape[0] <= matrix.shape[1] else matrix.T / scale
    return UP * scale * math.sqrt(eigenvalue(rows @ rows.T, rows.shape[1]))


def product_rounding(matrix: np.ndarray, value: float, bias: float, length: Any) -> Any:
    """Bound the error of matrix x + bias in float32, for |x| of a length and |matrix| = value."""
    m, v, more = np.abs(matrix), np.ones(len(matrix)), 1.0 + 4.0 * U * (sum(matrix.shape) + 8)
    for _ in range(3):
        v = m @ (m.T @ v)
        v = v + 1e-6 * max(v.max(), 1e-300)
    absolute = math.sqrt((m @ (m.T @ v) / v).max()) * more * length + bias
    additions, total = gamma(matrix.shape[1] + 1), value * length + bias
    return gamma(4) * absolute + additions * ((absolute + total) / 2.0 + additions * absolute)


def channel_sigmas(kernels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Bound the norms of zero padded depthwise convolutions, [C, k, k], on maps of a size."""
    k, (height, width) = kernels.shape[-1], size
    if height * width <= MAX_DENSE_TOKENS:
        y, x = np.divmod(np.arange(height * width), width)
        dy, dx = (i[None] - i[:, None] + k // 2 for i in (y, x))
        inside = (dy >= 0) & (dy < k) & (dx >= 0) & (dx < k)
        operators = kernels[:, dy.clip(0, k - 1), dx.clip(0, k - 1)] * inside
        return np.array([sigma(operator) for operator in operators])
    peaks = np.abs(np.fft.rfft2(kernels, s=(16 * k, 16 * k))).max((1, 2))
    sums = np.abs(kernels).sum((1, 2))
    return (peaks + FFT_ERROR * sums) * UP / math.cos(math.pi * (k - 1) / (32 * k)) ** 2


class Model:
    """The bounds of a LipsFormer-Swin, module by module: `nodes` holds the constants by name."""

    prefix, arguments, eps, logit_scale = "lipsformer_swin_", ARGUMENTS, 1e-2, 10.0

    def __init__(self, weights: dict[str, np.ndarray], config: dict[str, Any]):
        args, name = config["model_args"], config["architecture"]
        self.weights, self.args, self.nodes, self.used, self.noting = weights, args, {}, set(), True
        self.centers: dict[str, np.ndarray] = {}  # norms of the inputs of layers at the images
        self.paths = {name[: end.start()] for name in weights for end in re.finditer(r"\.", name)}
        usual = {"attn": "cosine", "global_pool": "avg", "official_compat": False}
        covered = name.startswith(self.prefix) and set(args) <= set(self.arguments.split())
        covered = covered and {**usual, **args} == {**args, **usual}
        require(covered, f"{name} with {args} is not covered")

    def of(self, name: str) -> np.ndarray:
        """Return a tensor of the weights, and note that a layer has read it."""
        require(name in self.weights, f"the weights have no {name}")
        self.used.add(name)
        return self.weights[name]

    def bias(self, path: str, scale: Any = 1.0) -> float:
        """Bound the length of the bias of a layer; 0 without one."""
        name = f"{path}.bias"
        bias = scale * self.of(name) if name in self.weights else np.zeros(1)
        return UP * (1.0 + 2.0 * U * (bias.size + 8)) * float(np.linalg.norm(bias))

    def block(self) -> Any:
        """Return the parts of a block: names, each with its rule or its own parts."""
        linear, gelu = self.linear, ("", self.gelu)
        conv2 = (("depthwise", self.depthwise), gelu)
        conv1 = (*conv2, ("pointwise", linear), gelu)
        mlp = (("fc1", linear), gelu, ("fc2", linear))
        return (
            *(("conv1", partial(self.residual, conv1)), ("conv2", partial(self.residual, conv2))),
            *(("attn", partial(self.residual, self.windows)), ("norm1", self.center_norm)),
            *(("mlp", partial(self.residual, mlp)), ("norm2", self.center_norm)),
        )

    def bound(self, x: Map) -> Map:
        """Return the logits of images; every weight must have been read by a layer."""
        norm, blocks = ("norm", self.center_norm), partial(self.numbered, self.block())
        stage = (("downsample", self.merging), ("blocks", blocks))
        head = (("global_pool", self.pool), ("drop", self.identity), ("fc", self.linear))
        parts = (("patch_embed", (("proj", self.patches), norm)),)
        parts += (("stages", partial(self.numbered, stage)), norm, ("head", head))
        whole = self.apply(parts, "", x, 1.0)
        require(not (extra := set(self.weights) - self.used), f"{sorted(extra)} have no layer")
        self.nodes[""] = whole.value
        return whole

    def around(self, path: str, x: Map) -> Map:
        """Return the inputs of a layer that are in the ball around the inputs at the images."""
        norm = UP * (self.centers.get(path, math.inf) + x.ball + 2.0**-28 * x.error)
        return x._replace(norm=np.minimum(x.norm, norm))

    def apply(self, rule: Any, path: str, x: Map, scale: Any) -> Map:
        """Apply a rule, or parts one after the other; scale multiplies the output."""
        x = self.around(path, x)
        if callable(rule):
            return rule(path, x, scale)
        value, last = 1.0, [name for name, _ in rule if name][-1]
        for name, inner in rule:
            own = f"{path}.{name}".lstrip(".")
            x = self.apply(inner, own, x, scale if name == last else 1.0)
            if self.noting and name:
                self.nodes[own] = x.value
            value *= UP * x.value
        return x._replace(value=value)

    def numbered(self, rule: Any, path: str, x: Map, scale: Any) -> Map:
        """Apply a rule to the modules path.0, path.1 and so on."""
        parts = [(str(i), rule) for i in range(99) if f"{path}.{i}" in self.paths]
        return self.apply(parts, path, x, scale)

    def merging(self, path: str, x: Map, scale: Any) -> Map:
        if path not in self.paths:
            return self.identity(path, x, scale)
        parts = (("norm", self.center_norm), ("reduction", self.linear))
        x = x._replace(size=tuple((side + 1) // 2 for side in x.size))
        return self.apply(parts, path, x, scale)

    def identity(self, path: str, x: Map, _: Any) -> Map:
        return layer(1.0, x, 0.0, 0.0)

    def gelu(self, path: str, x: Map, _: Any) -> Map:
        return layer(GELU, x, 0.0, GELU_ERROR * x.rms)._replace(norm=UP * x.norm)

    def pool(self, path: str, x: Map, _: Any) -> Map:
        rounding = gamma(math.prod(x.size) + 2) * x.rms
        return layer(1.0 / math.sqrt(math.prod(x.size)), x._replace(size=()), 0.0, rounding)

    def linear(self, path: str, x: Map, scale: Any) -> Map:
        matrix, bias = (scale * self.of(f"{path}.weight").T).T, self.bias(path, scale)
        value = sigma(matrix)
        if path == "head.fc":  # the error of its input, and the rounding of each logit
            shifts = np.abs(self.weights.get(f"{path}.bias", np.zeros(len(matrix))))
            rows = np.linalg.norm(matrix, axis=1) * np.reshape(x.rms, (-1, 1)) + shifts
            steps = gamma(matrix.shape[1] + 1)
            self.last = (
                np.reshape(x.error, (-1, 1, 1)),
                UP**2 * (gamma(4) + steps + steps**2) * rows,
            )
        return layer(value, x, bias, product_rounding(matrix, value, bias, x.rms))

    def patches(self, path: str, x: Map, _: Any) -> Map:
        weight, bias = self.of(f"{path}.weight"), self.bias(path)
        k, matrix = weight.shape[-1], weight.reshape(len(weight), -1)
        require(all(side % k == 0 for side in x.size), f"{x.size} is no multiple of {k}")
        size, value = tuple(side // k for side in x.size), sigma(matrix)
        rounding = product_rounding(matrix, value, bias, k * x.rms)
        return layer(UP * value, x._replace(size=size), bias, rounding)

    def center_norm(self, path: str, x: Map, _: Any) -> Map:
        gain, bias = self.of(f"{path}.weight"), self.bias(path)
        squares = np.sort(gain**2)[::-1] * UP
        d, high, low = len(gain), *map(float, squares[:2])
        while low < (middle := 0.5 * (low + high)) < high and high - low > 2.0**-50 * high:
            terms = 1.0 / (squares - middle)
            positive = terms.sum() > 2.0 * U * (d + 4) * np.abs(terms).sum()
            high, low = (middle, low) if positive else (high, middle)
        value = UP * (d / (d - 1) * math.sqrt(high))
        rounding = gamma(d + 8) * (float(np.abs(gain).max()) * d / (d - 1) * x.rms + bias)
        return layer(value, x, bias, rounding)

    def depthwise(self, path: str, x: Map, scale: Any) -> Map:
        weight, bias = self.of(f"{path}.weight"), self.bias(path, scale)
        factor = np.abs(scale) * np.ones(len(weight))
        value = float((channel_sigmas(weight[:, 0], x.size) * factor).max())
        largest = float((np.abs(weight).sum((1, 2, 3)) * factor).max())
        rounding = gamma(min(weight[0].size, math.prod(x.size)) + 3) * (largest * x.rms + bias)
        return layer(value, x, bias, rounding)

    def residual(self, branch: Any, path: str, x: Map, _: Any) -> Map:
        alpha = self.of(f"{path}.residual_scale")
        self.apply((("branch", branch),), path, x, 1.0)  # notes the constants without alpha
        self.noting = False
        part = self.apply(branch, f"{path}.branch", x, alpha)
        self.noting = True
        rounding = gamma(3) * (x.rms + part.rms)
        error = carried(1.0, x.error, rounding, math.prod(x.size)) + part.error
        value = UP * (1.0 + part.value)
        return Map(x.size, UP * (x.norm + part.norm), UP * error, value, UP * value * x.ball)

    def windows(self, path: str, x: Map, scale: Any) -> Map:
        table = self.of(f"{path}.relative_position_bias_table")
        side, heads = (math.isqrt(len(table)) + 1) // 2, table.shape[1]
        square = self.args.get("window_size", side) in (side, [side, side])
        require(square and (2 * side - 1) ** 2 == len(table), "only square windows are covered")
        h, w = (-(-extent // -(-extent // side)) for extent in x.size)
        n, index = h * w, np.arange(h * w)
        y, z = (i[:, None] - i[None] + side - 1 for i in (index // w, index % w))
        bias = table[y * (2 * side - 1) + z].transpose(2, 0, 1)
        tau = np.full(heads, float(self.args.get("logit_scale", self.logit_scale)))
        if self.args.get("learn_logit_scale"):
            learned = self.of(f"{path}.attention.log_logit_scale").ravel()
            tau = np.exp(np.minimum(learned, math.log(MAX_LOGIT_SCALE))) * UP
        nu, steep = abs(float(self.of(f"{path}.attention.value_scale"))), self.eps**-0.5
        p, odds = np.exp(bias - bias.max(-1, keepdims=True)), np.exp(-2.0 * tau)[:, None, None]
        p = p / p.sum(-1, keepdims=True)
        mass = (p / (p + (1.0 - p) * odds)).sum(1).max(1) * UP * (1.0 + 4.0 * U * (n + 500.0))
        qkv = self.of(f"{path}.qkv.weight")
        query, key, value = qkv.reshape(3, heads, -1, qkv.shape[1])
        key_factor = np.sqrt(np.minimum(mass, n / 2.0))
        spread, value_factor = nu if n > 1 else 0.0, nu * steep * np.sqrt(mass)
        gram = np.zeros((qkv.shape[1],) * 2)
        for i in range(heads):
            scores = np.concatenate([query[i], key_factor[i] * key[i]])
            paths = [(scores, sigma(scores), spread * tau[i] * steep)]
            paths += [(value[i], sigma(value[i]), value_factor[i])]
            total = sum(size * factor for _, size, factor in paths)
            for matrix, size, factor in paths:
                gram += (total * factor / size if size > 0.0 else 0.0) * (matrix.T @ matrix)
        constant, longest = UP * math.sqrt(eigenvalue(gram, len(qkv))), math.sqrt(nu**2 * heads)
        slope = float((spread * tau * steep * np.maximum(key_factor, 1.0) + value_factor).max())
        overflow = self.linear(f"{path}.qkv", x, 1.0).rms == math.inf
        length = np.where(overflow, math.inf, x.rms)
        projected = product_rounding(qkv, sigma(qkv), self.bias(f"{path}.qkv"), length)
        dim, steepest, most = query.shape[1], float(tau.max()), float(np.abs(bias).max())
        score = steepest * (gamma(3 * dim + 24) + EXP_ERROR) + gamma(2) * (steepest + most)
        exponential = (2 + n // 32) * (gamma(2) * 2.0 * (steepest + most) + EXP_ERROR)
        core = 4.0 * score + 4.0 * exponential + gamma(2 * n + 8)
        core = core + gamma(dim + n + 16) if core < 0.25 else math.inf
        tokens, rounding = math.prod(x.size), UP * (slope * projected + longest * core)
        error = carried(constant, x.error, rounding, tokens)
        between = Map(x.size, UP * math.sqrt(tokens) * longest, error)
        proj = self.linear(f"{path}.proj", between, scale)
        self.core = (float(mass.max()), n, nu * steep, steepest, longest, core)
        return proj._replace(value=UP * proj.value * constant)


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


def differences(
    model: Any, x: Map, apart: np.ndarray, centers: dict[str, Any], chosen: list[int]
) -> np.ndarray:
    """Return the errors of the differences of chosen logits in float32, for every case of x."""
    model.centers = centers
    model.bound(x)
    carried, rows = model.last
    errors = apart * carried + rows[:, :, None] + rows[:, None, :]
    return UP * errors[:, chosen][:, :, chosen]


def check(claims: dict[str, Any], path: Path) -> str:
    """Derive all claims again from the weights of a file or folder; return what was found."""
    check_form(claims)
    file, config = claimed_weights(claims, path)
    data = claims["preprocessing"]
    x, domain = images(data)
    require(claims["domain"] == domain, f"the domain is not {domain}")
    swin = config["architecture"].startswith(Model.prefix)
    kind: Any = Model if swin else contractive(sys.modules[__name__])
    model = kind(read_safetensors(file), config)
    whole = model.bound(x)
    check_layers(claims["layers"], model.nodes)
    error = whole.error if whole.norm <= MAX_NORM else math.inf
    require(claims["logit_rounding"] >= error, f"the rounding of the logits is {error}")
    rows, last = model.of("head.fc.weight"), model.nodes["head.fc"]
    apart = np.array([np.linalg.norm(row - rows, axis=1) for row in rows]) * UP**2
    between = apart * (whole.value / last if last > 0.0 else 0.0)  # of the differences of logits
    for name, content in claims["sets"].items():
        check_premises(name, content, data)
        check_radii(name, content, model, x, apart, between, min(data["std"]), claims["dtype"])
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


def check_layers(claimed: list[dict[str, Any]], nodes: dict[str, float]) -> None:
    """Compare the constants of all layers with those that were derived."""
    require(all(set(row) == set(ROW.split()) for row in claimed), "a layer claims more")
    stated = unique([(row["name"], row["log10"]) for row in claimed])
    require(set(stated) == set(nodes), f"other layers: {set(stated) ^ set(nodes)}")
    for name, value in nodes.items():
        derived = math.log10(UP * value) if value > 0.0 else -400.0
        require(stated[name] >= derived, f"{name!r}: {stated[name]} is below {derived}")


def check_premises(name: str, content: dict[str, Any], data: dict[str, Any]) -> None:
    """Check the form of a set of images, and the factors of the data's own pixels."""
    only = set(content) == SET and all(set(share) == SHARE for share in content["shares"])
    given = content["premises"]
    require(only and set(given) == set(PREMISES.split()), f"{name}: there are other claims")
    require(content["premises_sha256"] == digest(given), f"{name}: other premises")
    for size, factor in zip(given["sizes"], content["own_pixel_factors"], strict=True):
        require(factor >= own_factor(size, data), f"{name}: {factor} for {size} is too small")
    listed = [given[key] for key in ("labels", "levels", "size_of", "logits")]
    lengths = {len(values) for values in (*listed, content["real"], content["executed"])}
    require(len(lengths) == 1, f"{name}: lists of images of several lengths {lengths}")
    for key, known in (("levels", range(1, 17)), ("size_of", range(len(given["sizes"])))):
        inside = all(type(value) is int and value in known for value in given[key])
        require(inside, f"{name}: {key} must be integers in {known}")


def check_radii(
    name: str,
    content: dict[str, Any],
    model: Any,
    x: Map,
    apart: np.ndarray,
    between: np.ndarray,
    least_std: float,
    dtype: str,
) -> None:
    """Derive the radii of a set from its logits, and its shares from the radii.

    The differences of logits i and j change by at most between[i, j] times the distance of the
    network's input, and apart[i, j] times that of the input of its last layer.
    """
    given, every = content["premises"], range(len(apart))
    logits, chosen = np.array(given["logits"]), [every[i] for i in given["outputs"] or every]
    require(np.isfinite(logits).all(), f"{name}: the logits are not finite")
    require(len(set(chosen)) == logits.shape[1], f"{name}: not one logit for every output")
    best, every = logits.argmax(1), np.arange(len(logits))
    levels, level = np.unique(given["levels"], return_inverse=True)
    parts, balls = UP * levels / 16.0, np.zeros(len(levels))
    np.maximum.at(balls, level, np.array(content["executed"]) * UP / least_std)
    allowance = {"real": 2.0**-28 * differences(model, x, apart, {}, chosen)[0, best]}
    around = x._replace(ball=balls)
    centers = {path: norm * parts for path, norm in given["norms"].items()}
    errors = differences(model, around, apart, centers, chosen)[level, best]
    allowance["executed"] = (FLOAT32_SHARES[dtype] + 2.0**-28) * errors
    for key, errors in allowance.items():
        margins = logits[every, best][:, None] - logits - UP**2 * errors
        radii = margins.clip(0.0) / between[np.ix_(chosen, chosen)][best].clip(1e-300)
        radii[every, best] = np.inf
        claimed = np.array(content[key], dtype=float)
        follows = claimed <= radii.min(1) * least_std / UP**2
        require(follows.all(), f"{name}: {key} radii {np.flatnonzero(~follows)[:9]} too large")
        right = best == np.array(given["labels"])
        for share in content["shares"]:
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
