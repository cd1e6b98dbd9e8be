"""Check a certificate of `eval.py --certify`: `python -m scripts.check_certificate FILE WEIGHTS`.

WEIGHTS is a file of weights, its folder or a run. Constants, composition, rounding errors, radii
and shares are derived again from the weights, in NumPy and the standard library alone. A claim that
is stronger than what follows is refused, a weaker one is accepted. The architecture is read from the
config.json beside the weights. Logits, labels and sizes of the data's images are taken from the
certificate. Models: LipsFormer-Swin (`lipsformer_swin_*`) with scaled cosine attention and
normalized values. The proofs and the formulas of the rounding are in docs/lipschitz.md. Exit code 0
if everything follows, 1 if a claim does not, 2 for a mistake.
"""

import argparse
import contextlib
import hashlib
import json
import math
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

U, U32 = 2.0**-53, 2.0**-24  # unit roundoffs of float64 and of float32
UP = 1.0 + 2.0**-44
GELU = UP * (0.5 * (1.0 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi))
GELU_ERROR, EXP_ERROR, FFT_ERROR, TINY = 2.0**-20, 2.0**-18, 2.0**-43, 2.0**-90
MAX_DENSE_TOKENS, MAX_LOGIT_SCALE, EPS = 64, 100.0, 1e-2
PREPROCESSING = ("source", "img_size", "crop_pct", "interpolation", "exact_eval", "mean", "std")
# Arguments of a model that are read here, follow from the weights, or matter in training only.
ARGUMENTS = {
    *("num_classes", "in_chans", "img_size", "patch_size", "embed_dim", "depths", "num_heads"),
    *("mlp_ratio", "window_size", "global_pool", "attn", "logit_scale", "learn_logit_scale"),
    *("value_scale", "residual_scale", "official_compat", "weight_init", "drop_rate"),
    *("proj_drop_rate", "attn_drop_rate", "drop_path_rate"),
}


class Refused(Exception):
    """A claim does not follow."""


class Map(NamedTuple):
    """A map of tokens: its size, its norm, and the error of float32."""

    size: tuple[int, ...]
    norm: float
    error: float

    @property
    def tokens(self) -> int:
        return math.prod(self.size)

    @property
    def rms(self) -> float:
        return UP * (self.norm + self.error) / math.sqrt(self.tokens)


class Layer(NamedTuple):
    """A constant, and the outputs."""

    value: float
    out: Map


def require(holds: Any, otherwise: str) -> None:
    if not holds:
        raise Refused(otherwise)


Rule = Callable[[str, Map, np.ndarray | None], Layer]


def gamma(steps: int) -> float:
    return UP * (steps * U32 / (1.0 - steps * U32))


def carried(value: float, error: float, added: float, tokens: int) -> float:
    total = value * error + math.sqrt(tokens) * added
    return UP * total + TINY if total < math.inf else math.inf


def layer(value: float, x: Map, shift: float, rounding: float, size: Any = None) -> Layer:
    size = x.size if size is None else size
    known = ((x.norm, shift), (x.error, rounding))
    return Layer(UP * value, Map(size, *(carried(value, *k, math.prod(size)) for k in known)))


def eigenvalue(gram: np.ndarray, terms: int) -> float:
    """Bound the largest eigenvalue: proposed by LAPACK, proved by a Cholesky decomposition."""
    n, trace = len(gram), float(np.trace(gram))
    if trace == 0.0:
        return 0.0
    mu, step = max(float(np.linalg.eigvalsh(gram)[-1]), 0.0), 8.0 * n * U
    proved = False
    while not proved:
        mu, step = mu + step * max(mu, trace / n), 8.0 * step
        with contextlib.suppress(np.linalg.LinAlgError):
            proved = np.linalg.cholesky(mu * np.eye(n) - gram) is not None
    return UP * (mu * (1.0 + 4.0 * n * (n + 3) * U) + 4.0 * (terms + 4) * U * trace)


def sigma(matrix: np.ndarray) -> float:
    """Bound the largest singular value."""
    largest = float(np.abs(matrix).max())
    scale = 2.0 ** math.frexp(largest)[1] if largest > 0.0 else 1.0
    rows = matrix / scale if matrix.shape[0] <= matrix.shape[1] else matrix.T / scale
    return UP * scale * math.sqrt(eigenvalue(rows @ rows.T, rows.shape[1]))


