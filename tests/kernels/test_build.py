"""Compiling, finding and refusing the CPU kernels; the compiler gets one small file here."""

import threading
from functools import cache

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from lipsformer.kernels import build
from lipsformer.layers import DepthwiseConv2d
from tests.oracles import depthwise_conv

KERNEL = """
#include <cstdint>
extern "C" void fill(float *y, const float *x, int64_t size, float factor, const float *none,
                     int64_t flag, int64_t threads) {
    #pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < size; ++i)
        y[i] = factor * x[i] + (none ? 100 : 0) + 10 * flag + threads;
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The empty cache of a new user, of whose kernels none are loaded yet."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "fill.cpp").write_text(KERNEL)
    (sources / "note.h").write_text("")
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setattr(build, "_library", cache(build._library.__wrapped__))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LIPSFORMER_NATIVE", raising=False)
    return tmp_path / "cache" / "lipsformer"


@pytest.fixture
def compiled(folder):
    """The same where there is a compiler."""
    if build._library() is None:
        pytest.skip("no compiler for this processor")
    return folder


def test_arguments_arrive_and_threads_come_last(compiled):
    x = torch.arange(5.0)
    y = torch.empty(5)
    build.run("fill", y, x, 5, 0.5, None, True)
    assert torch.equal(y, 0.5 * x + 10 + torch.get_num_threads())


def test_compiled_once_and_again_when_the_sources_change(compiled, monkeypatch):
    (library,) = compiled.iterdir()
    written = library.stat().st_mtime_ns
    build._library.cache_clear()
    assert build._library() is not None
    assert library.stat().st_mtime_ns == written
    (build._SOURCES / "note.h").write_text("// another")
    build._library.cache_clear()
    assert build._library() is not None
    assert len(list(compiled.iterdir())) == 2


@pytest.mark.parametrize("variable", ["LIPSFORMER_NATIVE", "PATH"])
def test_switched_off_or_without_a_compiler_nothing_is_said(folder, variable, monkeypatch, caplog):
    monkeypatch.setenv(variable, "0" if variable == "LIPSFORMER_NATIVE" else "")
    assert not build.native(torch.ones(1))
    assert not caplog.records
    assert not folder.exists()


@pytest.mark.parametrize("broken", ["compiler", "cache"])
def test_failing_compiler_or_cache_gives_one_warning_and_equal_results(
    folder, broken, monkeypatch, caplog
):
    if broken == "compiler":
        monkeypatch.setenv("CXX", "false")
    else:
        folder.parent.write_text("a file, not a folder")
    layer = DepthwiseConv2d(3, 7).train()
    x = torch.randn(2, 5, 11, 3)
    expected = torch.stack([depthwise_conv(image, layer.weight, layer.bias) for image in x])
    for _ in range(2):
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no CPU kernels, PyTorch's operators take their place" in record.message
    assert broken == "cache" or not list(folder.iterdir())


def test_processes_that_compile_at_once_leave_one_whole_library(compiled):
    (library,) = compiled.iterdir()
    library.unlink()
    together, found = threading.Barrier(3), []

    def compile_like_another_process():
        together.wait()
        found.append(build._library.__wrapped__())

    threads = [threading.Thread(target=compile_like_another_process) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and None not in found
    assert list(compiled.iterdir()) == [library]


def test_refused_where_something_looks_at_the_operators(compiled):
    x = torch.ones(2, 3)
    seen = {}

    def note(name):
        def function(x):
            seen.setdefault(name, build.native(x))  # tracing runs it once more to compare
            return x.sum()

        return function

    assert build.native(x, nn.Parameter(x))
    with FlopCounterMode(display=False):
        note("mode")(x)
    with forward_ad.dual_level():
        note("forward")(x)
    torch.jit.trace(note("trace"), x)
    torch.func.vmap(note("vmap"))(x)
    torch.func.grad(note("grad"))(x)
    note("subclass")(x.as_subclass(type("Own", (torch.Tensor,), {})))
    assert seen == dict.fromkeys(["mode", "forward", "trace", "vmap", "grad", "subclass"], False)
