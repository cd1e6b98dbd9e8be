"""The trial of the Triton kernels where they first meet a class of graphs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lipsformer import kernels
from lipsformer.graph.edge_attention.csr import EdgeCSR
from lipsformer.graph.edge_attention.settings import Settings

__all__ = ["triton_passes"]

Attention = Callable[..., Tensor]


def triton_passes(
    inputs: Sequence[Tensor],
    csr: EdgeCSR,
    settings: Settings,
    *,
    kernel: Attention,
    plain: Attention,
) -> bool:
    """Return whether the Triton kernels are right and faster for graphs of this class.

    Args:
        inputs: Query, key and value of `edge_attention`.
        csr: The sorted edges.
        settings: The settings of the call.
        kernel: Takes csr, the inputs and the settings, and computes with Triton.
        plain: Does the same with PyTorch's operators.
    """
    query, _, value = inputs
    differentiates = torch.is_grad_enabled()
    name = (
        f"edge_attention, {query.dtype}, {value.dtype}, {value.size(1)} heads, {query.size(-1)} "
        f"and {value.size(-1)} channels, dropout {settings.keep is not None}, gradients "
        f"{differentiates}, 2^{csr.num_edges.bit_length()} edges, "
        f"2^{csr.num_targets.bit_length()} targets"
    )

    def work(attend: Attention, dtype: torch.dtype | None = None) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            own = [x.detach().to(dtype or x.dtype) for x in inputs]
            own = [x.requires_grad_(differentiates) for x in own]
            out = attend(csr, *own, settings)
            if not differentiates:
                return [out]
            return [out, *torch.autograd.grad(out.square().sum(), own)]

        return run

    return kernels.passes_trial(name, work(kernel), work(plain), work(plain, torch.float64))
