"""Check a Triton kernel where it first runs, time it, and remember whether it is used.

A kernel that was tested in an interpreter may still be wrong or slow on a GPU that nobody has
tried. So each class of shapes begins with a trial against the plain operators.
"""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lipsformer.kernels import dispatch

Work = Callable[[], Sequence[Tensor]]

_VERDICTS: dict[str, bool] = {}  # a run stores them, so that it continues with the same kernels
# A right kernel may have this many times the error of the plain operators, because it may round in
# another order. Right kernels of graph attention had up to 5 times their error.
ERROR_RATIO = 16.0
# An error of this many units in the last place of the largest value is no fault either.
TOLERATED_ULPS = 64.0
# The same for intermediate results, in units of the type to which the kernel rounds them. It does
# not apply to float32, which is the type of the sums.
TOLERATED_INNER_ULPS = 4.0
TRIAL_SAMPLES = 16  # The results of this many samples of the batch are compared.
# The trial times this many samples. With 16 the host that launches kernels, and not an H100,
# limited both ways.
TIMED_SAMPLES = 128
WAIT_FOR_RANK_0 = timedelta(minutes=1)  # Other ranks wait so long for the verdict of rank 0.


def passes_trial(
    name: str,
    kernel: Work,
    plain: Work,
    exact: Work,
    inner_dtype: torch.dtype = torch.float32,
    timed: tuple[Work, Work] | None = None,
) -> bool:
    """Return whether a kernel is used for a class of shapes; it must be right and faster.

    Rank 0 decides for all ranks. A rank that gets no answer takes the plain operators, which are
    always right. With `torch.use_deterministic_algorithms` nothing is timed, and a kernel that is
    right is used. `LIPSFORMER_NATIVE=0` switches all kernels off.

    Args:
        name: Operator and class of shapes.
        kernel: Computes results and gradients with the kernel.
        plain: Computes the same with the operators that would take the kernel's place.
        exact: Computes the same with plain operators in float64.
        inner_dtype: Type to which the kernel rounds between its steps.
        timed: The kernel and the plain operators on larger inputs, which are timed instead if they
            fit into the memory.

    Example:
        >>> x = torch.arange(5.0)
        >>> passes_trial("wrong", lambda: [2 * x + 1], lambda: [2 * x], lambda: [2 * x.double()])
        False
    """
    if not dispatch.ENABLED:
        return False
    if name not in _VERDICTS:
        verdict = _ask(name, lambda: _judge(name, kernel, plain, exact, inner_dtype, timed))
        if verdict is None:
            return False
        _VERDICTS[name] = verdict
    return _VERDICTS[name]


def stored_verdict(name: str) -> bool:
    """Return the verdict on a kernel without a trial; False if it has not been tried."""
    return dispatch.ENABLED and _VERDICTS.get(name, False)


def verdicts() -> dict[str, bool]:
    """Return which kernels this process uses, by operator and class of shapes.

    Example:
        >>> restore_verdicts({"an operator": False})
        >>> verdicts()["an operator"]
        False
    """
    return dict(_VERDICTS)


def restore_verdicts(known: Mapping[str, bool]) -> None:
    """Take over the verdicts of the run that is continued.

    Example:
        >>> restore_verdicts({"an operator": False})
    """
    _VERDICTS.update(known)


def _ask(name: str, judge: Callable[[], bool | None]) -> bool | None:
    """Return the verdict of rank 0, or False if it gives none; on rank 0, see `_judge`."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return judge()
    store, key = dist.distributed_c10d._get_default_store(), f"lipsformer/verdict/{name}"
    if dist.get_rank() == 0:
        verdict = judge()
        if verdict is not None:
            store.set(key, str(int(verdict)))
        return verdict
    try:
        store.wait([key], WAIT_FOR_RANK_0)
    except RuntimeError:  # rank 0 has not met this class of shapes
        return False
    return store.get(key) == b"1"


def _judge(
    name: str,
    kernel: Work,
    plain: Work,
    exact: Work,
    inner_dtype: torch.dtype,
    timed: tuple[Work, Work] | None,
) -> bool | None:
    """Try a kernel; return None if the inputs cannot tell, because the truth is not finite."""
    try:
        others, truth = plain(), exact()
    except torch.OutOfMemoryError:
        warnings.warn(
            f"the Triton kernel of {name} is used unchecked, because the plain operators that it "
            "would be compared with do not fit into the memory; LIPSFORMER_NATIVE=0 switches "
            "it off",
            RuntimeWarning,
            stacklevel=4,
        )
        return _say(name, "kernel, unchecked", True)
    if not all(bool(t.isfinite().all()) for t in truth):
        return None
    try:
        fault = _fault(kernel(), others, truth, inner_dtype)
    except Exception as error:  # a compiler and a driver raise whatever they raise
        fault = f"it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        _refuse_a_broken_gpu(name, error)
    if fault is not None:
        warnings.warn(
            f"the Triton kernel of {name} is not used, because {fault}; plain operators take its "
            "place, and the results are right",
            RuntimeWarning,
            stacklevel=4,
        )
        return False
    if torch.are_deterministic_algorithms_enabled():
        return _say(name, "kernel, without timing", True)
    try:
        ours, theirs = map(_milliseconds, timed or (kernel, plain))
    except torch.OutOfMemoryError:
        ours, theirs = map(_milliseconds, (kernel, plain))
    return _say(name, f"kernel {ours:.3g} ms, plain operators {theirs:.3g} ms", ours < theirs)


def _refuse_a_broken_gpu(name: str, error: Exception) -> None:
    """Raise a `RuntimeError` if the GPU computes nothing any more, plain operators included."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise RuntimeError(
            f"the Triton kernel of {name} made the GPU unusable for this process; set "
            "LIPSFORMER_NATIVE=0 and start again"
        ) from error


@torch.no_grad()
def _fault(
    found: Sequence[Tensor],
    plain: Sequence[Tensor],
    exact: Sequence[Tensor],
    inner_dtype: torch.dtype,
) -> str | None:
    for index, (result, other, truth) in enumerate(zip(found, plain, exact, strict=True)):
        error, usual = (float((x.double() - truth).abs().max()) for x in (result, other))
        # Sums are kept in float32 at least, intermediate results are rounded a few times, and the
        # result once.
        result_eps = torch.finfo(result.dtype).eps
        sum_eps = min(torch.finfo(torch.float32).eps, result_eps)
        tolerated = TOLERATED_ULPS * sum_eps + result_eps
        if inner_dtype != torch.float32:
            tolerated += TOLERATED_INNER_ULPS * torch.finfo(inner_dtype).eps
        rounding = tolerated * float(truth.abs().max())
        if not error <= max(ERROR_RATIO * usual, rounding):  # also if it is not a number
            return f"result {index} is off by {error:.3g}, plain operators by {usual:.3g}"
    return None


def _milliseconds(work: Work) -> float:
    """Return the median time of a call; the timer waits for the GPU."""
    from torch.utils.benchmark import Timer  # takes 0.1 s and looks for a compiler of CUDA

    timer = Timer("work()", globals={"work": work})
    timer.timeit(2)
    return 1e3 * sorted(timer.timeit(1).median for _ in range(5))[2]


def _say(name: str, reason: str, verdict: bool) -> bool:
    if dispatch.LOG:
        sys.stderr.write(f"lipsformer kernels: {name}: {reason}: {'used' if verdict else 'not'}\n")
    return verdict
