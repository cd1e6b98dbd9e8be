"""Triton: scaled cosine attention in the windows of a map, from projected tokens to the map.

A program takes one head and visits every n-th window. It gathers the tokens of the window,
normalizes them, and keeps all scores of a block of queries, so there is no running softmax and
nothing but the projected tokens is kept for the backward pass, which computes the weights again.

What is summed over windows (the gradients of the bias, tau and LePE) is summed within a program in
registers and written once per program. The caller adds the programs.

Shapes: qkv [B, H, W, 3, P, heads * D] and out [B, H, W, P, heads * D], both contiguous.
"""
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lipsformer.kernels.dispatch import refuse_second_derivatives
from lipsformer.kernels.gpu_arguments import WINDOW_SCHEMA, WindowArguments
from lipsformer.kernels.gpu_operator import FLEXIBLE

NUM_PROGRAMS = 1024  # about as many as run at the same time


@triton.jit
def _number(first, second, at, part, HAS: tl.constexpr):
    """Load a number of the program's partition; 1 if there is none."""
    if HAS:
        here = tl.load(first + at).to(tl.float32)
        return tl.where(part == 0, here, tl.load(second + at).to(tl.float32))
    else:
        return 1.0


@triton.jit
def _tap(first, second, at, part, valid):
    """Load a row of numbers of the program's partition."""
    here = tl.load(first + at, mask=valid, other=0.0).to(tl.float32)
    return tl.where(part == 0, here, tl.load(second + at, mask=valid, other=0.0).to(tl.float32))


@triton.jit
def _tokens(window, n, height, width, h, w, rows, cols):
    """Return the indices of the tokens n of a window in the batch, and which are on the map."""
    image, place = window // (rows * cols), window % (rows * cols)
    y, x = place // cols * h + n // w, place % cols * w + n % w
    index = (image.to(tl.int64) * height + y) * width + x
    return index, (n < h * w) & (y < height) & (x < width)


@triton.jit
def _neighbors(window, n, dy, dx, height, width, h, w, rows, cols):
    """Return the tokens at an offset from the tokens n, and which are in the window and the map."""
    y, x = n // w + dy, n % w + dx
    index, valid = _tokens(window, y * w + x, height, width, h, w, rows, cols)
    return index, valid & (y >= 0) & (y < h) & (x >= 0) & (x < w) & (n < h * w)


@triton.jit
def _load(x, index, valid, stride, d, D: tl.constexpr):
    """Load rows of D channels, with zeros where not valid."""
    at = x + index[:, None] * stride + d[None, :]
    return tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _cosine(x, eps):
    """Return x / sqrt(|x|^2 + eps) for every row, and the factor."""
    x = x.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) + eps)
    return x * inverse[:, None], inverse


@triton.jit
def _unit(x, eps):
    """Return x / sqrt(|x|^2 + eps) for every row."""
    cosine, _inverse = _cosine(x, eps)
    return cosine


@triton.jit
def _cosine_backward(grad, cosine, inverse):
    """Return the gradient of the rows that `_cosine` normalized."""
    return (grad - cosine * tl.sum(grad * cosine, 1)[:, None]) * inverse[:, None]


@triton.jit
def _table(bias, head, m, n, tokens, HAS_BIAS: tl.constexpr):
    """Return what is added to the scores: the bias, and -inf where there is no key."""
    table = tl.zeros((m.shape[0], n.shape[0]), tl.float32)
    if HAS_BIAS:
        # other rows and columns repeat the last one: masks would take registers
        row, column = tl.minimum(m, tokens - 1), tl.minimum(n, tokens - 1)
        at = bias + (head * tokens + row[:, None]) * tokens + column[None, :]
        table += tl.load(at).to(tl.float32)
    return tl.where((n < tokens)[None, :], table, float("-inf"))


@triton.jit
def _weights(q, k, tau, table, DOT: tl.constexpr):
    """Return the cosines of queries and keys, and softmax(tau * cosines + table)."""
    cosines = tl.dot(q, tl.trans(k), input_precision=DOT)
    scores = cosines * tau + table
    attn = tl.exp(scores - tl.max(scores, 1)[:, None])
    return cosines, attn / tl.sum(attn, 1)[:, None]


