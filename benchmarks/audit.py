"""Lipschitz constants that published codes claim, against the hunter of our tests.

    git clone https://github.com/sagarverma/transformer-lipschitz ../transformer-lipschitz
    python -m benchmarks.audit certvit ../transformer-lipschitz \
        --output benchmarks/results/audit.json
    python -m benchmarks.audit --table benchmarks/results/audit.json

The other codes are `liresnet` (hukkai/liresnet), `torchlip` (deel-ai/deel-torchlip), `orthogonium`
(deel-ai/orthogonium) and `lipsformer` (this repository). The checkout's own modules run, and its
own methods state the constants; nothing of it is copied. All is computed in float64. The hunter
climbs over inputs with exact Jacobians: at three random initializations of the code, and then while
it moves the weights of the worst of them. CertViT's claims differ from call to call, so the largest
of 10 calls counts. The output file keeps the results of the other codes.
"""

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.records import markdown, write_record
from lipsformer._commands import documented_parser
from lipsformer._machine import commit
from lipsformer.analysis.bounds import Domain, lipschitz_bound
from lipsformer.layers import Linear, ScaledCosineAttention
from lipsformer.models.lipsformer import Mlp
from lipsformer.models.lipsformer_swin import WindowAttention
from tests.hunt.attack import climb, starts

SEEDS = (0, 1, 2)
INPUT_STEPS = 5
WEIGHT_MOVES = 30
ROUNDING = 1e-6


@dataclass(frozen=True)
class Subject:
    """A module of a published code, and what the code claims about it.

    Attributes:
        name: What the module is.
        module: The module.
        shape: Shape of one input.
        claim: Returns the constant that the code claims for the current weights.
        settle: Brings buffers that belong to the weights up to date.
        calls: How often the claim is asked for.
    """

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    claim: Callable[[], float]
    settle: Callable[[], None] = lambda: None
    calls: int = 1


def hunt(
    subject: Subject, x: Tensor, steps: int = INPUT_STEPS
) -> tuple[float, list[float], Tensor]:
    """Return the largest constant found, the claims of all calls, and the inputs reached."""
    subject.settle()
    claims = [float(subject.claim()) for _ in range(subject.calls)]
    sigma, x = climb(subject.module, x, steps, math.inf, -1)
    return sigma.max().item(), claims, x


@torch.no_grad()
def move(module: nn.Module, generator: torch.Generator) -> None:
    """Scale one weight of a module by up to 3 either way, or add noise of half its size to it."""
    weights = [weight for weight in module.parameters() if weight.any()]
    if not weights:
        return
    draw = torch.rand(3, generator=generator).tolist()
    weight = weights[int(draw[0] * len(weights))]
    if draw[1] < 0.3:
        weight.mul_(3.0 ** (2.0 * draw[2] - 1.0))
    else:
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.add_(0.5 * weight.square().mean().sqrt() * noise)


def audit(make: Callable[[], Subject]) -> dict[str, Any]:
    """Hunt one subject at several initializations, then while its weights move."""
    worst = None
    for seed in SEEDS:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  (CertViT draws from the global generator)
        subject = make()
        subject.module.double().eval()
        x = starts(subject.shape, math.inf, -1, seed)
        found, claims, x = hunt(subject, x)
        if worst is None or found / max(claims) > worst[0]:
            worst = (found / max(claims), subject, found, claims, x)
    assert worst is not None
    ratio, subject, found, claims, x = worst
    row = {"module": subject.name, "initial": _entry(found, claims)}
    generator, best = torch.Generator().manual_seed(0), row["initial"]
    for _ in range(WEIGHT_MOVES):
        before = {name: value.clone() for name, value in subject.module.state_dict().items()}
        move(subject.module, generator)
        found, claims, moved = hunt(subject, x, steps=1)
        if found / max(claims) > ratio:
            ratio, x, best = found / max(claims), moved, _entry(found, claims)
        else:
            subject.module.load_state_dict(before)
    return {**row, "moved": best}


def _entry(found: float, claims: list[float]) -> dict[str, float]:
    return {"smallest_claim": min(claims), "largest_claim": max(claims), "found": found}


