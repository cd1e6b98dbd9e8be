"""Compiling, finding, calling and refusing the CPU kernels, with one small source made here."""

import os
import re
import subprocess
import sys
import threading
from functools import cache

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from lipsformer.kernels import bindings, build, dispatch
from lipsformer.layers import DepthwiseConv2d
from tests.oracles import depthwise_conv

SOURCES = build._SOURCES
KERNEL = """
#include <cstdint>
static void filled(float *y, const float *x, int64_t size, float factor, const float *none,
                   int64_t flag, int64_t threads) {
    #pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < size; ++i)
        y[i] = factor * x[i] + (none ? 100 : 0) + 10 * flag + threads;
}
extern "C" { auto *fill = filled; }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The empty cache of a new user, of whose kernels none are loaded yet."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "fill.cpp").write_text(KERNEL)
    (sources / "note.h").write_text("")
    monkeypatch.setattr(build, "_SOURCES", sources)
    library = cache(build.compiled_library.__wrapped__)
    for module in (build, bindings, dispatch):
        monkeypatch.setattr(module, "compiled_library", library)
    monkeypatch.setattr(bindings, "_function", cache(bindings._function.__wrapped__))
    signature = (bindings.F32, bindings.F32, bindings.INT, bindings.NUMBER, bindings.F32)
    monkeypatch.setitem(bindings.SIGNATURES, "fill", (*signature, bindings.INT))
    monkeypatch.setattr(dispatch, "ENABLED", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lipsformer"


@pytest.fixture
def compiled(folder):
    """The same where there is a compiler."""
    if build.compiled_library() is None:
        pytest.skip("no compiler for this processor")
    return folder


def test_arguments_arrive_and_threads_come_last(compiled):
    x = torch.arange(5.0)
    y = torch.empty(5)
    bindings.run("fill", y, x, 5, 0.5, None, True)
    assert torch.equal(y, 0.5 * x + 10 + torch.get_num_threads())


@pytest.mark.parametrize(
    "args",
    [
        (5, "x", "y", 0.5, None, 1),  # order
        ("y", "x", 5.0, 0.5, None, 1),  # a number where an integer belongs
        ("y", "double", 5, 0.5, None, 1),  # type of a tensor
        ("y", "x", 5, 0.5, None),  # one too few
        ("y", "x", 5, 0.5, None, 1, 1),  # one too many
        ("y", "x", 5, None, None, 1),  # nothing where a number belongs
    ],
)
@pytest.mark.usefixtures("compiled")
def test_wrong_arguments_are_type_errors(args):
    tensors = {"x": torch.ones(5), "y": torch.ones(5), "double": torch.ones(5).double()}
    with pytest.raises(TypeError, match="fill"):
        bindings.run("fill", *(tensors.get(arg, arg) for arg in args))


def test_signatures_are_those_of_the_sources():
    """Every exported function, with the types of its parameters in order."""
    found, exported = {}, {}
    for path in SOURCES.glob("*.cpp"):
        text = path.read_text()
        heads = r"(?:template <(?:class|typename) (\w+)(?:, class (\w+) = (\w+))?>\s+)?"
        for value, other, default, name, parameters in re.findall(
            heads + r"void (\w+)\(([^)]*)\)\s*\{", text
        ):
            written = [
                re.sub(r"^const |\w+$", "", " ".join(p.split())) for p in parameters.split(",")
            ]
            found[name] = written, {value: "the export's", other: default}
        for name, function, argument in re.findall(
            r"constexpr auto (\w+) = (\w+)<\w+, (\w+)>", text
        ):
            written, types = found[function]
            value, other = types
            found[name] = written, {value: types[value], other: argument}
        for which, name in re.findall(r"^(EXPORT\w*)\((\w+)\)", text, re.MULTILINE):
            for dtype in ("float32",) if which == "EXPORT_FLOAT32" else ("float32", "bfloat16"):
                exported[f"{name}_{dtype}"] = dtype, *found[name]
    assert set(exported) == set(bindings.SIGNATURES)
    kinds = {"int64_t ": bindings.INT, "float ": bindings.NUMBER}
    for name, (dtype, written, types) in exported.items():
        *signature, threads = written
        assert threads == "int64_t "
        assert len(bindings.SIGNATURES[name]) == len(signature), name
        for kind, parameter in zip(bindings.SIGNATURES[name], signature, strict=True):
            if parameter in kinds:
                assert kind is kinds[parameter], (name, parameter)
                continue
            pointed = parameter.removesuffix(" *")
            while pointed in types:  # of the template, whose first type is that of the export
                pointed = dtype if types[pointed] == "the export's" else types[pointed]
            tensor = {"float": "float32", "int64_t": "int64"}.get(pointed, pointed)
            assert str(kind.dtype) == f"torch.{tensor}", (name, parameter)


def test_compiled_once_and_again_when_the_sources_change(compiled, monkeypatch):
    (library,) = compiled.iterdir()
    written = library.stat().st_mtime_ns
    build.compiled_library.cache_clear()
    assert build.compiled_library() is not None
    assert library.stat().st_mtime_ns == written
    (build._SOURCES / "note.h").write_text("// another")
    build.compiled_library.cache_clear()
    assert build.compiled_library() is not None
    assert len(list(compiled.iterdir())) == 2


def test_without_a_compiler_nothing_is_said(folder, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    assert not dispatch.usable("sum_rows.csrc", torch.ones(1), training=True)
    assert not caplog.records
    assert not folder.exists()


PROGRAM = """
import torch
from lipsformer import layers
x = torch.ones(1, 3, 3, 8)
for _ in range(2):
    layers.Linear(8, 8)(x), layers.DepthwiseConv2d(8, 7)(x)
    layers.CenterNorm(8).double()(x.double())
