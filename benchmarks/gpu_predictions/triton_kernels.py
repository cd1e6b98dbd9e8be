"""Compile the Triton kernels of graph attention for GPUs that are absent, and read what they use.

A launch with tensors of PyTorch, whose addresses are multiples of 16 bytes, compiles another
variant than a launch with odd addresses: only the first may load 128 bits at a time.
"""

# pyright: reportAttributeAccessIssue=false

from typing import Any

import torch
import triton
from triton.compiler import ASTSource

from benchmarks.gpu_predictions import cubins
from lipsformer.graph.edge_attention import triton as kernels
from lipsformer.graph.edge_attention.settings import Settings

INTEGERS = {"ptr", "col", "ptr_t", "row_t", "perm"}
WIDE = {"out", "shift", "log_sum", "delta"}  # float32 whatever the type of the features
KERNELS = [
    name
    for name, function in vars(kernels).items()
    if isinstance(function, triton.JITFunction) and INTEGERS.intersection(function.arg_names)
]


def resources(
    name: str,
    architecture: int,
    heads: int = 8,
    channels: int = 8,
    dtype: str = "fp32",
    aligned: bool = True,
) -> dict[str, Any]:
    """Compile a kernel and return its registers, spilled bytes, shared memory and loads.

    Args:
        name: One of `KERNELS`.
        architecture: Compute capability times 10, such as 90 for an H100.
        heads: Number of heads.
        channels: Number of channels per head of queries, keys and values.
        dtype: Triton's name of the type of the features.
        aligned: Whether all addresses are multiples of 16 bytes.

    Returns:
        See `cubins.resources`.
    """
    function = getattr(kernels, name)
    features = torch.empty(1, heads, channels, device="meta")
    keep = torch.empty(1, device="meta")
    tile = kernels.TILES["backward" if "backward" in name else "forward"]
    settings = {
        **kernels._max_constants(features),
        **kernels._constants(features, features, Settings(0.2, 1.6, keep), tile),
    }
    constants = {key: value for key, value in settings.items() if key in function.arg_names}
    types = {"num_edges": "i32", "keep": "*i1", **dict.fromkeys(INTEGERS, "*i32")}
    types |= dict.fromkeys(WIDE, "*fp32") | dict.fromkeys(constants, "constexpr")
    signature = {key: types.get(key, f"*{dtype}") for key in function.arg_names}
    pointers = [i for i, key in enumerate(function.arg_names) if signature[key].startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers} if aligned else {}
    source = ASTSource(function, signature, constants, attributes)
    options = {key: settings[key] for key in kernels.LAUNCH}
    compiled = triton.compile(source, target=cubins.target(architecture), options=options)
    return cubins.resources(compiled, architecture)


def all_resources() -> list[dict[str, Any]]:
    """Return the resources of every kernel on every architecture at usual sizes."""
    return [
        {
            "kernel": name,
            "architecture": architecture,
            "channels": channels,
            **resources(name, architecture, channels=channels),
        }
        for name in KERNELS
        for architecture in cubins.ARCHITECTURES
        for channels in ((8, 32) if "C" in getattr(kernels, name).arg_names else (8,))
    ]
