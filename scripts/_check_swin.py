"""The bounds of `lipsformer_swin_*`, for `python -m scripts.check_certificate`.

The theorems are those of docs/theorems.md. What float32 adds to the error of each layer is in the
table of its section "Rounding".
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from scripts._check_maps import (
    UP,
    Map,
    U,
    carried,
    channel_sigmas,
    eigenvalue,
    gamma,
    layer,
    product_rounding,
    require,
    sigma,
)

GELU = UP * (0.5 * (1.0 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi))
GELU_ERROR, EXP_ERROR, MAX_LOGIT_SCALE = 2.0**-20, 2.0**-18, 100.0
# Arguments of a model that are read here, follow from the weights, or matter in training only.
ARGUMENTS = (
    "num_classes in_chans img_size patch_size embed_dim depths num_heads mlp_ratio window_size "
    "global_pool attn logit_scale learn_logit_scale value_scale residual_scale official_compat "
    "weight_init drop_rate proj_drop_rate attn_drop_rate drop_path_rate"
)


class Walk(NamedTuple):
    """What a rule is told besides its input, and where the outputs of layers are noted.

    Attributes:
        scale: Factor, one for all channels or one for each, that multiplies the output.
        centers: Norms of the inputs of layers at the images; empty for all images.
        outputs: The outputs of all layers by name, which the walk adds.
    """

    scale: Any
    centers: dict[str, np.ndarray]
    outputs: dict[str, Map]


Rule = Callable[[str, Map, Walk], Map]
Parts = Sequence[tuple[str, "Rule | Parts"]]


class Attention(NamedTuple):
    """What holds for attention in windows whatever its input is; arrays are over the heads.

    Attributes:
        tokens: Number n of tokens of a window.
        mass: Bounds m of the column sums of the attention matrices.
        tau: The logit scales.
        nu: The value scale.
        longest: Length of the longest output of all heads together.
        core: Relative error of an attention weight in float32.
    """

    tokens: int
    mass: np.ndarray
    tau: np.ndarray
    nu: float
    longest: float
    core: float


class Bound(NamedTuple):
    """What is derived for a model.

    Attributes:
        logits: The logits; `value` is the constant of the model.
        constants: The constants of all layers and of the model itself, by name.
        error: Error in float32 of the input of the last layer.
        rounding: What the last layer adds to the error of each logit, [cases, K].
    """

    logits: Map
    constants: dict[str, float]
    error: Any
    rounding: np.ndarray


def head_constant(
    qkv: np.ndarray, scores: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> float:
    """Bound the constant of all heads with their projections, [3 * channels, channels].

    It is the root of the largest eigenvalue of the sum over the heads of
    S sum_i c_i/|W_i| W_i^T W_i with S = sum_i c_i |W_i| (Theorem 11).

    Args:
        qkv: The matrices of queries, keys and values.
        scores: Factors c_i of the scores, one for each head.
        keys: Factors of the keys within the scores, one for each head.
        values: Factors c_i of the values, one for each head.
    """
    gram = np.zeros((qkv.shape[1],) * 2)
    heads = zip(*qkv.reshape(3, len(scores), -1, qkv.shape[1]), scores, keys, values, strict=True)
    for query, key, value, score_factor, key_factor, value_factor in heads:
        stacked = np.concatenate([query, key_factor * key])
        paths = [(stacked, sigma(stacked), score_factor), (value, sigma(value), value_factor)]
        total = sum(size * factor for _, size, factor in paths)
        for matrix, size, factor in paths:
            gram += (total * factor / size if size > 0.0 else 0.0) * (matrix.T @ matrix)
    return UP * math.sqrt(eigenvalue(gram, len(qkv)))


class Model:
    """The bounds of a LipsFormer-Swin, from its weights and its config.json.

    A rule takes the name of a layer, its input and the walk, and returns the layer's output.
    """

    prefix, arguments, eps, logit_scale = "lipsformer_swin_", ARGUMENTS, 1e-2, 10.0

    def __init__(self, weights: dict[str, np.ndarray], config: dict[str, Any]):
        self.weights = weights
        self.args = config["model_args"]
        self.used: set[str] = set()  # names of the weights that were read
        self.paths = {name[: end.start()] for name in weights for end in re.finditer(r"\.", name)}
        name = config["architecture"]
        usual = {"attn": "cosine", "global_pool": "avg", "official_compat": False}
        covered = name.startswith(self.prefix) and set(self.args) <= set(self.arguments.split())
        covered = covered and {**usual, **self.args} == {**self.args, **usual}
        require(covered, f"{name} with {self.args} is not covered")

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

    def block(self) -> Parts:
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

    def bound(self, x: Map, centers: dict[str, np.ndarray]) -> Bound:
        """Bound the logits of images; every weight must have been read by a layer.

        Args:
            x: All images, or those in balls around some.
            centers: Norms of the inputs of layers at the images in the middle of the balls, by name
                of the layer; empty for all images.
        """
        norm, blocks = ("norm", self.center_norm), partial(self.numbered, self.block())
        stage = (("downsample", self.merging), ("blocks", blocks))
        head = (("global_pool", self.pool), ("drop", self.identity), ("fc", self.linear))
        parts = (("patch_embed", (("proj", self.patches), norm)),)
        parts += (("stages", partial(self.numbered, stage)), norm, ("head", head))
        walk = Walk(1.0, centers, {})
        logits = self.apply(parts, "", x, walk)
        require(not (extra := set(self.weights) - self.used), f"{sorted(extra)} have no layer")
        constants = {name: output.value for name, output in walk.outputs.items()}
        last = self.around("head.fc", walk.outputs["head.drop"], centers)
        rounding = self.logit_rounding("head.fc", last)
        return Bound(logits, {**constants, "": logits.value}, last.error, rounding)

    def around(self, path: str, x: Map, centers: dict[str, np.ndarray]) -> Map:
        """Return the inputs of a layer that are in the ball around the inputs at the images.

        |h(x)| <= c + L r + 2^-28 e for the norm c at the images (Theorem 33).
        """
        norm = UP * (centers.get(path, math.inf) + x.ball + 2.0**-28 * x.error)
        return x._replace(norm=np.minimum(x.norm, norm))

    def apply(self, rule: Rule | Parts, path: str, x: Map, walk: Walk) -> Map:
        """Apply a rule, or parts one after the other, whose constants multiply (Theorem 24).

        The scale of the walk multiplies the output of the last named part.
        """
        x = self.around(path, x, walk.centers)
        if not isinstance(rule, Sequence):
            return rule(path, x, walk)
        value, last = 1.0, [name for name, _ in rule if name][-1]
        for name, inner in rule:
            own = f"{path}.{name}".lstrip(".")
            x = self.apply(inner, own, x, walk if name == last else walk._replace(scale=1.0))
            if name:
                walk.outputs[own] = x
            value *= UP * x.value
        return x._replace(value=value)

    def numbered(self, rule: Rule | Parts, path: str, x: Map, walk: Walk) -> Map:
        """Apply a rule to the modules path.0, path.1 and so on."""
        parts = [(str(i), rule) for i in range(99) if f"{path}.{i}" in self.paths]
        return self.apply(parts, path, x, walk)

    def merging(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound the merging of patches; the first stage has none.

        Joining 2 x 2 neighbors has the constant 1 (Theorem 5). A norm and a linear layer follow.
        """
        if path not in self.paths:
            return self.identity(path, x, walk)
        parts = (("norm", self.center_norm), ("reduction", self.linear))
        x = x._replace(size=tuple((side + 1) // 2 for side in x.size))
        return self.apply(parts, path, x, walk)

    def identity(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound a layer that changes nothing in evaluation: the constant is 1 (Theorem 5)."""
        return layer(1.0, x, 0.0, 0.0)

    def gelu(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound GELU: (1 + erf 1)/2 + exp(-1)/sqrt(pi) (Theorem 4), and |GELU(x)| <= |x|."""
        return layer(GELU, x, 0.0, GELU_ERROR * x.rms)._replace(norm=UP * x.norm)

    def pool(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound the average of N tokens: N^(-1/2) (Theorem 5)."""
        rounding = gamma(math.prod(x.size) + 2) * x.rms
        return layer(1.0 / math.sqrt(math.prod(x.size)), x._replace(size=()), 0.0, rounding)

    def linear(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound a linear layer: |diag(s) W| for the scale s (Theorem 1)."""
        matrix = (walk.scale * self.of(f"{path}.weight").T).T
        bias, value = self.bias(path, walk.scale), sigma(matrix)
        return layer(value, x, bias, product_rounding(matrix, value, bias, x.rms))

    def logit_rounding(self, path: str, x: Map) -> np.ndarray:
        """Bound what the last layer adds to the error of each logit, [cases, K].

        It is (gamma_4 + gamma_{n+1} (1 + gamma_{n+1})) (|w_i| |x| + |b_i|) (Theorem 33).
        """
        matrix = self.of(f"{path}.weight")
        shifts = np.abs(self.weights.get(f"{path}.bias", np.zeros(len(matrix))))
        rows = np.linalg.norm(matrix, axis=1) * np.reshape(x.rms, (-1, 1)) + shifts
        steps = gamma(matrix.shape[1] + 1)
        return UP**2 * (gamma(4) + steps + steps**2) * rows

    def patches(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound the convolution whose k x k taps are its stride: |W| of the reshaped kernel.

        Its input is cut into patches, each of which is multiplied by W (Theorem 3).
        """
        weight, bias = self.of(f"{path}.weight"), self.bias(path)
        k, matrix = weight.shape[-1], weight.reshape(len(weight), -1)
        require(all(side % k == 0 for side in x.size), f"{x.size} is no multiple of {k}")
        size, value = tuple(side // k for side in x.size), sigma(matrix)
        rounding = product_rounding(matrix, value, bias, k * x.rms)
        return layer(UP * value, x._replace(size=size), bias, rounding)

    def center_norm(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound CenterNorm: d/(d-1) l^(1/2) with the largest root l of sum_i 1/(g_i^2 - l) = 0.

        Bisection between the two largest g_i^2 finds l from above (Theorem 2).
        """
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

    def depthwise(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound a depthwise convolution: the largest norm of a channel's, scaled (Theorem 3)."""
        weight, bias = self.of(f"{path}.weight"), self.bias(path, walk.scale)
        factor = np.abs(walk.scale) * np.ones(len(weight))
        value = float((channel_sigmas(weight[:, 0], x.size) * factor).max())
        largest = float((np.abs(weight).sum((1, 2, 3)) * factor).max())
        rounding = gamma(min(weight[0].size, math.prod(x.size)) + 3) * (largest * x.rms + bias)
        return layer(value, x, bias, rounding)

    def residual(self, branch: Rule | Parts, path: str, x: Map, walk: Walk) -> Map:
        """Bound x + alpha f(x): 1 + Lip(alpha f), alpha in the last layer of f (Theorem 24).

        The certificate states the constants of the branch without alpha, so the branch is walked
        twice, and the outputs of the second walk are dropped.
        """
        self.apply((("branch", branch),), path, x, walk._replace(scale=1.0))
        scaled = walk._replace(scale=self.of(f"{path}.residual_scale"), outputs={})
        part = self.apply(branch, f"{path}.branch", x, scaled)
        rounding = gamma(3) * (x.rms + part.rms)
        error = carried(1.0, x.error, rounding, math.prod(x.size)) + part.error
        value = UP * (1.0 + part.value)
        return Map(x.size, UP * (x.norm + part.norm), UP * error, value, UP * value * x.ball)

    def attention(self, path: str, size: tuple[int, ...]) -> Attention:
        """Return what holds for attention in windows, on maps of a size, whatever its input is.

        With the softmax p of the position biases, an attention weight is at most
        p / (p + (1 - p) e^(-2 tau)). m is the largest sum of these over a column (Theorem 9).
        """
        table = self.of(f"{path}.relative_position_bias_table")
        side, heads = (math.isqrt(len(table)) + 1) // 2, table.shape[1]
        square = self.args.get("window_size", side) in (side, [side, side])
        require(square and (2 * side - 1) ** 2 == len(table), "only square windows are covered")
        h, w = (-(-extent // -(-extent // side)) for extent in size)
        n, index = h * w, np.arange(h * w)
        y, z = (i[:, None] - i[None] + side - 1 for i in (index // w, index % w))
        bias = table[y * (2 * side - 1) + z].transpose(2, 0, 1)
        tau = np.full(heads, float(self.args.get("logit_scale", self.logit_scale)))
        if self.args.get("learn_logit_scale"):
            learned = self.of(f"{path}.attention.log_logit_scale").ravel()
            tau = np.exp(np.minimum(learned, math.log(MAX_LOGIT_SCALE))) * UP
        p, odds = np.exp(bias - bias.max(-1, keepdims=True)), np.exp(-2.0 * tau)[:, None, None]
        p = p / p.sum(-1, keepdims=True)
        mass = (p / (p + (1.0 - p) * odds)).sum(1).max(1) * UP * (1.0 + 4.0 * U * (n + 500.0))
        nu = abs(float(self.of(f"{path}.attention.value_scale")))
        dim = len(self.of(f"{path}.qkv.weight")) // (3 * heads)
        steepest, most = float(tau.max()), float(np.abs(bias).max())
        score = steepest * (gamma(3 * dim + 24) + EXP_ERROR) + gamma(2) * (steepest + most)
        exponential = (2 + n // 32) * (gamma(2) * 2.0 * (steepest + most) + EXP_ERROR)
        core = 4.0 * score + 4.0 * exponential + gamma(2 * n + 8)
        core = core + gamma(dim + n + 16) if core < 0.25 else math.inf
        return Attention(n, mass, tau, nu, math.sqrt(nu**2 * heads), core)

    def windows(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound scaled cosine attention in windows with its projections (Theorems 8, 10 and 11).

        The factors of a head are nu eps^(-1/2) tau (1 for queries, min(m, n/2)^(1/2) for keys) and
        nu eps^(-1/2) m^(1/2) for values. A single token has no scores.
        """
        known, qkv = self.attention(path, x.size), self.of(f"{path}.qkv.weight")
        steep = self.eps**-0.5
        spread = known.nu if known.tokens > 1 else 0.0
        scores, values = spread * known.tau * steep, known.nu * steep * np.sqrt(known.mass)
        keys = np.sqrt(np.minimum(known.mass, known.tokens / 2.0))
        constant = head_constant(qkv, scores, keys, values)
        slope = float((scores * np.maximum(keys, 1.0) + values).max())
        overflow = self.linear(f"{path}.qkv", x, walk._replace(scale=1.0)).rms == math.inf
        length = np.where(overflow, math.inf, x.rms)
        projected = product_rounding(qkv, sigma(qkv), self.bias(f"{path}.qkv"), length)
        tokens = math.prod(x.size)
        rounding = UP * (slope * projected + known.longest * known.core)
        error = carried(constant, x.error, rounding, tokens)
        between = Map(x.size, UP * math.sqrt(tokens) * known.longest, error)
        proj = self.linear(f"{path}.proj", between, walk)
        return proj._replace(value=UP * proj.value * constant)
