"""Compare what the models compute in two checkouts: a refactoring must not change a number.

    python -m benchmarks.same_numbers OLD_CHECKOUT
    python -m benchmarks.same_numbers OLD_CHECKOUT --exact

Every model below is built with the same seed in a process of each checkout. The initial parameters
must be equal bit for bit, in any order and under any names. Logits and gradients, in training with
dropped branches and in evaluation, must agree within 1e-12 in float64 and within 1e-6 of their
spread in float32, or bit for bit with `--exact`. The exit code is 1 if anything differs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import lipsformer  # noqa: F401  (registers the models)

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
SMALL: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": (1, 2, 1),
    "num_heads": (2, 4, 8),
    "num_classes": 7,
}
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "swin": ("lipsformer_swin_tiny", {"window_size": 3}),
    "swin, released": ("lipsformer_swin_tiny", {"window_size": 3, "official_compat": True}),
    "swin, learned scale": (
        "lipsformer_swin_tiny",
        {"learn_logit_scale": True, "drop_path_rate": 0.4, "proj_drop_rate": 0.1},
    ),
    "swin, nu 2": ("lipsformer_swin_tiny", {"value_scale": 2.0, "attn_drop_rate": 0.2}),
    "swin, lipschitznorm": ("lipsformer_swin_tiny", {"attn": "lipschitznorm"}),
    "cswin": ("lipsformer_tiny", {"drop_path_rate": 0.4}),
    "cswin, released": ("lipsformer_tiny", {"official_compat": True}),
    "cswin, learned scale": ("lipsformer_tiny", {"learn_logit_scale": True}),
}
VIT = {"img_size": 32, "patch_size": 8, "depth": 3, "num_classes": 7, "embed_dim": 48}
GRAPH = {
    "GCN": {},
    "GGNN": {},
    "DeepGAT": {"heads": 2},
    "DeepGraphTransformer": {"heads": 2},
    "LipsGAT": {"heads": 2, "value_scale": None},
    "LipsGraphTransformer": {"heads": 2, "value_scale": None},
    "ResidualGCN": {},
    "ResidualGAT": {"heads": 2},
}


def vision_models() -> Iterator[tuple[str, nn.Module]]:
    """Yield the vision models, each built with the same seed."""
    for name, (model, arguments) in VISION.items():
        torch.manual_seed(3)
        yield name, timm.create_model(model, **{**SMALL, **arguments})
    torch.manual_seed(3)
    yield "vit", timm.create_model("lipsformer_vit_tiny", num_heads=3, **VIT)


def graph_models() -> Iterator[tuple[str, nn.Module]]:
    """Yield the graph models, each built with the same seed."""
    from lipsformer.graph import models

    for name, arguments in GRAPH.items():
        torch.manual_seed(3)
        yield f"graph, {name}", getattr(models, name)(11, 8, 5, num_layers=5, **arguments)


def record(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return initial parameters, and output and gradients in either precision and mode."""
    found: dict[str, Any] = {"parameters": [p.detach().clone() for p in model.parameters()]}
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        converted = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        for training in (True, False):
            model.train(training).zero_grad()
            torch.manual_seed(5)
            output = model(*converted)
            (output.square().sum() + output.sum()).backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found[f"{dtype}, training {training}"] = [output.detach(), *gradients]
    return found


def record_all(path: Path) -> None:
    """Record every model of the checkout that is imported."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 3, 32, 32, generator=generator)
    nodes = torch.randn(23, 11, generator=generator)
    edges = torch.randint(0, 23, (2, 71), generator=generator)
    found = {name: record(model, (images,)) for name, model in vision_models()}
    found |= {name: record(model, (nodes, edges)) for name, model in graph_models()}
    torch.save(found, path)


def in_checkout(checkout: Path, path: Path) -> dict[str, Any]:
    """Record in a process that imports the checkout's library."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, __file__, "--record", str(path)],
        cwd=checkout,
        env=environment,
        check=True,
    )
    return torch.load(path)


def order(tensors: list[Tensor]) -> list[Tensor]:
    """Sort tensors by shape and values, so that renamed modules may be registered in any order."""
    return sorted(tensors, key=lambda t: (tuple(t.shape), round(t.double().norm().item(), 6)))


def compare(old: dict[str, Any], new: dict[str, Any], exact: bool) -> list[str]:
    """Return one line for everything that differs."""
    faults = []
    for name, was in old.items():
        now = new[name]
        pairs = list(zip(order(was["parameters"]), order(now["parameters"]), strict=True))
        if not all(torch.equal(a, b) for a, b in pairs):
            faults.append(f"{name}: initial parameters differ")
        for key in [key for key in was if key != "parameters"]:
            (output, *gradients), (other, *others) = was[key], now[key]
            spread = output.double().std().item()
            largest = max(gradient.abs().max().item() for gradient in gradients)
            pairs = zip(order(gradients), order(others), strict=True)
            worst = max(((a - b).abs().max().item() / largest for a, b in pairs), default=0.0)
            off = (output - other).abs().max().item() / spread
            allowed = 0.0 if exact else TOLERANCES[output.dtype]
            if max(off, worst) > allowed:
                faults.append(f"{name}, {key}: output {off:.1e}, gradients {worst:.1e}")
    return faults


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", nargs="?", type=Path, help="the other checkout of this repository")
    parser.add_argument("--exact", action="store_true", help="demand equality bit for bit")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record is not None:
        record_all(options.record)
        return 0
    if options.old is None:
        parser.error("name the other checkout")
    if not Path(options.old, "lipsformer", "__init__.py").is_file():
        parser.error(f"{options.old} is no checkout: the installed library would be taken for it")
    with tempfile.TemporaryDirectory() as folder:
        old = in_checkout(options.old.resolve(), Path(folder, "old.pt"))
        new = in_checkout(Path(__file__).parents[1], Path(folder, "new.pt"))
    faults = compare(old, new, options.exact)
    print("\n".join(faults) or f"{len(old)} models compute the same numbers")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