@triton.jit
def _forward(
    qkv,
    bias,
    tau_0,
    tau_1,
    nu_0,
    nu_1,
    lepe_0,
    lepe_1,
    offset_0,
    offset_1,
    out,
    scale,
    eps,
    batch,
    height,
    width,
    h_0,
    w_0,
    h_1,
    w_1,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TAU: tl.constexpr,
    HAS_NU: tl.constexpr,
    HAS_LEPE: tl.constexpr,
    DOT: tl.constexpr,
):
    part, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    h, w = tl.where(part == 0, h_0, h_1), tl.where(part == 0, w_0, w_1)
    rows, cols, tokens = (height + h - 1) // h, (width + w - 1) // w, h * w
    n, d, first = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    tau = scale * _number(tau_0, tau_1, head, part, HAS_TAU)
    nu = _number(nu_0, nu_1, 0, part, HAS_NU)
    width_out = PARTS * HEADS * D
    query = qkv + tl.program_id(0) * D
    key, value = query + width_out, query + 2 * width_out
    table = _table(bias, head, first, n, tokens, HAS_BIAS)
    dtype = qkv.dtype.element_ty
    for window in range(tl.program_id(1), batch * rows * cols, tl.num_programs(1)):
        index, valid = _tokens(window, n, height, width, h, w, rows, cols)
        k = _unit(_load(key, index, valid, 3 * width_out, d, D), eps)
        v = _load(value, index, valid, 3 * width_out, d, D)
        if HAS_NU:
            v = (_unit(v, eps) * nu).to(dtype)
        for start in range(0, BLOCK_N, BLOCK_M):
            m = start + first
            query_index, stored = _tokens(window, m, height, width, h, w, rows, cols)
            q = _unit(_load(query, query_index, stored, 3 * width_out, d, D), eps)
            _cosines, attn = _weights(q.to(dtype), k.to(dtype), tau, table, DOT)
            result = tl.dot(attn.to(dtype), v, input_precision=DOT)
            if HAS_LEPE:
                channel = head * D + d
                tap = _tap(offset_0, offset_1, channel, part, d < D)
                result += tap[None, :]
                for t in tl.static_range(9):
                    near, inside = _neighbors(
                        window, m, t // 3 - 1, t % 3 - 1, height, width, h, w, rows, cols
                    )
                    tap = _tap(lepe_0, lepe_1, channel * 9 + t, part, d < D)
                    result += _load(value, near, inside, 3 * width_out, d, D) * tap[None, :]
            at = out + query_index[:, None] * width_out + tl.program_id(0) * D + d[None, :]
            tl.store(at, result.to(dtype), mask=stored[:, None] & (d < D)[None, :])


