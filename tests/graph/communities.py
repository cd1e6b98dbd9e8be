"""A small graph on which networks learn in a few epochs, and a network for it."""

import torch
from torch_geometric.data import Data

from lipsformer.graph import create_model


def communities() -> Data:
    """Return two noisy communities of 20 nodes each."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 2
    x = torch.randn(40, 5, generator=generator) + y[:, None]
    edges = torch.randint(40, (2, 160), generator=generator)
    part = torch.arange(40) % 4
    return Data(
        x=x,
        edge_index=edges[:, y[edges[0]] == y[edges[1]]],
        y=y,
        train_mask=part < 2,
        val_mask=part == 2,
        test_mask=part == 3,
    )


def build():
    return create_model("deep_gat", 5, 4, 2, 2, norm="lipschitznorm", min_att_norm=0.2)


def without_time(result):
    return {key: value for key, value in result.items() if key != "seconds"}