def certvit() -> Iterator[Callable[[], Subject]]:
    """CertViT: attention, its linear layers and GELU."""
    vit = importlib.import_module("liptrf.models.vit")
    linear = importlib.import_module("liptrf.models.layers.linear").LinearX
    training = {"power_iter": 10}  # as in its training scripts

    def subject(name: str, module: Any, shape: tuple[int, ...]) -> Subject:
        for part in module.modules():  # its hooks serve its training, and change outputs in place
            if isinstance(part, linear):
                part._forward_hooks.clear()
                part._backward_hooks.clear()
        return Subject(name, module, shape, module.lipschitz, calls=10)

    def mlp() -> Subject:
        module = vit.FeedForward(5, 5, **training)
        for weight in module.parameters():  # its estimate of an identity's norm is exact
            nn.init.eye_(weight)
        return subject("MLP, identity weights: GELU counts as 1.12", module, (3, 5))

    yield lambda: subject("linear layer", linear(13, 11, **training), (13,))
    yield mlp
    yield lambda: subject("L2 attention", vit.L2Attention(6, 2, n_value=5, **training), (5, 6))
    image = {"image_size": 6, "patch_size": 3, "channels": 1, "num_classes": 3}
    size = {"dim": 6, "depth": 1, "heads": 2, "attention_type": "L2"}
    yield lambda: subject("ViT, one block", vit.ViT(**image, **size, **training), (1, 6, 6))


def liresnet() -> Iterator[Callable[[], Subject]]:
    """LiResNet: power iteration with the 500 steps of its evaluation."""
    layers = importlib.import_module("models.layers")
    blocks = importlib.import_module("models.blocks")

    def subject(name: str, module: Any, shape: tuple[int, ...]) -> Subject:
        return Subject(name, module, shape, module.lipschitz)

    def planted() -> Subject:
        module = layers.Linear(2, 2, num_lc_iter=500)
        with torch.no_grad():
            module.weight.copy_(torch.tensor([[1.0, 1.0], [3.0, -3.0]]))
        return subject("linear layer, weights [[1, 1], [3, -3]]", module, (2,))

    yield lambda: subject("linear layer", layers.Linear(31, 31, num_lc_iter=500), (31,))
    yield lambda: subject(
        "convolution, stride 2",
        layers.Conv2d(3, 5, 5, stride=2, input_size=6, num_lc_iter=500),
        (3, 6, 6),
    )
    yield lambda: subject(
        "residual convolution",
        blocks.LiResConv(4, 1, 6, nn.Identity(), num_lc_iter=500),
        (4, 6, 6),
    )
    yield planted


def torchlip() -> Iterator[Callable[[], Subject]]:
    """deel-torchlip: constant 1 by spectral normalization and Björck's orthogonalization."""
    layers = importlib.import_module("deel.torchlip")

    def subject(name: str, module: nn.Module, shape: tuple[int, ...]) -> Subject:
        def settle() -> None:  # its power iteration advances in training mode, one step a pass
            module.train()
            for _ in range(100):
                module(torch.zeros(1, *shape, dtype=torch.float64))
            module.eval()

        return Subject(name, module, shape, lambda: 1.0, settle)

    yield lambda: subject("SpectralLinear", layers.SpectralLinear(13, 11), (13,))
    yield lambda: subject("FrobeniusLinear", layers.FrobeniusLinear(13, 1), (13,))
    yield lambda: subject("SpectralConv2d", layers.SpectralConv2d(3, 5, 3, padding=1), (3, 5, 5))
    yield lambda: subject(
        "SpectralConv2d, stride 2", layers.SpectralConv2d(3, 5, 3, stride=2, padding=1), (3, 5, 5)
    )