@triton.jit
def _backward(
    qkv,
    bias,
    tau_0,
    tau_1,
    nu_0,
    nu_1,
    lepe_0,
    lepe_1,
    grad,
    grad_qkv,
    sums,
    scale,
    eps,
    batch,
    height,
    width,
    h_0,
    w_0,
    h_1,
    w_1,
    size,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TAU: tl.constexpr,
    HAS_NU: tl.constexpr,
    HAS_LEPE: tl.constexpr,
    DOT: tl.constexpr,
):
    part, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    h, w = tl.where(part == 0, h_0, h_1), tl.where(part == 0, w_0, w_1)
    rows, cols, tokens = (height + h - 1) // h, (width + w - 1) // w, h * w
    n, d, first = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    tau = scale * _number(tau_0, tau_1, head, part, HAS_TAU)
    nu = _number(nu_0, nu_1, 0, part, HAS_NU)
    width_out = PARTS * HEADS * D
    query = qkv + tl.program_id(0) * D
    key, value = query + width_out, query + 2 * width_out
    grad_query, grad_out = grad_qkv + tl.program_id(0) * D, grad + tl.program_id(0) * D
    grad_key, grad_value = grad_query + width_out, grad_query + 2 * width_out
    table = _table(bias, head, first, n, tokens, HAS_BIAS)
    dtype = qkv.dtype.element_ty
    channel = head * D + d
    bias_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # one block of queries if there is a bias
    tau_sum = tl.full((), 0.0, tl.float32)
    tap_sums = tl.zeros((16, BLOCK_D), tl.float32)  # nine taps and the offset
    tap_rows = tl.arange(0, 16)
    for window in range(tl.program_id(1), batch * rows * cols, tl.num_programs(1)):
        index, valid = _tokens(window, n, height, width, h, w, rows, cols)
        mask = valid[:, None] & (d < D)[None, :]
        k = _unit(_load(key, index, valid, 3 * width_out, d, D), eps).to(dtype)
        v = _load(value, index, valid, 3 * width_out, d, D)
        if HAS_NU:
            v = (_unit(v, eps) * nu).to(dtype)
        grad_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        grad_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for start in range(0, BLOCK_N, BLOCK_M):
            m = start + first
            query_index, stored = _tokens(window, m, height, width, h, w, rows, cols)
            q, inverse_q = _cosine(_load(query, query_index, stored, 3 * width_out, d, D), eps)
            g = _load(grad_out, query_index, stored, width_out, d, D)
            grad_attn = tl.dot(g, tl.trans(v), input_precision=DOT)
            cosines, attn = _weights(q.to(dtype), k, tau, table, DOT)
            grad_v += tl.dot(tl.trans(attn.to(dtype)), g, input_precision=DOT)
            grad_scores = attn * (grad_attn - tl.sum(attn * grad_attn, 1)[:, None])
            if HAS_BIAS:
                bias_sum += grad_scores
            if HAS_TAU:
                tau_sum += tl.sum(grad_scores * cosines)
            grad_cosines = (grad_scores * tau).to(dtype)
            grad_k += tl.dot(tl.trans(grad_cosines), q.to(dtype), input_precision=DOT)
            grad_q = tl.dot(grad_cosines, k, input_precision=DOT)
            grad_q = _cosine_backward(grad_q, q, inverse_q)
            at = grad_query + query_index[:, None] * 3 * width_out + d[None, :]
            tl.store(at, grad_q.to(dtype), mask=stored[:, None] & (d < D)[None, :])
        # normalized again, because the registers have no room for them in float32 meanwhile
        cosine, inverse = _cosine(_load(key, index, valid, 3 * width_out, d, D), eps)
        grad_k = _cosine_backward(grad_k, cosine, inverse)
        at = index[:, None] * 3 * width_out + d[None, :]
        tl.store(grad_key + at, grad_k.to(dtype), mask=mask)
        if HAS_NU:
            cosine, inverse = _cosine(_load(value, index, valid, 3 * width_out, d, D), eps)
            grad_v = _cosine_backward(grad_v * nu, cosine, inverse)
        if HAS_LEPE:
            raw = _load(value, index, valid, 3 * width_out, d, D).to(tl.float32)
            for t in range(9):
                near, inside = _neighbors(
                    window, n, 1 - t // 3, 1 - t % 3, height, width, h, w, rows, cols
                )
                g = _load(grad_out, near, inside, width_out, d, D).to(tl.float32)
                tap = _tap(lepe_0, lepe_1, channel * 9 + t, part, d < D)
                grad_v += g * tap[None, :]
                total = tl.sum(g * raw, 0)
                tap_sums += tl.where(tap_rows[:, None] == t, total[None, :], 0.0)
            g = _load(grad_out, index, valid, width_out, d, D).to(tl.float32)
            tap_sums += tl.where(tap_rows[:, None] == 9, tl.sum(g, 0)[None, :], 0.0)
        tl.store(grad_value + at, grad_v.to(dtype), mask=mask)
    sums += tl.program_id(1).to(tl.int64) * size
    if HAS_BIAS:
        at = sums + (head * tokens + first[:, None]) * tokens + n[None, :]
        tl.store(at, bias_sum, mask=(first < tokens)[:, None] & (n < tokens)[None, :])
        sums += HEADS * tokens * tokens
    if HAS_TAU:
        tl.store(sums + tl.program_id(0), tau_sum * scale)
        sums += PARTS * HEADS
    if HAS_LEPE:  # the taps of all channels, then the offsets
        channels = tl.program_id(0) * D + d
        taps = channels[None, :] * 9 + tap_rows[:, None]
        offsets = width_out * 9 + channels[None, :]
        at = sums + tl.where(tap_rows[:, None] < 9, taps, offsets)
        tl.store(at, tap_sums, mask=(tap_rows < 10)[:, None] & (d < D)[None, :])


