"""Structures of single layers: PyTorch's, timm's and this project's."""

import itertools
from typing import Any

from hypothesis import strategies as st
from timm.layers import ClassifierHead, DropPath, Mlp, SelectAdaptivePool2d
from torch import nn

from lipsformer.layers import CenterNorm, DepthwiseConv2d, FoldShift, JoinTokens, Linear
from tests.hunt.cases import Subject, kind

CHANNELS = st.sampled_from([2, 1, 3, 5])
SIDE = st.integers(1, 4)
MAP = st.tuples(SIDE, SIDE)
SIZE = st.one_of(MAP, st.tuples(SIDE), st.just(()))
POOLS = st.sampled_from(["avg", "fast", "fastavg", "", "max", "avgmax", "catavgmax", "fastmax"])
ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU, "identity": nn.Identity, "softplus": nn.Softplus}


def tokens(module: nn.Module, size: tuple[int, ...], channels: int, exact: bool) -> Subject:
    """Return a layer on channels-last tokens."""
    return Subject(module, (*size, channels), tuple(size), exact=exact)


def image(module: nn.Module, size: tuple[int, ...], channels: int, exact: bool = False) -> Subject:
    """Return a layer on channels-first maps."""
    return Subject(module, (channels, *size), tuple(size), 1, 1, exact)


@kind("Identity", size=SIZE, channels=CHANNELS)
def _identity(size: Any, channels: int) -> Subject:
    return tokens(nn.Identity(), size, channels, True)


@kind("Dropout", size=SIZE, channels=CHANNELS, p=st.sampled_from([0.0, 0.5, 1.0]))
def _dropout(size: Any, channels: int, p: float) -> Subject:
    return tokens(nn.Dropout(p), size, channels, True)


@kind("DropPath", size=SIZE, channels=CHANNELS, p=st.sampled_from([0.0, 0.5]))
def _drop_path(size: Any, channels: int, p: float) -> Subject:
    return tokens(DropPath(p), size, channels, True)


@kind("GELU", size=SIZE, channels=CHANNELS, approximate=st.sampled_from(["none", "none", "tanh"]))
def _gelu(size: Any, channels: int, approximate: str) -> Subject:
    return tokens(nn.GELU(approximate), size, channels, False)


@kind("ReLU", size=SIZE, channels=CHANNELS)
def _relu(size: Any, channels: int) -> Subject:
    return tokens(nn.ReLU(), size, channels, False)


@kind("nn.Linear", size=SIZE, channels=CHANNELS, out=CHANNELS, bias=st.booleans())
def _torch_linear(size: Any, channels: int, out: int, bias: bool) -> Subject:
    return tokens(nn.Linear(channels, out, bias), size, channels, True)


@kind("Linear", size=MAP, channels=CHANNELS, out=CHANNELS, bias=st.booleans())
def _linear(size: Any, channels: int, out: int, bias: bool) -> Subject:
    return tokens(Linear(channels, out, bias), size, channels, True)


@kind("CenterNorm", size=SIZE, channels=st.sampled_from([2, 3, 5, 7]))
def _center_norm(size: Any, channels: int) -> Subject:
    return tokens(CenterNorm(channels), size, channels, True)


@kind("FoldShift", size=MAP, groups=st.sampled_from([1, 3]))
def _fold_shift(size: Any, groups: int) -> Subject:
    return tokens(FoldShift(), size, 8 * groups, True)


@kind("JoinTokens", size=MAP, channels=CHANNELS)
def _join_tokens(size: Any, channels: int) -> Subject:
    return tokens(JoinTokens(), size, channels, True)


@kind("DepthwiseConv2d", size=MAP, channels=CHANNELS, kernel=st.sampled_from([3, 1, 5, 7]))
def _depthwise(size: Any, channels: int, kernel: int) -> Subject:
    return tokens(DepthwiseConv2d(channels, kernel), size, channels, True)


