"""Domains, bounds, how bounds compose, and how the errors of float32 are carried along."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor, nn

from lipsformer.analysis.bounds.rounding import (
    FLOAT64_SHARE,
    MAX_NORM32,
    TINY32,
    gamma,
    log10_of,
    log10_product,
    outward,
    power_of_ten,
)


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The set of inputs on which a bound holds.

    Attributes:
        size: Size of the map in tokens or pixels: (H, W), (N,) for a sequence, or () for pooled
            features.
        radius: Largest 2-norm of a token (of a pixel over its channels). Attention on raw values
            needs it, because its constant grows with the values. So does every rounding error.
        norm: Largest 2-norm of the map; inf if it is not known.
        error: Largest distance between the map that the float32 program computes and the exact map,
            as a 2-norm over the map; inf if it is not known, or if float32 might overflow.
        channels: Number of channels of a token; None if it is not known.
        channels_first: Whether the channels come before the map, as in images; None if it is not
            known.
        ball: Largest distance from the map of one image, the center, as a 2-norm over the map; inf
            if there is no such image.
        centers: Norms of the inputs of some modules at the center, computed in float64.

    Example:
        >>> from lipsformer.analysis.bounds import Domain
        >>> Domain(size=(14, 14), radius=3.0).tokens
        196
    """

    size: tuple[int, ...]
    radius: float = math.inf
    norm: float = math.inf
    error: float = math.inf
    channels: int | None = None
    channels_first: bool | None = None
    ball: float = math.inf
    centers: Mapping[nn.Module, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if any(side < 1 for side in self.size):
            raise ValueError(f"a map of size {self.size} has no tokens: use sides of at least 1")
        for name in ("radius", "norm", "error", "ball"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name}={getattr(self, name)} is a length: use at least 0")
        if math.isnan(self.radius):  # 0 * inf, or weights that are not finite
            object.__setattr__(self, "radius", math.inf)
        if not self.norm <= MAX_NORM32:  # float32 might overflow
            object.__setattr__(self, "error", math.inf)

    def around(self, module: nn.Module) -> "Domain":
        """Return the inputs of a module with the norm that holds around the center (theorem 33)."""
        if module not in self.centers:
            return self
        norm = outward(self.centers[module] + self.ball + FLOAT64_SHARE * self.error)
        return replace(self, norm=min(self.norm, norm))

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return math.prod(self.size)

    @property
    def reach(self) -> float:
        """Largest 2-norm of a token, exact or computed."""
        return self.radius + (self.error if self.error < math.inf else 0.0)

    @property
    def rms(self) -> float:
        """Largest root mean square of the 2-norms of the tokens of a map, exact or computed."""
        return outward((self.norm + self.error) / math.sqrt(self.tokens))


class Last(NamedTuple):
    """The linear layer that a map ends in, for differences of logits.

    Attributes:
        log10: Of the bound of its constant.
        weight: A copy of its weight, [K, n], so that the bound stays that of this weight.
        error: Largest distance between the computed and the exact input, as a 2-norm.
        rounding: The error that float32 adds to each output for an input of one token, [K].

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> lipschitz_bound(nn.Linear(3, 2), Domain(size=(), norm=1.0, error=0.0)).last.error
        0.0
    """

    log10: float
    weight: Tensor
    error: float
    rounding: Tensor


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A proved upper bound of a Lipschitz constant: 2-norm, whole input, evaluation mode.

    Attributes:
        log10: Decimal logarithm of the bound, rounded up.
        paper_log10: The same with the paper's Theorem 1 for attention and max|alpha| Lip(f) for
            residual branches, for comparison. It is inf if an attention is not covered by its
            paper's theorem.
        output: The domain of the outputs.
        input: The domain on which the bound holds.
        parts: Bounds of the children, by name.
        kind: Name of the module's class.
        last: The linear layer that the map ends in; None for other maps.

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> bound = lipschitz_bound(nn.GELU(), Domain(size=(49,)))
        >>> f"{bound.kind}: {bound.value:.3f}"
        'GELU: 1.129'
    """

    log10: float
    paper_log10: float
    output: Domain
    input: Domain
    parts: dict[str, "Bound"] = field(default_factory=dict)
    kind: str = ""
    last: Last | None = field(default=None, compare=False)

    @property
    def value(self) -> float:
        """The bound itself; inf if it exceeds the range of a float."""
        return power_of_ten(self.log10)


def simple_bound(
    value: float,
    domain: Domain,
    *,
    size: tuple[int, ...] | None = None,
    radius: float,
    shift: float = math.inf,
    rounding: float = math.inf,
    channels: int | None = None,
) -> Bound:
    """Return the bound of a layer without parts. This function rounds its arguments up.

    Args:
        value: Bound of the Lipschitz constant.
        domain: The inputs.
        size: Size of the output map; None if it equals that of the input map.
        radius: Largest 2-norm of an output token.
        shift: Largest 2-norm of an output token for the input 0; inf if it is not known.
        rounding: The error that float32 adds to a token of the output, as a root mean square over
            the tokens, for inputs up to `domain.rms`; inf if it is not known.
        channels: Number of channels of the output; None if it equals that of the input.

    Example:
        >>> from lipsformer.analysis.bounds import Domain, simple_bound
        >>> domain = Domain(size=(4,), radius=3.0)
        >>> bound = simple_bound(2.0, domain, radius=2.0 * domain.radius)  # of the map x -> 2 x
        >>> f"{bound.value:.3f} {bound.output.radius:.3f}"
        '2.000 6.000'
    """
    size = domain.size if size is None else size
    tokens = math.prod(size)
    output = replace(
        domain,
        size=size,
        radius=outward(radius),
        norm=carried(value, domain.norm, shift, tokens),
        error=carried(value, domain.error, rounding, tokens),
        ball=carried(value, domain.ball, 0.0, tokens),
        channels=domain.channels if channels is None else channels,
    )
    log10 = log10_of(value)
    return Bound(log10=log10, paper_log10=log10, output=output, input=domain)


def carried(value: float, length: float, added: float, tokens: int) -> float:
    r"""Return :math:`L a + \sqrt N b`, rounded up: a norm, an error or a ball after a layer.

    Args:
        value: Lipschitz constant L of the layer.
        length: Norm, error or radius of the ball before the layer, a.
        added: What the layer adds to a token, b, as a root mean square.
        tokens: Number of tokens N of its output.
    """
    total = value * length + math.sqrt(tokens) * added
    return outward(total) + TINY32 if total < math.inf else math.inf  # 0 * inf is not below inf


def compose(first: Bound, second: Bound, name: str | None = None) -> Bound:
    """Return the bound of one map followed by another: the constants multiply.

    Args:
        first: Bound of the first map.
        second: Bound of the second map on `first.output`.
        name: Name under which `second` becomes a part of the result. None adds the parts of
            `second` instead.

    Example:
        >>> from lipsformer.analysis.bounds import Domain, compose, simple_bound
        >>> double = simple_bound(2.0, Domain(size=(4,), radius=1.0), radius=2.0)
        >>> triple = simple_bound(3.0, double.output, radius=6.0)
        >>> f"{compose(double, triple).value:.3f}"
        '6.000'
    """
    return Bound(
        log10=log10_product((first.log10, second.log10)),
        paper_log10=log10_product((first.paper_log10, second.paper_log10)),
        output=second.output,
        input=first.input,
        parts={**first.parts, **({name: second} if name else second.parts)},
        last=second.last,
    )


def scale_output(bound: Bound, scale: Tensor | None) -> Bound:
    """Return the bound of a map whose output is multiplied by one factor per channel.

    Args:
        bound: Bound of the map.
        scale: The factors, [C]; None for none.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain, scale_output, simple_bound
        >>> bound = simple_bound(2.0, Domain(size=(4,), radius=1.0), radius=2.0)
        >>> f"{scale_output(bound, torch.tensor([0.5, -3.0])).value:.3f}"
        '6.000'
    """
    factor = max_abs(scale)
    output = bound.output
    return replace(
        bound,
        log10=log10_product((bound.log10, log10_of(factor))),
        paper_log10=log10_product((bound.paper_log10, log10_of(factor))),
        last=None,
        output=replace(
            output,
            radius=outward(factor * output.radius),
            norm=carried(factor, output.norm, 0.0, output.tokens),
            error=carried(factor, output.error, 0.0, output.tokens),
            ball=carried(factor, output.ball, 0.0, output.tokens),
        ),
    )


def max_abs(scale: Tensor | None) -> float:
    """Return the largest absolute value, which is the 2-norm of diag(scale); 1 for None.

    Args:
        scale: One factor per channel, [C], with C >= 1; None for none.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import max_abs
        >>> max_abs(torch.tensor([0.5, -3.0])), max_abs(None)
        (3.0, 1.0)
    """
    return 1.0 if scale is None else scale.detach().abs().max().item()


def image_domain(size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> Domain:
    """Return the domain of normalized images [B, channels, H, W] with pixels in [0, 1].

    The error is that of the normalization (255 x - 255 mean) / (255 std) in float32.

    Args:
        size: (H, W) in pixels.
        mean: Mean per channel that the normalization subtracts.
        std: Standard deviation per channel by which it divides, > 0.

    Raises:
        ValueError: If `size` is not two numbers, or a standard deviation is not positive.

    Example:
        >>> from lipsformer.analysis.bounds import image_domain
        >>> domain = image_domain((4, 6), mean=(0.5,), std=(0.25,))
        >>> f"{domain.radius:.3f} {domain.norm:.3f}"  # of one pixel, and of the whole image
        '2.000 9.798'
    """
    if len(size) != 2:
        raise ValueError(f"size={size} must be (H, W)")
    if min(std) <= 0.0:
        raise ValueError(f"std={std} must be > 0 in every channel")
    longest = [max(m, 1.0 - m) / s for m, s in zip(mean, std, strict=True)]
    radius, tokens = outward(math.hypot(*longest)), math.prod(size)
    rounding = gamma(8) * math.hypot(*((1.0 + abs(m)) / s for m, s in zip(mean, std, strict=True)))
    return Domain(
        size=size,
        radius=radius,
        norm=outward(math.sqrt(tokens) * radius),
        error=carried(0.0, 0.0, rounding, tokens),
        channels=len(mean),
        channels_first=True,
    )


def flatten_bound(bound: Bound, name: str = "") -> Iterator[tuple[str, Bound]]:
    """Yield (module name, bound) of a bound and of all its parts, parents before children.

    Args:
        bound: Bound of a module.
        name: Dotted name of this module; the names of the parts start with it.

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.bounds import Domain, flatten_bound, lipschitz_bound
        >>> bound = lipschitz_bound(nn.Sequential(nn.ReLU(), nn.GELU()), Domain(size=(4,)))
        >>> [(name, f"{part.value:.3f}") for name, part in flatten_bound(bound)]
        [('', '1.129'), ('0', '1.000'), ('1', '1.129')]
    """
    yield name, bound
    for part_name, part in bound.parts.items():
        yield from flatten_bound(part, f"{name}.{part_name}" if name else part_name)