def _grid(qkv: Tensor, windows: Sequence[int], heads: int) -> tuple[int, int]:
    """Return the number of heads in all and of the programs that share the windows."""
    batch, height, width, _, parts, _ = qkv.shape
    sizes = zip(windows[::2], windows[1::2], strict=True)
    most = max(batch * -(-height // h) * -(-width // w) for h, w in sizes)
    return parts * heads, min(most, max(1, NUM_PROGRAMS // (parts * heads)))


def _settings(qkv: Tensor, windows: Sequence[int], heads: int) -> dict[str, Any]:
    """Return the constants that depend on the sizes.

    Queries come in one block up to 64 tokens, as the sum of the gradients of a bias needs. The
    blocks of larger windows are small, so that nothing is spilled. Four warps share 64 tokens; more
    would repeat each other's products.
    """
    tokens = max(h * w for h, w in zip(windows[::2], windows[1::2], strict=True))
    block_n = max(16, triton.next_power_of_2(tokens))
    dim = qkv.shape[-1] // heads
    return {
        "PARTS": qkv.shape[-2],
        "HEADS": heads,
        "D": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_M": block_n if block_n <= 64 else 16,
        "BLOCK_N": block_n,
        "DOT": "ieee" if qkv.dtype == torch.float32 else "tf32",
        "num_warps": 8 if block_n > 64 else 4,
        "num_stages": 1,
    }


def _launch(
    qkv: Tensor, arguments: WindowArguments
) -> tuple[list[Tensor | None], tuple[int, ...], dict[str, Any]]:
    """Return the tensors in front of the results, the sizes and the constants of a launch."""
    groups = [arguments.tau, arguments.nu, arguments.lepe, arguments.lepe_bias]
    pairs = [side for group in groups for side in ([*group, *group] or [None, None])[:2]]
    tensors = [tensor if tensor is None else tensor.contiguous() for tensor in pairs]
    bias = arguments.bias if arguments.bias is None else arguments.bias.contiguous()
    constants = _settings(qkv, arguments.windows, arguments.heads)
    for name, group in zip(("HAS_TAU", "HAS_NU", "HAS_LEPE"), groups, strict=False):
        constants[name] = len(group) > 0
    constants["HAS_BIAS"] = bias is not None
    sizes = (*qkv.shape[:3], *(tuple(arguments.windows) * 2)[:4])
    return [qkv, bias, *tensors], sizes, constants


@torch.library.custom_op(
    "lipsformer::cosine_windows",
    mutates_args=(),
    schema=f"(Tensor qkv, {WINDOW_SCHEMA}) -> Tensor",
    tags=FLEXIBLE,
)
def cosine_windows(qkv: Tensor, *attention: Any) -> Tensor:
    """Attend as `lipsformer.kernels.gpu_cosine_windows` says; `attention` is `WindowArguments`."""
    qkv, arguments = qkv.contiguous(), WindowArguments(*attention)
    out = qkv.new_empty(*qkv.shape[:3], qkv.shape[-2] * qkv.shape[-1])
    tensors, sizes, constants = _launch(qkv, arguments)
    where = _grid(qkv, arguments.windows, arguments.heads)
    with torch.cuda.device_of(qkv):
        _forward[where](*tensors, out, arguments.scale, arguments.eps, *sizes, **constants)
    return out


@cosine_windows.register_fake
def _(qkv: Tensor, *attention: Any) -> Tensor:
    return qkv.new_empty(*qkv.shape[:3], qkv.shape[-2] * qkv.shape[-1])


@torch.library.custom_op(
    "lipsformer::cosine_windows_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor qkv, {WINDOW_SCHEMA}) -> (Tensor, Tensor)",
    tags=FLEXIBLE,
)
def window_gradients(grad: Tensor, qkv: Tensor, *attention: Any) -> tuple[Tensor, Tensor]:
    """Return the gradient of `qkv`, and a row per program for `parameter_gradients`."""
    grad, qkv = grad.to(qkv.dtype).contiguous(), qkv.contiguous()
    arguments = WindowArguments(*attention)
    grad_qkv, sums = _empty_gradients(grad, qkv, *attention)
    tensors, sizes, constants = _launch(qkv, arguments)
    numbers = (arguments.scale, arguments.eps, *sizes, sums.shape[1])
    where = _grid(qkv, arguments.windows, arguments.heads)
    with torch.cuda.device_of(qkv):
        _backward[where](*tensors[:-2], grad, grad_qkv, sums, *numbers, **constants)
    return grad_qkv, sums


@window_gradients.register_fake
def _empty_gradients(grad: Tensor, qkv: Tensor, *attention: Any) -> tuple[Tensor, Tensor]:
    arguments = WindowArguments(*attention)
    columns = sum(tensor.numel() for tensor in learned(arguments))
    rows = _grid(qkv, arguments.windows, arguments.heads)[1]
    return qkv.new_empty(qkv.shape), qkv.new_empty(rows, columns, dtype=torch.float32)


def learned(arguments: WindowArguments) -> list[Tensor]:
    """Return the tensors that learn, in the order of the columns of the sums."""
    bias = [] if arguments.bias is None else [arguments.bias]
    return [*bias, *arguments.tau, *arguments.lepe, *arguments.lepe_bias]


def parameter_gradients(total: Tensor, arguments: WindowArguments) -> list[Tensor | None]:
    """Return the gradients of the tensors of the arguments from the sum over the programs."""
    parameters = learned(arguments)
    columns = total.split([tensor.numel() for tensor in parameters])
    grads: list[Tensor | None] = [
        column.reshape(tensor.shape).to(tensor.dtype)
        for column, tensor in zip(columns, parameters, strict=True)
    ]
    if arguments.bias is None:
        grads.insert(0, None)
    taus = 1 + len(arguments.tau)
    return [*grads[:taus], *[None] * len(arguments.nu), *grads[taus:]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, *rest = inputs
    arguments = WindowArguments(*rest)
    ctx.save_for_backward(qkv, *arguments.tensors())
    ctx.arguments = arguments.without_tensors()


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    refuse_second_derivatives(grad)
    qkv, *tensors = ctx.saved_tensors
    arguments = ctx.arguments.with_tensors(tensors)
    grad_qkv, sums = window_gradients(grad, qkv, *arguments)
    grads = parameter_gradients(sums.sum(0), arguments)
    return grad_qkv, *arguments.with_tensors(grads)[:5], *[None] * 4


cosine_windows.register_autograd(_gradients, setup_context=_keep)