"""


@pytest.mark.parametrize("native", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_switched_off_or_on_the_log_says_so_once(native):
    environment = {**os.environ, "LIPSFORMER_NATIVE": native, "LIPSFORMER_LOG": "kernels"}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said = [line for line in run.stderr.splitlines() if line.startswith("lipsformer kernels: ")]
    assert len(set(said)) == len(said)
    lines = {line.split(": ")[1]: line.split(": ")[2] for line in said}
    if native == "0":
        off = "plain operators, because LIPSFORMER_NATIVE=0 switches the kernels off"
        assert lines == dict.fromkeys(["linear", "depthwise", "center_norm"], off)
    else:
        assert lines["linear"] == lines["depthwise"] == "kernel"
        assert lines["center_norm"] == "plain operators, because the input is torch.float64"


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
    (record,) = warnings(caplog)
    assert "no CPU kernels, PyTorch's operators take their place" in record.message
    assert broken == "cache" or [path.suffix for path in folder.iterdir()] == [".failed"]


def warnings(caplog) -> list:
    """Return only the warnings, because an earlier test may have switched on the build's notes."""
    return [record for record in caplog.records if record.levelname == "WARNING"]


def again() -> object:
    """What a new process would find."""
    build.compiled_library.cache_clear()
    return build.compiled_library()


@pytest.mark.parametrize("said", ["bad", "unterminated comment"])
def test_a_failed_compilation_is_not_tried_again(folder, tmp_path, monkeypatch, caplog, said):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/calls\necho 'a.h: error: {said}' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} -DX='1 2'")
    for _ in range(3):
        assert again() is None
    assert (tmp_path / "calls").read_text() == "x\n"
    assert len(warnings(caplog)) == 3
    for record in warnings(caplog):
        assert f"failed: a.h: error: {said}" in record.message
        assert "\n" not in record.message


