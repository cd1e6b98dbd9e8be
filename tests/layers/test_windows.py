import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipsformer.layers import merge_heads, partition_heads, relative_position_index
from lipsformer.models.lipsformer import fit_window


@given(size=st.integers(1, 200), max_window=st.integers(1, 20))
def test_fit_window_pads_least(size, max_window):
    num_windows = min(n for n in range(1, size + 1) if n * max_window >= size)
    best = min(w for w in range(1, max_window + 1) if num_windows * w >= size)
    assert fit_window(size, max_window) == best


@pytest.mark.parametrize(
    ("size", "window"), [((6, 10), (3, 5)), ((5, 7), (3, 4)), ((2, 3), (2, 3))]
)
def test_partition_places_every_token(size, window):
    torch.manual_seed(0)
    heads, head_dim = 3, 2
    x = torch.randn(2, *size, 3, heads * head_dim)
    parts = partition_heads(x, window, heads)
    cols = -(-size[1] // window[1])
    rows = -(-size[0] // window[0])
    assert parts.shape == (3, 2 * rows * cols, heads, window[0] * window[1], head_dim)
    expected = torch.zeros_like(parts)
    for b in range(2):
        for row in range(size[0]):
            for col in range(size[1]):
                index = (b * rows + row // window[0]) * cols + col // window[1]
                token = row % window[0] * window[1] + col % window[1]
                expected[:, index, :, token] = x[b, row, col].view(3, heads, head_dim)
    torch.testing.assert_close(parts, expected, rtol=0, atol=0)
    for part in range(3):
        merged = merge_heads(parts[part], window, size)
        torch.testing.assert_close(merged, x[:, :, :, part], rtol=0, atol=0)


def test_relative_position_index_depends_on_the_offset_alone():
    index = relative_position_index((3, 5))
    seen = {}
    for i in range(3):
        for j in range(5):
            for k in range(3):
                for m in range(5):
                    seen.setdefault((i - k, j - m), set()).add(int(index[i, j, k, m]))
    assert all(len(rows) == 1 for rows in seen.values())
    assert [next(iter(seen[offset])) for offset in sorted(seen)] == list(range(5 * 9))
