"""A small graph with every oddity, and attention over it as a loop in plain torch."""

import torch
import torch.nn.functional as F

SOURCES, TARGETS, EDGES, HEADS, CHANNELS, KEY_CHANNELS, FEATURES = 13, 7, 41, 3, 5, 2, 11


def random_edges(seed=0):
    """Duplicates, self loops, and a source and a target without edges."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(SOURCES - 1, (EDGES,), generator=generator)
    target = torch.randint(TARGETS - 1, (EDGES,), generator=generator)
    edges = torch.stack([source, target])
    assert len(edges.unique(dim=1).T) < EDGES and (source == target).any()
    return edges


def random_inputs(size=1.0, dtype=torch.double, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    shapes = ((TARGETS, KEY_CHANNELS), (SOURCES, KEY_CHANNELS), (SOURCES, CHANNELS))
    return tuple(
        (size * torch.randn(nodes, HEADS, width, generator=generator, dtype=torch.double))
        .to(device, dtype)
        .requires_grad_()
        for nodes, width in shapes
    )


def looped_attention(edge_index, query, key, value, slope, keep=None, dropout=0.0):
    """Definition, one head and one target at a time; the mask goes by edges sorted by target."""
    order = edge_index[1].sort(stable=True).indices
    source, target = edge_index[:, order].tolist()
    targets, heads, channels = len(query), query.size(1), value.size(2)
    out = []
    for i in range(targets):
        edges = [e for e in range(len(target)) if target[e] == i]
        sources = [source[e] for e in edges]
        for head in range(heads):
            scores = F.leaky_relu(key[sources, head] @ query[i, head], slope)
            attn = scores.softmax(0)
            if keep is not None:
                attn = attn * keep[head, edges] / (1 - dropout)
            out.append(attn @ value[sources, head])
    return torch.stack(out).view(targets, heads, channels)
