"""The trial of a kernel at its first use, with stand-ins for kernels."""

import copy
import time
import warnings

import pytest
import torch

from lipsformer.kernels import TIMED_SAMPLES, dispatch, verdict
from lipsformer.layers._trial import try_kernel

X = torch.randn(31, 17, generator=torch.Generator().manual_seed(0))


def exact():
    return [X.double().softmax(1), X.double().exp()]


def plain():
    time.sleep(0.002)
    return [X.softmax(1), X.exp()]


def right():
    weights = (X - X.amax(1, keepdim=True)).exp()
    return [weights / weights.sum(1, keepdim=True), X.exp()]


def slow():
    time.sleep(0.02)
    return right()


def wrong():
    softmax, exponential = right()
    exponential[29, 13] *= 1.01  # one value in 527
    return [softmax, exponential]


def not_a_number():
    return [torch.full_like(X, torch.nan), X.exp()]


def raising():
    raise RuntimeError("out of resource: shared memory\nRequired: 1")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(verdict, "_VERDICTS", {})
    monkeypatch.setattr(dispatch, "ENABLED", True)


def test_right_and_faster_is_used_and_tried_only_once():
    calls = []

    def counted():
        calls.append(1)
        return right()

    assert verdict.passes_trial("a", counted, plain, exact)
    tried = len(calls)
    assert verdict.passes_trial("a", counted, plain, exact) and len(calls) == tried
    assert {"a": True} == verdict._VERDICTS


def test_slow_is_not_used_and_nobody_is_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not verdict.passes_trial("a", slow, plain, exact)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (wrong, "result 1 is off by"),
        (not_a_number, "result 0 is off by nan"),
        (raising, "RuntimeError: out of resource: shared memory;"),
    ],
)
def test_wrong_is_not_used_with_one_warning(kernel, message):
    with pytest.warns(RuntimeWarning, match=message):
        assert not verdict.passes_trial("a", kernel, plain, exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not verdict.passes_trial("a", kernel, plain, exact)


def test_a_deterministic_run_takes_no_timing(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(verdict, "_milliseconds", lambda work: pytest.fail("timed"))
    assert verdict.passes_trial("a", slow, plain, exact)


def test_larger_inputs_are_timed_where_they_fit():
    """The small inputs would decide otherwise."""
    assert not verdict.passes_trial("a", right, plain, exact, timed=(slow, plain))
    assert verdict.passes_trial("b", slow, plain, exact, timed=(right, plain))

    def too_large():
        raise torch.OutOfMemoryError("80 GB")

    assert verdict.passes_trial("c", right, plain, exact, timed=(right, too_large))


def test_a_module_is_copied_for_its_trial_only(monkeypatch):
    layer, x = torch.nn.Linear(17, 5), X[:3]
    samples = []

    def kernel(twin, inputs):
        samples.append(len(inputs))
        return twin(inputs)

    def plain_operators(twin, inputs):
        time.sleep(0.002)
        return twin(inputs)

    assert try_kernel("a", layer, x, kernel, plain_operators)
    assert set(samples) == {3, TIMED_SAMPLES}
    monkeypatch.setattr(copy, "deepcopy", lambda _: pytest.fail("copied"))
    assert try_kernel("a", layer, x, kernel, plain_operators)


def test_kernels_that_are_switched_off_are_not_tried():
    dispatch.ENABLED = False
    assert not verdict.passes_trial("a", right, plain, exact)
    assert not verdict._VERDICTS


def test_a_continued_run_reuses_its_verdicts():
    verdict.restore_verdicts({"a": False, "b": True})
    assert not verdict.passes_trial("a", right, plain, exact)
    assert verdict.passes_trial("b", wrong, plain, exact)


def test_inputs_that_are_not_finite_decide_nothing():
    def infinite():
        return [torch.full((3,), torch.inf).double()]

    assert not verdict.passes_trial("a", infinite, infinite, infinite)
    assert not verdict._VERDICTS


def test_rank_zero_decides_for_all(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(verdict, "WAIT_FOR_RANK_0", verdict.WAIT_FOR_RANK_0 / 1000)
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    rank = [1]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank[0])
    assert not verdict.passes_trial("unknown to rank 0", right, plain, exact)
    for kernel, expected in ((right, True), (slow, False)):
        rank[0] = 0
        assert verdict.passes_trial(kernel.__name__, kernel, plain, exact) is expected
        rank[0] = 1
        verdict._VERDICTS.clear()
        # this rank would decide otherwise
        other = slow if expected else right
        assert verdict.passes_trial(kernel.__name__, other, plain, exact) is expected


def test_a_kernel_is_used_unchecked_with_a_warning_if_nothing_else_fits():
    def too_large():
        raise torch.OutOfMemoryError("80 GB")

    with pytest.warns(RuntimeWarning, match=r"used unchecked.*LIPSFORMER_NATIVE=0"):
        assert verdict.passes_trial("a", right, too_large, exact)


def test_a_kernel_that_breaks_the_gpu_ends_the_run_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", raising)
    with pytest.raises(RuntimeError, match=r"unusable.*LIPSFORMER_NATIVE=0"):
        verdict.passes_trial("a", raising, plain, exact)
