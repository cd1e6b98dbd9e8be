"""Hold one structure's bound against the attack."""

import copy
import math
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from lipsformer.analysis.bounds import (
    Bound,
    Domain,
    UnknownModuleError,
    flatten_bound,
    lipschitz_bound,
    registration_of,
)
from tests.hunt import changes, weights
from tests.hunt.attack import climb, starts, top_singular
from tests.hunt.cases import Case, Subject, build

ROUNDING = 1e-9  # rounding of float64 in a bound and in the attack
FLOAT32 = 1e-5  # an excess up to here is the rounding of a bound computed in float32

FAULTS = ("exceeded", "rounding", "radius", "size", "accepts", "error")


def judge(case: Case, *, input_steps: int = 3, weight_steps: int = 2) -> dict[str, Any]:
    """Return what became of one structure.

    The outcome is "holds", "refused" (no bound is given), "unusable" (the structure cannot be built
    or run), or one of `FAULTS`: the bound is "exceeded", by "rounding" only, the stated "radius"
    or "size" of the outputs is wrong, a bound is given for inputs that the module "accepts" not, or
    the bound ends in another "error" than `UnknownModuleError`.
    """
    began = time.perf_counter()
    verdict = {"kind": case["kind"], "ratio": 0.0, "log10": None, "detail": "", "case": case}
    verdict["classes"] = []
    # fused attention cannot be differentiated twice
    with torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(case["weights"]["seed"])
        verdict.update(_judge(case, input_steps, weight_steps))
    verdict["seconds"] = round(time.perf_counter() - began, 4)
    return verdict


def _judge(case: Case, input_steps: int, weight_steps: int) -> dict[str, Any]:
    try:
        subject = build(case)
        weights.fill(subject.module, case["weights"])
        module = subject.module.to(torch.float64 if case["double"] else torch.float32)
        module.train(case["training"])
        if not changes.apply(module, case["change"]):
            return {"outcome": "unusable", "detail": "nothing to change"}
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        return {"outcome": "unusable", "detail": _line(error)}
    hunt = _Hunt(case, subject)
    verdict = _verdict(hunt, case, input_steps, weight_steps)
    return {**verdict, "classes": registered_classes(module)}


def registered_classes(module: nn.Module) -> list[str]:
    """Return the names of the classes with a rule that a module consists of."""
    found = [registration_of(type(part)) for part in module.modules()]
    classes = {registered.cls for registered in found if registered is not None}
    return sorted(map(class_name, classes))


def class_name(cls: type) -> str:
    """Return the package and the name of a class."""
    return f"{cls.__module__.partition('.')[0]}: {cls.__name__}"


def _verdict(hunt: "_Hunt", case: Case, input_steps: int, weight_steps: int) -> dict[str, Any]:
    subject = hunt.subject
    runs = hunt.forward_error()
    try:
        bound = hunt.bound()
    except UnknownModuleError as error:
        return {"outcome": "refused", "exact": subject.exact, "detail": _line(error)}
    except Exception as error:
        if runs is not None:
            refused = isinstance(error, ValueError) and case["change"] is None
            return {"outcome": "refused" if refused else "unusable", "detail": runs}
        broken = case["change"] is not None and case["change"]["what"] in changes.BREAKING
        return {"outcome": "refused" if broken else "error", "detail": _line(error)}
    if runs is not None:
        changed = case["change"] is not None
        return {"outcome": "unusable" if changed else "accepts", "detail": runs}
    found = {"log10": bound.log10, "exact": subject.exact}
    if math.isnan(bound.log10):
        return {**found, "outcome": "error", "detail": "the bound is not a number"}
    fault = hunt.outputs_outside(bound)
    ratio = hunt.ratio(bound, input_steps)
    for _ in range(weight_steps if fault is None and ratio <= 1.0 else 0):
        ratio = max(ratio, hunt.weight_step(ratio))
    found["ratio"] = ratio
    if ratio > 1.0 + FLOAT32:
        return {**found, "outcome": "exceeded"}
    if fault is not None:
        return {**found, "outcome": fault[0], "detail": fault[1]}
    # A parametrized weight is rounded to float32 in the module, and not in its float64 copy.
    rounds = not case["double"] and any(map(parametrize.is_parametrized, hunt.module.modules()))
    allowed = FLOAT32 if rounds else ROUNDING
    return {**found, "outcome": "rounding" if ratio > 1.0 + allowed else "holds"}