@kind("DepthwiseConv2d, large map", channels=st.sampled_from([1, 2]), rows=st.integers(5, 9))
def _wide_depthwise(channels: int, rows: int) -> Subject:
    return tokens(DepthwiseConv2d(channels, 3), (rows, 65 // rows + 1), channels, False)


@kind(
    "Conv2d",
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    channels=st.sampled_from([1, 2, 3]),
    out=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 1, 2]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.one_of(
        st.just((0, 0)),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.sampled_from(["same", "valid"]),
    ),
    dilation=st.sampled_from([1, 1, 1, 2]),
    mode=st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]),
)
def _conv2d(
    size: Any,
    channels: int,
    out: int,
    groups: int,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: int,
    mode: str,
) -> Subject:
    stride = (1, 1) if padding == "same" else tuple(stride)
    padding = padding if isinstance(padding, str) else tuple(padding)
    conv = nn.Conv2d(
        channels * groups,
        out * groups,
        tuple(kernel),
        stride,
        padding,
        dilation,
        groups,
        padding_mode=mode,  # pyright: ignore[reportArgumentType]
    )
    whole = all(side >= k for side, k in zip(size, kernel, strict=True))
    exact = stride == tuple(kernel) and padding in ((0, 0), "valid") and whole and dilation == 1
    return image(conv, size, channels * groups, exact)


@kind(
    "SelectAdaptivePool2d",
    size=MAP,
    channels=CHANNELS,
    pool=POOLS,
    layout=st.sampled_from(["NHWC", "NCHW"]),
    flatten=st.booleans(),
    output=st.sampled_from([1, 1, 2]),
)
def _pool(size: Any, channels: int, pool: str, layout: str, flatten: bool, output: int) -> Subject:
    module = SelectAdaptivePool2d(output, pool, flatten, layout)
    if layout == "NCHW":
        return image(module, size, channels, True)
    return tokens(module, size, channels, True)


@kind("Flatten", size=MAP, channels=CHANNELS, end=st.sampled_from([-1, -1, 2]))
def _flatten(size: Any, channels: int, end: int) -> Subject:
    return image(nn.Flatten(1, end), size, channels, True)


@kind(
    "Sequential",
    size=MAP,
    widths=st.lists(CHANNELS, min_size=1, max_size=4),
    act=st.sampled_from(["gelu", "relu", "identity", "softplus"]),
    shared=st.booleans(),
)
def _sequential(size: Any, widths: list[int], act: str, shared: bool) -> Subject:
    layers: list[nn.Module] = []
    same = ACTIVATIONS[act]()
    for width, out in itertools.pairwise(widths):
        layers += [nn.Linear(width, out), same if shared else ACTIVATIONS[act]()]
    return tokens(nn.Sequential(*layers), size, widths[0], False)


@kind(
    "timm Mlp",
    size=MAP,
    channels=CHANNELS,
    hidden=st.sampled_from([2, 3, 5]),
    act=st.sampled_from(sorted(ACTIVATIONS)),
    norm=st.booleans(),
    conv=st.booleans(),
    bias=st.booleans(),
)
def _mlp(
    size: Any, channels: int, hidden: int, act: str, norm: bool, conv: bool, bias: bool
) -> Subject:
    layer = CenterNorm if norm and not conv else None
    mlp = Mlp(channels, hidden, None, ACTIVATIONS[act], layer, bias, 0.1, conv)
    return image(mlp, size, channels) if conv else tokens(mlp, size, channels, False)


@kind(
    "ClassifierHead",
    size=MAP,
    channels=CHANNELS,
    classes=st.integers(0, 3),
    pool=POOLS,
    layout=st.sampled_from(["NHWC", "NCHW"]),
    conv=st.booleans(),
)
def _head(size: Any, channels: int, classes: int, pool: str, layout: str, conv: bool) -> Subject:
    head = ClassifierHead(channels, classes, pool, 0.1, conv and layout == "NCHW", layout)
    if layout == "NCHW":
        return image(head, size, channels)
    return tokens(head, size, channels, False)