def absolute_sigma(matrix: np.ndarray) -> float:
    """Bound the 2-norm of the absolute values (Collatz and Wielandt)."""
    m = np.abs(matrix)
    v = np.ones(len(m))
    for _ in range(3):
        v = m @ (m.T @ v)
        v = v + 1e-6 * max(v.max(), 1e-300)
    return math.sqrt((m @ (m.T @ v) / v).max()) * (1.0 + 4.0 * U * (sum(m.shape) + 8))


def scaled(weight: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    return weight if scale is None else scale.reshape(-1, *[1] * (weight.ndim - 1)) * weight


def product_rounding(matrix: np.ndarray, value: float, bias: float, length: float) -> float:
    """Bound the error of W x + b, where |x| <= length and |W| <= value."""
    absolute, total = absolute_sigma(matrix) * length + bias, value * length + bias
    additions = gamma(matrix.shape[1] + 1)
    return gamma(4) * absolute + additions * ((absolute + total) / 2.0 + additions * absolute)


def channel_sigmas(kernels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Bound the norms of zero padded depthwise convolutions [C, k, k] on a map."""
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
    """The bounds of a LipsFormer-Swin, module by module: `nodes` holds the logarithms by name."""

    def __init__(self, weights: dict[str, np.ndarray], config: dict[str, Any]):
        self.weights, self.args = weights, config["model_args"]
        self.nodes: dict[str, float] = {}
        self.used: set[str] = set()
        self.noting = True
        args, name = self.args, config["architecture"]
        require(name.startswith("lipsformer_swin_"), f"{name} is not covered by this checker")
        require(set(args) <= ARGUMENTS, f"unknown arguments {sorted(set(args) - ARGUMENTS)}")
        require(args.get("attn", "cosine") == "cosine", "only cosine attention is covered")
        require(args.get("global_pool", "avg") == "avg", "only average pooling is covered")
        require(not args.get("official_compat"), "raw values are not covered")

    def of(self, name: str) -> np.ndarray:
        require(name in self.weights, f"the weights have no {name}")
        self.used.add(name)
        return self.weights[name]

    def bias(self, path: str, scale: np.ndarray | None = None) -> float:
        if f"{path}.bias" not in self.weights:
            return 0.0
        bias = scaled(self.of(f"{path}.bias"), scale)
        return UP * (1.0 + 2.0 * U * (bias.size + 8)) * float(np.linalg.norm(bias))

    def holds(self, path: str) -> bool:
        return any(name.startswith(f"{path}.") for name in self.weights)

    def bound(self, x: Map) -> Layer:
        norm, linear, gelu = self.center_norm, self.linear, ("", self.gelu)
        conv1 = self.chain(("depthwise", self.depthwise), gelu, ("pointwise", linear), gelu)
        conv2 = self.chain(("depthwise", self.depthwise), gelu)
        mlp = self.chain(("fc1", linear), gelu, ("fc2", linear))
        block = self.chain(
            *(("conv1", self.residual(conv1)), ("conv2", self.residual(conv2))),
            *(("attn", self.residual(self.windows)), ("norm1", norm)),
            *(("mlp", self.residual(mlp)), ("norm2", norm)),
        )
        stage = self.chain(("downsample", self.merging), ("blocks", self.numbered(block)))
        head = self.chain(("global_pool", self.pool), ("drop", self.identity), ("fc", linear))
        whole = self.chain(
            ("patch_embed", self.chain(("proj", self.patches), ("norm", norm))),
            *(("stages", self.numbered(stage)), ("norm", norm), ("head", head)),
        )("", x, None)
        extra = set(self.weights) - self.used
        require(not extra, f"the weights {sorted(extra)} belong to no known layer")
        self.nodes[""] = whole.value
        return whole

    def chain(self, *parts: tuple[str, Rule]) -> Rule:
        """Compose modules. A part without a name is GELU. The last named part gets the scale."""

        def rule(path: str, x: Map, scale: np.ndarray | None) -> Layer:
            total, last = Layer(1.0, x), [name for name, _ in parts if name][-1]
            for name, inner in parts:
                own = f"{path}.{name}".lstrip(".")
                part = inner(own, total.out, scale if name == last else None)
                if self.noting and name:
                    self.nodes[own] = part.value
                total = Layer(UP * total.value * part.value, part.out)
            return total

        return rule

    def numbered(self, rule: Rule) -> Rule:
        def found(path: str) -> list[tuple[str, Rule]]:
            return [(str(i), rule) for i in range(99) if self.holds(f"{path}.{i}")]

        return lambda path, x, scale: self.chain(*found(path))(path, x, scale)

    def merging(self, path: str, x: Map, scale: np.ndarray | None) -> Layer:
        if not self.holds(path):
            return self.identity(path, x, scale)
        size = tuple((side + 1) // 2 for side in x.size)
        parts = self.chain(("norm", self.center_norm), ("reduction", self.linear))
        return parts(path, x._replace(size=size), scale)

    def identity(self, path: str, x: Map, _: np.ndarray | None) -> Layer:
        return layer(1.0, x, 0.0, 0.0)

    def gelu(self, path: str, x: Map, _: np.ndarray | None) -> Layer:
        found = layer(GELU, x, 0.0, GELU_ERROR * x.rms)
        return found._replace(out=found.out._replace(norm=UP * x.norm))

    def pool(self, path: str, x: Map, _: np.ndarray | None) -> Layer:
        rounding = gamma(x.tokens + 2) * x.rms
        return layer(1.0 / math.sqrt(x.tokens), x, 0.0, rounding, ())

    def linear(self, path: str, x: Map, scale: np.ndarray | None) -> Layer:
        matrix, bias = scaled(self.of(f"{path}.weight"), scale), self.bias(path, scale)
        value = sigma(matrix)
        return layer(value, x, bias, product_rounding(matrix, value, bias, x.rms))

    def patches(self, path: str, x: Map, _: np.ndarray | None) -> Layer:
        """A convolution whose stride is the side of its kernel."""
        weight, bias = self.of(f"{path}.weight"), self.bias(path)
        k, matrix = weight.shape[-1], weight.reshape(len(weight), -1)
        require(all(side % k == 0 for side in x.size), f"{x.size} is no multiple of {k}")
        size, value = tuple(side // k for side in x.size), sigma(matrix)
        rounding = product_rounding(matrix, value, bias, k * x.rms)
        return layer(UP * value, x, bias, rounding, size)

    def center_norm(self, path: str, x: Map, _: np.ndarray | None) -> Layer:
        gain, bias = self.of(f"{path}.weight"), self.bias(path)
        squares, d = np.sort(gain**2)[::-1] * UP, len(gain)
        high, low = float(squares[0]), float(squares[1])
        while low < (middle := 0.5 * (low + high)) < high and high - low > 2.0**-50 * high:
            terms = 1.0 / (squares - middle)
            positive = terms.sum() > 2.0 * U * (d + 4) * np.abs(terms).sum()
            high, low = (middle, low) if positive else (high, middle)
        value = UP * (d / (d - 1) * math.sqrt(high))
        rounding = gamma(d + 8) * (float(np.abs(gain).max()) * d / (d - 1) * x.rms + bias)
        return layer(value, x, bias, rounding)

    def depthwise(self, path: str, x: Map, scale: np.ndarray | None) -> Layer:
        weight, bias = self.of(f"{path}.weight"), self.bias(path, scale)
        factor = np.ones(len(weight)) if scale is None else np.abs(scale)
        value = float((channel_sigmas(weight[:, 0], x.size) * factor).max())
        largest = float((np.abs(weight).sum((1, 2, 3)) * factor).max())
        rounding = gamma(min(weight[0].size, x.tokens) + 3) * (largest * x.rms + bias)
        return layer(value, x, bias, rounding)

    def residual(self, branch: Rule) -> Rule:
        def rule(path: str, x: Map, _: np.ndarray | None) -> Layer:
            alpha = self.of(f"{path}.residual_scale")
            self.chain(("branch", branch))(path, x, None)  # notes the constants without alpha
            self.noting = False
            part = branch(f"{path}.branch", x, alpha)
            self.noting = True
            added = part.out if np.abs(alpha).max() > 0.0 else Map((), 0.0, 0.0)
            error = carried(1.0, x.error, gamma(3) * (x.rms + added.rms), x.tokens) + added.error
            out = Map(x.size, UP * (x.norm + added.norm), UP * error)
            return Layer(UP * (1.0 + part.value), out)

        return rule

    def windows(self, path: str, x: Map, scale: np.ndarray | None) -> Layer:
        table = self.of(f"{path}.relative_position_bias_table")
        side, heads = (math.isqrt(len(table)) + 1) // 2, table.shape[1]
        require((2 * side - 1) ** 2 == len(table), "only square windows are covered")
        h, w = (-(-extent // -(-extent // side)) for extent in x.size)
        n, index = h * w, np.arange(h * w)
        y, z = (i[:, None] - i[None] + side - 1 for i in (index // w, index % w))
        bias = table[y * (2 * side - 1) + z].transpose(2, 0, 1)
        tau = np.full(heads, float(self.args.get("logit_scale", 10.0)))
        if self.args.get("learn_logit_scale"):
            learned = self.of(f"{path}.attention.log_logit_scale").ravel()
            tau = np.exp(np.minimum(learned, math.log(MAX_LOGIT_SCALE))) * UP
        nu, steep = abs(float(self.of(f"{path}.attention.value_scale"))), EPS**-0.5
        odds = np.exp(-2.0 * tau)[:, None, None]
        p = np.exp(bias - bias.max(-1, keepdims=True))
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
        constant = UP * math.sqrt(eigenvalue(gram, len(qkv)))
        longest = math.sqrt(nu**2 * heads)
        slope = float((spread * tau * steep * np.maximum(key_factor, 1.0) + value_factor).max())
        projected = product_rounding(qkv, sigma(qkv), self.bias(f"{path}.qkv"), x.rms)
        dim, steepest, most = query.shape[1], float(tau.max()), float(np.abs(bias).max())
        score = steepest * (gamma(3 * dim + 24) + EXP_ERROR) + gamma(2) * (steepest + most)
        exponential = gamma(2) * 2.0 * (steepest + most) + EXP_ERROR
        core = 4.0 * score + 4.0 * (2 + n // 32) * exponential + gamma(2 * n + 8)
        core = core + gamma(dim + n + 16) if core < 0.25 else math.inf
        error = carried(constant, x.error, UP * (slope * projected + longest * core), x.tokens)
        between = Map(x.size, UP * math.sqrt(x.tokens) * longest, error)
        proj = self.linear(f"{path}.proj", between, scale)
        return Layer(UP * proj.value * constant, proj.out)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read a file: the length of a JSON header, the header, and the values."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, values = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        require(entry["dtype"] == "F32", f"{name} is {entry['dtype']}, not float32")
        flat = np.frombuffer(values[slice(*entry["data_offsets"])], "<f4")
        arrays[name] = flat.reshape(entry["shape"]).astype(np.float64)
    return arrays


def resize_norm(old: int, new: int, interpolation: str) -> float:
    """Return the norm of Pillow's resize of a line of pixels."""
    if old == new:
        return 1.0
    scale, reach = old / new, 2.0 if interpolation == "bicubic" else 1.0
    wide, operator = max(scale, 1.0), np.zeros((new, old))
    for i in range(new):
        center = (i + 0.5) * scale
        first = max(int(center - reach * wide + 0.5), 0)
        last = min(int(center + reach * wide + 0.5), old)
        t = np.abs(np.arange(first, last) - center + 0.5) / wide
        cubic = np.where(t < 1, (1.5 * t - 2.5) * t**2 + 1, ((2.5 - 0.5 * t) * t - 4) * t + 2)
        filtered = np.maximum(1 - t, 0) if reach == 1.0 else np.where(t < 2, cubic, 0)
        operator[i, first:last] = filtered / filtered.sum()
    return float(np.linalg.svd(operator, compute_uv=False)[0])


def own_factor(size: Sequence[int], settings: dict[str, Any]) -> float:
    """Bound the norm of the map from the data's pixels to those of the network."""
    *sides, channels = size
    new, kind, factor = settings["img_size"], settings["interpolation"], math.sqrt(3.0 / channels)
    if settings["source"] == "digits":
        factor *= math.prod(resize_norm(side, new, kind) for side in sides)
        sides = [new, new]
    resized = math.floor(new / settings["crop_pct"])
    return factor * math.prod(resize_norm(s, int(resized * s / min(sides)), kind) for s in sides)


def digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def find_weights(path: Path, sha256: str) -> Path:
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    for file in files:
        if hashlib.sha256(file.read_bytes()).hexdigest() == sha256:
            return file
    raise Refused(f"{path} holds no weights with the certificate's SHA-256")


def check(claims: dict[str, Any], path: Path) -> str:
    """Return what was derived; raise `Refused` for a claim that does not follow."""
    require(claims["format"] == "lipsformer certificate 1", "the format is unknown")
    file, data = find_weights(path, claims["weights"]["sha256"]), claims["preprocessing"]
    config = json.loads((file.parent / "config.json").read_text())
    for key in ("architecture", "model_args"):
        require(claims["model"][key] == config[key], f"config.json has another {key}")
    known = {**config["pretrained_cfg"], "img_size": config["pretrained_cfg"]["input_size"][1]}
    for key in ("img_size", "crop_pct", "interpolation", "mean", "std"):
        require(data[key] == known[key], f"config.json has another {key}")
    stated = digest({key: data[key] for key in PREPROCESSING})
    require(data["sha256"] == stated, "the hash of the preprocessing is another")
    mean, std, size = data["mean"], data["std"], [data["img_size"]] * 2
    radius = UP * math.hypot(*(max(m, 1.0 - m) / s for m, s in zip(mean, std, strict=True)))
    domain = claims["domain"]
    require(domain["size"] == size and domain["pixels"] == [0, 1], "the domain is another")
    require(math.isclose(domain["radius"], radius, rel_tol=1e-9), "the radius is another")
    added = gamma(8) * math.hypot(*((1.0 + m) / s for m, s in zip(mean, std, strict=True)))
    pixels = math.prod(size)
    x = Map(tuple(size), UP * math.sqrt(pixels) * radius, carried(0.0, 0.0, added, pixels))
    model = Model(read_safetensors(file), config)
    whole = model.bound(x)
    stated = {row["name"]: row["log10"] for row in claims["layers"]}
    require(set(stated) == set(model.nodes), f"other layers: {set(stated) ^ set(model.nodes)}")
    for name, value in model.nodes.items():
        claimed = -math.inf if stated[name] is None else stated[name]
        derived = math.log10(UP * value) if value > 0.0 else -math.inf
        require(claimed >= derived, f"{name or 'the model'}: log10 {claimed} is below {derived}")
    error, premises = whole.out.error, []
    require(claims["logit_rounding"] >= error, f"the rounding of the logits is {error}")
    exact = UP * 2.0**-28 * error
    allowance = {"real": exact, "executed": UP * (error + exact)}
    rows, last = model.of("head.fc.weight"), model.nodes["head.fc"]
    between = np.array([np.linalg.norm(row - rows, axis=1) for row in rows]) * UP**2
    between *= whole.value / last if last > 0.0 else 0.0  # constants of the differences of logits
    for name, content in claims["sets"].items():
        chosen = content["outputs"] or range(len(rows))
        constants = between[np.ix_(chosen, chosen)]
        for kind in content["own_pixels"]:
            factor = own_factor(kind["size"], data)
            require(kind["factor"] >= factor, f"own pixels of {kind['size']}: {factor}")
        for row in content["images"]:
            logits, best = np.array(row["logits"]), int(np.argmax(row["logits"]))
            for key, error in allowance.items():
                margins = np.maximum(logits[best] - logits - UP * math.sqrt(2.0) * error, 0.0)
                radii = np.delete(margins, best) / np.delete(constants[best], best)
                radius = float(radii.min()) * min(std) / UP**2
                require(row[key] <= radius, f"{name}: {key} {row[key]} exceeds {radius}")
        images = [[row["label"], row["logits"], row["own"]] for row in content["images"]]
        premises.append(
            [name, content["outputs"], [kind["size"] for kind in content["own_pixels"]], images]
        )
    require(claims["premises_sha256"] == digest(premises), "the hash of the premises is another")
    for share in claims["shares"]:
        images = claims["sets"][share["set"]]["images"]
        right = [row for row in images if int(np.argmax(row["logits"])) == row["label"]]
        for key in allowance:
            held = 100.0 * sum(row[key] > share["distance"] for row in right) / len(images)
            require(share[key] <= held, f"{share['set']}: {key} {share[key]} exceeds {held}")
    number = sum(len(images) for *_, images in premises)
    return (
        f"{len(model.nodes)} constants, bound {whole.value:.6g}, rounding of the logits "
        f"{whole.out.error:.3e}, radii of {number} images: all claims follow\nlogits, labels and "
        "sizes of the data's images are taken from the certificate"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("certificate", type=Path, metavar="FILE")
    parser.add_argument("weights", type=Path, metavar="WEIGHTS")
    options = parser.parse_args(argv)
    try:
        print(check(json.loads(options.certificate.read_text()), options.weights))
    except Refused as error:
        print(f"refused: {error}")
        return 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