@pytest.mark.parametrize(
    ("trouble", "said"),
    [("kill -KILL $$", "Killed"), ("ulimit -v 60000; exec {cc1plus} $*", "memory")],
    ids=["killed", "memory"],
)
def test_a_compilation_that_the_machine_ended_is_tried_again(
    folder, tmp_path, monkeypatch, caplog, trouble, said
):
    """g++ itself ends with an ordinary exit code if the compiler proper that it calls is killed."""
    where = subprocess.run(["g++", "-print-prog-name=cc1plus"], capture_output=True, text=True)
    proper = tmp_path / "cc1plus"
    proper.write_text(f"#!/bin/sh\n{trouble.format(cc1plus=where.stdout.strip())}\n")
    proper.chmod(0o755)
    (tmp_path / "csrc" / "fill.cpp").write_text("#include <map>\n#include <string>\n")
    monkeypatch.setenv("CXX", f"g++ -B{tmp_path}")
    assert again() is None
    (record,) = warnings(caplog)
    assert said in record.message
    assert list(folder.iterdir()) == []
    proper.unlink()
    assert again() is not None


@pytest.mark.parametrize("step", ["-c", "-shared"], ids=["compiling", "linking"])
def test_a_compiler_that_is_killed_itself_is_tried_again(
    folder, tmp_path, monkeypatch, caplog, step
):
    compiler = tmp_path / "compiler"
    ends = f"case \" $* \" in *' {step} '*) kill -KILL $$ ;; esac\n"
    compiler.write_text(f'#!/bin/sh\n{ends}exec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert again() is None
    assert len(warnings(caplog)) == 1
    assert list(folder.iterdir()) == []
    compiler.write_text('#!/bin/sh\nexec g++ "$@"\n')
    assert again() is not None


@pytest.mark.parametrize(
    ("machine", "capability", "features", "option"),
    [
        ("x86_64", "AVX512", "avx512f avx512_bf16", "-mavx512bf16"),
        ("x86_64", "AVX512", "avx512f avx512_bf16_later", "-mavx512bw"),
        ("x86_64", "AVX2", "avx512f avx512_bf16", "-mavx2"),  # as ATEN_CPU_CAPABILITY may say
        ("x86_64", "DEFAULT", "", None),
        ("aarch64", "DEFAULT", "", "-march=armv8-a"),
        ("aarch64", "SVE256", "", "-march=armv8-a"),
        ("riscv64", "DEFAULT", "", None),
    ],
)
def test_the_processor_chooses_the_compilers_target(
    folder, tmp_path, monkeypatch, machine, capability, features, option
):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho $* > {tmp_path}/arguments\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: Zuse Z3\nflags\t\t: fpu {features} sse2\n")
    monkeypatch.setattr(build, "_CPUINFO", cpuinfo)
    assert again() is None
    arguments = tmp_path / "arguments"
    assert arguments.exists() == (option is not None)
    if option is not None:
        given = arguments.read_text()
        assert option in given.split()
        assert ("avx512" in given) == (capability == "AVX512")
        assert ("bf16" in given) == (option == "-mavx512bf16")


def test_a_compiler_may_have_arguments_and_one_that_is_missing_is_named(
    compiled, monkeypatch, caplog
):
    monkeypatch.setenv("CXX", "g++ -DUNUSED='1 2'")
    assert again() is not None
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert again() is None
    (record,) = warnings(caplog)
    assert "there is no compiler 'no-such-compiler', which CXX names" in record.message


@pytest.mark.parametrize("wrong", ["damaged", "of a group", "of everyone", "of another user"])
def test_a_library_that_cannot_be_trusted_is_compiled_once_more(
    compiled, wrong, monkeypatch, caplog
):
    (library,) = compiled.iterdir()
    before = library.stat().st_ino
    if wrong == "damaged":  # elsewhere: the linker does not read a loaded library again
        compiled = compiled.parent / "another" / "lipsformer"
        compiled.mkdir(parents=True)
        monkeypatch.setenv("XDG_CACHE_HOME", str(compiled.parent))
        library = compiled / library.name
        library.write_bytes(b"no library")
        library.chmod(0o755)
    elif wrong == "of a group":
        library.chmod(0o775)
    elif wrong == "of everyone":
        library.chmod(0o757)
    elif os.getuid() == 0:
        os.chown(library, 12345, -1)
    else:
        pytest.skip("only root can give a file away")
    compiled.chmod(0o777)
    assert again() is not None
    assert "is compiled once more" in caplog.text
    assert library.stat().st_mode & 0o777 == 0o755
    assert library.stat().st_uid == os.getuid()
    assert compiled.stat().st_mode & 0o777 == 0o755
    assert wrong == "damaged" or library.stat().st_ino != before
    caplog.clear()
    assert again() is not None
    assert not caplog.records


def test_a_damaged_library_is_noticed_before_it_is_loaded(compiled):
    """One changed byte, or a missing end, might kill the process that loads it."""
    (library,) = compiled.iterdir()
    whole = library.read_bytes()
    middle = len(whole) // 2
    for damaged in (
        whole[:-1],
        whole[:middle],
        whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
    ):
        copy = library.with_name("copy.so")
        copy.write_bytes(damaged)
        copy.chmod(0o755)
        with pytest.raises(OSError, match="damaged"):
            build._load(copy, as_safe_as=compiled)


def test_what_cannot_be_loaded_is_built_once(folder, tmp_path, monkeypatch, caplog):
    """A library that needs a symbol that nobody has, or a compiler that writes no library."""
    (tmp_path / "csrc" / "fill.cpp").write_text(
        'extern "C" { void nowhere(); auto *fill = nowhere; }'
    )
    monkeypatch.setenv("CXX", "g++ -Wl,-z,now")
    for _ in range(2):
        assert again() is None
    assert [path.suffix for path in folder.iterdir()] == [".failed"]
    first, second = (record.message for record in warnings(caplog))
    assert "g++ made cannot be loaded" in first and "nowhere" in first
    assert "remembered" in second


@pytest.mark.parametrize("others_may_write", [False, True])
def test_a_library_of_the_wheel_needs_no_compiler(
    folder, tmp_path, monkeypatch, caplog, others_may_write
):
    prebuilt = tmp_path / "prebuilt"
    build.main(prebuilt)
    (prebuilt / "csrc-of-before.so").touch()
    build.main(prebuilt)
    assert len(list(prebuilt.iterdir())) == 3  # AVX2, AVX-512, and that with bfloat16
    monkeypatch.setattr(build, "_PREBUILT", prebuilt)
    monkeypatch.setenv("PATH", "")
    if others_may_write:
        for library in prebuilt.iterdir():
            library.chmod(0o777)
        assert again() is None
        (record,) = warnings(caplog)
        assert "is not used, the kernels are compiled: another user" in record.message
    else:
        test_arguments_arrive_and_threads_come_last(folder)
        (prebuilt.parent / "csrc" / "note.h").write_text("// a later version")
        assert again() is None
        assert not warnings(caplog)
    assert not folder.exists()


def test_a_cache_of_another_user_is_refused(compiled, caplog):
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(compiled, 12345, -1)
    assert again() is None
    assert "belongs to another user" in caplog.text


def test_processes_that_compile_at_once_leave_one_whole_library(compiled):
    (library,) = compiled.iterdir()
    library.unlink()
    together, found = threading.Barrier(3), []

    def compile_like_another_process():
        together.wait()
        found.append(build.compiled_library.__wrapped__())

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

    def usable(*tensors):
        return dispatch.usable("sum_rows.csrc", *tensors, training=True)

    def note(name):
        def function(x):
            seen.setdefault(name, usable(x))  # tracing runs it once more to compare
            return x.sum()

        return function

    assert usable(x, nn.Parameter(x))
    with FlopCounterMode(display=False):
        note("mode")(x)
    with forward_ad.dual_level():
        note("forward")(x)
    torch.jit.trace(note("trace"), x)
    torch.func.vmap(note("vmap"))(x)
    torch.func.grad(note("grad"))(x)
    note("subclass")(x.as_subclass(type("Own", (torch.Tensor,), {})))
    assert seen == dict.fromkeys(["mode", "forward", "trace", "vmap", "grad", "subclass"], False)