def orthogonium() -> Iterator[Callable[[], Subject]]:
    """Orthogonium: constant 1 by the theorems of AOL and SLL."""
    aol = importlib.import_module("orthogonium.layers.conv.AOL.aol").AOLConv2D
    sll = importlib.import_module("orthogonium.layers.conv.SLL.sll_layer")

    def subject(name: str, module: nn.Module, shape: tuple[int, ...]) -> Subject:
        return Subject(name, module, shape, lambda: 1.0)

    yield lambda: subject("AOLConv2D", aol(3, 5, 3, padding=1), (3, 5, 5))
    yield lambda: subject(
        "AOLConv2D, stride 2, three steps", aol(5, 3, 3, stride=2, padding=1, niter=3), (5, 5, 5)
    )
    yield lambda: subject("SDPBasedLipschitzDense", sll.SDPBasedLipschitzDense(7, 7, 11), (7,))
    yield lambda: subject(
        "SDPBasedLipschitzResBlock", sll.SDPBasedLipschitzResBlock(3, 2), (3, 5, 5)
    )


def ours() -> Iterator[Callable[[], Subject]]:
    """This repository: the counterparts of CertViT's parts."""

    def subject(name: str, module: nn.Module, shape: tuple[int, ...]) -> Subject:
        domain = Domain(size=shape[:-1])
        return Subject(name, module, shape, lambda: lipschitz_bound(module, domain).value)

    def attention() -> Subject:
        core = ScaledCosineAttention(2)
        core.fused_attn = False  # fused attention cannot be differentiated twice
        return subject("scaled cosine attention", WindowAttention(6, 2, (1, 5), core), (1, 5, 6))

    yield lambda: subject("linear layer", Linear(13, 11), (13,))
    yield lambda: subject("MLP", Mlp(5, 5), (1, 3, 5))
    yield attention


Subjects = Callable[[], Iterator[Callable[[], Subject]]]
CODES: dict[str, tuple[str, Subjects]] = {
    "certvit": ("sagarverma/transformer-lipschitz", certvit),
    "liresnet": ("hukkai/liresnet", liresnet),
    "torchlip": ("deel-ai/deel-torchlip", torchlip),
    "orthogonium": ("deel-ai/orthogonium", orthogonium),
    "lipsformer": ("this repository", ours),
}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of docs/audit.md: the figures, and what was run."""
    figures, runs = [], []
    for code, record in results.items():
        shown = (f"`{record['commit'][:12]}`", f"`{record['command']}`")
        runs.append((code, record["repository"], *shown))
        for row in record["rows"]:
            initial = row["initial"]
            low, high = (f"{initial[key]:.4g}" for key in ("smallest_claim", "largest_claim"))
            claimed = low if low == high else f"{low} to {high}"
            ratios = (_ratio(initial), _ratio(row["moved"]))
            figures.append((code, row["module"], claimed, f"{initial['found']:.5g}", *ratios))
    of_figures = ("code", "module", "claimed", "found", "found / claimed", "with moved weights")
    of_runs = ("code", "repository", "commit", "command")
    return {"figures": markdown(of_figures, figures), "runs": markdown(of_runs, runs)}


def _ratio(entry: dict[str, float]) -> str:
    ratio = entry["found"] / entry["largest_claim"]
    text = f"{ratio:.5f}" if ratio < 10.0 else f"{ratio:.1f}"
    return f"**{text}**" if ratio > 1.0 + ROUNDING else text


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__, prog="python -m benchmarks.audit")
    parser.add_argument("code", nargs="?", choices=CODES)
    parser.add_argument("checkout", nargs="?", type=Path, help="folder of the code's repository")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--table", type=Path, metavar="JSON", help="only print these results")
    options = parser.parse_args()
    if options.table is not None:
        print("\n\n".join(tables(json.loads(options.table.read_text())).values()))
        return
    if options.checkout is None or not (options.checkout / ".git").exists():
        parser.error("give a code and the folder of a clone of its repository")
    repository, subjects = CODES[options.code]
    sys.path.insert(0, str(options.checkout.resolve()))
    record = {
        "repository": repository,
        "commit": commit(options.checkout),
        "command": f"python -m benchmarks.audit {options.code} {options.checkout.name or '.'}",
        "torch": torch.__version__,
        "rows": [audit(make) for make in subjects()],
    }
    if options.output is not None:
        known = json.loads(options.output.read_text()) if options.output.exists() else {}
        results = {**known, options.code: record}
        ordered = {code: results[code] for code in CODES if code in results}
        write_record(options.output, ordered)
    print(tables({options.code: record})["figures"])


if __name__ == "__main__":
    main()
