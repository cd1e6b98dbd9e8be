"""A plugin of pytest: every kernel runs as a program for aarch64 under QEMU.

    EMULATED=FOLDER python -m pytest -p tests.kernels.emulated FILES

FOLDER holds the kernels, `csrc.so`, and `driver` (emulated.cpp). At the end the names of the
kernels that were called are written to FOLDER/called.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipsformer.kernels import bindings, dispatch, product

FOLDER = Path(os.environ["EMULATED"])
LIBRARIES = "/usr/aarch64-linux-gnu"  # where Debian has those of aarch64
GUARD = torch.full((64,), 165, dtype=torch.uint8)  # lies around every tensor
called = set()


def emulated(kernel: str) -> Callable[..., None]:
    """Return what calls a kernel with copies of all tensors and copies back what it wrote."""

    def call(*values: Any) -> None:
        called.add(kernel)
        words, parts, places = [], [GUARD], {}
        for kind, value in zip((*bindings.SIGNATURES[kernel], bindings.INT), values, strict=True):
            if isinstance(value, Tensor):
                kind.from_param(value)  # checks the type
                storage = value.untyped_storage()
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                if storage.data_ptr() not in places:  # tensors may share their memory
                    places[storage.data_ptr()] = (sum(map(len, parts)), whole)
                    parts += [whole, GUARD]
                offset, _ = places[storage.data_ptr()]
                words.append(f"@{offset + value.data_ptr() - storage.data_ptr()}")
            elif kind is bindings.NUMBER:
                words.append(f"f{float(value).hex()}")
            else:
                words.append(str(int(value or 0)))
        memory = FOLDER / "memory"
        memory.write_bytes(torch.cat(parts).numpy().tobytes())
        program = ["qemu-aarch64", "-L", LIBRARIES, str(FOLDER / "driver")]
        subprocess.run([*program, str(FOLDER / "csrc.so"), kernel, str(memory), *words], check=True)
        after = torch.frombuffer(bytearray(memory.read_bytes()), dtype=torch.uint8)
        assert torch.equal(after[:64], GUARD)
        for offset, whole in places.values():
            end = offset + len(whole)
            whole.copy_(after[offset:end])
            assert torch.equal(after[end : end + 64], GUARD), f"{kernel} writes too far"

    return call


bindings._function = emulated
dispatch.compiled_library = lambda: FOLDER  # not None
product._PANEL = 16  # also if this machine has AVX-512


def pytest_sessionfinish() -> None:
    (FOLDER / "called").write_text("\n".join(sorted(called)))