class _Hunt:
    """One module, the float64 copy that is attacked, and the worst inputs so far."""

    def __init__(self, case: Case, subject: Subject) -> None:
        self.subject, self.module = subject, subject.module
        self.radius = math.inf if case["radius"] is None else case["radius"]
        self.token_dim = subject.token_dim
        self.twin = copy.deepcopy(self.module).double().eval()
        self.generator = torch.Generator().manual_seed(case["weights"]["seed"] + 1)
        self.scale: Tensor | None = None
        self.magnitude = case["scale"]
        seed = case["weights"]["seed"]
        self.x = starts(subject.shape, self.radius, self.token_dim, seed)

    def forward_error(self) -> str | None:
        """Run the module once; return what it raises."""
        try:
            with torch.no_grad():
                y = self.subject.run(self.twin, self.x)
                alone = self.subject.run(self.twin, self.x[:1], watched=True)
        except Exception as error:
            return _line(error)
        if (
            not isinstance(y, Tensor)
            or y.shape[:1] != self.x.shape[:1]
            or not y.is_floating_point()
        ):
            return "the module returns no batch"
        if alone.shape != y[:1].shape or not torch.allclose(alone, y[:1], equal_nan=True):
            return "the samples of a batch are not independent"
        self.channel_dim = self.subject.output_dim if y.ndim == self.x.ndim else -1
        if self.magnitude is not None:
            channels = y.shape[self.channel_dim]
            scale = torch.randn(channels, generator=self.generator, dtype=torch.float64)
            self.scale = self.magnitude * scale
        return None

    def bound(self) -> Bound:
        """Return the bound under attack."""
        dtype = next((p.dtype for p in self.module.parameters()), torch.float64)
        scale = None if self.scale is None else self.scale.to(dtype)
        self.scale = None if scale is None else scale.double()
        return lipschitz_bound(self.module, self.subject.domain(self.radius), scale)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.subject.run(self.twin, x)
        if self.scale is None:
            return y
        shape = [1] * y.ndim
        shape[self.channel_dim] = -1
        return y * self.scale.reshape(shape)

    def ratio(self, bound: Bound, steps: int) -> float:
        """Climb over the inputs; return the largest constant found over the bound."""
        sigma, self.x = climb(self, self.x, steps, self.radius, self.token_dim)
        return _ratio(sigma.max().item(), bound)

    def weight_step(self, best: float) -> float:
        """Move the weights; keep the move if the ratio grew."""
        if not list(self.module.parameters()):
            return best
        before = [p.detach().clone() for p in self.module.parameters()]
        weights.step(self.module, self.generator)
        self._copy()
        try:
            ratio = _ratio(top_singular(self, self.x)[0].max().item(), self.bound())
        except UnknownModuleError:
            ratio = 0.0
        if ratio <= best:
            with torch.no_grad():
                for parameter, value in zip(self.module.parameters(), before, strict=True):
                    parameter.copy_(value)
            self._copy()
        return ratio

    @torch.no_grad()
    def _copy(self) -> None:
        for mine, its in zip(self.twin.parameters(), self.module.parameters(), strict=True):
            mine.copy_(its)

    @torch.no_grad()
    def outputs_outside(self, bound: Bound) -> tuple[str, str] | None:
        """Compare the domains that the bound states, of the output and of every part."""
        y = self(self.x)
        fault = _outside("output", y, self.channel_dim, bound.output)
        seen: dict[str, Tensor] = {}
        parts = dict(flatten_bound(bound))
        everywhere = dict(self.twin.named_modules(remove_duplicate=False))
        places = Counter(map(id, everywhere.values()))
        named = {name: module for name, module in everywhere.items() if places[id(module)] == 1}
        handles = [
            module.register_forward_pre_hook(_keeper(seen, name))
            for name, module in named.items()
            if name in parts and name
        ]
        self.subject.run(self.twin, self.x, watched=True)
        for handle in handles:
            handle.remove()
        for name, x in seen.items():
            part = parts[name]
            if fault is None and part.kind != "CosineWindowAttention":
                if self.subject.edges is not None:
                    x = x.reshape(-1, *self.subject.size, x.shape[-1])
                images = self.subject.output_dim == 1 or name.endswith(("patch_embed", "patches"))
                first = x.ndim == 4 and (images or isinstance(named[name], nn.Conv2d))
                fault = _outside(f"input of {name}", x, 1 if first else -1, part.input)
        return fault


def _keeper(seen: dict[str, Tensor], name: str) -> Any:
    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.setdefault(name, args[0])

    return keep


def _outside(what: str, x: Tensor, channel_dim: int, domain: Domain) -> tuple[str, str] | None:
    tokens = x[0].numel() // x.shape[channel_dim]
    if tokens != domain.tokens:
        return "size", f"{what}: {tokens} tokens, {domain.tokens} stated"
    longest = x.norm(dim=channel_dim).max().item()
    if longest > domain.radius * (1.0 + FLOAT32) + 1e-12:
        return "radius", f"{what}: length {longest:.6g}, {domain.radius:.6g} stated"
    return None


def _ratio(sigma: float, bound: Bound) -> float:
    if sigma <= 0.0 or bound.log10 == math.inf:
        return 0.0
    if bound.log10 == -math.inf:
        return math.inf
    return 10.0 ** min(math.log10(sigma) - bound.log10, 300.0)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]
